"""Options of the verbs, declared once for the command line, the plans of sweeps and the Python signatures.

A Python function still writes out its own parameters; a test compares them with the declarations here. A verb lists its
options in the order of its help, and changes a default with :meth:`Option.replace`. This module imports nothing heavy,
because ``rankscope --help`` reads it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rankscope.errors import InputError

Several = Literal["names", "expressions", "repeated", "pair"]
Noun = Literal["model", "inputs", "surgery"]
LARGEST_NUMBER = 2**63 - 1
"""Largest seed, size or number that torch takes."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting of a verb.

    Attributes:
        name: the parameter of the Python function.
        help: one line for ``--help``.
        kind: ``bool``, ``int``, ``float``, ``str`` or ``Path``.
        default: default on the command line and in a plan; None to leave the default of the Python function.
        choices: the allowed words.
        minimum: the smallest allowed number.
        maximum: the largest allowed number.
        several: how a list is written: ``"names"`` with commas, ``"expressions"`` with commas outside brackets,
            ``"repeated"`` one at a time, ``"pair"`` two words after one flag; None for a single value.
        flags: flags on the command line; ``--name`` if empty. The first is documented, the others are older spellings.
        metavar: placeholder for the value in ``--help``.
        is_argument: whether the command line takes it as an argument, without a flag.
        is_required: whether such an argument must be given.
        in_python: whether the Python function has it; ``--fail-if`` exists only on the command line.
        in_plans: whether the plan of a sweep can set it for this verb.
        checks: further settings for typer, such as ``exists``.
        noun: the object that carries it in Python: ``"model"`` for :class:`rankscope.Model`, ``"inputs"`` for
            :class:`rankscope.Inputs`, ``"surgery"`` for :class:`rankscope.Surgery`; None for an argument of the verb.
        accepts: further classes accepted in Python, as ``module.Class``, because this module imports none of
            them; ``"builtins.object"`` accepts everything.
        on_command_line: whether the command line has it; tensors exist only in Python.
    """

    name: str
    help: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    several: Several | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    is_argument: bool = False
    is_required: bool = True
    in_python: bool = True
    in_plans: bool = False
    checks: Mapping[str, Any] = field(default_factory=dict)
    noun: Noun | None = None
    accepts: tuple[str, ...] = ()
    on_command_line: bool = True

    def replace(self, **changes: Any) -> Option:
        """The same option with another default, help or bound."""
        return dataclasses.replace(self, **changes)

    def checked(self, value: Any) -> Any:
        """A value passed in Python, in its usual type; None stays None if the option may be left out.

        A single word is accepted where a list is expected, NumPy numbers where Python numbers are.

        Raises:
            InputError: it is not what the declaration allows.

        Example:
            >>> TOKENS.checked(-1)
            Traceback (most recent call last):
            rankscope.errors.InputError: tokens=-1: expected a whole number, 1 or more.
        """
        if value is None and self.kind is not bool:
            return None
        if self.several is None:
            return self._checked_one(value)
        entries = [value] if isinstance(value, (str, numbers.Integral)) else value
        if not isinstance(entries, Iterable) or isinstance(entries, (bytes, Mapping)):
            raise self._refused(value)
        entries = [self._checked_one(entry) for entry in entries]
        if self.several == "pair" and len(entries) != 2:
            raise self._refused(value)
        return entries

    def _is_accepted_class(self, value: Any) -> bool:
        return any(f"{cls.__module__}.{cls.__qualname__}" in self.accepts for cls in type(value).__mro__)

    def _checked_one(self, value: Any) -> Any:
        if self._is_accepted_class(value):
            return value
        if self.kind is bool:
            if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
                return bool(value)
        elif self.kind is Path:
            if isinstance(value, (str, os.PathLike)):
                return value
        elif self.kind is str:
            if isinstance(value, str) and (not self.choices or value in self.choices):
                return value
        elif (number := self._number(value)) is not None:
            return number
        raise self._refused(value)

    def _number(self, value: Any) -> int | float | None:
        """``value`` as a number within the bounds; None if it is not one."""
        if isinstance(value, bool) or type(value).__name__ == "bool_":
            return None
        found: int | float
        if self.kind is int:
            try:
                found = operator.index(value)
            except (TypeError, ValueError, RuntimeError):
                return None
        elif isinstance(value, numbers.Real):
            try:
                found = float(value)
            except OverflowError:
                return None
            if not math.isfinite(found):
                return None
        else:
            return None
        too_small = self.minimum is not None and found < self.minimum
        too_large = self.maximum is not None and found > self.maximum
        return None if too_small or too_large else found

    def _refused(self, value: Any) -> InputError:
        shown = reprlib.repr(value)
        near = difflib.get_close_matches(value, self.choices, n=1) if isinstance(value, str) else []
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if self.maximum is not None and isinstance(value, int) and value > self.maximum:
            hint = f" The largest is {self.maximum}."
        return InputError(f"{self.name}={shown}: expected {self.expected}.{hint}")

    @property
    def expected(self) -> str:
        """What the declaration allows, in words."""
        if self.choices:
            *others, last = map(repr, self.choices)
            one = f"{', '.join(others)} or {last}" if others else last
        else:
            one = _EXPECTED[self.kind]
            if self.minimum is not None:
                one += f", {self.minimum} or more"
        if self.accepts and "builtins.object" not in self.accepts:
            one += " or " + " or ".join(f"a {name.replace('builtins.', '')}" for name in self.accepts)
        return {None: one, "pair": f"two of: {one}"}.get(self.several, f"a list of: {one}")


_EXPECTED = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", Path: "a path"}


def checked_fields(declared: Iterable[Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these options, checked; see :meth:`Option.checked`."""
    return {option.name: option.checked(values[option.name]) for option in declared if option.name in values}


