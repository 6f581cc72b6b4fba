"""A run that was stopped on its way, with what had been finished."""

from __future__ import annotations

from dataclasses import replace

from rankscope.runs.run import Run

KEY = "interrupted"


class Interrupted(KeyboardInterrupt):
    """A verb was interrupted after some of its work; :attr:`run` holds what was finished.

    It is a ``KeyboardInterrupt``: whoever does not know it sees an interrupt like any other.

    Attributes:
        run: rows of whole sequences (or whole networks of an ablation), none of them half measured.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.notes[0])
        self.run = run


def partial(run: Run, finished: int, of: int, what: str) -> Run:
    """A run that says that it is partial, in its first note and under ``interrupted`` in its JSON.

    Args:
        run: holds only what was finished.
        finished: how much that is.
        of: how much it would have been.
        what: is counted, in the plural.
    """
    note = f"Interrupted: {finished} of {of} {what} were finished, and nothing is known of the others."
    told = {KEY: {"finished": finished, "of": of, "what": what}}
    return replace(run, notes=(note, *run.notes), extra={**run.extra, **told})
