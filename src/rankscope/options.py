"""Options of the verbs, declared once for the command line, for plans of sweeps and for the Python signatures.

A Python function spells its own parameters; a test compares them with the declarations here. A verb lists the options
it takes, in the order of its help, and changes a default with :meth:`Option.but`. Nothing heavy is imported here,
because ``rankscope --help`` reads this file.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Several = Literal["names", "expressions", "repeated", "pair"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting of a verb.

    Attributes:
        name: the parameter of the Python function.
        help: one line for ``--help``.
        kind: ``bool``, ``int``, ``float``, ``str`` or ``Path``.
        default: on the command line and in a plan; None where nothing is passed on.
        choices: the only words allowed.
        least: smallest number allowed.
        several: how a list is written: ``"names"`` with commas, ``"expressions"`` with commas outside brackets,
            ``"repeated"`` one at a time, ``"pair"`` two words after one flag; None for a single value.
        flags: on the command line; ``--name`` if empty. The first is the one documented, others are earlier spellings.
        metavar: stands for the value in ``--help``.
        is_argument: whether the command line takes it without a flag.
        is_positional: passed to the Python function by position.
        in_python: whether the Python function has it; ``--fail-if`` is only on the command line.
        in_plans: whether the plan of a sweep sets it for this verb.
        completes: what a shell completes: ``"models"`` or ``"sites"``.
        checks: further settings of typer, such as ``exists``.
    """

    name: str
    help: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    several: Several | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    is_argument: bool = False
    is_positional: bool = False
    in_python: bool = True
    in_plans: bool = False
    completes: Literal["models", "sites"] | None = None
    checks: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Option:
        """The same option with another default, help or bound."""
        return dataclasses.replace(self, **changes)


MODEL = Option(
    name="model",
    metavar="SPEC",
    is_argument=True,
    is_positional=True,
    completes="models",
    help="Hub name, local folder, init:NAME or a config.json.",
)

# Inputs.
TEXT = Option(
    name="inputs",
    flags=("--text",),
    kind=Path,
    is_positional=True,
    checks={"exists": True, "dir_okay": False, "readable": True},
    help="Text file to read instead of the sample.",
)
TOKENIZER = Option(
    name="tokenizer", metavar="NAME", help="Hub name or folder of the tokenizer, if the model comes without one."
)
RANDOM_TOKENS = Option(name="random_tokens", kind=bool, default=False, help="Tokens drawn at random instead of text.")
SEQUENCES = Option(name="sequences", kind=int, default=8, least=1, help="How many sequences.")
TOKENS = Option(name="tokens", kind=int, default=128, least=1, help="Tokens per sequence.")
BATCH = Option(name="batch", kind=int, default=8, least=1, help="Sequences per forward pass.")
TOKENS_POLICY = Option(
    name="tokens_policy", choices=("content", "no-first", "no-special"), default="content", help="Which tokens count."
)
SEED = Option(name="seed", kind=int, default=0, help="Seed of a random initialisation and of random tokens.")
INPUTS = (TEXT, TOKENIZER, RANDOM_TOKENS, SEQUENCES, TOKENS, BATCH, TOKENS_POLICY, SEED)

# The model.
DTYPE = Option(name="dtype", help="Run in this dtype, e.g. float64.")
BLOCKS = Option(name="blocks", metavar="PATTERN", help="Name the blocks, e.g. 'layers.*'.")
LAYOUT = Option(
    name="stream",
    flags=("--layout",),
    metavar="AXES",
    help="Where the residual stream is, e.g. 'batch dim tokens', slot=1, skips=around.",
)

# What is measured.
METRICS = Option(
    name="metrics", several="names", in_plans=True, help="Metrics, with commas or repeated; see `ls metrics`."
)
SITES = Option(
    name="sites",
    several="names",
    in_plans=True,
    completes="sites",
    help="Sites, with commas or repeated; see `ls sites`.",
)
FAIL_IF = Option(
    name="fail_if",
    several="repeated",
    metavar="CONDITION",
    in_python=False,
    help="Exit with 1 if it holds, e.g. 'relative_residual@block.out < 1e-3'; repeat it.",
)

WEIGHTS_ONLY = Option(
    name="weights_only",
    kind=bool,
    default=False,
    in_plans=True,
    help="Read a local folder tensor by tensor, without building the model.",
)
"""Without a model there are no inputs and no surgery; sweeps look for this one by name."""

