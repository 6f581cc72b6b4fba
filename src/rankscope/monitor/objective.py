"""Whether the loop still computes the same objective: the operations between the outputs of the model and the loss."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.models.wrapping import is_compiled
from rankscope.monitor.answers import EVERY, NEAR

CALM = 4
"""Losses in a row with the same operations, before others are told: some loops have several objectives in turn."""
_SETTINGS = ("alpha", "dim", "reduction", "ignore_index", "exponent", "p", "beta", "delta", "keepdim")


class ObjectiveWatch:
    """Reads the graph of the loss, which autograd has anyway; nothing is replaced.

    **Exact** for operations that gradients pass, and for settings such as a reduction. What is done to labels, and
    factors, are not seen. The outputs are those of the last forward in training.

    Attributes:
        follows: whether it hears the outputs of a model.
    """

    def __init__(self) -> None:
        self._ends: set[Any] = set()
        self._before: tuple[str, ...] = ()
        self._calm, self._calls = 0, 0
        self._handle: Any = None
        self.follows = False
        self._model: Callable[[], nn.Module | None] = lambda: None

    def follow(self, model: nn.Module) -> None:
        """Hear the outputs of a model."""
        self.follows, self._model = True, weakref.ref(model)
        if not is_compiled(model):  # a hook inside compiled code would have it compiled again
            self._handle = model.register_forward_hook(self._see)

    def __deepcopy__(self, memo: Any) -> ObjectiveWatch:
        return self  # a copy of a watched model, such as a teacher, is not watched

    def close(self) -> None:
        """Stop listening."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._ends = set()

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        if (
            module is self._model()
            and module.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            is_plain = isinstance(output, Tensor | dict | tuple | list)
            leaves = pytree.tree_leaves(output if is_plain else getattr(output, "__dict__", {}))
            self._ends = {one.grad_fn for one in leaves if isinstance(one, Tensor) and one.grad_fn is not None}

    def take(self, loss: Tensor) -> str:
        """How the operations differ from those of the losses before, in words; empty if they do not."""
        ends, self._ends = self._ends, set()  # not held longer than needed: they keep the graph
        self._calls += 1
        if not ends or (self._calls > 2 * EVERY and self._calls % EVERY):
            return ""
        now, before = self._operations(loss, ends), self._before
        if not now:
            return ""
        self._before = now
        is_new = bool(before) and now != before and self._calm >= CALM
        self._calm = self._calm + 1 if now == before else 0
        if not is_new:
            return ""
        added, gone = ([one for one in these if one not in others] for these, others in ((now, before), (before, now)))
        parts = [f"{', '.join(names[:3])} {words}" for names, words in ((added, "new"), (gone, "gone")) if names]
        return f"the loss is computed otherwise: {'; '.join(parts) or 'the same operations in another order'}"

    @staticmethod
    def _operations(loss: Tensor, ends: set[Any]) -> tuple[str, ...]:
        waiting, seen, found, is_of_model = deque([loss.grad_fn]), {loss.grad_fn}, list[str](), False
        while waiting and len(found) < NEAR:
            node = waiting.popleft()
            if node is None or (node in ends and node is not loss.grad_fn):
                is_of_model = is_of_model or node is not None
                continue
            settings = [f"{name}={value}" for name in _SETTINGS
                        if isinstance(value := getattr(node, f"_saved_{name}", None), int | float | bool)]  # fmt: skip
            found.append(f"{node.name().removesuffix('0').removesuffix('Backward')}({', '.join(settings)})")
            following = [one for one, _ in node.next_functions if one is not None and one not in seen]
            seen.update(following)
            waiting.extend(following)
        return tuple(found) if is_of_model and len(found) < NEAR else ()
