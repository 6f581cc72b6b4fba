"""One run over several ranks: which rank runs which batches, and how their rows become one table.

Whole batches are distributed, so every forward pass has the same batch as in a single process, and its values are
bit-identical. If weights are sharded (FSDP2), a rank without a batch left runs a pass without observing it, because the
others need its shard. If products are split (tensor parallel), every rank runs every batch and sees its own heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from rankscope.errors import InputError, ProcessError, UnsupportedConfigError
from rankscope.execution.findings import Findings
from rankscope.execution.rendezvous import Rendezvous, rendezvous
from rankscope.execution.support import Parallel
from rankscope.models.inputs import Batch, Prepared, digest_of, need_same_inputs
from rankscope.models.loading import LoadedModel
from rankscope.models.wrapping import Spread, in_group, is_distributed, whole
from rankscope.runs.rows import Piece, rows_from_bytes
from rankscope.stream.operators import is_attention
from rankscope.stream.sites import SiteRef
from rankscope.stream.tracer import Observed, Observer, Unreadable


def parallel_mode(parallel: Parallel | None, *, is_module: bool, spread: Spread | None) -> Parallel | None:
    """The requested mode, or the one in which a module is already sharded; None if this process works alone.

    Args:
        parallel: the requested mode.
        is_module: whether the model is a module of the user, which is not changed.
        spread: how that module is sharded.

    Raises:
        InputError: the mode does not fit the model or the number of processes.
    """
    if not is_module:
        if parallel in ("fsdp", "tensor") and not in_group():
            raise InputError(
                f"parallel={parallel!r} shards a model over several processes, but there is one. Start several, e.g. "
                "torchrun --nproc-per-node 2 -m rankscope measure ..., or leave it out."
            )
        return parallel if in_group() else None
    if spread is None and parallel in ("fsdp", "tensor"):
        raise InputError(
            f"parallel={parallel!r}: your own module is not changed, and it is not sharded. Call fully_shard on it or "
            "load it with a tensor-parallel plan yourself, or pass its folder."
        )
    if spread is not None and in_group():
        if parallel is not None and parallel != spread:
            raise InputError(f"parallel={parallel!r}, but this module is already sharded: {spread}. Leave it out.")
        return spread
    return parallel if in_group() else None


class RankShare:
    """This process's share of a run; all of it if there is one process.

    Args:
        mode: how the ranks share the work, None for one process.
        ranks: the rendezvous of all ranks, None for one process.
    """

    def __init__(self, mode: Parallel | None = None, ranks: Rendezvous | None = None) -> None:
        self._mode = mode
        self._ranks = ranks
        self._observer: RankObserver | None = None
        self._compared = False

    @property
    def is_first(self) -> bool:
        """Whether this rank shows progress."""
        return self._ranks is None or self._ranks.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is one process."""
        return self._ranks is None

    @property
    def described(self) -> dict[str, Any]:
        """What a run records about its processes; nothing if there was one."""
        return {} if self._ranks is None else {"processes": {"count": self._ranks.world, "parallel": self._mode}}

    @property
    def spread(self) -> Spread | None:
        """How a model is sharded over the ranks; None if each has all of it."""
        return self._mode if self._mode in ("fsdp", "tensor") else None

    def gather(self, own: bytes) -> Sequence[bytes]:
        """What each rank that takes part in a forward pass hands in; only this one if each has all of the model."""
        return [own] if self._ranks is None or self.spread is None else self._ranks.gather(own)

    def before_discovery(self, prepared: Prepared) -> None:
        """Wait for the other ranks, which discover the same structure on the same inputs.

        Raises:
            InputError: the ranks received different inputs.
        """
        if self._ranks is not None and not self._compared:
            parts = [(part.first_sequence, part.sequences, part.arguments, part.inputs, part.keep) for part in prepared]
            need_same_inputs(self._ranks.gather(digest_of(parts)))
            self._compared = True
        self._before_a_pass()

    def watch(self, observe: Observer) -> Observer:
        """An observer that postpones errors until the pass is over, and can be muted."""
        if self._ranks is None:
            return observe
        self._observer = RankObserver(observe, spread=self._mode == "tensor")
        return self._observer

    def own(self, prepared: Prepared) -> Sequence[Batch]:
        """The batches this rank runs and observes."""
        if self._ranks is None or self._mode == "tensor":
            return prepared.batches
        # Round robin, so that the ranks finish within one batch of each other.
        return prepared.batches[self._ranks.rank :: self._ranks.world]

    def batches(self, prepared: Prepared, run: Callable[[Batch], object]) -> Iterator[Batch]:
        """The batches of this rank, in order; when the iterator ends, so have all forward passes.

        Args:
            prepared: all batches.
            run: runs the model once, for a pass that only the other ranks need.
        """
        if self._ranks is None:
            yield from prepared
            return
        own = self.own(prepared)
        for part in own:
            self._before_a_pass()
            if self._observer is not None:
                self._observer.batch = part
            yield part
            if self._observer is not None:
                self._observer.settle()
        # Batches do not divide evenly: this rank has one less than others, which need its shards in their last pass.
        if self._mode != "tensor" and len(own) * self._ranks.world < len(prepared):
            self._before_a_pass()
            if self._mode == "fsdp":
                assert self._observer is not None
                with self._observer.muted():
                    run(prepared[-1])

    def _before_a_pass(self) -> None:
        """Synchronise: a forward pass of a sharded model contains collectives, so all ranks must start it together.

        If each rank has all of the model, an error on one is noticed here before the others go on.
        """
        if self._ranks is not None:
            self._ranks.barrier()

    def collect(self, findings: Findings, loaded: LoadedModel) -> None:
        """Add the results of the other ranks, so that every rank has all of them; the rows are not yet in order."""
        if self._ranks is None:
            return
        tables = [rows_from_bytes(data) for data in self._ranks.gather(findings.packed())]
        pieces = [pieces for pieces, _ in tables]
        # Tensor parallel: all ranks have the same pieces with different heads. Otherwise each has pieces of its own.
        if self._mode == "tensor":
            gathered = self._observer is not None and self._observer.gathered_heads
            findings.writer.replace(_with_all_heads(pieces, _heads_of(loaded, gathered=gathered)))
        else:
            findings.writer.replace(piece for rank in pieces for piece in rank)
        for _, remarks in reversed(tables):  # the first rank last: if ranks differ by rounding, its values win
            findings.learn(remarks)

    def from_first(self, act: Callable[[], Any]) -> Any:
        """Call ``act`` on the first rank only and return its result, as JSON, on every rank."""
        if self._ranks is None:
            return act()
        payload = json.dumps(act() if self.is_first else None).encode()
        return json.loads(self._ranks.gather(payload)[0])


