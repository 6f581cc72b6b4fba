"""``ablate`` on a model larger than memory: every variant goes through a block before the next one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._errors import UnsupportedOperationError
from rankscope.execution.offload.schedule import Stage, Walk
from rankscope.execution.passes import RowProgress, arrange, each_stage
from rankscope.metrics import MetricSpec
from rankscope.models.inputs import TokensPolicy
from rankscope.runs.rows import RowWriter
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_operable
from rankscope.verbs.reader import SiteReader

Arm = tuple[str, str, Operation]
"""Variant, mask, and what both come to."""


class BlockGrid:
    """Measures all variants side by side, block by block.

    Args:
        arms: the variants.
        specs: what to take.
        policy: which tokens count.
        writer: where the rows go.
        selection: the sites.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        specs: Sequence[MetricSpec],
        policy: TokensPolicy,
        writer: RowWriter,
        selection: SiteSelection,
    ) -> None:
        self._arms = {
            f"{variant} under the mask {mask}": (variant, mask, operation) for variant, mask, operation in arms
        }
        self._writer = writer
        self._selection = selection
        self._readers = {
            lane: SiteReader(specs, policy, writer, {"variant": variant, "mask": mask, "weights": "given"})
            for lane, (variant, mask, _) in self._arms.items()
        }
        self._reasons: dict[str, str] = {}
        self._plain = SiteReader(specs, policy, writer)

    @property
    def reader(self) -> SiteReader:
        """The reader of the last variant that could be run."""
        ran = [reader for lane, reader in self._readers.items() if lane not in self._reasons]
        return ran[-1] if ran else self._plain

    @property
    def refused(self) -> list[str]:
        """What was left out, and why."""
        return [f"{lane} was left out: {self._reasons[lane]}" for lane in self._arms if lane in self._reasons]

    def run(self, walk: Walk, *, shown: bool) -> None:
        """All blocks."""
        for lane, (_, _, operation) in self._arms.items():
            try:
                check_operable(operation, walk.view)
            except UnsupportedOperationError as error:
                self._reasons[lane] = str(error)
        progress = RowProgress(self._writer, self._plain, rest=self._known, learn=self._learn)
        for stage in each_stage(walk, progress, verb="ablate", shown=shown):
            for lane, (_, _, operation) in self._arms.items():
                if lane not in self._reasons:
                    try:
                        self._pass(stage, walk, lane, operation)
                    except UnsupportedOperationError as error:
                        self._reasons[lane] = str(error)
        self._arrange()

    def _pass(self, stage: Stage, walk: Walk, lane: str, operation: Operation) -> None:
        model, reader = walk.view.model, self._readers[lane]
        with operating(model, operation, view=stage.view), trace(stage.view, self._selection, reader):
            for part in walk.prepared:
                reader.start(part)
                with stage.through(part, lane):
                    part.run(model)

    def _known(self) -> dict[str, Any]:
        return {"seen": {lane: reader.seen() for lane, reader in self._readers.items()}, "reasons": self._reasons}

    def _learn(self, known: Mapping[str, Any]) -> None:
        self._reasons |= known["reasons"]
        for lane, seen in known["seen"].items():
            self._readers[lane].learn(seen)

    def _arrange(self) -> None:
        """Variant by variant; rows of one that turned out to be impossible half-way are not kept."""
        order: dict[tuple[str | int | None, ...], int] = {
            arm[:2]: number for number, (lane, arm) in enumerate(self._arms.items()) if lane not in self._reasons
        }
        self._writer.replace(piece for piece in self._writer.pieces if piece.coordinates[:2] in order)
        arrange(self._writer, lambda piece: (order[piece.coordinates[:2]], piece.first_sequence))