# Surgery: the words of rankscope.operate, in exact and in the variants of a plan.
SKIP = Option(name="skip", kind=float, metavar="GAIN", help="Gain on every skip; 0 removes it.")
MLP = Option(name="mlp", choices=("keep", "drop"), default="keep", help="Keep or drop the MLPs.")
NORM = Option(
    name="norm",
    choices=("keep", "identity", "scale", "rms"),
    default="keep",
    help="Keep the norms, or what replaces them.",
)
MASK = Option(name="mask", metavar="EXPRESSION", help="Another mask, e.g. 'causal & window(4)'.")
SURGERY = (
    SKIP,
    Option(name="attention_skip", kind=float, metavar="GAIN", help="Gain where attention is added; overrides --skip."),
    Option(name="mlp_skip", kind=float, metavar="GAIN", help="Gain where the MLP is added; overrides --skip."),
    MLP,
    NORM,
    MASK,
    Option(
        name="mask_mode",
        choices=("replace", "intersect", "unite"),
        default="replace",
        help="How --mask is combined with the model's own.",
    ),
    Option(
        name="attention",
        choices=("keep", "uniform", "centred"),
        default="keep",
        help="Keep the attention probabilities, make them uniform, or subtract the uniform ones.",
    ),
    Option(name="layers", kind=int, least=0, several="repeated", help="Only this block, from 0; repeat it."),
)

# Execution.
OFFLOAD = Option(
    name="offload",
    flags=("--offload", "--stream"),
    kind=bool,
    default=False,
    help="Read a local folder block by block, for a model larger than memory; --stream is the earlier spelling.",
)
MEMORY = Option(name="memory", metavar="BUDGET", help="With --offload: keep to this much, e.g. 3GiB.")
WORK = Option(
    name="work",
    metavar="DIR",
    kind=Path,
    checks={"file_okay": False},
    help="With --offload: folder for checkpoints, so that a killed run can resume; by default next to --out.",
)
PARALLEL = Option(
    name="parallel",
    choices=("data", "fsdp", "tensor"),
    help="Under torchrun: deal out batches (data, the default), or spread the model.",
)


def execution(no_offload: str | None, no_spread: str | None) -> tuple[Option, ...]:
    """The options of a verb that runs a model; what it cannot do says why.

    Args:
        no_offload: why the blocks cannot run one at a time; None if they can.
        no_spread: why the model cannot be spread over processes; None if it can.
    """
    spread = ", or spread the model." if no_spread is None else f". Not fsdp or tensor: {no_spread}."
    parallel = PARALLEL.but(help=f"Under torchrun: deal out batches (data, the default){spread}")
    if no_offload is None:
        return (parallel, OFFLOAD, MEMORY, WORK)
    return (parallel, OFFLOAD.but(flags=("--offload",), help=f"Refused here: {no_offload}."))


# What becomes of the result; every verb that makes a run has these.
FIGURE = Option(name="figure", kind=Path, metavar="FILE", in_python=False, help="Draw it: .png, .svg or .pdf.")
JSON = Option(
    name="as_json", flags=("--json",), kind=bool, default=False, in_python=False, help="One JSON object on stdout."
)
OUT = Option(name="out", kind=Path, metavar="DIR", in_python=False, help="Save the run (Parquet and run.json) here.")
QUIET = Option(
    name="quiet",
    flags=("--quiet", "-q"),
    kind=bool,
    default=False,
    in_python=False,
    help="The verdict only, no progress.",
)
NO_PROGRESS = Option(name="no_progress", kind=bool, default=False, in_python=False, help="No progress bar.")
RESULT = (FIGURE, JSON, OUT, QUIET, NO_PROGRESS)


def renamed(verb: str, old: str, value: Any, new: str, given: Any) -> Any:
    """The value of a renamed parameter, under whichever name it was passed.

    Args:
        verb: the function, for the warning.
        old: the earlier name.
        value: what was passed under it; None for nothing.
        new: the name now.
        given: what was passed under that.
    """
    if value is None:
        return given
    warnings.warn(f"{verb}({old}=...) is now called {new}.", DeprecationWarning, stacklevel=3)
    return value if given is None else given
