"""The forward passes of ``measure``: through a model in memory, or block by block as its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from tqdm.auto import tqdm

from rankscope._errors import InputError
from rankscope.execution.interrupting import Finished
from rankscope.execution.passes import RowProgress, Streaming, arrange, each_stage
from rankscope.execution.ranks import Share
from rankscope.models.inputs import Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed
from rankscope.verbs.measuring_choice import BatteryChoice
from rankscope.verbs.similarity import LikenessReader, labels_of


class MeasuringPasses:
    """Takes a battery of one model.

    Args:
        choice: what is taken.
        loaded: the model.
        prepared: its inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, where it was declared.
        shown: whether there is a progress bar.

    Attributes:
        prepared: the inputs that were finished; all of them, unless an interrupt came.
        reader: has seen formats, shapes and lengths.
        finished: counts sequences.
    """

    def __init__(
        self,
        choice: BatteryChoice,
        loaded: LoadedModel,
        prepared: Prepared,
        blocks: str | Sequence[str] | None,
        stream: Stream | None,
        *,
        shown: bool,
    ) -> None:
        self._choice, self._loaded, self._blocks, self._shown = choice, loaded, blocks, shown
        self._stream = stream
        self._writer = RowWriter()
        self._view: ModelView | None = None
        self.prepared = prepared
        self.reader = choice.reader(self._writer)
        labels = labels_of(prepared, prepared.tokenizer or loaded.tokenizer) if choice.similarity else []
        self._likeness = LikenessReader(self.reader, labels) if choice.similarity else None
        self.finished = Finished(self._writer, prepared.sequences, "sequences")

    def in_memory(self, share: Share) -> None:
        """The batches of this process, one after the other."""
        model, selection = self._loaded.model, self._choice.selection
        with undisturbed(model), quiet_transformers():
            self._view = share.view(model, self.prepared, self._blocks, self._stream)
            watched = share.watch(self._likeness or self.reader)
            with self.finished.kept(alone=share.is_alone), trace(self._view, selection, watched):
                parts, rounds = share.parts(self.prepared, model), share.rounds(self.prepared)
                for part in tqdm(parts, desc="measure", unit="batch", total=rounds, disable=not self._shown):
                    self.reader.start(part)
                    part.run(model)
                    self.finished.add(part.sequences)
            self.prepared = self.finished.sequences_of(self.prepared)

    def by_blocks(self, streaming: Streaming) -> None:
        """All batches through a block before the next one's weights are read."""
        selection = self._choice.selection
        walk = streaming.walk(self.prepared, self._choice.identity(), blocks=self._blocks, stream=self._stream)
        self._view = walk.view
        progress = RowProgress(self._writer, self.reader, self._likeness)
        for stage in each_stage(walk, progress, verb="measure", shown=self._shown, final=selection.wants("final")):
            with trace(stage.view, selection, self._likeness or self.reader):
                for part in walk.prepared:
                    self.reader.start(part)
                    with stage.through(part):
                        part.run(walk.view.model)
        arrange(self._writer, lambda piece: piece.first_sequence)

    def collect(self, share: Share) -> dict[str, Any]:
        """Put the rows of all processes together; gives back what a run holds besides rows."""
        similar = {} if self._likeness is None else {"similarity": self._likeness.stored()}
        return share.collect(self._writer, self.reader, self._loaded, similar)[0]

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
