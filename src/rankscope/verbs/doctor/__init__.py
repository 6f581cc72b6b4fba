"""``doctor``: what is wrong with this model, and what to change?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope import options
from rankscope.options import Option
from rankscope.runs.showing import Show
from rankscope.verbs._spec import Verb, verb


def _run() -> Callable[..., Any]:
    from rankscope.verbs.doctor.run import doctor

    return doctor


def _show() -> Show:
    from rankscope.verbs.doctor.show import document

    return Show(document=document)


def _explained() -> Callable[[str], str]:
    from rankscope.verbs.doctor.explaining import explained

    return explained


OWN = (
    Option(
        name="loss",
        metavar="FILE.py:NAME",
        accepts=("builtins.object",),
        help="Loss, a function of output and labels, or 'own' for the model's own.",
    ),
    Option(
        name="labels",
        metavar="FILE.py:NAME",
        accepts=("builtins.object",),
        help="Targets of the loss, or the class of each sequence; also a .pt or .npz file.",
    ),
    Option(
        name="optimizer",
        metavar="FILE.py:NAME",
        accepts=("builtins.object",),
        help="The optimizer, or a function of the model that makes it.",
    ),
    Option(
        name="details", kind=bool, default=False, help="Also print all checks and what is claimed of the structure."
    ),
)

PAGE = Option(
    name="page", flags=("--page",), kind=Path, metavar="FILE", in_python=False, help="Write the answer as an HTML file."
)

DOCTOR = verb(
    Verb(
        name="doctor",
        question="What is wrong with this model, and what to change?",
        answer="Looks for faults by experiments on the model, and checks that its numbers can be trusted.",
        run=_run,
        makes_runs=False,
        show=_show,
        options=(
            options.MODEL,
            options.TEXT,
            options.SEED,
            options.TOKENIZER,
            *OWN,
            *options.SURGERY,
            *options.LOADING,
        ),
        outputs=(PAGE, options.JSON, options.QUIET.replace(help="Print only the answer and the checks that failed.")),
        examples=("doctor init:tiny-bert", "doctor init:tiny-llama --quiet"),
        explain=_explained,
        order=90,
    )
)