MODEL = Option(
    name="model",
    metavar="SPEC",
    is_argument=True,
    noun="model",
    help="Hub name, local folder, config.json, train.py:build_model, or init:NAME (random weights).",
)


# Inputs: the fields of rankscope.Inputs.
TEXT = Option(
    name="inputs",
    flags=("--text", "--inputs"),
    kind=Path,
    noun="inputs",
    accepts=("builtins.object",),
    help="Text file, tensors (.pt, .npz, .safetensors) or train.py:batch instead of the sample text.",
)
TOKENIZER = Option(
    name="tokenizer",
    metavar="NAME",
    noun="inputs",
    accepts=("builtins.object",),
    help="Hub name or folder of a tokenizer, for a model without one.",
)
RANDOM_TOKENS = Option(
    name="random_tokens", kind=bool, default=False, noun="inputs", help="Use random tokens instead of text."
)
SEQUENCES = Option(
    name="sequences", kind=int, default=8, minimum=1, maximum=LARGEST_NUMBER, noun="inputs", help="Number of sequences."
)
TOKENS = Option(
    name="tokens", kind=int, default=128, minimum=1, maximum=LARGEST_NUMBER, noun="inputs", help="Tokens per sequence."
)
BATCH = Option(
    name="batch",
    kind=int,
    default=8,
    minimum=1,
    maximum=LARGEST_NUMBER,
    noun="inputs",
    help="Sequences per forward pass.",
)
TOKENS_POLICY = Option(
    name="tokens_policy",
    choices=("content", "no-first", "no-special"),
    default="content",
    noun="inputs",
    help="Which tokens to measure.",
)
PADDING = Option(
    name="padding",
    noun="inputs",
    accepts=("torch.Tensor",),
    on_command_line=False,
    help="Which tokens of your own tensors are padding.",
)
AXES = Option(
    name="axes",
    choices=("batch tokens", "tokens batch"),
    noun="inputs",
    on_command_line=False,
    help="Order of the first two axes of your own tensors.",
)
LABELS = Option(
    name="labels",
    noun="inputs",
    accepts=("builtins.object",),
    on_command_line=False,
    help="The class of each sequence.",
)
SEED = Option(
    name="seed",
    kind=int,
    default=0,
    minimum=0,
    maximum=LARGEST_NUMBER,
    noun="model",
    help="Seed for random weights and random tokens.",
)
TEXTS = (TEXT, TOKENIZER, RANDOM_TOKENS)
INPUTS = (*TEXTS, SEQUENCES, TOKENS, BATCH, TOKENS_POLICY, SEED)
"""The options of a verb that reads inputs; ``seed`` is that of the model, from which the inputs take theirs."""
INPUTS_FIELDS = (*INPUTS, PADDING, AXES, LABELS)

# The model, and how it is run: the fields of rankscope.Model.
DTYPE = Option(name="dtype", noun="model", accepts=("torch.dtype",), help="Dtype to run in, e.g. float64.")
DEVICE = Option(
    name="device",
    metavar="NAME",
    noun="model",
    accepts=("torch.device",),
    help="Device to run on, e.g. cuda, cuda:1 or mps; default: cpu.",
)
BLOCKS = Option(
    name="blocks",
    metavar="PATTERN",
    noun="model",
    accepts=("builtins.list", "builtins.tuple"),
    help="Pattern for the block modules, e.g. 'layers.*'; discovered by default.",
)
LAYOUT = Option(
    name="stream",
    flags=("--layout",),
    metavar="AXES",
    noun="model",
    accepts=("rankscope.models.stream.Stream",),
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
    help="Ranks of all tokens, or of 1,024 evenly spaced ones; default: exact up to min(tokens, width) 1024.",
)

