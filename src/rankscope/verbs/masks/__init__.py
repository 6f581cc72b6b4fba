"""``masks``: what does a mask do to collapse?"""

from rankscope import options
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

MASKS = verb(
    Verb(
        name="masks",
        question="What does a mask do to collapse?",
        answer="Reports centre nodes, radius, diameter, second eigenvalue and the layers until tokens agree.",
        run="verbs.masks.run:mask_graph",
        makes_runs=False,
        call="verbs.masks.run:compared",
        show=Show(document="verbs.masks.show:document", plot="verbs.masks.show:plot", has_choices=False, sections={}),
        options=(
            Option(
                name="masks",
                metavar="MASK",
                is_argument=True,
                several="repeated",
                in_python=False,
                help="Mask names, expressions such as 'causal | sink(1)', or graph files.",
            ),
            options.TOKENS.but(default=None, least=2, help="Sequence length; a graph file has its own."),
            options.SEED.but(help="Seed for the random tokens."),
        ),
        outputs=(options.FIGURE, options.JSON, options.QUIET.but(help="Print one sentence per mask.")),
        examples=(
            "masks causal 'causal_window(4) | sink(1)' --tokens 32",
            "masks 'window(3)' --tokens 64 --json",
        ),
        order=60,
    )
)
