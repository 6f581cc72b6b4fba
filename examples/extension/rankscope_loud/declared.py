"""The declaration of a verb; ``rankscope --help`` reads it."""

from rankscope import options
from rankscope.options import Option
from rankscope.verbs import Verb, verb


def _run():
    from rankscope_loud.loudness import loudness

    return loudness


LOUDNESS = verb(
    Verb(
        name="loudness",
        question="How loud is this model?",
        answer="The mean length of its tokens after each block.",
        run=_run,
        options=(
            options.MODEL,
            *options.INPUTS,
            *options.SURGERY,
            Option(name="louder", kind=float, default=1.0, in_plans=True, help="Factor on every length."),
        ),
        columns={"ear": "string"},
        examples=("loudness init:tiny-bert --sequences 2 --tokens 8",),
        in_plans=True,
        under_variants=True,
    )
)
