"""``predict``: will this design collapse at initialisation?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope import options
from rankscope.options import Option
from rankscope.verbs._spec import Verb, verb

DESIGN = (
    Option(name="depth", kind=int, minimum=1, in_python=False, help="Number of blocks."),
    Option(name="width", kind=int, minimum=1, in_python=False, help="Width of the residual stream."),
    Option(name="heads", kind=int, minimum=1, in_python=False, help="Number of attention heads."),
    Option(name="mask", metavar="EXPRESSION", in_python=False, help="Attention mask, e.g. 'causal'."),
    Option(name="norm", in_python=False, help="Norm: layernorm, rmsnorm or none."),
    Option(name="norm_place", in_python=False, help="Place of the norm: pre, post or none."),
    Option(name="mlp", in_python=False, help="Activation of the MLP, or none for no MLP."),
    Option(name="positions", in_python=False, help="Position encoding: none, learned, rope or alibi."),
    Option(
        name="skip_gain",
        flags=("--skip",),
        kind=float,
        metavar="GAIN",
        in_python=False,
        help="Multiply both skip connections by this; 0 removes them.",
    ),
)
"""Parts of a design with an option; in Python these and all others are keys of ``changes``."""


def predict_from_options(api: Any, given: Mapping[str, Any]) -> Any:
    """Call ``predict`` with the options of the command line."""
    values = dict(given)
    named = {option.name: values.pop(option.name) for option in DESIGN}
    changes = {name: value for name, value in named.items() if value is not None}
    return api.predict(values.pop("design"), changes, **values)


PREDICT = verb(
    Verb(
        name="predict",
        home=__name__,
        question="Will this design collapse at initialisation?",
        answer="Samples the design, compares theory curves, and gives the depth at which tokens agree.",
        options=(
            Option(
                name="design",
                metavar="CONFIG",
                is_argument=True,
                help="Preset (see `ls presets`), config.json or folder.",
            ),
            *DESIGN,
            options.TOKENS.replace(noun=None, default=None, minimum=2, help="Context length; all tokens are sampled."),
            Option(name="seeds", kind=int, default=3, minimum=1, help="Number of initialisations to sample."),
            Option(
                name="most_blocks",
                kind=int,
                minimum=1,
                in_plans=True,
                help="Number of blocks after which to stop if tokens do not agree.",
            ),
            options.SEED.replace(noun=None),
        ),
        columns={"curve": "string"},
        examples=(
            "predict tiny-bert --tokens 16 --seeds 1 --most-blocks 4",
            "predict tiny-bert --skip 0 --tokens 16 --seeds 1 --most-blocks 4 --quiet",
        ),
        order=80,
        subject="design",
        in_plans=True,
        in_plans_always={"seeds": 1},
        call=predict_from_options,
    )
)
