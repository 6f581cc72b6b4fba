"""``exact``: how fast does it really collapse? Computes residuals far below the float floor, with order and factor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rankscope.exact_arithmetic.float64 import in_float64
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution, Stage, executing
from rankscope.models.inputs import InputsLike, Prepared, as_inputs, prepare_planned
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.model import ModelLike, as_model
from rankscope.runs.rows import Piece, RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import need_plain_stream, undisturbed
from rankscope.surgery.surgery import SurgeryLike
from rankscope.verbs.calling import checked
from rankscope.verbs.exact import EXACT, EXECUTION, OWN
from rankscope.verbs.exact.judge import cross_checked, judge_exact
from rankscope.verbs.exact.readings import (
    Readings,
    is_pure,
    predict_blocks,
    read_exactly,
    read_in_float64,
    read_plainly,
    sees_everything,
)
from rankscope.verbs.origin import exact_floors, in_context, provenance_of
from rankscope.verbs.reader import SiteReader


@checked(*OWN)
def exact(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    stability: bool = False,
    plain: bool = True,
    progress: bool = False,
) -> Run:
    """Run a model in exact arithmetic and measure its residual at every block, however small.

    Args:
        model: a :class:`rankscope.Model`, a spec or your own module; it runs in float64 and is restored afterwards.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``. Sequences run one at a
            time, whatever ``batch`` says; 4 are read from a file or the sample text.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none.
        stability: also compute each block's factor on an infinitesimal residual (``linear_factor``): above 1 the block
            pushes away from collapse, below 1 toward it.
        plain: also measure in float64 and in the model's own dtype.
        progress: show a progress bar.

    Returns:
        Rows with the further column ``arithmetic``: ``exact``, ``law`` (the prediction of the cubic law from the
        weights, if it applies), ``float64`` and the model's own format.

    Raises:
        UnsupportedArithmeticError: the model uses an operation for which there is no exact rule yet.

    Example:
        >>> from rankscope import Inputs, Surgery
        >>> run = exact("init:tiny-bert", Inputs(sequences=1, tokens=16), Surgery(skip=0.0))
        >>> run.curve("order", "block.out").mean.round(2).tolist()
        [3.0, 3.0, 3.0]
    """
    started = time.perf_counter()
    subject, given = as_model(model), as_inputs(inputs)
    plan = replace(given.plan(**EXACT.inputs_defaults, seed=subject.seed), batch=1)
    with executing(EXECUTION, subject, surgery, progress=progress) as execution:
        loaded = execution.loaded
        prepared = prepare_planned(loaded, given.data, plan)
        passes = ExactPasses(execution, prepared, stability=stability, plain=plain)
        passes.run()
        with undisturbed(loaded.model), quiet_transformers():
            seconds = time.perf_counter() - started
            provenance = provenance_of(loaded, prepared, passes.counted, subject.seed, seconds, subject.declared_stream)
        table, contradictions = cross_checked(passes.writer.table())
        floor = exact_floors(loaded.dtype)
        verdict = judge_exact(table, floor["formats"], subject.spec)
        run = Run(
            kind="exact",
            provenance=provenance,
            floor=floor,
            **verdict.fields(),
            table=table,
            notes=(*contradictions, *loaded.notes, *prepared.notes),
            extra=execution.described,
        )
        return in_context(run, prepared)


class ExactPasses:
    """Reads the residuals of one network.

    Args:
        execution: how the model is run.
        prepared: its inputs, one sequence in each batch.
        stability: also measure the linear factor.
        plain: also measure in float64 and in the model's own dtype.

    Attributes:
        writer: collects the rows.
        counted: knows the dtypes and lengths seen.
    """

    def __init__(self, execution: Execution, prepared: Prepared, *, stability: bool, plain: bool) -> None:
        self._execution, self._prepared = execution, prepared
        self._loaded = execution.loaded
        self._stability, self._plain = stability, plain
        self._masked: set[int] = set()
        self._stopped: set[int] = set()
        self.writer = RowWriter(coordinates=("arithmetic",))
        self.counted = SiteReader([], prepared.policy, self.writer)

    def run(self) -> None:
        """All sequences."""
        execution = self._execution
        variants = 5 + 2 * self._stability + self._plain
        view = execution.plan(self._prepared, variants=variants, reads_weights=True)
        need_plain_stream(view, "exact")
        findings = Findings(self.writer, {"": self.counted}, rest=self._known, learn_rest=self._learn)
        with execution.stages(passes=2) as stages:
            for stage in stages:
                self._pass(stage)
        execution.collect(findings, self._order)
        # The law does not apply to a sequence in which any block hides a key, which is known only after the last block.
        self.writer.replace(
            piece
            for piece in self.writer.pieces
            if piece.coordinates != ("law",) or piece.first_sequence not in self._masked
        )

    def _pass(self, stage: Stage) -> None:
        """Run in the model's own dtype first, then convert the weights to float64 once for all sequences."""
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
