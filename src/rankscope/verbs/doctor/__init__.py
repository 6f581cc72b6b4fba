"""``doctor``: can the numbers be trusted on this model?"""

from rankscope.verbs._spec import Verb, verb

DOCTOR = verb(
    Verb(
        name="doctor",
        question="Can the numbers be trusted on this model?",
        answer="Checks that tracing leaves the outputs unchanged, and lists blocks, skips, sites and limits.",
        run="verbs.doctor.run:doctor",
        command="cli.diagnosing:doctor_command",
        examples=("doctor init:tiny-bert", "doctor init:tiny-llama --quiet"),
        order=90,
    )
)
