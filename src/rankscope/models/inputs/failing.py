"""Says why a model cannot run on its inputs: ids without an embedding, too many tokens, or an error of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from rankscope.errors import InputError
from rankscope.models.wrapping import needs_all_ranks


class AnyBatch(Protocol):
    """What is read of a batch here: a dataclass with at least these fields."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Keyword arguments of the model."""
        ...

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Positional arguments."""
        ...

    @property
    def axis(self) -> int:
        """Which axis counts sequences."""
        ...

    @property
    def sequences(self) -> int:
        """How many there are."""
        ...

    def call(self, model: nn.Module) -> Any:
        """The output, or the model's own error."""
        ...


def why_it_fails(model: nn.Module, batch: AnyBatch, error: Exception) -> InputError | None:
    """An error with the numbers that do not fit, found by running the model again; None if it is something else."""
    if needs_all_ranks(model) or any(tensor.device.type == "cuda" for tensor in model.parameters()):
        return None  # other processes would have to run as well; a failed kernel leaves the device unusable
    lookups = _Lookups(model, batch)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with suppress(Exception), lookups:  # it fails again, which is why it runs
            batch.call(model)
        return lookups.error or _too_long(model, batch, error) or _fails_by_itself(model, batch)


class _Lookups(TorchFunctionMode):
    """Finds the first lookup of a row that a table does not have."""

    def __init__(self, model: nn.Module, batch: AnyBatch) -> None:
        super().__init__()
        self.error: InputError | None = None
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        given = (*batch.arguments, *batch.inputs.values())
        self._inputs = [value for value in given if isinstance(value, Tensor) and not value.is_floating_point()]
        self._tokens = _tokens(batch)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if func in (F.embedding, torch.embedding) and self.error is None and len(args) > 1:
                ids, table = (args[0], args[1]) if func is F.embedding else (args[1], args[0])
                if isinstance(ids, Tensor) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
                    self.error = self._told(ids, table)
        return func(*args, **(kwargs or {}))

    def _told(self, ids: Tensor, table: Tensor) -> InputError:
        worst = int(ids.max()) if int(ids.max()) >= len(table) else int(ids.min())
        name = self._names.get(id(table), "an embedding")
        if any(value.shape == ids.shape and torch.equal(value, ids) for value in self._inputs):
            return InputError(
                f"The inputs hold the id {worst:,}, and the model has {len(table):,} embeddings ({name}): ids go from "
                f"0 to {len(table) - 1:,}. Pass ids of the model's own tokenizer, or fewer different ones."
            )
        return InputError(
            f"The model looks up row {worst:,} of {name}, which has {len(table):,} rows; the inputs have "
            f"{self._tokens} tokens. If these are positions, pass sequences of at most {len(table):,} tokens."
        )


def _too_long(model: nn.Module, batch: AnyBatch, error: Exception) -> InputError | None:
    """Whether the same inputs with fewer tokens run; then how many do."""
    tokens = _tokens(batch)
    if tokens is None or tokens < 2 or not _runs(model, batch, 1):
        return None
    runs, fails = 1, tokens
    while fails - runs > 1:
        middle = (runs + fails) // 2
        runs, fails = (middle, fails) if _runs(model, batch, middle) else (runs, middle)
    return InputError(
        f"The model fails on inputs of {tokens} tokens, and runs on up to {runs}: {' '.join(str(error).split())[:200]}."
        f" Pass sequences of at most {runs} tokens."
    )


def _fails_by_itself(model: nn.Module, batch: AnyBatch) -> InputError | None:
    """An error that torch raises for the model where no code of rankscope runs inside it; None if it raises none.

    What the model's own code raises is left as it is.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            batch.call(model)
    except Exception as error:  # noqa: BLE001  (whatever it raises is told)
        # Two of ours call the model: this function and the batch. More are hooks or modes inside it.
        roots = [_root_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
        if roots[-1] == "torch" and roots.count("rankscope") <= 2:
            told = " ".join(str(error).split())[:300].rstrip(".")
            return InputError(
                f"{type(model).__name__} cannot run on these inputs: {type(error).__name__}: {told}. Pass what it runs "
                "on when you call it yourself."
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return None


def _root_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _tokens(batch: AnyBatch) -> int | None:
    for value in (*batch.arguments, *batch.inputs.values()):
        if isinstance(value, Tensor) and value.ndim in (2, 3):
            return int(value.shape[1 - batch.axis])
    return None


def _runs(model: nn.Module, batch: AnyBatch, tokens: int) -> bool:
    longest = _tokens(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            for axis, size in enumerate(value.shape):
                if size == longest and not (axis == batch.axis and size == batch.sequences):
                    value = value.narrow(axis, 0, tokens)
        return value

    inputs = {name: cut(value) for name, value in batch.inputs.items()}
    whole: Any = batch
    try:
        replace(whole, inputs=inputs, arguments=tuple(map(cut, batch.arguments))).call(model)
    except Exception:  # noqa: BLE001  (any failure says the same)
        return False
    return True
