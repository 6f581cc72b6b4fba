"""Copies many small tensors from a device at once: every copy makes the host wait for all work queued before it.

A copy that was started early makes it wait for the copy only. On a device with streams (CUDA, XPU) it runs during later
work, on a stream of its own and into pinned memory; on others (MPS) it is made when the result is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, with one copy per device.

    Example:
        >>> to_host([torch.ones(2), torch.tensor(True)])
        [tensor([1., 1.]), tensor(True)]
    """
    found = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return _packed(found, lambda packed: packed.cpu)()


def start_to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy tensors to the CPU as they are now; the result waits for the copies and returns them.

    Example:
        >>> x = torch.ones(2)
        >>> copies = start_to_host([x])
        >>> x += 1.0
        >>> copies()
        [tensor([1., 1.])]
    """
    found = [tensor.detach() for tensor in tensors]
    return _packed([one.clone() if one.device.type == "cpu" else one for one in found], _started)


def _packed(found: list[Tensor], start: Callable[[Tensor], Callable[[], Tensor]]) -> Callable[[], list[Tensor]]:
    """Pack the tensors of each device into one, which ``start`` begins to copy."""
    copies = []
    for device in {tensor.device for tensor in found if tensor.device.type != "cpu"}:
        places = [place for place, tensor in enumerate(found) if tensor.device == device]
        as_bytes = [found[place].reshape(-1).contiguous().view(torch.uint8) for place in places]
        copies.append((places, [len(part) for part in as_bytes], start(torch.cat(as_bytes))))

    def finish() -> list[Tensor]:
        for places, sizes, copied in copies:
            for place, part in zip(places, torch.split(copied(), sizes), strict=True):
                # Copied once more, because a number must start at a multiple of its size.
                found[place] = part.clone().view(found[place].dtype).reshape(found[place].shape)
        copies.clear()
        return found

    return finish


def _started(packed: Tensor) -> Callable[[], Tensor]:
    streams: Any = getattr(torch, packed.device.type)
    if not hasattr(streams, "Stream"):
        return packed.cpu
    side = _side_stream(packed.device)
    side.wait_stream(streams.current_stream(packed.device))
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    with streams.stream(side):
        host.copy_(packed, non_blocking=True)
        done = side.record_event()
    return functools.partial(_waited_for, done, packed, host)


def _waited_for(done: Any, source: Tensor, host: Tensor) -> Tensor:
    """The copy; the source is an argument so that its memory is not reused before."""
    done.synchronize()
    return host


@functools.cache
def _side_stream(device: torch.device) -> Any:
    streams: Any = getattr(torch, device.type)
    return streams.Stream(device=device)
