"""What an interrupt costs: the piece of work that was under way, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rankscope.models.inputs import Prepared
from rankscope.runs.interrupted import Interrupted, partial
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run


class Finished:
    """Counts finished pieces of work, and forgets the rows of one that was interrupted.

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
        """So many more are finished, and everything written so far belongs to finished ones."""
        self._done, self._rows = self._done + count, len(self._writer.pieces)

    @contextmanager
    def kept(self, *, alone: bool = True) -> Iterator[None]:
        """End the body early, without an error, when it is interrupted after something was finished.

        Args:
            alone: whether this process does all the work; one of several raises, because the others wait for it.
        """
        try:
            yield
        except KeyboardInterrupt as stopped:
            if not (alone and self._rows):
                raise
            self._stopped = stopped
            self._writer.replace(self._writer.pieces[: self._rows])

    def sequences_of(self, prepared: Prepared) -> Prepared:
        """The inputs that were finished, where sequences are counted."""
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