# Surgery: the fields of rankscope.Surgery, as options of the verbs and in the variants of a plan.
SKIP = Option(
    name="skip",
    kind=float,
    metavar="GAIN",
    noun="surgery",
    help="Multiply every skip connection by this; 0 removes it.",
)
MLP = Option(name="mlp", choices=("keep", "drop"), default="keep", noun="surgery", help="Keep the MLPs or remove them.")
NORM = Option(
    name="norm",
    choices=("keep", "identity", "scale", "rms"),
    default="keep",
    noun="surgery",
    help="Keep the norms or replace them.",
)
MASK = Option(
    name="mask",
    metavar="EXPRESSION",
    noun="surgery",
    accepts=("rankscope.masks._mask.Mask",),
    help="Attention mask, e.g. 'causal & window(4)'.",
)
SURGERY = (
    SKIP,
    Option(
        name="attention_skip",
        kind=float,
        metavar="GAIN",
        noun="surgery",
        help="Gain on the skips around attention; overrides --skip.",
    ),
    Option(
        name="mlp_skip",
        kind=float,
        metavar="GAIN",
        noun="surgery",
        help="Gain on the skips around the MLPs; overrides --skip.",
    ),
    MLP,
    NORM,
    MASK,
    Option(
        name="mask_mode",
        choices=("replace", "intersect", "unite"),
        default="replace",
        noun="surgery",
        help="How to combine --mask with the model's own mask.",
    ),
    Option(
        name="attention",
        choices=("keep", "uniform", "centred"),
        default="keep",
        noun="surgery",
        help="Keep the attention probabilities, replace them by uniform ones, or subtract uniform ones.",
    ),
    Option(
        name="layers",
        kind=int,
        minimum=0,
        several="repeated",
        noun="surgery",
        help="Apply the surgery to this block only, counting from 0; repeatable.",
    ),
)
SURGERY_FIELDS = (
    *SURGERY,
    Option(
        name="temperature",
        kind=float,
        default=1.0,
        noun="surgery",
        on_command_line=False,
        help="Divide attention scores by this.",
    ),
    Option(
        name="attention_scale",
        kind=float,
        default=1.0,
        noun="surgery",
        on_command_line=False,
        help="Factor on the deviation from uniform attention.",
    ),
    Option(
        name="heads",
        kind=int,
        minimum=0,
        several="repeated",
        noun="surgery",
        on_command_line=False,
        help="Heads to remove.",
    ),
    Option(name="stack", noun="surgery", on_command_line=False, help="The stack to change, e.g. decoder."),
)

# Execution; also fields of rankscope.Model.
OFFLOAD = Option(
    name="offload",
    kind=bool,
    default=False,
    noun="model",
    in_plans=True,
    help="Read weights block by block, also from hub:NAME, s3:// or gs://.",
)
MEMORY = Option(
    name="memory",
    metavar="BUDGET",
    noun="model",
    accepts=("builtins.int",),
    help="With --offload: memory budget, e.g. 3GiB.",
)
PARALLEL = Option(
    name="parallel",
    choices=("data", "fsdp", "tensor"),
    noun="model",
    help="Under torchrun: distribute the batches (data, the default) or shard the model.",
)
LOADING = (DTYPE, DEVICE, BLOCKS, LAYOUT)
MODEL_FIELDS = (SEED, *LOADING, PARALLEL, OFFLOAD, MEMORY)


def execution(no_offload: str | None, no_spread: str | None) -> tuple[Option, ...]:
    """The execution options of a verb that runs a model; the help of an unsupported one says why.

    Args:
        no_offload: why the blocks cannot run one at a time; None if they can run so.
        no_spread: why the model cannot be sharded over processes; None if it can.
    """
    spread = " or shard the model." if no_spread is None else f". fsdp and tensor are not supported: {no_spread}."
    parallel = PARALLEL.replace(help=f"Under torchrun: distribute the batches (data, the default){spread}")
    if no_offload is None:
        return (parallel, OFFLOAD, MEMORY)
    return (parallel, OFFLOAD.replace(in_plans=False, help=f"Not supported: {no_offload}."))


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
    name="out",
    metavar="DIR",
    in_python=False,
    help="Save the run (Parquet and run.json) in this folder, or at an address such as s3://bucket/run.",
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
