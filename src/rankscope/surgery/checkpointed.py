"""Gradient checkpointing: what runs again in the backward pass must find the surgery that it ran under first.

Nothing of rankscope is left on a model when its ``with`` block ends. So the check is a hook on the autograd graph of
the pass, where it lives exactly as long as a backward pass through it is possible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from rankscope.errors import UnsupportedOperationError
from rankscope.stream.block_call import ActiveBlock, SavingHooks, saving_hooks
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


class CheckpointedPart:
    """Lets a part of a block that is checkpointed by itself run again under the surgery that it ran under first.

    A checkpoint that is not reentrant puts a pair of functions in place: one that packs each tensor saved for the
    backward pass, and one that unpacks it, and runs the part again when the first tensor is wanted. The second is
    wrapped as soon as the first operation of the part is seen, with the state of the block at that moment. A custom
    autograd function at the very beginning, which no mode sees, is run again with the rest.

    Args:
        running: what is active while a part of this call runs again.
    """

    def __init__(self, running: Callable[[ActiveBlock], AbstractContextManager[None]]) -> None:
        self._running = running
        self._saving: SavingHooks | None = None

    def follow(self, call: ActiveBlock, has_long_skips: bool) -> None:
        """An operation of a block begins, which may be the first of a part that is checkpointed."""
        saving = saving_hooks()
        if saving is None or saving in (call.saving, self._saving):
            return
        pack, unpack = saving
        if not getattr(pack, "__qualname__", "").startswith(checkpoint._checkpoint_hook.__name__):
            return
        if has_long_skips:
            raise UnsupportedOperationError(
                f"Gradient checkpointing runs a part of {call.call.module_name} again by itself in the backward pass, "
                "where long skips cannot be scaled. Checkpoint whole blocks."
            )
        state = call.again()

        def wrapped(packed: Any) -> Any:
            with self._running(state.again()):
                return unpack(packed)

        self._saving = pack, wrapped
        torch._C._autograd._pop_saved_tensors_default_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(pack, wrapped)
