"""``measure``: where does this model stand?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rankscope import options
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option
from rankscope.verbs._spec import Verb, verb

EXECUTION = ExecutionSupport("measure")
SEQUENCES = options.SEQUENCES.replace(default=None, help="Number of sequences; 8 of a text, all of --states.")

OWN = (
    options.METRICS,
    options.SITES,
    Option(
        name="null",
        kind=bool,
        default=False,
        in_plans=True,
        help="Also measure Gaussian tokens of the same shape, as a baseline.",
    ),
    Option(
        name="similarity",
        kind=bool,
        default=False,
        help="Save the cosines between tokens of the first sequence, for the report.",
    ),
    Option(
        name="between_inputs",
        several="names",
        metavar="POOLING",
        in_plans=True,
        help="Compare inputs pooled by mean (default), first or last; none to leave it out.",
    ),
    Option(
        name="attention_algorithm",
        choices=("dense", "blockwise"),
        help="How attention probabilities are reduced; default: by the memory that they need.",
    ),
    options.SPECTRA,
)
STATES = (
    Option(
        name="states",
        several="repeated",
        metavar="FILE",
        in_python=False,
        help="Measure hidden states (.safetensors, .npz, or a folder of them) instead of a model; repeatable.",
    ),
    Option(
        name="at",
        several="names",
        metavar="SITES",
        in_python=False,
        help="With --states: the site of each layer, in order, e.g. block.in@0,block.out@0-10,final@11.",
    ),
)
"""Options of ``judge``, which is ``measure --states`` on the command line."""
JUDGE = (
    *(option for option in OWN if option.name not in ("sites", "attention_algorithm")),
    STATES[1],
    Option(name="layout", help="Order of the axes."),
    Option(name="computed_in", accepts=("torch.dtype",), help="The format the model ran in."),
)
"""What ``judge`` takes in Python; ``--layout`` and ``--dtype`` are the last two on the command line."""


def _run() -> Callable[..., Any]:
    from rankscope.verbs.measure.run import measure

    return measure


def _call(api: Any, values: Mapping[str, Any]) -> Any:
    from rankscope.verbs.measure.run import from_options

    return from_options(api, values)


MEASURE = verb(
    Verb(
        name="measure",
        question="Where does this model stand?",
        answer="Measures a set of metrics after each block and gives a verdict with its evidence.",
        run=_run,
        call=_call,
        options=(
            options.MODEL.replace(is_required=False),
            *(option if option is not options.SEQUENCES else SEQUENCES for option in options.INPUTS),
            *OWN,
            *STATES,
            options.DTYPE.replace(help="Dtype to run in, e.g. float64; with --states, the format the model ran in."),
            options.DEVICE,
            options.BLOCKS,
            options.LAYOUT.replace(
                help=f"{options.LAYOUT.help} With --states: the axes of an array, 'tokens layers dim'."
            ),
            *options.SURGERY,
            *options.execution(EXECUTION.no_offload, EXECUTION.no_spread),
            options.FAIL_IF,
        ),
        examples=(
            "measure init:tiny-bert",
            "measure init:tiny-gpt2 --sequences 4 --tokens 32 --tokens-policy no-first --out run",
            "measure init:tiny-bert --metrics relative_residual,stable_rank --sites block.out,attention.out --json",
            "measure init:tiny-llama --random-tokens --tokens 512 --sequences 1 --attention-algorithm blockwise",
        ),
        under_torchrun="torchrun --nproc-per-node 2 -m rankscope measure init:tiny-llama --tokens 16 --batch 2",
        execution=EXECUTION,
        order=10,
        in_plans=True,
        under_variants=True,
    )
)
