"""``exact``: how fast does it really collapse?"""

from rankscope import options
from rankscope.execution.support import WHOLE_WEIGHTS, ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

EXECUTION = ExecutionSupport("exact", no_spread=WHOLE_WEIGHTS, in_float64=True)

EXACT = verb(
    Verb(
        name="exact",
        question="How fast does it really collapse?",
        answer="Computes residuals far below the float floor, with order and factor, and compares the cubic law.",
        run="verbs.exact.run:exact",
        judge="verbs.exact.judge:judge_exact",
        options=(
            options.MODEL,
            # Sequences run one at a time, so there is no --batch.
            *(option for option in options.INPUTS if option is not options.BATCH and option is not options.SEQUENCES),
            options.SEQUENCES.but(default=4),
            *options.SURGERY,
            Option(
                name="stability",
                kind=bool,
                default=False,
                in_plans=True,
                help="Also compute each block's factor on an infinitesimal residual.",
            ),
            Option(
                name="plain",
                kind=bool,
                default=True,
                in_plans=True,
                help="Also measure in float64 and in the model's own dtype.",
            ),
            options.DTYPE,
            options.DEVICE,
            options.BLOCKS,
            options.LAYOUT,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=Show(
            document="verbs.exact.show:document",
            plot="verbs.exact.show:plot",
            has_choices=False,
            sections={"orders": "reporting.page.exact_sections:exact_section"},
        ),
        columns={"arithmetic": "string"},
        examples=(
            "exact init:tiny-bert --skip 0 --sequences 1 --tokens 32",
            "exact init:tiny-bert --skip 0 --mlp drop --norm identity --mask causal --sequences 1 --tokens 16",
        ),
        execution=EXECUTION,
        order=40,
        in_plans=True,
        under_variants=True,
        is_float64=True,
    )
)
