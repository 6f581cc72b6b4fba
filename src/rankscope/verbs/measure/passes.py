"""The passes of ``measure``: all batches through the model, observed by the reader and by further observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from torch import Tensor

from rankscope.errors import InputError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.view import ModelView
from rankscope.runs.rows import BETWEEN_INPUTS, RowWriter
from rankscope.stream.sites import SiteRef
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import notes_on_hidden_attention, notes_on_noise, notes_on_second_streams
from rankscope.verbs.between_inputs import InputsReader
from rankscope.verbs.measure.choosing import BatteryChoice
from rankscope.verbs.measure.outliers import OutlierReader
from rankscope.verbs.measure.similarity import SimilarityReader, labels_of
from rankscope.verbs.measure.streams import notes_on_depth, stream_mixing
from rankscope.verbs.reader import SiteReader


class Observers:
    """The reader, and further observers that keep something else.

    Args:
        choice: what is measured.
        reader: writes the rows of the sites.
        writer: collects the rows.
        labels: the tokens of sequence 0, or empty.

    Attributes:
        inputs: compares the inputs; None until their number and that of the blocks are known, or if they are not
            compared.
    """

    def __init__(self, choice: BatteryChoice, reader: SiteReader, writer: RowWriter, labels: list[str]) -> None:
        self._choice, self._reader, self._writer, self._labels = choice, reader, writer, labels
        self._similarity = SimilarityReader(reader, labels) if choice.similarity else None
        self._outliers = OutlierReader(reader)
        self.inputs: InputsReader | None = None

    def expect(self, inputs: int, blocks: int) -> None:
        """Announce the number of inputs and of blocks."""
        if self._choice.poolings:
            choice = self._choice
            self.inputs = InputsReader(
                self._reader, choice.poolings, choice.of_inputs, inputs=inputs, blocks=blocks, classes=choice.classes
            )

    def start(self, batch: Batch) -> None:
        """Announce the batch of the next forward pass."""
        self._reader.start(batch)
        if self.inputs is not None:
            self.inputs.start(batch)

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        """Show what a site shows to each of them."""
        self._reader(ref, seen)
        if isinstance(seen, Tensor):
            for observe in (self._similarity, self._outliers, self.inputs):
                if observe is not None:
                    observe(ref, seen)

    def commit(self) -> None:
        """The forward pass is finished."""
        if self.inputs is not None:
            self.inputs.commit(self._writer)

    def finish(self) -> None:
        """All passes are finished."""
        if self.inputs is not None:
            self.inputs.finish(self._writer)

    def learners(self) -> Mapping[str, Any]:
        """Those that remember something, by a name that is the same on every rank and after a restart."""
        learners: dict[str, Any] = {"": self._reader, "similarity": self._similarity,
                                            "outliers": self._outliers, "inputs": self.inputs}  # fmt: skip
        return {name: learner for name, learner in learners.items() if learner is not None}

    def classes(self) -> dict[str, Any]:
        """How far the classes of the inputs are apart; empty if they are not known."""
        return {} if self.inputs is None else self.inputs.classes()

    def extra(self, sequences: int) -> dict[str, Any]:
        """Entries of the run, about this many finished sequences."""
        similarity = {} if self._similarity is None else {"similarity": self._similarity.seen()}
        outliers = self._outliers.rows(sequences, self._labels)
        return {**similarity, **({"outliers": outliers} if outliers else {})}


class ObservedPasses:
    """What was observed of some inputs.

    Attributes:
        prepared: the inputs.
        reader: knows the dtypes, shapes and lengths seen.
    """

    def __init__(self, prepared: Prepared, reader: SiteReader, writer: RowWriter, observers: Observers) -> None:
        self.prepared, self.reader, self._writer, self._observers = prepared, reader, writer, observers

    @property
    def extra(self) -> dict[str, Any]:
        """Further entries of the run, in addition to the rows."""
        return self._observers.extra(self.prepared.sequences)

    def classes(self) -> dict[str, Any]:
        """How far the classes of the inputs are apart; empty if they are not known."""
        return self._observers.classes()

    def notes(self) -> list[str]:
        """Notes about what was observed but not measured."""
        return self.reader.notes()

    def table(self) -> pa.Table:
        """The rows."""
        return self._writer.table()


class MeasuringPasses(ObservedPasses):
    """Measures the metrics on one model.

    Args:
        choice: the metrics, the sites and how to read them.
        execution: how the model is run.
        prepared: its inputs.
    """

    def __init__(self, choice: BatteryChoice, execution: Execution, prepared: Prepared) -> None:
        writer = RowWriter()
        reader = choice.reader(writer)
        labels = labels_of(prepared, prepared.tokenizer or execution.loaded.tokenizer)
        super().__init__(prepared, reader, writer, Observers(choice, reader, writer, labels))
        self._choice, self._execution = choice, execution
        self._view: ModelView | None = None

    def run(self) -> None:
        """All batches."""
        execution, selection, observers = self._execution, self._choice.selection, self._observers
        self._view = execution.plan(self.prepared)
        observers.expect(self.prepared.sequences, self._view.depth)
        findings = Findings(self._writer, observers.learners())
        with execution.stages(final=selection.wants("final")) as stages:
            for stage in stages:
                watched = execution.watch(observers)
                with trace(stage.view, selection, watched):
                    for part in execution.batches():
                        observers.start(part)
                        with stage.through(part):
                            part.run(stage.view.model)
                        observers.commit()
        execution.collect(findings)
        observers.finish()
        # An offloaded run wrote the comparison of inputs block by block, others at the end.
        findings.arrange(lambda piece: piece.site.startswith(BETWEEN_INPUTS))

    def notes(self) -> list[str]:
        """Notes about what was observed but not measured, and about what blocks read."""
        assert self._view is not None
        asked = self._choice.selection.wants_attention
        hidden = notes_on_hidden_attention(self._view) if asked else []
        about_blocks = [*notes_on_depth(self._view), *notes_on_second_streams(self._view)]
        return [*self.reader.notes(), *hidden, *about_blocks, *notes_on_noise(self._view)]

    def stream_mixing(self) -> list[dict[str, Any]]:
        """How the blocks mix the streams of a token, for each stack in which it has several."""
        assert self._view is not None
        if not any(stack.stream.has_streams for stack in self._view.stacks):
            return []
        return stream_mixing(self._execution, self._view, self.prepared[0])

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        table = self._writer.table()
        if table.num_rows == 0:
            assert self._view is not None
            raise InputError(" ".join([self._choice.nothing_measured(self._view), *self.reader.notes()]))
        return table
