"""The results of a verb so far, in a form that can be sent between ranks and saved after each offloaded block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rankscope.models.inputs import Prepared
from rankscope.runs.interrupted import Interrupted, partial
from rankscope.runs.rows import Piece, RowWriter, rows_from_bytes, rows_to_bytes
from rankscope.runs.run import Run


class Findings:
    """Rows, what their readers have seen, and further JSON of a verb.

    Args:
        writer: collects the rows.
        readers: by a name that is the same on every rank and after a restart. ``seen()`` gives what a reader remembers
            besides rows, as JSON, and ``learn(seen)`` adds what another one has seen.
        rest: returns the further JSON of the verb.
        learn_rest: merges such JSON from another rank, or from a killed process, into what is known here; it must be
            idempotent.
    """

    def __init__(
        self,
        writer: RowWriter,
        readers: Mapping[str, Any],
        *,
        rest: Callable[[], Any] = lambda: None,
        learn_rest: Callable[[Any], None] = lambda rest: None,
    ) -> None:
        self.writer = writer
        self._readers, self._rest, self._learn_rest = readers, rest, learn_rest
        self._kept = 0

    def packed(self) -> bytes:
        """All results, to send to other ranks."""
        return rows_to_bytes(self.writer.pieces, self._remarks())

    def added(self) -> bytes:
        """The rows since the last call, and everything else, to save after a block."""
        new, self._kept = self.writer.pieces[self._kept :], len(self.writer.pieces)
        return rows_to_bytes(new, self._remarks())

    def restore(self, added: bytes) -> None:
        """Load what :meth:`added` returned in an earlier process."""
        pieces, remarks = rows_from_bytes(added)
        self.writer.replace((*self.writer.pieces, *pieces))
        self._kept = len(self.writer.pieces)
        self.learn(remarks)

    def learn(self, remarks: Mapping[str, Any]) -> None:
        """Merge everything but the rows."""
        for name, seen in remarks["seen"].items():
            self._readers[name].learn(seen)
        self._learn_rest(remarks["rest"])

    def arrange(self, order: Callable[[Piece], Any]) -> None:
        """Sort the rows; the sort is stable."""
        self.writer.replace(sorted(self.writer.pieces, key=order))

    def _remarks(self) -> dict[str, Any]:
        return {"seen": {name: reader.seen() for name, reader in self._readers.items()}, "rest": self._rest()}


class Finished:
    """Counts finished pieces of work, and drops the rows of one that was interrupted.

    Args:
        writer: collects the rows.
        of: total number of pieces.
        what: the word for them, in the plural.
    """

    def __init__(self, writer: RowWriter, of: int, what: str) -> None:
        self._writer = writer
        self._of, self._what = of, what
        self._done = self._rows = 0
        self._stopped: KeyboardInterrupt | None = None

    def add(self, count: int = 1) -> None:
        """Count more finished pieces; everything written so far belongs to them."""
        self._done, self._rows = self._done + count, len(self._writer.pieces)

    @contextmanager
    def saved_on_interrupt(self, *, alone: bool = True) -> Iterator[None]:
        """On an interrupt, end the body without an error if at least one piece is finished.

        Args:
            alone: whether this process does all the work, piece by piece. One of several processes raises, because
                the others wait for it; so does an offloaded run, whose pieces all end with the last block.
        """
        try:
            yield
        except KeyboardInterrupt as stopped:
            if not (alone and self._rows):
                raise
            # Raised later, by checked(), which can attach the partial run.
            self._stopped = stopped
            self._writer.replace(self._writer.pieces[: self._rows])

    def sequences_of(self, prepared: Prepared) -> Prepared:
        """The inputs that were finished, if sequences are counted."""
        if self._stopped is None:
            return prepared
        batches = tuple(batch for batch in prepared if batch.first_sequence < self._done)
        return replace(prepared, batches=batches, lengths=prepared.lengths[: self._done])

    def checked(self, run: Run) -> Run:
        """The run, if nothing interrupted it.

        Raises:
            Interrupted: contains the run, marked as partial.
        """
        if self._stopped is not None:
            raise Interrupted(partial(run, self._done, self._of, self._what)) from self._stopped
        return run
