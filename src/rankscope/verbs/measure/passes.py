"""The forward passes of ``measure``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rankscope._errors import InputError
from rankscope.execution.findings import Findings, Finished
from rankscope.execution.passes import Execution
from rankscope.models.inputs import Prepared
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.tracer import trace
from rankscope.verbs.measure.choice import BatteryChoice
from rankscope.verbs.measure.similarity import SimilarityReader, labels_of


class MeasuringPasses:
    """Takes a battery of metrics of one model.

    Args:
        choice: the metrics, the sites and how they are read.
        execution: how the model is run.
        prepared: its inputs.

    Attributes:
        prepared: the inputs that were finished; all of them, unless an interrupt came.
        reader: has seen formats, shapes and lengths.
        finished: counts sequences.
    """

    def __init__(self, choice: BatteryChoice, execution: Execution, prepared: Prepared) -> None:
        self._choice, self._execution = choice, execution
        self._writer = RowWriter()
        self._view: ModelView | None = None
        self.prepared = prepared
        self.reader = choice.reader(self._writer)
        self._similarity: SimilarityReader | None = None
        if choice.similarity:
            labels = labels_of(prepared, prepared.tokenizer or execution.loaded.tokenizer)
            self._similarity = SimilarityReader(self.reader, labels)
        self.finished = Finished(self._writer, prepared.sequences, "sequences")

    def run(self, blocks: str | Sequence[str] | None, stream: Stream | None) -> None:
        """All batches."""
        execution, selection = self._execution, self._choice.selection
        self._view = execution.plan(self.prepared, self._choice.identity(), blocks=blocks, stream=stream)
        findings = Findings(self._writer, {"": self.reader}, rest=self._similar, learn_rest=self._learn_similar)
        with execution.stages(findings, final=selection.wants("final")) as stages:
            for stage in stages:
                watched = execution.watch(self._similarity or self.reader)
                kept = self.finished.kept(alone=execution.ends_batch_by_batch)
                with kept, trace(stage.view, selection, watched):
                    for part in execution.batches():
                        self.reader.start(part)
                        with stage.through(part):
                            part.run(stage.view.model)
                        self.finished.add(part.sequences)
        self.prepared = self.finished.sequences_of(self.prepared)
        execution.collect(findings)

    @property
    def extra(self) -> dict[str, Any]:
        """What the run holds besides rows."""
        return {} if self._similarity is None else {"similarity": self._similarity.stored()}

    def _similar(self) -> Any:
        return None if self._similarity is None else self._similarity.stored()

    def _learn_similar(self, stored: Any) -> None:
        if self._similarity is not None:
            self._similarity.learn(stored)

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        found = self._writer.table()
        if found.num_rows == 0:
            assert self._view is not None
            raise InputError(self._choice.nothing_measured(self._view))
        return found