@contextmanager
def sharing(mode: Parallel | None) -> Iterator[RankShare]:
    """Share a run among the ranks of the group; an error on one of them is raised on all.

    Args:
        mode: the result of :func:`parallel_mode`.
    """
    if mode is None:
        yield RankShare()
        return
    with rendezvous() as ranks:
        yield RankShare(mode, ranks)


class RankObserver:
    """An observer on one of several ranks: an error in it must not stop a forward pass that other ranks take part in.

    Args:
        observe: receives the observed tensors, gathered if necessary.
        spread: whether activations may be distributed over the ranks.

    Attributes:
        batch: the batch of the current forward pass.
        gathered_heads: whether heads were observed as distributed tensors and gathered here.
    """

    def __init__(self, observe: Observer, *, spread: bool) -> None:
        self._observe = observe
        self._spread = spread
        self._muted = False
        self._error: Exception | None = None
        self.batch: Batch | None = None
        self.gathered_heads = False

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        """Observe, unless muted; an error is stored for :meth:`settle`."""
        if self._spread:
            seen = self._whole(seen)  # a collective operation: every rank must make it
        if self._muted or self._error is not None:
            return
        try:
            if self._spread and isinstance(seen, (Tensor, tuple)):
                self._need_all_tokens(ref, seen[0] if isinstance(seen, tuple) else seen)
            self._observe(ref, seen)
        except Exception as error:  # noqa: BLE001  (raised by settle, when no rank waits for this one any more)
            self._error = error

    def settle(self) -> None:
        """Raise the stored error, now that the forward pass is over."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Observe nothing inside this block."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def _need_all_tokens(self, ref: SiteRef, stream: Tensor) -> None:
        ids = None if self.batch is None else self.batch.inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and stream.shape[1] < ids.shape[1]:
            raise InputError(
                f"At {ref.site} of block {ref.layer} this process has {stream.shape[1]} of {ids.shape[1]} tokens: the "
                "stream is split along the sequence (sequence parallel). Load the model with a plan that does not "
                "split it."
            )

    def _whole(self, seen: Observed) -> Observed:
        if isinstance(seen, Tensor):
            return whole(seen)
        if isinstance(seen, tuple):
            return tuple(map(whole, seen))
        if isinstance(seen, Unreadable):
            return seen
        names = ("weights", "query", "key", "value", "mask", "scores")
        spread: dict[str, Any] = {
            name: whole(tensor) for name in names if is_distributed(tensor := getattr(seen, name))
        }
        self.gathered_heads |= bool(spread)
        return replace(seen, **spread) if spread else seen


@dataclass(frozen=True)
class _Heads:
    """The attention heads of a tensor-parallel model.

    Attributes:
        total: number of heads per layer, from the configuration; None if unknown.
        cut: whether each rank saw only its own heads, judged by the weights of the attention modules.
    """

    total: int | None
    cut: bool


def _heads_of(loaded: LoadedModel, *, gathered: bool) -> _Heads:
    """Determine the heads of a model; ``gathered`` if they were distributed tensors that are already gathered."""
    config = loaded.config
    total = None if config is None else config.get_text_config().to_dict().get("num_attention_heads")
    inside = [
        parameter
        for name, module in loaded.model.named_modules()
        if is_attention(name, type(module))
        for parameter in module.parameters()
    ]
    return _Heads(total if isinstance(total, int) else None, not gathered and any(map(_is_cut, inside)))


def _is_cut(parameter: Any) -> bool:
    return is_distributed(parameter) and not all(placement.is_replicate() for placement in parameter.placements)


def _with_all_heads(ranks: Sequence[Sequence[Piece]], heads: _Heads) -> list[Piece]:
    """Join pieces of the same batches from several ranks, each with its own heads, as a single process writes them.

    Rows without a head axis are the same on every rank; those of the first rank are used.

    Raises:
        ProcessError: the ranks saw different sites.
        UnsupportedConfigError: the heads are neither all on every rank nor split among the ranks.
    """
    if len({tuple(map(_key, pieces)) for pieces in ranks}) > 1:
        raise ProcessError("The processes saw different sites. Pass the same model, inputs and sites on every one.")
    return [_joined(same, heads) for same in zip(*ranks, strict=True)]


def _key(piece: Piece) -> tuple[object, ...]:
    return piece.metric, piece.site, piece.stack, piece.layer, piece.first_sequence, piece.coordinates


def _joined(same: Sequence[Piece], heads: _Heads) -> Piece:
    first = same[0]
    if first.values.ndim == 1:
        return first
    counts = [piece.values.shape[1] for piece in same]
    # The heads of all ranks add up to the total: concatenate. Every rank has all of them: use the first rank.
    if not (heads.cut if heads.total is None else sum(counts) == heads.total):
        if heads.total is None or set(counts) == {heads.total}:
            return first
        raise UnsupportedConfigError(
            f"Block {first.layer} has {heads.total} heads according to its configuration, but the processes saw "
            f"{', '.join(map(str, counts))}. Choose token metrics only, or use parallel='fsdp'."
        )
    return replace(
        first,
        values=np.concatenate([piece.values for piece in same], axis=1),
        statuses=np.concatenate([piece.statuses for piece in same], axis=1),
    )
