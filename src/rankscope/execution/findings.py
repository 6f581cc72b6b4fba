"""The results of a verb so far, in a form that can be sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankscope.runs.rows import Piece, RowWriter, rows_to_bytes


class Findings:
    """Rows, what their readers have seen, and further JSON of a verb.

    Args:
        writer: collects the rows.
        readers: by a name that is the same on every rank. ``seen()`` gives what a reader remembers
            other than rows, as JSON, and ``learn(seen)`` adds what another one has seen.
        rest: returns the further JSON of the verb.
        learn_rest: merges such JSON from another rank into what is known here; it must be idempotent.
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

    def packed(self) -> bytes:
        """All results, to send to other ranks."""
        return rows_to_bytes(self.writer.pieces, self._remarks())

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
