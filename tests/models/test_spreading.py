"""What is asked of a model before it is spread over processes."""

from __future__ import annotations

import pytest

from rankscope.errors import LoadError
from rankscope.models.loading import spreading


def test_one_process_is_too_few() -> None:
    with pytest.raises(LoadError, match="there is one"):
        spreading.spread_arguments("fsdp", None, None)
