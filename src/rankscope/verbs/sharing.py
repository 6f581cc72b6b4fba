"""One measurement by several processes: who runs which batches, and how their rows become one table.

Whole batches are dealt out, so every forward pass has the composition it has in one process and its values the same
bits. Where weights are spread (FSDP2), a rank that has no batch left runs along unobserved, because the others need its
part. Where products are spread (tensor parallel), every rank runs every batch and sees its own heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rankscope._errors import InputError
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading import LoadedModel, load
from rankscope.processes.meeting import Meeting, in_group, meeting
from rankscope.processes.sharded import Spread, spread_of
from rankscope.results.pieces import packed, unpacked
from rankscope.results.rows import RowWriter
from rankscope.stream.tracer import Observer
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.sharing_heads import heads_of, in_order_of_batches, with_all_heads
from rankscope.verbs.sharing_watch import Watch

Parallel = Literal["data", "fsdp", "tensor"]
WAYS: tuple[Parallel, ...] = ("data", "fsdp", "tensor")


class Share:
    """The part of this process; all of it where there is only one.

    Args:
        way: how the processes share the work, None where there is one.
        together: the meeting of all ranks, None where there is one.
    """

    def __init__(self, way: Parallel | None = None, together: Meeting | None = None) -> None:
        self._way = way
        self._together = together
        self._watch: Watch | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank shows progress."""
        return self._together is None or self._together.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is one process."""
        return self._together is None

    @property
    def described(self) -> dict[str, Any]:
        """What a run says of its processes; nothing where there was one."""
        return {} if self._together is None else {"processes": {"count": self._together.world, "parallel": self._way}}

    def load(self, model: str | Path | nn.Module, *, seed: int, dtype: torch.dtype | str | None) -> LoadedModel:
        """Load a model whole, or this rank's part of it."""
        spread: Spread | None = self._way if self._way in ("fsdp", "tensor") else None
        return load(model, seed=seed, dtype=dtype, spread=None if isinstance(model, nn.Module) else spread)

    def watch(self, observe: Observer) -> Observer:
        """An observer that keeps still while this rank only runs along."""
        if self._together is None:
            return observe
        self._watch = Watch(observe, spread=self._way == "tensor")
        return self._watch

    def rounds(self, prepared: Prepared) -> int:
        """How many batches are this rank's."""
        return len(self._own(prepared))

    def parts(self, prepared: Prepared, model: nn.Module) -> Iterator[Batch]:
        """The batches of this rank, in order; the last forward pass has ended when the iterator has."""
        if self._together is None:
            yield from prepared
            return
        assert self._watch is not None
        own = self._own(prepared)
        for part in own:
            self._together.beat()
            self._watch.batch = part
            yield part
            self._watch.settle()
        if self._way == "fsdp" and len(own) * self._together.world < len(prepared):
            with self._watch.muted():
                prepared[-1].run(model)

    def _own(self, prepared: Prepared) -> Sequence[Batch]:
        if self._together is None or self._way == "tensor":
            return prepared.batches
        return prepared.batches[self._together.rank :: self._together.world]

    def collect(
        self,
        writer: RowWriter,
        reader: SiteReader,
        loaded: LoadedModel,
        prepared: Prepared,
        remarks: Mapping[str, Any],
        order: Sequence[tuple[str | int | None, ...]] = ((),),
    ) -> list[dict[str, Any]]:
        """Put the rows of all ranks into ``writer`` in the order one process writes them in, on every rank.

        Args:
            writer: holds this rank's rows, and all of them afterwards.
            reader: learns which formats, shapes and lengths the others saw.
            loaded: the model.
            prepared: the inputs, which must be the same on all ranks.
            remarks: JSON this rank has to say besides.
            order: values of the writer's further columns, in the order in which one process goes through them.

        Returns:
            The remarks of every rank.
        """
        if self._together is None:
            return [dict(remarks)]
        own = {"inputs": _digest(prepared), "seen": reader.seen(), "remarks": dict(remarks)}
        found = [unpacked(data) for data in self._together.gather(packed(writer.pieces, own))]
        _need_same_inputs([said["inputs"] for _, said in found])
        pieces = [pieces for pieces, _ in found]
        if self._way == "tensor":
            gathered = self._watch is not None and self._watch.gathered_heads
            writer.replace(with_all_heads(pieces, heads_of(loaded, gathered=gathered)))
        else:
            writer.replace(in_order_of_batches(pieces, order))
        for _, said in found:
            reader.learn(said["seen"])
        return [said["remarks"] for _, said in found]


@contextmanager
def sharing(model: str | Path | nn.Module, parallel: Parallel | None) -> Iterator[Share]:
    """Share one measurement among the processes of the group; an error on one of them is raised on all.

    Args:
        model: what is measured.
        parallel: ``"data"``, ``"fsdp"``, ``"tensor"``; None for one process, except where a module is spread already.

    Raises:
        InputError: ``parallel`` does not go with the model or with the number of processes.
    """
    way = _way(model, parallel)
    if way is None:
        yield Share()
        return
    with meeting() as together:
        yield Share(way, together)


def _way(model: str | Path | nn.Module, parallel: Parallel | None) -> Parallel | None:
    if parallel is not None and parallel not in WAYS:
        raise InputError(f"parallel={parallel!r} is not one of {', '.join(WAYS)}.")
    if not isinstance(model, nn.Module):
        if parallel in ("fsdp", "tensor") and not in_group():
            raise InputError(
                f"parallel={parallel!r} spreads a model over several processes, and there is one. Start several, e.g. "
                "torchrun --nproc-per-node 2 -m rankscope measure ..., or leave it out."
            )
        return parallel if in_group() else None
    spread = spread_of(model)
    if spread is None and parallel in ("fsdp", "tensor"):
        raise InputError(
            f"parallel={parallel!r}: a module that is handed over is not changed, and this one is not spread. Call "
            "fully_shard on it or load it with a tensor-parallel plan yourself, or pass the folder it lies in."
        )
    if spread is not None and in_group():
        if parallel is not None and parallel != spread:
            raise InputError(f"parallel={parallel!r}, but this module is spread already: {spread}. Leave it out.")
        return spread
    return parallel if in_group() else None


def _digest(prepared: Prepared) -> str:
    """A hash of all tensors of all batches, and of their sizes."""
    found = hashlib.sha256()
    for part in prepared:
        found.update(f"{part.first_sequence},{part.sequences};".encode())
        for value in (*part.arguments, *part.inputs.values(), part.keep):
            if isinstance(value, torch.Tensor):
                bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found.update(f"{tuple(value.shape)}{value.dtype}".encode() + bits.numpy().tobytes())
    return found.hexdigest()


def _need_same_inputs(digests: Sequence[str]) -> None:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise InputError(
            f"Process {', '.join(map(str, different))} was given other inputs than process 0. Whole batches are dealt "
            "out here: pass the same inputs, all of them, on every process."
        )
