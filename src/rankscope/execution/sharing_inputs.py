"""Whether all processes that share a measurement were given the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from rankscope._errors import InputError
from rankscope.models.inputs import Prepared


def digest_of(prepared: Prepared) -> bytes:
    """A hash of all tensors of all batches, and of their sizes."""
    found = hashlib.sha256()
    for part in prepared:
        found.update(f"{part.first_sequence},{part.sequences};".encode())
        for value in (*part.arguments, *part.inputs.values(), part.keep):
            if isinstance(value, torch.Tensor):
                bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found.update(f"{tuple(value.shape)}{value.dtype}".encode() + bits.numpy().tobytes())
    return found.digest()


def need_same_inputs(digests: Sequence[bytes]) -> None:
    """Make sure that all ranks were given the same.

    Raises:
        InputError: one was not.
    """
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise InputError(
            f"Process {', '.join(map(str, different))} was given other inputs than process 0. Whole batches are dealt "
            "out here: pass the same inputs, all of them, on every process."
        )
