"""``exact`` on a model larger than memory: every arithmetic goes through a block before the next one is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rankscope.exact_arithmetic.float64 import in_float64
from rankscope.execution.offload.schedule import Stage, Walk
from rankscope.execution.passes import RowProgress, arrange, each_stage
from rankscope.models.loading import LoadedModel
from rankscope.runs.rows import Piece, RowWriter
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable
from rankscope.verbs.exact_readings import Readings, read_exactly, read_in_float64, read_plainly
from rankscope.verbs.laws import is_pure, predict_blocks, sees_everything
from rankscope.verbs.reader import SiteReader


class ExactByBlocks:
    """Reads each sequence in all arithmetics, block by block.

    Args:
        loaded: the model.
        operation: what is done to it.
        writer: where the rows go.
        counted: notes formats and lengths.
        stability: also read the linear factor.
        plain: also read in float64 and in the model's own format.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        operation: Operation,
        writer: RowWriter,
        counted: SiteReader,
        *,
        stability: bool,
        plain: bool,
    ) -> None:
        self._loaded, self._operation = loaded, operation
        self._writer, self._counted = writer, counted
        self._stability, self._plain = stability, plain
        self._own = getattr(torch, loaded.dtype)
        self._masked: set[int] = set()
        self._stopped: set[int] = set()

    def run(self, walk: Walk, *, shown: bool) -> None:
        """All blocks."""
        check_operable(self._operation, walk.view)
        progress = RowProgress(self._writer, self._counted, rest=self._known, learn=self._learn)
        for stage in each_stage(walk, progress, verb="exact", shown=shown):
            with operating(walk.view.model, self._operation, view=stage.view):
                self._pass(stage, walk)
        self._arrange()

    def _pass(self, stage: Stage, walk: Walk) -> None:
        """The model's own format first; then its weights are widened once for all sequences."""
        pure = is_pure(self._loaded)
        for part in walk.prepared:
            if pure:
                with stage.through(part, "own", keep=not self._plain):
                    complete = sees_everything(stage.view, part)
                if not complete:
                    self._masked.add(part.first_sequence)
            if self._plain:
                readings = Readings(part.first_sequence, self._writer)
                read_plainly(stage.view, part, readings, self._counted, partial(stage.through, part))
        with in_float64(walk.view.model):
            for part in walk.prepared:
                readings, through = Readings(part.first_sequence, self._writer), partial(stage.through, part)
                states = read_exactly(stage.view, part, readings, stability=self._stability, through=through)
                reached = pure and part.first_sequence not in self._stopped | self._masked
                if reached and not predict_blocks(self._loaded, stage.view, states, readings):
                    self._stopped.add(part.first_sequence)
                if self._plain and self._own != torch.float64:
                    read_in_float64(stage.view, part, readings, self._counted, through)

    def _known(self) -> dict[str, Any]:
        return {"masked": sorted(self._masked), "stopped": sorted(self._stopped)}

    def _learn(self, known: Mapping[str, Any]) -> None:
        self._masked |= set(known["masked"])
        self._stopped |= set(known["stopped"])

    def _arrange(self) -> None:
        """Sequence by sequence and arithmetic by arithmetic; the law is silent where a key was hidden anywhere."""
        own = self._loaded.dtype
        order = {"exact": 0, "law": 1, own: 2, "float64": 3} | {own: 2}

        def stays(piece: Piece) -> bool:
            return piece.coordinates != ("law",) or piece.first_sequence not in self._masked

        self._writer.replace(filter(stays, self._writer.pieces))
        arrange(self._writer, lambda piece: (piece.first_sequence, order[str(piece.coordinates[0])]))
