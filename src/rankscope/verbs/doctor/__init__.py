"""``doctor``: can the numbers be trusted on this model?"""

from rankscope import options
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

DOCTOR = verb(
    Verb(
        name="doctor",
        question="Can the numbers be trusted on this model?",
        answer="Checks that tracing leaves the outputs unchanged, and lists blocks, skips, sites and limits.",
        run="verbs.doctor.run:doctor",
        makes_runs=False,
        show=Show(document="verbs.doctor.show:document", sections={}),
        options=(
            options.MODEL,
            options.SEED,
            options.DTYPE,
            options.DEVICE,
            options.BLOCKS,
            options.LAYOUT,
            options.TOKENIZER,
            Option(
                name="shapes",
                kind=bool,
                default=False,
                help="Only read the headers of the weight files: sizes, no model.",
            ),
        ),
        outputs=(options.JSON, options.QUIET.but(help="Print only the checks that failed.")),
        examples=("doctor init:tiny-bert", "doctor init:tiny-llama --quiet"),
        order=90,
    )
)
