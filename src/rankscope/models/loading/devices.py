"""Devices by name, and a model held on another device inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import LoadError

_EXAMPLES = "Write cpu, cuda, cuda:1, mps or xpu."


def parse_device(device: torch.device | str | None) -> torch.device | None:
    """A device of this machine, given as itself or by name; None stays None.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')

    Raises:
        LoadError: torch does not know the name, or the machine does not have the device.
    """
    if device is None:
        return None
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise LoadError(f"device {str(device)!r:.80} is not a device of torch. {_EXAMPLES}") from None
    if parsed.type == "meta":
        raise LoadError(f"device 'meta' has no data, so nothing can be measured on it. {_EXAMPLES}")
    try:
        torch.empty(1, device=parsed)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise LoadError(
            f"device {str(parsed)!r} is not available on this machine: {why:.200}. Leave device out to run on the "
            "processor; with a driver installed, install the build of torch for that device."
        ) from error
    return parsed


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    first = next(iter(parameters), None)
    return torch.device("cpu") if first is None else first.device


def devices_of(parameters: Iterable[Tensor]) -> str:
    """The devices of the parameters, in words; parameters that are not in memory do not count."""
    devices = {str(parameter.device) for parameter in parameters if not parameter.is_meta}
    return ", ".join(sorted(devices)) or "cpu"


def are_on(parameters: Iterable[Tensor], device: torch.device) -> bool:
    """Whether all parameters are on a device; one without an index, such as ``cuda``, stands for any of its type."""
    return all(
        parameter.device.type == device.type and device.index in (None, parameter.device.index)
        for parameter in parameters
    )


@contextmanager
def moved_to(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Hold copies of the model's weights and buffers on ``device`` inside the block; the originals return after it.

    The entries of the modules are exchanged, not the data of the parameters, so an optimizer keeps its parameters.
    """
    copies: dict[int, Tensor] = {}  # tied weights stay tied
    exchanged: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for entries in tables:
                for name, tensor in entries.items():
                    if tensor is None or tensor.device == device:
                        continue
                    if id(tensor) not in copies:
                        moved = tensor.detach().to(device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        copies[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
                    exchanged.append((entries, name, tensor))
        for entries, name, tensor in exchanged:
            entries[name] = copies[id(tensor)]
        yield
    finally:
        for entries, name, tensor in exchanged:
            entries[name] = tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore what :func:`random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module = torch.get_device_module(device)
    module.set_rng_state(state) if device.type == "mps" else module.set_rng_state(state, device)


def have_drawn(seed: int) -> bool:
    """Whether random numbers were drawn since the default generators were seeded with this."""
    accelerator = _accelerator_in_use()
    generators = [(torch.device("cpu"), torch.get_rng_state())]
    if accelerator is not None:
        generators.append((accelerator, torch.get_device_module(accelerator).get_rng_state()))
    return any(
        not torch.equal(state, torch.Generator(device).manual_seed(seed).get_state()) for device, state in generators
    )


def seed_generators(seed: int) -> None:
    """Seed the default generators of all devices that are in use.

    For each kind that is not there, ``torch.manual_seed`` keeps a traceback for good, and the three that it formats
    take as long as a pass of a small model.
    """
    torch.default_generator.manual_seed(seed)
    accelerator = _accelerator_in_use()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        module.manual_seed(seed) if accelerator.type == "mps" else module.manual_seed_all(seed)


def current_accelerator() -> torch.device | None:
    """The accelerator of this torch, which before 2.7 has to be found by trying: 2.6 raises if there is none."""
    if torch.__version__ >= "2.7":
        return torch.accelerator.current_accelerator()
    is_there = {"cuda": torch.cuda.is_available(), "xpu": torch.xpu.is_available()}
    is_there["mps"] = torch.backends.mps.is_available()
    return next((torch.device(kind) for kind, available in is_there.items() if available), None)


def _accelerator_in_use() -> torch.device | None:
    """The accelerator, if torch has initialised it."""
    accelerator = current_accelerator()
    if accelerator is None:
        return None
    return accelerator if getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)() else None


def devices_in_use() -> list[torch.device]:
    """The CPU, and every device of the accelerator if torch has initialised it."""
    accelerator = _accelerator_in_use()
    if accelerator is None:
        return [torch.device("cpu")]
    count = torch.get_device_module(accelerator).device_count()
    return [torch.device("cpu"), *(torch.device(accelerator.type, index) for index in range(count))]
