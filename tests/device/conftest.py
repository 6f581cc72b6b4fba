"""Fixtures of the simulated device; a test that uses them is skipped where there is no C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.linalg.precision import has_float64
from tests.device.simulated import SimulatedDevice, compiler, simulated_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Register the device before any test runs: torch knows only devices that were there at its first backward pass."""
    here = Path(__file__).parent
    if compiler() is not None and any(here in item.path.parents for item in items):
        simulated_device().is_available = False


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """The simulated device ``sim``, its counters at zero."""
    if compiler() is None:
        pytest.skip("the simulated device needs a C++ compiler (g++, or CXX)")
    found = simulated_device()
    found.reset()
    found.is_available = True
    yield found
    found.is_available = False


@pytest.fixture
def without_float64(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """The same device without float64, as Apple's MPS."""
    has_float64.cache_clear()
    with device.without_float64():
        yield device
    has_float64.cache_clear()
