"""Networks laid out without their numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rankscope.models.loading.affording import on_meta


def test_tensors_made_inside_have_no_numbers() -> None:
    with on_meta():
        assert torch.nn.Linear(10**6, 10**6).weight.is_meta
    assert not torch.empty(1).is_meta


def test_the_device_is_given_back_when_the_body_raises() -> None:
    with pytest.raises(ValueError, match="body"), on_meta():
        raise ValueError("body")
    assert not torch.empty(1).is_meta


@pytest.mark.slow
def test_modeling_code_may_be_imported_first_inside() -> None:
    """In a process of its own, because an import happens once."""
    code = (
        "from rankscope.models.loading.affording import on_meta\n"
        "with on_meta():\n    from transformers import BertModel"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
