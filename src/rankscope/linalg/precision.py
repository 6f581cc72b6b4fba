"""Float formats: where float64 statistics are computed, and the floor below which a format shows only rounding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import UnsupportedConfigError

FLOOR_IN_EPS = 4.0
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-1000, 2.0**1000


def float_floor(dtype: torch.dtype) -> float:
    r"""Relative residual at and below which a float format shows only rounding: :math:`4\varepsilon`.

    **Heuristic.** A stored activation has a relative error of up to :math:`\varepsilon/2`, so rows that should be equal
    differ by about that much. Published float32 curves of pure attention flatten at 1.2e-7 to 2.1e-7, one to two
    :math:`\varepsilon`; the factor 4 leaves room for the rounding of the previous layer.

    Example:
        >>> float_floor(torch.float32) == 4 * 2.0**-23
        True
    """
    return FLOOR_IN_EPS * torch.finfo(dtype).eps


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Apple's and some of Intel's do not. Asked once per device.

    Example:
        >>> has_float64(torch.device("cpu"))
        True
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)  # some devices allocate float64 but have no kernel
    except TypeError:
        return False
    except RuntimeError as error:
        if "64" in str(error):
            return False
        raise  # out of memory, or an earlier error of the device
    return True


def float64_home(x: Tensor) -> torch.device:
    """The device on which statistics of ``x`` are computed: its own, or the CPU if its own has no float64."""
    return x.device if has_float64(x.device) else torch.device("cpu")


def as_float64(x: Tensor) -> Tensor:
    """``x`` in float64, on the device where float64 statistics of it are computed."""
    return x.to(float64_home(x), torch.float64)


def need_float64(device: torch.device, what: str) -> None:
    """Check that a device has float64, for computations that cannot move what they are given.

    Raises:
        UnsupportedConfigError: it has not.
    """
    if not has_float64(device):
        raise UnsupportedConfigError(
            f"{what} computes in float64, which {device} does not have. Move the model to the processor: model.cpu()."
        )


def widest(device: torch.device) -> torch.dtype:
    """The format for sums that must stay on a device: float64, or float32 if it has none."""
    return torch.float64 if has_float64(device) else torch.float32


def format_of(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The format whose rounding activations show: their own, or that of an active autocast if it is coarser."""
    if dtype == torch.float64 or not _is_autocast(device):  # autocast leaves float64 alone
        return dtype
    lowered = torch.get_autocast_dtype(device.type)
    return max(dtype, lowered, key=lambda one: torch.finfo(one).eps)


def _is_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def lowered_products(device: torch.device) -> str | None:
    """The format to which torch rounds the factors of float32 products on this device, e.g. ``"tf32"``; None if none.

    ``torch.set_float32_matmul_precision`` and ``allow_tf32`` set it.
    """
    setting = _product_settings().get(device.type)
    return None if setting is None or setting.fp32_precision in ("none", "ieee") else str(setting.fp32_precision)


def _product_settings() -> dict[str, Any]:
    """Where torch keeps the format of float32 products, by device type; empty before torch 2.9."""
    settings = {"cuda": torch.backends.cuda.matmul, "cpu": getattr(torch.backends.mkldnn, "matmul", None)}
    return {device: setting for device, setting in settings.items() if hasattr(setting, "fp32_precision")}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in the formats of the tensors themselves: without autocast, and float32 products without TF32."""
    with (
        nullcontext() if lowered_products(device) is None else _full_products(_product_settings()[device.type]),
        torch.autocast(device.type, enabled=False) if _is_autocast(device) else nullcontext(),
    ):
        yield


@contextmanager
def _full_products(setting: Any) -> Iterator[None]:
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = "none"  # inherit torch.backends.fp32_precision again, if that is what it did
        if setting.fp32_precision != before:
            setting.fp32_precision = before


def device_name(device: torch.device) -> str:
    """What its maker calls a device; empty if torch does not know."""
    named = getattr(torch.get_device_module(device), "get_device_name", lambda _: "")
    return str(named(device))


def is_wide(dtype: torch.dtype) -> bool:
    """Whether squares of this format may exceed the range, and its digits the precision, of float64 arithmetic."""
    return dtype == torch.float64


def may_hold(condition: Tensor) -> bool:
    """Whether the condition holds somewhere; True on an accelerator, where to ask would make the host wait.

    For work that changes nothing where the condition does not hold.

    Example:
        >>> may_hold(torch.tensor([False, True])), may_hold(torch.tensor([False]))
        (True, False)
    """
    return condition.device.type != "cpu" or bool(condition.any())


def power_of_two_below(largest: Tensor) -> Tensor:
    """The power of two at or below each entry (1 for zero and non-finite entries): dividing by it is exact.

    Example:
        >>> power_of_two_below(torch.tensor([5.0, 0.0], dtype=torch.float64)).tolist()
        [4.0, 1.0]
    """
    mantissa, _ = torch.frexp(largest)
    scale = (largest / (2 * mantissa)).clamp(_LEAST_SCALE, _LARGEST_SCALE)
    return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))
