"""Options of the verbs, declared once for the command line, the plans of sweeps and the Python signatures.

A Python function still writes out its own parameters; a test compares them with the declarations here. A verb lists its
options in the order of its help, and changes a default with :meth:`Option.but`. This module imports nothing heavy,
because ``rankscope --help`` reads it.
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
        default: default on the command line and in a plan; None to leave the default of the Python function.
        choices: the allowed words.
        least: the smallest allowed number.
        several: how a list is written: ``"names"`` with commas, ``"expressions"`` with commas outside brackets,
            ``"repeated"`` one at a time, ``"pair"`` two words after one flag; None for a single value.
        flags: flags on the command line; ``--name`` if empty. The first is documented, the others are older spellings.
        metavar: placeholder for the value in ``--help``.
        is_argument: whether the command line takes it as an argument, without a flag.
        is_required: whether such an argument must be given.
        is_positional: whether it is passed to the Python function by position.
        in_python: whether the Python function has it; ``--fail-if`` exists only on the command line.
        in_plans: whether the plan of a sweep can set it for this verb.
        completes: shell completion: ``"models"`` or ``"sites"``.
        checks: further settings for typer, such as ``exists``.
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
    is_required: bool = True
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
    help="Hub name, local folder, config.json, or init:NAME (a preset with random weights).",
)

# Inputs.
TEXT = Option(
    name="inputs",
    flags=("--text",),
    kind=Path,
    is_positional=True,
    checks={"exists": True, "dir_okay": False, "readable": True},
    help="Text file to use instead of the built-in sample text.",
)
TOKENIZER = Option(name="tokenizer", metavar="NAME", help="Hub name or folder of a tokenizer, for a model without one.")
RANDOM_TOKENS = Option(name="random_tokens", kind=bool, default=False, help="Use random tokens instead of text.")
SEQUENCES = Option(name="sequences", kind=int, default=8, least=1, help="Number of sequences.")
TOKENS = Option(name="tokens", kind=int, default=128, least=1, help="Tokens per sequence.")
BATCH = Option(name="batch", kind=int, default=8, least=1, help="Sequences per forward pass.")
TOKENS_POLICY = Option(
    name="tokens_policy",
    choices=("content", "no-first", "no-special"),
    default="content",
    help="Which tokens to measure.",
)
SEED = Option(name="seed", kind=int, default=0, help="Seed for random weights and random tokens.")
INPUTS = (TEXT, TOKENIZER, RANDOM_TOKENS, SEQUENCES, TOKENS, BATCH, TOKENS_POLICY, SEED)

# The model.
DTYPE = Option(name="dtype", help="Dtype to run in, e.g. float64.")
DEVICE = Option(name="device", metavar="NAME", help="Device to run on, e.g. cuda, cuda:1 or mps; default: cpu.")
BLOCKS = Option(
    name="blocks", metavar="PATTERN", help="Pattern for the block modules, e.g. 'layers.*'; discovered by default."
)
LAYOUT = Option(
    name="stream",
    flags=("--layout",),
    metavar="AXES",
    help="Layout of the residual stream, e.g. 'batch dim tokens', slot=1, skips=around.",
)

# What is measured.
METRICS = Option(
    name="metrics", several="names", in_plans=True, help="Metrics, separated by commas or repeated; see `ls metrics`."
)
SITES = Option(
    name="sites",
    several="names",
    in_plans=True,
    completes="sites",
    help="Sites, separated by commas or repeated; see `ls sites`.",
)
FAIL_IF = Option(
    name="fail_if",
    several="repeated",
    metavar="CONDITION",
    in_python=False,
    help="Exit with code 1 if this holds, e.g. 'relative_residual@block.out < 1e-3'; repeatable.",
)

SPECTRA = Option(
    name="spectra",
    choices=("exact", "estimated"),
    in_plans=True,
    help="Ranks from all singular values, or estimated with intervals; default: exact up to min(tokens, width) 1024.",
)

WEIGHTS_ONLY = Option(
    name="weights_only",
    kind=bool,
    default=False,
    in_plans=True,
    help="Read the weights tensor by tensor, from a folder, hub:NAME or a server, without building the model.",
)
"""Without a model there are no inputs and no surgery; sweeps look this option up by name."""

# Surgery: the arguments of rankscope.operate, as options of exact and in the variants of a plan.
SKIP = Option(name="skip", kind=float, metavar="GAIN", help="Multiply every skip connection by this; 0 removes it.")
MLP = Option(name="mlp", choices=("keep", "drop"), default="keep", help="Keep the MLPs or remove them.")
NORM = Option(
    name="norm",
    choices=("keep", "identity", "scale", "rms"),
    default="keep",
    help="Keep the norms or replace them.",
)
MASK = Option(name="mask", metavar="EXPRESSION", help="Attention mask, e.g. 'causal & window(4)'.")
SURGERY = (
    SKIP,
    Option(
        name="attention_skip", kind=float, metavar="GAIN", help="Gain on the skips around attention; overrides --skip."
    ),
    Option(name="mlp_skip", kind=float, metavar="GAIN", help="Gain on the skips around the MLPs; overrides --skip."),
    MLP,
    NORM,
    MASK,
    Option(
        name="mask_mode",
        choices=("replace", "intersect", "unite"),
        default="replace",
        help="How to combine --mask with the model's own mask.",
    ),
    Option(
        name="attention",
        choices=("keep", "uniform", "centred"),
        default="keep",
        help="Keep the attention probabilities, replace them by uniform ones, or subtract uniform ones.",
    ),
    Option(
        name="layers",
        kind=int,
        least=0,
        several="repeated",
        help="Apply the surgery to this block only, counting from 0; repeatable.",
    ),
)

# Execution.
OFFLOAD = Option(
    name="offload",
    flags=("--offload", "--stream"),
    kind=bool,
    default=False,
    in_plans=True,
    help="Read weights block by block, also from hub:NAME, https://, s3:// or gs://; --stream is the old spelling.",
)
MEMORY = Option(name="memory", metavar="BUDGET", help="With --offload: memory budget, e.g. 3GiB.")
WORK = Option(
    name="work",
    metavar="DIR",
    kind=Path,
    checks={"file_okay": False},
    help="With --offload: folder for checkpoints, so that a killed run can resume; default: next to --out.",
)
BYTE_BUDGET = Option(
    name="byte_budget",
    metavar="BUDGET",
    help="Of a model on a server: the most to read, e.g. 20GiB.",
)
PARALLEL = Option(
    name="parallel",
    choices=("data", "fsdp", "tensor"),
    help="Under torchrun: distribute the batches (data, the default) or shard the model.",
)


def execution(no_offload: str | None, no_spread: str | None) -> tuple[Option, ...]:
    """The execution options of a verb that runs a model; the help of an unsupported one says why.

    Args:
        no_offload: why the blocks cannot run one at a time; None if they can run so.
        no_spread: why the model cannot be sharded over processes; None if it can.
    """
    spread = " or shard the model." if no_spread is None else f". fsdp and tensor are not supported: {no_spread}."
    parallel = PARALLEL.but(help=f"Under torchrun: distribute the batches (data, the default){spread}")
    if no_offload is None:
        return (parallel, OFFLOAD, MEMORY, WORK, BYTE_BUDGET)
    return (parallel, OFFLOAD.but(flags=("--offload",), in_plans=False, help=f"Not supported: {no_offload}."))


# Output; every verb that makes a run has these options.
FIGURE = Option(name="figure", kind=Path, metavar="FILE", in_python=False, help="Save a figure: .png, .svg or .pdf.")
JSON = Option(
    name="as_json",
    flags=("--json",),
    kind=bool,
    default=False,
    in_python=False,
    help="Print one JSON object to stdout.",
)
OUT = Option(
    name="out", kind=Path, metavar="DIR", in_python=False, help="Save the run (Parquet and run.json) in this folder."
)
QUIET = Option(
    name="quiet",
    flags=("--quiet", "-q"),
    kind=bool,
    default=False,
    in_python=False,
    help="Print only the verdict; no progress bar.",
)
NO_PROGRESS = Option(name="no_progress", kind=bool, default=False, in_python=False, help="Hide the progress bar.")
RESULT = (FIGURE, JSON, OUT, QUIET, NO_PROGRESS)


def renamed(verb: str, old: str, value: Any, new: str, given: Any) -> Any:
    """The value of a renamed parameter, passed under the old or the new name.

    Args:
        verb: name of the function, for the warning.
        old: the old name.
        value: the value passed under the old name; None if there is none.
        new: the new name.
        given: the value passed under the new name.
    """
    if value is None:
        return given
    warnings.warn(f"{verb}({old}=...) is now called {new}.", DeprecationWarning, stacklevel=3)
    return value if given is None else given
