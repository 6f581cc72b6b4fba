"""``selftest``: are the numbers right on this machine?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope import options
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb


def _run() -> Callable[..., Any]:
    from rankscope.verbs.selftest.run import selftest

    return selftest


def _show() -> Show:
    from rankscope.verbs.selftest.run import document

    return Show(document=document)


SELFTEST = verb(
    Verb(
        name="selftest",
        question="Are the numbers right on this machine?",
        answer="Recomputes a table of known values and compares every digit; with --device, also every verb on it.",
        run=_run,
        makes_runs=False,
        show=_show,
        options=(
            options.DEVICE.replace(
                noun=None, help="Also compare every verb on this device with the processor, e.g. cuda or mps."
            ),
        ),
        outputs=(options.JSON, options.QUIET.replace(help="Print nothing; the exit code gives the result.")),
        examples=("selftest",),
        order=95,
    )
)
