"""``selftest``: are the numbers right on this machine?"""

from rankscope import options
from rankscope.verbs._spec import Show, Verb, verb

SELFTEST = verb(
    Verb(
        name="selftest",
        question="Are the numbers right on this machine?",
        answer="Recomputes a table of known values and compares every digit; with --device, also every verb on it.",
        run="verbs.selftest.run:selftest",
        makes_runs=False,
        show=Show(document="verbs.selftest.run:document", sections={}),
        options=(
            options.DEVICE.but(help="Also compare every verb on this device with the processor, e.g. cuda or mps."),
        ),
        outputs=(options.JSON, options.QUIET.but(help="Print nothing; the exit code gives the result.")),
        examples=("selftest",),
        order=95,
    )
)
