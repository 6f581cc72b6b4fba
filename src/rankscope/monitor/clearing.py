"""Whether the optimizer gets what backward left: no gradient of the step before, and at which size and angle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.linalg.to_host import start_to_host
from rankscope.models.wrapping import is_compiled, is_distributed

LEAST_ENTRIES = 16
MOST_TRIED = 3
"""Smallest parameters of which one has to have a gradient that is not zero; on an accelerator every look waits."""
EXPLAINED = 0.01
"""Share of a gradient that the new and the old one may leave unexplained; what else changes gradients leaves more."""
SAME_ANGLE = 0.99
"""Cosine of two gradients from which on they cannot be told apart."""


class Clearing:
    r"""Fits the gradient of a step to what backward added since the last one and to what it was then.

    With :math:`g` the gradient of one small parameter, :math:`h` the sum that backward added to it and :math:`g'` its
    value after the last step of the optimizer, :math:`g = a h + b g'`. Clipping and loss scales change :math:`a` and
    :math:`b`, and :math:`b = 0` if gradients were cleared. **Exact** up to rounding, for one process.

    Attributes:
        ratio: size of the last gradient that was judged, relative to what backward added; negative if it was turned.
        cosine: between the two.
    """

    def __init__(self) -> None:
        self._parameter: nn.Parameter | None = None
        self._value: Tensor | None = None
        self._old: Tensor | None = None
        self._added: list[Tensor] = []
        self._handle: Any = None
        self._judged: tuple[Tensor, Callable[[], list[Tensor]]] | None = None
        self._share = math.nan
        self._unadded: tuple[nn.Parameter, Tensor] | None = None
        self.ratio, self.cosine = math.nan, math.nan

    def after_backward(self, model: nn.Module, *, is_due: bool) -> None:
        """Judge the step before, if it was read; and remember a parameter, if this one is."""
        parameter, self._parameter = self._parameter, None
        if self._handle is not None and self._old is not None and parameter is not None and parameter.grad is not None:
            # An accelerator is not waited for in a step that is not read.
            self._judged = self._old, start_to_host([parameter.grad, *self._added])
            self._unadded = None if self._added else (parameter, parameter.detach().clone())
        self.close()
        self._old, self._added, self._value = None, [], None
        if is_due and not is_compiled(model):
            small = sorted(filter(_is_fit, model.parameters()), key=Tensor.numel)[:MOST_TRIED]
            self._parameter = next((one for one in small if one.grad is not None and bool(one.grad.any())), None)
            self._value = None if self._parameter is None else _flat(self._parameter)

    def after_step(self) -> None:
        """Listen to what the next backward adds, if the optimizer made a step and left the gradient as it was."""
        one = self._parameter
        if one is None or self._value is None or torch.equal(_flat(one), self._value):
            return
        self._old = torch.zeros_like(self._value) if one.grad is None else _flat(one.grad)
        self._share = math.nan if bool(self._old.any()) else 0.0
        self._handle = one.register_hook(self._hear)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """The gradients of the coming step do not compare with those of the step before."""
        self.close()
        self._parameter = None

    def close(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def take(self) -> float:
        """Share of the last gradient that was judged, that is the one before; NaN if none was since the last call."""
        judged, self._judged = self._judged, None
        share, self._share = self._share, math.nan
        if judged is not None:
            now, *added = map(_flat, judged[1]())
            old = judged[0]
            if not bool(old.any()):
                share = 0.0
            elif self._unadded is not None and torch.equal(now, old):
                # Nothing was added: a second step with the same gradient, if it moved this parameter and not others.
                parameter, before = self._unadded
                share = math.nan if torch.equal(parameter, before) else 1.0
            else:
                share = _carried(now, old, added)
            if len(added) == 1:  # of several, one may have been cleared before the next, as where two networks play
                size, left = float(added[0].norm()), float(now.norm())
                # Nothing has no direction: what was scaled to zero was not turned.
                self.cosine = float(added[0] @ now) / (size * left) if size * left > 0.0 else 1.0
                self.ratio = math.copysign(left / size, self.cosine) if size > 0.0 else 1.0
        return share

    def _hear(self, gradient: Tensor) -> None:
        self._added.append(gradient.detach().clone())


def _carried(now: Tensor, old: Tensor, added: Sequence[Tensor]) -> float:
    """The share of ``old`` in ``now``; NaN if it cannot be told from what was added, or if neither explains it."""
    if not added:
        return math.nan  # written by hand, as by automatic differentiation outside ``backward``
    new = torch.stack(list(added)).sum(0)
    new, old, size = new / new.norm(), old / old.norm(), float(now.norm())
    cosine = float(old @ new)
    if not (abs(cosine) < SAME_ANGLE and size > 0.0):  # also what is not finite
        return math.nan
    along, across = float(new @ now), float(old @ now)
    share = (across - cosine * along) / (1.0 - cosine**2)
    left = now - (along - cosine * share) * new - share * old
    return abs(share) / size if float(left.norm()) <= EXPLAINED * size else math.nan


def _is_fit(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.numel() >= LEAST_ENTRIES
        and not (gradient.is_sparse or is_distributed(gradient) or parameter.is_meta)
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().cpu().double()
