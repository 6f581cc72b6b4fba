"""The forward passes of ``exact``: every sequence in all arithmetics, in memory or block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from rankscope.execution.passes import Streaming, need_weights
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.viewing import need_plain_stream, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.exact_by_blocks import ExactByBlocks
from rankscope.verbs.exact_readings import Readings, read_exactly, read_in_float64, read_plainly
from rankscope.verbs.laws import predicted_residuals
from rankscope.verbs.reader import SiteReader


class ExactPasses:
    """Reads the residuals of one network.

    Args:
        loaded: the model.
        prepared: its inputs, one sequence in each batch.
        operation: what is done to it.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, where it was declared.
        stability: also read the linear factor.
        plain: also read in float64 and in the model's own format.
        shown: whether there is a progress bar.

    Attributes:
        writer: collects the rows.
        counted: has seen formats and lengths.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prepared: Prepared,
        operation: Operation,
        blocks: str | Sequence[str] | None,
        stream: Stream | None,
        *,
        stability: bool,
        plain: bool,
        shown: bool,
    ) -> None:
        self._loaded, self._prepared, self._operation, self._blocks = loaded, prepared, operation, blocks
        self._stream = stream
        self._stability, self._plain, self._shown = stability, plain, shown
        self.writer = RowWriter(coordinates=("arithmetic",))
        self.counted = SiteReader([], prepared.policy, self.writer)

    def in_memory(self) -> ModelView:
        """One sequence after the other; returns the structure found."""
        model = self._loaded.model
        need_weights(model, "exact")
        view = view_of(model, self._prepared[0], blocks=self._blocks, stream=self._stream)
        need_plain_stream(view, "exact")
        with operating(model, self._operation, view=view):
            for part in tqdm(self._prepared, desc="exact", unit="sequence", disable=not self._shown):
                self._read(view, part)
        return view

    def by_blocks(self, streaming: Streaming) -> ModelView:
        """All sequences through a block before the next one's weights are read; returns the structure found."""
        identity = ("exact", self._operation, self._prepared.policy, self._stability, self._plain)
        lanes = 5 + 2 * self._stability + self._plain
        walk = streaming.walk(
            self._prepared, identity, blocks=self._blocks, stream=self._stream, lanes=lanes, widened=True
        )
        need_plain_stream(walk.view, "exact")
        reading = ExactByBlocks(
            self._loaded, self._operation, self.writer, self.counted, stability=self._stability, plain=self._plain
        )
        reading.run(walk, shown=self._shown)
        return walk.view

    def _read(self, view: ModelView, part: Batch) -> None:
        readings = Readings(part.first_sequence, self.writer)
        states = read_exactly(view, part, readings, stability=self._stability)
        predicted_residuals(self._loaded, view, part, states, readings)
        if self._plain:
            read_plainly(view, part, readings, self.counted)
            if next(view.model.parameters()).dtype != torch.float64:
                read_in_float64(view, part, readings, self.counted)
