"""Small views of several blocks made one: an operation on a small tensor takes as long to start as on a large one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """How a view was made.

    Attributes:
        function: makes the view.
        tensors: its arguments, with the sequences as their first axis.
        options: its other arguments, by name.
    """

    function: Callable[..., Any]
    tensors: tuple[Tensor | None, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def entries(self) -> int:
        """Number of entries of the tensors."""
        return sum(tensor.numel() for tensor in self.tensors if tensor is not None)

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Equal for views that can be made one: everything but the number of sequences."""
        kinds = (None if t is None else (tuple(t.shape[1:]), t.dtype, t.device) for t in self.tensors)
        return self.function, self.options, *kinds

    def copied(self) -> Made:
        """The same with copies of the tensors, which the model may overwrite."""
        copies = (None if tensor is None else tensor.detach().clone() for tensor in self.tensors)
        return Made(self.function, tuple(copies), self.options)


class Joinable:
    """Base of the views of which several can be made one.

    Attributes:
        batch_shape: the batch axes (and the heads) of the values.
        made: how the view was made.
    """

    batch_shape: tuple[int, ...]
    made: Made

    @property
    def home(self) -> torch.device:
        """Where its tensors are."""
        return next(tensor.device for tensor in self.made.tensors if tensor is not None)

    @property
    def keeps_bits(self) -> bool:
        """Whether bits on a CPU depend neither on the number of threads nor on what the view is joined with."""
        return True


def joined(views: Sequence[Made]) -> Any:
    """One view of all their sequences; the views are alike."""
    together = [
        None if parts[0] is None else torch.cat(parts) for parts in zip(*(view.tensors for view in views), strict=True)
    ]
    return views[0].function(*together, **dict(views[0].options))
