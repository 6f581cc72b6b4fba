"""``selftest``: are the numbers right on this machine?"""

from rankscope.verbs._spec import Verb, verb

SELFTEST = verb(
    Verb(
        name="selftest",
        question="Are the numbers right on this machine?",
        answer="Recomputes a table of known values and compares every digit.",
        run="verbs.selftest.run:selftest",
        command="cli.selftesting:selftest_command",
        examples=("selftest",),
        order=95,
    )
)
