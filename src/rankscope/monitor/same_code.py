"""Whether the model is the same code: the operations of the probe's pass, where they are in the code, and constants.

The operations, what each of them reads and which numbers it is given, are those of the reading before; so are buffers
and tensors that are neither weights nor computed, by digest. **Exact**: no weight is copied and none is compared::

    code = SameCode()
    code.take(model, batch, step=0)          # "": nothing to compare with
    code.take(model, batch, step=100)        # "train.py:40 adds (add) what train.py:41 ..." once it differs
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.models.inputs import Batch
from rankscope.monitor.isolation import beside_training
from rankscope.pass_graph.kernel_mode import KernelMode

SEQUENCES = 2
CALM = 2
"""Equal passes in a row before a difference is told: a model whose operations depend on the step, on its weights or on
chance, as routing does, never has them."""
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
LARGEST_DIGEST = 2**22
"""Entries of the largest tensor whose values are looked at."""


@dataclass(frozen=True)
class PassOperation:
    """One operation of a pass.

    Attributes:
        name: as torch calls it, such as ``"aten.add.Tensor"``.
        reads: for each tensor it is given, the number of the operation that computed it, the name of the parameter or
            buffer, ``"input"``, or ``"constant"``.
        given: the other arguments, and the shapes and dtypes of the results, in words.
        digests: of the buffers and constants that it reads.
        where: file and line; not compared, because editing a file moves lines.
    """

    name: str
    reads: tuple[int | str, ...]
    given: str
    digests: tuple[str, ...]
    where: str

    @property
    def key(self) -> tuple[object, ...]:
        """What is compared."""
        return self.name, self.reads, self.given, self.digests


class _Recorder(KernelMode):  # type: ignore[no-untyped-call]
    """Writes down the operations of a pass."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.operations: list[PassOperation] = []
        # Tensors are held until the pass is over, so that no number is given twice.
        self._known: dict[int, tuple[Tensor, int | str]] = {id(one): (one, "input") for one in inputs}
        for named in (model.named_parameters(), model.named_buffers()):
            self._known |= {id(one): (one, name) for name, one in named}
        self._buffers = {name for name, _ in model.named_buffers()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        reads = tuple(self._known.get(id(one), (one, "constant"))[1] for one in tensors)
        kept = {*self._buffers, "constant"}
        digests = [_digest(one) for one, of in zip(tensors, reads, strict=True) if of in kept]
        out = func(*args, **(kwargs or {}))
        results = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor)]
        others = [str(one) for one in leaves if not isinstance(one, Tensor | torch.Generator)]
        shapes = [f"{tuple(one.shape)} {one.dtype}" for one in results]
        number = len(self.operations)
        self.operations.append(
            PassOperation(str(func), reads, "; ".join([*others, *shapes]), tuple(digests), _place(sys._getframe(1)))
        )
        for one in results:
            if id(one) not in self._known or not isinstance(self._known[id(one)][1], str):
                self._known[id(one)] = one, number
        return out


def _digest(tensor: Tensor) -> str:
    if tensor.numel() > LARGEST_DIGEST or type(tensor.detach()) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return ""
    values = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def _place(frame: FrameType | None) -> str:
    """File and line of the first caller that is neither torch nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def operations_of(model: nn.Module, batch: Batch) -> tuple[PassOperation, ...]:
    """Run a batch in evaluation mode beside the training, and write down the operations."""
    inputs = [one for one in pytree.tree_leaves((dict(batch.inputs), batch.arguments)) if isinstance(one, Tensor)]
    with beside_training(model), _Recorder(model, inputs) as recorder:
        batch.run(model)
    return tuple(recorder.operations)


class SameCode:
    """Compares the operations of the probe's pass with those of the reading before.

    Attributes:
        digest: of all operations, for another session of the run; empty before the first look.
        used: names of the parameters that the pass reads; empty before the first look.
    """

    def __init__(self) -> None:
        self._before: tuple[PassOperation, ...] = ()
        self._calm, self._step, self._varies = 0, 0, set[int]()
        self._settings: dict[str, float] = {}
        self._set: set[str] = set()
        self.digest, self.used = "", frozenset[str]()

    def forget(self) -> None:
        """Start over: another model is declared."""
        self._before, self._settings = (), {}

    def take(self, model: nn.Module, batch: Batch, step: int) -> str:
        """The first difference in words, with the step of the reading before; empty if there is none."""
        batch = batch.taken(0, min(SEQUENCES, batch.sequences)) if batch.sequences else batch
        now, before, since = operations_of(model, batch), self._before, self._step
        was_set = self._settings_changed(model)
        self._before, self._step = now, step
        self.used = frozenset(read for one in now for read in one.reads if isinstance(read, str))
        names = "".join(f"{one.name} {one.reads} {one.given};" for one in now)
        self.digest = hashlib.sha256(f"{torch.__version__} {names}".encode()).hexdigest()[:16]
        if not before:
            return ""
        found = next(self._differences(before, now), "")
        is_new = bool(found) and self._calm >= CALM
        # The control: two equal passes are equal, or the model is not deterministic.
        if is_new and next(self._differences(now, operations_of(model, batch)), ""):
            is_new, self._calm = False, -(10**9)
        self._calm = 0 if found else self._calm + 1
        self._varies = set() if found else self._varies
        return f"{found} (step {since})" if is_new else was_set

    def _settings_changed(self, model: nn.Module) -> str:
        """Numbers that code has set on modules, as ``dropout.p``; each once, and none that changes from the start."""
        named = ((f"{name}.{key}", one) for name, module in model.named_modules() for key, one in vars(module).items())
        now = {name: float(one) for name, one in named if type(one) in (int, float) and "._" not in name}
        before, self._settings = self._settings, now
        names = [name for name in now if name not in self._set and before.get(name, now[name]) != now[name]]
        self._set.update(names)
        if not names or self._calm < CALM:
            return ""
        more = f", and {len(names) - 1} others" if len(names) > 1 else ""
        return f"{names[0].lstrip('.')} was set to {now[names[0]]:.3g}, and was {before[names[0]]:.3g}{more}"

    def _differences(self, before: Sequence[PassOperation], now: Sequence[PassOperation]) -> Iterator[str]:
        """Digests that change in the first looks, as statistics do, are left out from then on."""
        for number, (old, new) in enumerate(zip(before, now, strict=False)):
            if old.key == new.key or (old.key[:3] == new.key[:3] and number in self._varies):
                continue
            if old.key[:3] == new.key[:3] and self._calm < CALM:
                self._varies.add(number)
                continue
            yield f"{new.where} now {_said(new, now)}, and {old.where} did {_said(old, before)} there"
        if len(now) != len(before):
            longer, words = (now, "is new") if len(now) > len(before) else (before, "is gone")
            first = longer[min(len(now), len(before))]
            yield f"{first.where}: {_said(first, longer)} {words}"


def _said(one: PassOperation, of: Sequence[PassOperation]) -> str:
    """An operation in words: its name, what it reads, and the numbers it is given."""
    reads = [read if isinstance(read, str) else _short(of[read].name) for read in one.reads[:3]]
    digests = f", values {'/'.join(one.digests)}" if any(one.digests) else ""
    return f"{_short(one.name)} of {', '.join(reads) or 'nothing'} ({one.given}{digests})"


def _short(name: str) -> str:
    return name.removeprefix("aten.").partition(".")[0]
