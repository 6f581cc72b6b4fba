"""``predict``: will this design collapse at initialisation?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope import options
from rankscope.errors import InputError
from rankscope.options import Option
from rankscope.runs.showing import Show
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
    Option(
        name="weight_std", kind=float, in_python=False, help="Standard deviation of the entries of every weight matrix."
    ),
)
"""Parts of a design with their own option; in Python they are keys of ``changes``."""


def predict_from_options(api: Any, given: Mapping[str, Any]) -> Any:
    """Call ``predict`` with the options of the command line."""
    values = dict(given)
    design, changed = values.pop("design"), values.pop("set")
    named = {option.name: values.pop(option.name) for option in DESIGN}
    changes = {name: value for name, value in named.items() if value is not None}
    changes.update(assignments(changed or ()))
    return api.predict(design, changes, **values)


def assignments(words: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs, numbers as numbers.

    Example:
        >>> assignments(["kv_heads=4", "attention_scale=0.5", "mlp=relu"])
        {'kv_heads': 4, 'attention_scale': 0.5, 'mlp': 'relu'}

    Raises:
        InputError: a word without ``=``.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"--set {word}: expected NAME=VALUE, such as kv_heads=4.")
        values[name.strip()] = _value(value.strip())
    return values


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _run() -> Callable[..., Any]:
    from rankscope.ext.theory.predict.run import predict

    return predict


def _show() -> Show:
    from rankscope.ext.theory.predict.show import document, plot

    return Show(document=document, plot=plot)


PREDICT = verb(
    Verb(
        name="predict",
        question="Will this design collapse at initialisation?",
        answer="Samples the design, compares theory curves, and gives the depth at which tokens agree.",
        run=_run,
        options=(
            Option(
                name="design",
                metavar="CONFIG",
                is_argument=True,
                help="Preset (see `ls presets`), config.json or folder.",
            ),
            *DESIGN,
            options.TOKENS.replace(noun=None, default=None, minimum=2, help="Context length; all tokens are sampled."),
            Option(
                name="set",
                several="repeated",
                metavar="NAME=VALUE",
                in_python=False,
                help="Set any other part of the design; repeatable.",
            ),
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
        show=_show,
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
