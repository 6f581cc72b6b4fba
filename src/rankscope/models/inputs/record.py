"""The inputs of a model: batches, which tokens count, and where they came from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, overload

import torch

from rankscope.errors import RankscopeError
from rankscope.models.inputs.failing import why_it_fails
from rankscope.models.loading.dtypes import default_dtype
from rankscope.models.wrapping import is_loaded_double

TokensPolicy = Literal["content", "no-first", "no-special"]
Padding = str | torch.Tensor | None
"""Which of the caller's own tokens are padding: a tensor that is True there, or the argument that marks them."""
Axes = Literal["batch tokens", "tokens batch"]
AXES: tuple[Axes, ...] = get_args(Axes)
"""What the first two axes of the inputs can be, by the number of the axis that counts sequences."""

_MASK_WORDS = ("mask", "pad", "valid", "lens", "lengths", "seqlen", "seq_len")
# These mark tokens that a model has to predict or treat specially, but which other tokens do see.
_OTHER_MASKS = ("masked", "mask_time", "mask_pos", "mlm", "head_mask", "loss", "labels")

_SEQUENCES: ContextVar[int | None] = ContextVar("_SEQUENCES", default=None)


@dataclass
class PassCount:
    """Number of forward passes of batches, also those that were ended early."""

    passes: int = 0


_COUNT: ContextVar[PassCount | None] = ContextVar("_COUNT", default=None)


@contextmanager
def passes_counted() -> Iterator[PassCount]:
    """Count the forward passes of batches."""
    count = PassCount()
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def is_mask_like(name: str) -> bool:
    """Whether an argument of that name may be a token mask."""
    words = name.casefold()
    return any(word in words for word in _MASK_WORDS) and not any(word in words for word in _OTHER_MASKS)


def sequences_in_pass() -> int | None:
    """Number of sequences in the batch that is running; None in a pass that is not of a batch."""
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
    """What to prepare, and how much of it: the fields of :class:`rankscope.Inputs`, which checks them."""

    sequences: int | None
    tokens: int
    batch: int
    policy: TokensPolicy
    seed: int
    random_tokens: bool
    tokenizer: Any = field(default=None, compare=False)
    padding: Padding = field(default=None, compare=False)
    usual: int = 8
    """Sequences to make up if no number is given."""
    axes: Axes | None = None
    labels: Any = field(default=None, compare=False)

    @property
    def wanted(self) -> int:
        """Number of sequences to use."""
        return self.usual if self.sequences is None else self.sequences


