"""What a verb feeds to a model: batches, which tokens count, and where they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch

from rankscope._errors import InputError
from rankscope.models.loading.dtypes import default_dtype

TokensPolicy = Literal["content", "no-first", "no-special"]
TOKENS_POLICIES: tuple[TokensPolicy, ...] = ("content", "no-first", "no-special")

_SEQUENCES: ContextVar[int | None] = ContextVar("_SEQUENCES", default=None)


def sequences_in_pass() -> int | None:
    """How many sequences the batch holds that runs now; None in a pass that is not one of a batch."""
    return _SEQUENCES.get()


@contextmanager
def _running(sequences: int) -> Iterator[None]:
    token = _SEQUENCES.set(sequences)
    try:
        yield
    finally:
        _SEQUENCES.reset(token)


@dataclass(frozen=True)
class InputPlan:
    """How much of what is to be prepared; the arguments of ``prepare_inputs``, checked."""

    sequences: int | None
    tokens: int
    batch: int
    policy: TokensPolicy
    seed: int
    random_tokens: bool

    def __post_init__(self) -> None:
        for name, value in (("sequences", self.sequences), ("tokens", self.tokens), ("batch", self.batch)):
            if value is not None and value < 1:
                raise InputError(f"{name}={value}: expected at least 1.")
        if self.policy not in TOKENS_POLICIES:
            raise InputError(f"tokens_policy {self.policy!r} is not one of {', '.join(TOKENS_POLICIES)}.")

    @property
    def wanted(self) -> int:
        """Sequences to make up when nobody said how many."""
        return 8 if self.sequences is None else self.sequences


@dataclass(frozen=True)
class Batch:
    """One forward pass.

    Attributes:
        inputs: keyword arguments of the model's forward.
        keep: (batch, tokens), True where a token counts; None when all do.
        first_sequence: the number of the first sequence in the whole run.
        sequences: how many sequences the batch holds.
        arguments: positional arguments, for modules that take a bare tensor.
        axis: the axis of those arguments along which the sequences lie.
    """

    inputs: Mapping[str, Any]
    keep: torch.Tensor | None
    first_sequence: int
    sequences: int
    arguments: tuple[torch.Tensor, ...] = ()
    axis: int = 0

    def run(self, model: torch.nn.Module) -> Any:
        """Call ``model`` on this batch.

        A float64 model runs with float64 as torch's default, because some models make constants on the way.
        """
        first = next(model.parameters(), None)
        with _running(self.sequences):
            if first is None or first.dtype is not torch.float64:
                return model(*self.arguments, **self.inputs)
            with default_dtype(torch.float64):
                return model(*self.arguments, **self.inputs)


@dataclass(frozen=True)
class Prepared(Sequence[Batch]):
    """The batches of a run and what a result has to say about them.

    Attributes:
        batches: in order of their sequences.
        source: where the inputs came from, in words.
        lengths: tokens that count, per sequence; empty where the model decides (images, audio, own tensors).
        policy: which tokens count.
        notes: remarks worth printing.
    """

    batches: tuple[Batch, ...]
    source: str
    lengths: tuple[int, ...]
    policy: TokensPolicy
    notes: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        """How many sequences there are in all."""
        return sum(batch.sequences for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        return self.batches[index]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)
