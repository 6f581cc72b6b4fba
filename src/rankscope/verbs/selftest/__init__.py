"""``selftest``: are the numbers right on this machine?"""

from __future__ import annotations

from rankscope import options
from rankscope.verbs._spec import Verb, verb

SELFTEST = verb(
    Verb(
        name="selftest",
        home=__name__,
        question="Are the numbers right on this machine?",
        answer="Recomputes a table of known values and compares every digit; with --device, also every verb on it.",
        makes_runs=False,
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
