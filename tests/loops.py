"""Many checks in one test: a model is built once, every check runs on it, and what fails says which one it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn


@contextmanager
def case(*names: object) -> Iterator[None]:
    """Put names in front of whatever fails inside."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{' '.join(map(str, names))}: {error}") from error


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fail if parameters, buffers or hooks of a shared model are not the same bits afterwards."""
    before, hooks = {name: value.clone() for name, value in model.state_dict().items()}, _hooks(model)
    yield
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert not changed, f"the model was changed: {changed}"
    assert _hooks(model) == hooks, "hooks were left behind"


def _hooks(model: nn.Module) -> int:
    return sum(len(value) for part in model.modules() for name, value in vars(part).items() if name.endswith("_hooks"))
