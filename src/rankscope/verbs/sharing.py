"""One measurement by several processes: who runs which batches, and how their rows become one table.

Whole batches are dealt out, so every forward pass has the composition it has in one process and its values the same
bits. Where weights are spread (FSDP2), a rank that has no batch left runs along unobserved, because the others need its
part. Where products are spread (tensor parallel), every rank runs every batch and sees its own heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading import LoadedModel, load
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.processes.meeting import Meeting, meeting
from rankscope.processes.sharded import Spread
from rankscope.runs.rows import RowWriter, rows_from_bytes, rows_to_bytes
from rankscope.stream.tracer import Observer
from rankscope.stream.viewing import view_of
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.sharing_heads import heads_of, in_order_of_batches, with_all_heads
from rankscope.verbs.sharing_inputs import digest_of, need_same_inputs
from rankscope.verbs.sharing_watch import Watch
from rankscope.verbs.sharing_ways import Parallel, way_of


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
        self._compared = False

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

    def view(
        self,
        model: nn.Module,
        prepared: Prepared,
        blocks: str | Sequence[str] | None,
        stream: Stream | None = None,
    ) -> ModelView:
        """The structure of a model, found in a forward pass on some of its inputs, which are the same on all ranks.

        Raises:
            InputError: they are not.
        """
        if self._together is not None and not self._compared:
            need_same_inputs(self._together.gather(digest_of(prepared)))
            self._compared = True
        self._come()
        return view_of(model, prepared[0], blocks=blocks, stream=stream)

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
            self._come()
            self._watch.batch = part
            yield part
            self._watch.settle()
        if self._way == "fsdp" and len(own) * self._together.world < len(prepared):
            self._come()
            with self._watch.muted():
                prepared[-1].run(model)

    def _come(self) -> None:
        """A forward pass is next; one of a spread model has collective operations in it, and begins with all ranks."""
        if self._together is not None and self._way == "data":
            self._together.beat()
        elif self._together is not None:
            self._together.assemble()

    def _own(self, prepared: Prepared) -> Sequence[Batch]:
        if self._together is None or self._way == "tensor":
            return prepared.batches
        return prepared.batches[self._together.rank :: self._together.world]

    def collect(
        self,
        writer: RowWriter,
        reader: SiteReader,
        loaded: LoadedModel,
        remarks: Mapping[str, Any],
        order: Sequence[tuple[str | int | None, ...]] = ((),),
    ) -> list[dict[str, Any]]:
        """Put the rows of all ranks into ``writer`` in the order one process writes them in, on every rank.

        Args:
            writer: holds this rank's rows, and all of them afterwards.
            reader: learns which formats, shapes and lengths the others saw.
            loaded: the model.
            remarks: JSON this rank has to say besides.
            order: values of the writer's further columns, in the order in which one process goes through them.

        Returns:
            The remarks of every rank.
        """
        if self._together is None:
            return [dict(remarks)]
        own = {"seen": reader.seen(), "remarks": dict(remarks)}
        found = [rows_from_bytes(data) for data in self._together.gather(rows_to_bytes(writer.pieces, own))]
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
    way = way_of(model, parallel)
    if way is None:
        yield Share()
        return
    with meeting() as together:
        yield Share(way, together)
