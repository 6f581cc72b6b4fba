"""What every test relies on: no network, two threads, fixed seeds, and nothing left behind in torch."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MPLBACKEND", "Agg")

import random
import zlib
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tests.tiny_presets  # noqa: F401 it adds presets
from rankscope.models.loading.devices import seed_generators
from tests.found_once import found_once, takes_part

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

settings.register_profile("local", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, max_examples=25, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all but one in n cases of a test with the mark ``sampled(n)``, whatever else is collected."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        (n,) = found[0].get_closest_marker("sampled").args
        in_order = sorted(found, key=lambda item: zlib.crc32(item.name.encode()))
        for item in in_order[-(-len(found) // n) :]:
            item.add_marker(pytest.mark.slow)


GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def _left_in_torch() -> dict[str, object]:
    """The global state of torch that a verb may borrow and must give back."""
    hooks = {name: len(getattr(torch_module, name)) for name in GLOBAL_HOOKS}
    return {
        "function modes": [type(mode).__name__ for mode in _get_current_function_mode_stack()],
        "dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "default dtype": torch.get_default_dtype(),
        "grad enabled": torch.is_grad_enabled(),
        "transformer fast path": torch.backends.mha.get_fastpath_enabled(),
        **hooks,
    }


@pytest.fixture(autouse=True)
def same_seeds() -> Iterator[None]:
    """Each test starts from the same generators, and leaves those of the session alone."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    seed_generators(0)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(autouse=True)
def structures_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Equal models are looked at once, except by tests of how they are looked at."""
    with found_once() if takes_part(request.path) else nullcontext():
        yield


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """Fail a test that leaves a mode, a global hook or a global switch behind."""
    before = _left_in_torch()
    yield
    after = _left_in_torch()
    assert after == before, f"torch was left changed: {after}, it was {before}"
