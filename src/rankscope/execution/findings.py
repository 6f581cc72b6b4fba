"""What a verb has found so far, in a form that travels: between ranks, and to disk after each offloaded block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from rankscope.models.inputs import Prepared
from rankscope.runs.interrupted import Interrupted, partial
from rankscope.runs.rows import Piece, RowWriter, rows_from_bytes, rows_to_bytes
from rankscope.runs.run import Run


class Learner(Protocol):
    """What readers remember besides rows: formats, shapes and lengths."""

    def seen(self) -> dict[str, Any]:
        """All of it as JSON."""

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Add what another reader has seen."""


class Findings:
    """Rows, what the readers behind them have seen, and JSON a verb keeps besides.

    Args:
        writer: collects the rows.
        readers: by a name that is the same on every rank and after a restart.
        rest: returns the JSON a verb keeps besides.
        learn_rest: merges such JSON from another rank, or from a process that was killed, into what is known here;
            merging the same twice must change nothing.
    """

    def __init__(
        self,
        writer: RowWriter,
        readers: Mapping[str, Learner],
        *,
        rest: Callable[[], Any] = lambda: None,
        learn_rest: Callable[[Any], None] = lambda rest: None,
    ) -> None:
        self.writer = writer
        self._readers, self._rest, self._learn_rest = readers, rest, learn_rest
        self._kept = 0

    def packed(self) -> bytes:
        """All of it."""
        return rows_to_bytes(self.writer.pieces, self._remarks())

    def added(self) -> bytes:
        """The rows since the last call, and all the rest."""
        new, self._kept = self.writer.pieces[self._kept :], len(self.writer.pieces)
        return rows_to_bytes(new, self._remarks())

    def restore(self, added: bytes) -> None:
        """Take in what :meth:`added` returned in an earlier process."""
        pieces, remarks = rows_from_bytes(added)
        self.writer.replace((*self.writer.pieces, *pieces))
        self._kept = len(self.writer.pieces)
        self.learn(remarks)

    def learn(self, remarks: Mapping[str, Any]) -> None:
        """Take in everything but the rows."""
        for name, seen in remarks["seen"].items():
            self._readers[name].learn(seen)
        self._learn_rest(remarks["rest"])

    def arrange(self, order: Callable[[Piece], Any]) -> None:
        """Sort the rows; those of equal order stay as they were written."""
        self.writer.replace(sorted(self.writer.pieces, key=order))

    def _remarks(self) -> dict[str, Any]:
        return {"seen": {name: reader.seen() for name, reader in self._readers.items()}, "rest": self._rest()}


class Finished:
    """Counts finished pieces of work, and drops the rows of one that was interrupted.

    Args:
        writer: collects the rows.
        of: how many pieces there are.
        what: they are, in the plural.
    """

    def __init__(self, writer: RowWriter, of: int, what: str) -> None:
        self._writer = writer
        self._of, self._what = of, what
        self._done = self._rows = 0
        self._stopped: KeyboardInterrupt | None = None

    def add(self, count: int = 1) -> None:
        """Count so many more; everything written so far belongs to finished pieces."""
        self._done, self._rows = self._done + count, len(self._writer.pieces)

    @contextmanager
    def kept(self, *, alone: bool = True) -> Iterator[None]:
        """End the body early, without an error, when it is interrupted after something was finished.

        Args:
            alone: whether this process does all the work, piece by piece. One of several raises, because the others
                wait for it; so does an offloaded run, whose pieces all end with the last block.
        """
        try:
            yield
        except KeyboardInterrupt as stopped:
            if not (alone and self._rows):
                raise
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
            Interrupted: holding the run, which says that it is partial.
        """
        if self._stopped is not None:
            raise Interrupted(partial(run, self._done, self._of, self._what)) from self._stopped
        return run