@dataclass(frozen=True)
class Batch:
    """One forward pass.

    Attributes:
        inputs: keyword arguments of the model's forward.
        keep: (batch, tokens), True where a token counts; None if all do.
        first_sequence: the number of the first sequence in the whole run.
        sequences: number of sequences in the batch.
        arguments: positional arguments, for modules that take a bare tensor.
        axis: along which axis the ids and vectors count sequences; 1 if the model takes ``(tokens, batch)``.
        batch_first: keyword arguments that count them along their first axis nevertheless, such as masks.
    """

    inputs: Mapping[str, Any]
    keep: torch.Tensor | None
    first_sequence: int
    sequences: int
    arguments: tuple[torch.Tensor, ...] = ()
    axis: int = 0
    batch_first: frozenset[str] = frozenset()

    def axis_of(self, name: str) -> int:
        """Along which axis the keyword argument of this name counts sequences, if it does; "" for positional ones."""
        return 0 if name in self.batch_first else self.axis

    def mapped(self, change: Callable[[str, torch.Tensor, int], torch.Tensor], **fields: Any) -> Batch:
        """The batch with ``change(name, tensor, axis)`` for each tensor that has an axis of sequences.

        ``fields`` replace others; positional arguments have no name.
        """

        def changed(name: str, value: Any) -> Any:
            axis = self.axis_of(name)
            has_axis = isinstance(value, torch.Tensor) and value.ndim > axis and value.shape[axis] == self.sequences
            return change(name, value, axis) if has_axis else value

        inputs = {name: changed(name, value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, arguments=tuple(changed("", value) for value in self.arguments), **fields)

    def taken(self, start: int, count: int) -> Batch:
        """Some sequences of the batch, as a batch."""
        return self.mapped(
            lambda _, value, axis: value.narrow(axis, start, count),
            keep=None if self.keep is None else self.keep[start : start + count],
            first_sequence=self.first_sequence + start,
            sequences=count,
        )

    def run(self, model: torch.nn.Module) -> Any:
        """Call ``model`` on this batch.

        A model that was loaded in float64 runs with float64 as torch's default dtype, because some create constants in
        forward; a module of the caller's own runs as it is.

        Raises:
            InputError: an id has no embedding, there are more tokens than the model takes, or it fails by itself.
        """
        try:
            return self.call(model)
        except RankscopeError:
            raise
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            why = why_it_fails(model, self)
            if why is None:
                raise
            raise why from error

    def call(self, model: torch.nn.Module) -> Any:
        """Like :meth:`run`, with the model's own errors."""
        if (count := _COUNT.get()) is not None:
            count.passes += 1
        with _running(self.sequences), default_dtype(torch.float64) if is_loaded_double(model) else nullcontext():
            return model(*self.arguments, **self.inputs)


@dataclass(frozen=True)
class Prepared(Sequence[Batch]):
    """The batches of a run, and what is recorded about them.

    Attributes:
        batches: in order of their sequences.
        source: where the inputs came from, in words.
        lengths: tokens that count, per sequence; empty if the model decides (images, audio, own tensors).
        policy: which tokens count.
        notes: remarks worth printing.
        caveats: sentences for the verdict: how what was read differs from what was given (hashed, random, truncated).
        tokenizer: the tokenizer of the texts, None if there was none.
        padding: the argument that excluded tokens, in the format of ``padding``.
    """

    batches: tuple[Batch, ...]
    source: str
    lengths: tuple[int, ...]
    policy: TokensPolicy
    notes: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, repr=False, compare=False)
    padding: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids, or of all tensors if there are no ids; independent of the batch size."""
        rows: dict[str, list[bytes]] = {}
        for part in self.batches:
            named = {"input_ids": part.inputs["input_ids"]} if "input_ids" in part.inputs else part.inputs
            named = {**named, **{f"argument {place}": value for place, value in enumerate(part.arguments)}}
            for name, value in sorted(named.items()):
                if isinstance(value, torch.Tensor):
                    axis = part.axis_of(name)
                    for row in value.detach().cpu().movedim(axis, 0) if value.ndim > axis else (value.detach().cpu(),):
                        bits = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                        rows.setdefault(name, []).append(f"{tuple(row.shape)}{row.dtype}".encode() + bits)
        digest = hashlib.sha256()
        for name, entries in sorted(rows.items()):
            digest.update(name.encode())
            for entry in entries:
                digest.update(entry)
        return digest.hexdigest()

    @property
    def distinct(self) -> int:
        """How many inputs differ from each other; all of them if they are not tensors."""
        return distinct_in(self.batches)

    @property
    def common_prefix(self) -> int:
        """With how many equal token ids, of those that count, all inputs begin; 0 without ids."""
        first: list[int] | None = None
        shared = 0
        for part in self.batches:
            ids = part.inputs.get("input_ids")
            if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
                return 0
            for row, values in enumerate(ids.movedim(part.axis, 0)):
                kept = values if part.keep is None else values[part.keep[row].to(values.device)]
                numbers = kept.tolist()
                if first is None:
                    first, shared = numbers, len(numbers)
                differs = (place for place, (a, b) in enumerate(zip(first, numbers, strict=False)) if a != b)
                shared = min(shared, len(numbers), next(differs, shared))
        return shared

    @property
    def sequences(self) -> int:
        """Total number of sequences."""
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


def distinct_in(batches: Sequence[Batch]) -> int:
    """How many sequences of these batches differ from each other; all of them if they are not tensors."""
    digests: set[bytes] = set()
    for part in batches:
        hashes = [hashlib.sha256() for _ in range(part.sequences)]
        tensors = [(value, part.axis) for value in part.arguments]
        named = sorted(part.inputs.items())
        tensors += [(value, part.axis_of(name)) for name, value in named if isinstance(value, torch.Tensor)]
        rows = [value.detach().movedim(axis, 0) for value, axis in tensors if value.ndim > axis]
        rows = [value.cpu().contiguous() for value in rows if len(value) == part.sequences]
        if not rows:
            return sum(part.sequences for part in batches)
        keep = None if part.keep is None else part.keep.cpu()
        for value in rows:
            if keep is not None and value.shape == keep.shape:
                # Without padding: how long it is depends on the other inputs of the batch.
                entries = [value[row][keep[row]].view(torch.uint8).numpy() for row in range(part.sequences)]
            else:
                flat = value.reshape(part.sequences, math.prod(value.shape[1:]))
                entries = list(flat.view(torch.uint8).numpy())
            for one, entry in zip(hashes, entries, strict=True):
                one.update(entry.tobytes())
        digests |= {one.digest() for one in hashes}
    return len(digests)
