"""The forward passes of ``exact``: every sequence in all arithmetics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rankscope.exact_arithmetic.float64 import in_float64
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution, Stage
from rankscope.models.inputs import Prepared
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import Piece, RowWriter
from rankscope.stream.viewing import need_plain_stream
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable
from rankscope.verbs.exact.laws import is_pure, predict_blocks, sees_everything
from rankscope.verbs.exact.readings import Readings, read_exactly, read_in_float64, read_plainly
from rankscope.verbs.reader import SiteReader


class ExactPasses:
    """Reads the residuals of one network.

    Args:
        execution: how the model is run.
        prepared: its inputs, one sequence in each batch.
        operation: what is done to it.
        stability: also read the linear factor.
        plain: also read in float64 and in the model's own format.

    Attributes:
        writer: collects the rows.
        counted: has seen formats and lengths.
    """

    def __init__(
        self, execution: Execution, prepared: Prepared, operation: Operation, *, stability: bool, plain: bool
    ) -> None:
        self._execution, self._prepared, self._operation = execution, prepared, operation
        self._loaded = execution.loaded
        self._stability, self._plain = stability, plain
        self._masked: set[int] = set()
        self._stopped: set[int] = set()
        self.writer = RowWriter(coordinates=("arithmetic",))
        self.counted = SiteReader([], prepared.policy, self.writer)

    def run(self, blocks: str | Sequence[str] | None, stream: Stream | None) -> ModelView:
        """All sequences; returns the structure of the model."""
        execution = self._execution
        view = execution.plan(
            self._prepared,
            (self._operation, self._prepared.policy, self._stability, self._plain),
            blocks=blocks,
            stream=stream,
            variants=5 + 2 * self._stability + self._plain,
            reads_weights=True,
        )
        need_plain_stream(view, "exact")
        check_operable(self._operation, view)
        findings = Findings(self.writer, {"": self.counted}, rest=self._known, learn_rest=self._learn)
        with execution.stages(findings, passes=2) as stages:
            for stage in stages:
                with operating(view.model, self._operation, view=stage.view):
                    self._pass(stage)
        execution.collect(findings, self._order)
        # The law is silent about a sequence in which a key was hidden anywhere, which only the last block can tell.
        self.writer.replace(
            piece
            for piece in self.writer.pieces
            if piece.coordinates != ("law",) or piece.first_sequence not in self._masked
        )
        return view

    def _pass(self, stage: Stage) -> None:
        """The model's own format first; then its weights are widened once for all sequences."""
        model = stage.view.model
        own = next((parameter.dtype for parameter in model.parameters()), torch.float64)
        pure = is_pure(self._loaded) and len(stage.view.stacks) == 1
        for part in self._execution.batches():
            if pure:
                with stage.through(part, "own", keep=not self._plain):
                    complete = sees_everything(stage.view, part)
                if not complete:
                    self._masked.add(part.first_sequence)
            if self._plain:
                readings = Readings(part.first_sequence, self.writer)
                read_plainly(stage.view, part, readings, self.counted, partial(stage.through, part))
        with in_float64(model):
            for part in self._execution.batches():
                readings, through = Readings(part.first_sequence, self.writer), partial(stage.through, part)
                states = read_exactly(stage.view, part, readings, stability=self._stability, through=through)
                reached = pure and part.first_sequence not in self._stopped | self._masked
                if reached and not predict_blocks(self._loaded, stage.view, states, readings):
                    self._stopped.add(part.first_sequence)
                if self._plain and own != torch.float64:
                    read_in_float64(stage.view, part, readings, self.counted, through)

    def _known(self) -> dict[str, Any]:
        return {"masked": sorted(self._masked), "stopped": sorted(self._stopped)}

    def _learn(self, known: Mapping[str, Any]) -> None:
        self._masked |= set(known["masked"])
        self._stopped |= set(known["stopped"])

    def _order(self, piece: Piece) -> tuple[int, int]:
        """Sequence by sequence; exact, the law, the model's own format, float64."""
        places = {"exact": 0, "law": 1, "float64": 3} | {self._loaded.dtype: 2}
        return piece.first_sequence, places.get(str(piece.coordinates[0]), 2)
