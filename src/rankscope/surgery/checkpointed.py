"""Gradient checkpointing: what runs again in the backward pass must find the surgery that it ran under first.

Nothing of rankscope is left on a model when its ``with`` block ends. So the check is a hook on the autograd graph of
the pass, where it lives exactly as long as a backward pass through it is possible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from rankscope.errors import UnsupportedOperationError
from rankscope.stream.frames import tensors_in


class BackwardWatch:
    """Raises in a backward pass that would run parts of the model again under other surgery than in the forward pass.

    Args:
        steps: reads the operations and grafts that are active now.
    """

    def __init__(self, steps: Callable[[], Sequence[Any]]) -> None:
        self._steps = steps
        self._watched: list[FunctionCtx] = []
        self._needs_look = False
        self._saves = False
        """Whether the pass runs under a checkpoint that saves by hooks on tensors, which has no node of its own."""

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._watched.clear()
        self._saves, self._needs_look = False, True
        self.look()
        # Without gradients there is no backward pass, unless the whole pass runs inside a reentrant checkpoint.
        self._needs_look = torch.is_grad_enabled() or bool(self._watched)

    def look(self) -> None:
        """Find out whether what runs now is checkpointed: by its callers, which are the checkpoints it runs under."""
        if not (self._needs_look and self._steps()):
            return
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            # A function with a backward pass of its own, such as the reentrant checkpoint, gets its node as argument.
            if code.co_name == "forward" and code.co_argcount:
                node = frame.f_locals.get(code.co_varnames[0])
                if isinstance(node, FunctionCtx) and not any(node is known for known in self._watched):
                    self._watched.append(node)
                    node.register_prehook(self._check())  # type: ignore[attr-defined]
            self._saves = self._saves or code.co_filename == checkpoint.__file__
            frame = frame.f_back  # type: ignore[assignment]

    def see_output(self, output: object) -> None:
        """A block has returned."""
        for tensor in tensors_in(output, depth=4) if self._saves else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(self._check())  # type: ignore[no-untyped-call]

    def _check(self) -> Callable[[Any], None]:
        before = tuple(self._steps())

        def check(gradient: Any) -> None:
            now = self._steps()
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                raise UnsupportedOperationError(
                    "Gradient checkpointing runs parts of the model again in this backward pass, and the surgery "
                    "under which they ran in the forward pass is not active any more: the gradients would be those of "
                    "another model. Call backward() inside the same `with` block as the forward pass."
                )

        return check
