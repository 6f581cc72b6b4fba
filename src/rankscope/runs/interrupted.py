"""The exception for an interrupted run; it carries the part that was finished."""

from __future__ import annotations

from dataclasses import replace

from rankscope.runs.run import Run

KEY = "interrupted"


class Interrupted(KeyboardInterrupt):
    """A verb was interrupted after some of its work; :attr:`run` holds what was finished.

    It is a ``KeyboardInterrupt``, so code that does not know it handles it like any other interrupt.

    Attributes:
        run: rows of whole sequences (or whole networks of an ablation), none of them partly measured.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.notes[0])
        self.run = run


def partial(run: Run, finished: int, of: int, what: str) -> Run:
    """Mark a run as partial, in its first note and under ``interrupted`` in its JSON.

    Args:
        run: contains only what was finished.
        finished: how many were finished.
        of: how many there would have been.
        what: what is counted, in the plural.
    """
    note = f"Interrupted: {finished} of {of} {what} were finished, and nothing is known of the others."
    told = {KEY: {"finished": finished, "of": of, "what": what}}
    return replace(run, notes=(note, *run.notes), extra={**run.extra, **told})
