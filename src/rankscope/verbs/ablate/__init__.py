"""``ablate``: which component prevents collapse?"""

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Show, Verb, verb

EXECUTION = ExecutionSupport("ablate")

ABLATE = verb(
    Verb(
        name="ablate",
        question="Which component prevents collapse?",
        answer="Compares attention alone, with norms, with skips, with MLPs, and the full model.",
        run="verbs.ablate.run:ablate",
        judge="verbs.ablate.judge:judge_ablation",
        options=(
            options.MODEL,
            *options.INPUTS,
            Option(
                name="variants",
                several="names",
                in_plans=True,
                help="Variants to compare, separated by commas; see `ls variants`.",
            ),
            Option(
                name="masks",
                several="expressions",
                in_plans=True,
                help="Masks, separated by commas: own, or expressions such as 'causal' or 'window(1)'.",
            ),
            options.METRICS,
            Option(
                name="weights",
                choices=("given", "init", "both"),
                default="given",
                in_plans=True,
                help="Use the given weights, a random initialisation, or both.",
            ),
            options.DTYPE,
            options.DEVICE,
            options.BLOCKS,
            options.LAYOUT,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
        ),
        show=Show(
            document="verbs.ablate.show:document",
            plot="verbs.ablate.show:plot",
            sections={"grid": "reporting.page.ablate_sections:ablation_section"},
        ),
        columns={"variant": "string", "mask": "string", "weights": "string"},
        examples=(
            "ablate init:tiny-bert --sequences 4 --tokens 32",
            "ablate init:tiny-bert --masks 'own,causal,window(1)' --variants pure,+norm,full --quiet",
        ),
        under_torchrun="torchrun --nproc-per-node 2 -m rankscope ablate init:tiny-llama --tokens 16 --batch 2",
        execution=EXECUTION,
        order=20,
        in_plans=True,
    )
)
