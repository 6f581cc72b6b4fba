"""``bound``: what do the theorems say about these weights?"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rankscope._types import Status
from rankscope.errors import InputError, ResultError, UnsupportedConfigError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution, executing
from rankscope.ext.theory.attention_graph import AttentionGraph
from rankscope.ext.theory.bound import BOUND, EXECUTION, OWN
from rankscope.ext.theory.bound.judge import Violation, judge_bounds
from rankscope.ext.theory.bound.reading import BoundReader, Found, Measured, StepFacts
from rankscope.ext.theory.contraction import GainInterval, LayerGains
from rankscope.ext.theory.lipschitz import LipschitzConstants
from rankscope.ext.theory.theorems import (
    THEOREMS,
    Evaluation,
    HeadSizes,
    Hypothesis,
    LayerBound,
    LayerQuantities,
    Passage,
    StreamState,
    Theorem,
)
from rankscope.models.heads.family import undescribed
from rankscope.models.inputs import InputsLike, Prepared, as_inputs, prepare_planned
from rankscope.models.model import ModelLike, as_model
from rankscope.models.view import ModelView
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import need_plain_stream
from rankscope.surgery.session import operations_on
from rankscope.surgery.surgery import SurgeryLike, as_surgery
from rankscope.verbs.calling import checked
from rankscope.verbs.origin import floor_of, in_context, provenance_of
from rankscope.verbs.reader import SiteReader


@checked(*OWN)
def bound(
    model: ModelLike,
    inputs: InputsLike = None,
    surgery: SurgeryLike = None,
    *,
    theorems: Sequence[str] | str | None = None,
    progress: bool = False,
) -> Run:
    """Evaluate theorems on a model's own weights and activations: hypotheses, bound, measured value, slack.

    Each statement is tested on the inputs and outputs of attention in each layer, and over the depth. Padding is left
    out.

    Args:
        model: a :class:`rankscope.Model`, a spec or a module with a family description of its heads.
        inputs: :class:`rankscope.Inputs`, or what is accepted in their place; see ``measure``. Two sequences of 64
            tokens are read from a file or the sample text. The theorems concern all tokens that attention reads, so
            ``tokens_policy`` is ``"content"``.
        surgery: :class:`rankscope.Surgery` under which the model runs, or a dictionary of its fields; None for none.
            The bounds are those of the modified network.
        theorems: names from ``rankscope ls theorems``; None for all.
        progress: show a progress bar.

    Returns:
        Rows with the columns ``theorem``, ``scope`` (``layer``, ``depth`` or ``network``) and ``hypothesis``;
        metrics are ``log10_bound``, ``log10_lower_bound``, ``log10_measured``, ``log10_slack``, ``log10_factor``, and
        ``hypothesis_value`` and ``margin`` of each hypothesis. ``extra["sentences"]`` has one sentence per theorem.

    Raises:
        UnsupportedConfigError: a model without head weights.
        UnknownNameError: no theorem of that name.

    Example:
        >>> from rankscope import Inputs
        >>> small = Inputs(sequences=1, tokens=16)
        >>> run = bound("init:tiny-bert", small, theorems=["contraction_interval"])
        >>> run.extra["applies"]["contraction_interval"]
        True
    """
    started = time.perf_counter()
    chosen = [THEOREMS[name] for name in dict.fromkeys(THEOREMS if theorems is None else theorems)]
    subject, given, cut = as_model(model), as_inputs(inputs), as_surgery(surgery)
    plan = given.plan(**BOUND.inputs_defaults, seed=subject.seed)
    if plan.policy != "content":
        raise InputError(
            f"tokens_policy={plan.policy!r}: the theorems concern all tokens that attention reads. Leave it out."
        )
    with executing(EXECUTION, subject, cut, progress=progress) as execution:
        loaded = execution.loaded
        if loaded.config is None:
            raise UnsupportedConfigError(f"Theorems need the weights of single heads, and {undescribed(loaded.model)}.")
        prepared = prepare_planned(loaded, given.data, plan)
        passes = BoundPasses(execution, prepared)
        measured = passes.run()
        if not measured:
            raise InputError(
                "The residual needs at least two tokens, and no sequence has that many. Pass longer inputs."
            )
        seconds = time.perf_counter() - started
        provenance = provenance_of(loaded, prepared, passes.counted, subject.seed, seconds, subject.declared_stream)
        notes = (*loaded.notes, *prepared.notes)
        run = concluded(chosen, measured, provenance, floor_of(passes.counted.dtypes), notes, execution.described)
        return in_context(run, prepared)


def concluded(
    chosen: Sequence[Theorem],
    measured: Sequence[Measured],
    provenance: Provenance,
    floor: Mapping[str, Any],
    notes: tuple[str, ...],
    further: Mapping[str, Any] | None = None,
) -> Run:
    """Evaluate each theorem on every sequence: rows, one sentence per theorem, and the verdict.

    Args:
        chosen: the theorems.
        measured: the quantities they are evaluated on.
        provenance: provenance of the run.
        floor: float floor of the run.
        notes: notes of the run.
        further: further entries of ``Run.extra``.
    """
    writer = RowWriter(coordinates=COORDINATES)
    first: dict[str, dict[str | None, Evaluation]] = {}
    applies: dict[str, bool] = {}
    failed: dict[str, list[str]] = {}
    violations: list[Violation] = []
    for part in measured:
        for entry in chosen:
            evaluation = entry.function(part.network, part.layers)
            first.setdefault(entry.name, {}).setdefault(part.stack, evaluation)
            applies[entry.name] = applies.get(entry.name, True) and evaluation.applies
            failed[entry.name] = list(dict.fromkeys([*failed.get(entry.name, []), *evaluation.failed]))
            violations += _violations(evaluation, part)
            write_evaluation(writer, evaluation, part.stack, part.sequence)
    table = writer.table()
    verdict = judge_bounds(table, applies, violations, provenance.model)
    return Run(
        kind="bound",
        provenance=provenance,
        floor=floor,
        **verdict.fields(),
        table=table,
        notes=notes,
        extra={
            "code": verdict.code,
            "sentences": {name: _sentence(found) for name, found in first.items()},
            "quantities": {name: next(iter(found.values())).quantity for name, found in first.items()},
            "applies": applies,
            "failed_hypotheses": failed,
            "citations": {entry.name: [str(cite) for cite in entry.cites] for entry in chosen},
            **(further or {}),
        },
    )


def _violations(evaluation: Evaluation, part: Measured) -> list[Violation]:
    def tens(log_value: float | None) -> float | None:
        return None if log_value is None else log_value / math.log(10)

    return [
        Violation(
            theorem=evaluation.theorem,
            stack=part.stack,
            sequence=part.sequence,
            layer=bound.layer,
            log10_measured=bound.log_measured / math.log(10),
            log10_lower=tens(bound.log_lower),
            log10_upper=tens(bound.log_upper),
        )
        for bound in evaluation.violated
        if bound.log_measured is not None
    ]


def _sentence(found: Mapping[str | None, Evaluation]) -> str:
    """The sentence of a theorem on the first sequence, one per stack if there are several."""
    if len(found) == 1:
        return next(iter(found.values())).sentence
    return " ".join(f"{str(stack).capitalize()}: {evaluation.sentence}" for stack, evaluation in found.items())


COORDINATES = ("theorem", "scope", "hypothesis")
SITE = "attention.out"
_TEN = math.log(10)


def write_evaluation(writer: RowWriter, evaluation: Evaluation, stack: str | None, sequence: int) -> None:
    """All bounds and hypotheses of one theorem on one sequence."""
    rows = _Rows(writer, evaluation.theorem, stack, sequence)
    last = max((bound.layer or 0 for bound in evaluation.layers), default=0)
    for bound in evaluation.layers:
        rows.bound(bound, "layer", bound.layer or 0)
    if evaluation.depth is not None:
        rows.bound(evaluation.depth, "depth", last)
    for hypothesis in evaluation.hypotheses:
        rows.hypothesis(hypothesis, "network", last)


class _Rows:
    """Writes the rows of one theorem on one sequence."""

    def __init__(self, writer: RowWriter, theorem: str, stack: str | None, sequence: int) -> None:
        self._writer, self._theorem, self._stack, self._sequence = writer, theorem, stack, sequence

    def bound(self, bound: LayerBound, scope: str, layer: int) -> None:
        for metric, value in _numbers(bound):
            floor = bound.at_floor and metric in ("log10_measured", "log10_slack")
            self.add(metric, scope, layer, value, floor=floor)
        for hypothesis in bound.hypotheses:
            self.hypothesis(hypothesis, scope, layer)

    def hypothesis(self, hypothesis: Hypothesis, scope: str, layer: int) -> None:
        self.add("hypothesis_value", scope, layer, float(hypothesis.value), hypothesis=hypothesis.name)
        self.add("margin", scope, layer, float(hypothesis.margin), hypothesis=hypothesis.name)

    def add(
        self, metric: str, scope: str, layer: int, value: float, *, hypothesis: str | None = None, floor: bool = False
    ) -> None:
        status = Status.UNDEFINED if math.isnan(value) else Status.FLOOR if floor else Status.OK
        self._writer.add(
            metric=metric,
            site=SITE,
            stack=self._stack,
            layer=layer,
            first_sequence=self._sequence,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]),
            head_axis=False,
            at={"theorem": self._theorem, "scope": scope, "hypothesis": hypothesis},
        )


def _numbers(bound: LayerBound) -> Iterator[tuple[str, float]]:
    named = {
        "log10_bound": bound.log_upper,
        "log10_lower_bound": bound.log_lower,
        "log10_measured": bound.log_measured,
        "log10_slack": bound.log_slack,
        "log10_width": bound.log_width,
        "log10_factor": bound.log_factor,
        "log10_rounding": bound.log_rounding or None,
    }
    for metric, value in named.items():
        if value is not None:
            yield metric, _tens(value)


def _tens(log_value: float) -> float:
    return log_value / _TEN


_KINDS = {
    kind.__name__: kind
    for kind in (
        AttentionGraph,
        Found,
        LayerGains,
        HeadSizes,
        GainInterval,
        LayerQuantities,
        LipschitzConstants,
        Passage,
        StepFacts,
        StreamState,
    )
}


class BoundPasses:
    """Reads the numbers of all sequences, block by block.

    Args:
        execution: how the model is run.
        prepared: its inputs.

    Attributes:
        counted: knows the dtypes and lengths seen.
    """

    def __init__(self, execution: Execution, prepared: Prepared) -> None:
        self._execution, self._prepared = execution, prepared
        self.counted = SiteReader([], "content", RowWriter())
        self._found: dict[tuple[str | None, int], Found] = {}

    def run(self) -> list[Measured]:
        """All batches."""
        execution, config = self._execution, self._execution.loaded.config
        view = execution.plan(self._prepared, reads_weights=True)
        need_plain_stream(view, "bound")
        has_norm = _has_norm(view)
        findings = Findings(RowWriter(), {"": self.counted}, rest=self._known, learn_rest=self._learn)
        with execution.stages() as stages:
            for stage in stages:
                reader = BoundReader(stage.view, config, has_norm)
                for part in execution.batches():
                    before = stage.left(part)
                    with stage.through(part):
                        found = reader.read_part(part, before)
                    for stack, new in found.items():
                        key = (stack, part.first_sequence)
                        self._found[key] = new if key not in self._found else _joined(self._found[key], new)
                self.counted.dtypes |= reader.dtypes
                for stack, lengths in reader.lengths.items():
                    self.counted.lengths.setdefault(stack, {}).update(lengths)
        execution.collect(findings)
        whole = BoundReader(view, config, has_norm)
        ends = [(part, key) for part in self._prepared for key in self._found if key[1] == part.first_sequence]
        return [found for part, key in ends for found in whole.finished(key[0], part.first_sequence, self._found[key])]

    def _known(self) -> list[Any]:
        return [[stack, first, written(found)] for (stack, first), found in self._found.items()]

    def _learn(self, known: list[Any]) -> None:
        self._found |= {(stack, first): revived(found) for stack, first, found in known}


def _has_norm(view: ModelView) -> bool:
    """Whether a norm acts anywhere in a block and was not removed."""
    cut = any(operation.get("norm") == "identity" for operation in operations_on(view.model))
    return not cut and any(plan.has_norm for stack in view.stacks for plan in stack.plans)


def _joined(before: Found, new: Found) -> Found:
    """Append a block to the sequences read so far."""
    layers = [[*a, *b] for a, b in zip(before.layers, new.layers, strict=True)]
    return Found(layers, [*before.steps, *new.steps], before.width, before.qk_norm or new.qk_norm)


def written(value: Any) -> Any:
    """Frozen records of numbers as JSON, each with the name of its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: written(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, tuple):
        return {"kind": "tuple", "fields": [written(item) for item in value]}
    return [written(item) for item in value] if isinstance(value, list) else value


def revived(value: Any) -> Any:
    """The inverse of :func:`written`; only the record classes listed here are ever constructed.

    Raises:
        ResultError: a kind that is none of them.
    """
    if isinstance(value, list):
        return [revived(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind, fields = value["kind"], value["fields"]
    if kind == "tuple":
        return tuple(revived(item) for item in fields)
    if kind not in _KINDS:
        raise ResultError(f"{kind!r} is not one of {', '.join(_KINDS)}.")
    return _KINDS[kind](**{name: revived(item) for name, item in fields.items()})
