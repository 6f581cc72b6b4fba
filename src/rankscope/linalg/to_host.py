"""Copies many small tensors from a device at once: every copy makes the host wait for all work queued before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, with one copy per device.

    Example:
        >>> to_host([torch.ones(2), torch.tensor(True)])
        [tensor([1., 1.]), tensor(True)]
    """
    found = [tensor.detach() for tensor in tensors]
    for device in {tensor.device for tensor in found if tensor.device.type != "cpu"}:
        places = [place for place, tensor in enumerate(found) if tensor.device == device]
        as_bytes = [found[place].reshape(-1).view(torch.uint8) for place in places]
        copied = torch.split(torch.cat(as_bytes).cpu(), [len(part) for part in as_bytes])
        for place, part in zip(places, copied, strict=True):
            # Copied once more, because a number must start at a multiple of its size.
            found[place] = part.clone().view(found[place].dtype).reshape(found[place].shape)
    return found
