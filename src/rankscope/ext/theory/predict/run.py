"""``predict``: will this design collapse at initialisation? Oracle curves and a sampled one, without any weights."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope._types import Status, kind_of
from rankscope.errors import InputError
from rankscope.ext.theory.designs import design_of
from rankscope.ext.theory.mean_field import OracleAnswer, mean_field
from rankscope.ext.theory.predict import DESIGN, PREDICT
from rankscope.ext.theory.predict.judge import with_state
from rankscope.ext.theory.predict.sampled_design import (
    Followed,
    affordable_tokens,
    agreement_of,
    crossing,
    follow_seeds,
    interval_of,
    late_factor,
    visible_in,
)
from rankscope.ext.theory.prediction import (
    AGREEMENT,
    Agreement,
    CollapseName,
    predicted_sentence,
)
from rankscope.models.design import Design
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.runs.run import Run
from rankscope.verbs.calling import checked
from rankscope.verbs.origin import exact_floors

OPTIONS = tuple(option for option in PREDICT.options if option not in DESIGN and option.name != "design")
"""Those of the Python function; the others are parts of the design."""
METRIC = "log10_relative_residual"
SAMPLED = "sampled"
MOST_BLOCKS = 256
ORACLE_BLOCKS = 4000
ROUNDING = 1e-9
"""The factor of an oracle counts as below 1 if it is smaller by more than this."""
ONE_SEED = 1e-3
"""The same for a sampled factor without a known standard error."""


@checked(*OPTIONS)
def predict(
    design: Design | str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    seeds: int = 3,
    tokens: int | None = None,
    most_blocks: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Run:
    """Predict how the tokens of a design evolve at initialisation, block by block.

    The sampled curve is exact in distribution at the design's full width: weights are Gaussian and used once, so their
    effect on a few tokens can be sampled without sampling the weights (``rankscope.ext.theory.sampling``). The
    curve of theory (oracle) is added if its assumptions hold.

    Args:
        design: a ``Design``, a preset (``"bert-base"``), a ``config.json`` or a folder that contains one.
        changes: other values for parts of the design, e.g. ``{"depth": 48, "skip_gain": 0.0}``; see ``Design.changed``.
        seeds: number of initialisations to sample.
        tokens: context length; by default that of the design, or a shorter one, which a note then gives, if that
            would take minutes.
        most_blocks: number of blocks after which to stop if tokens do not agree within the design's depth; by default
            twice the depth and, unless pre-norm keeps them apart, at least 256.
        seed: of the first initialisation.
        progress: show a progress bar.

    Returns:
        Rows of ``log10_relative_residual`` with the further column ``curve``: ``sampled`` (one sequence per seed) and
        the oracles. ``extra`` holds ``design``, ``class``, ``agreement``, ``final`` (mean, spread and 95% interval
        after the last block), ``sampling`` and ``oracles``.

    Raises:
        InputError: an impossible design, or one whose stream overflows or vanishes within its depth.
        UnsupportedConfigError: a family whose initialisation is not known.

    Example:
        >>> run = predict(Design(depth=4, width=64, heads=4, tokens=16), {"skip_gain": 0.0}, seeds=2)
        >>> run.extra["class"]["name"], run.extra["agreement"]["block"]
        ('order 3', 2)
    """
    started = time.perf_counter()
    name, chosen, notes = _read(design, tokens, _checked(changes))
    if seeds < 1:
        raise InputError(f"seeds={seeds}: expected one or more.")
    furthest = max(chosen.depth, _far(chosen) if most_blocks is None else most_blocks)
    context = chosen.tokens
    if tokens is None:
        # With fewer tokens the prediction is that of a shorter context, and the run says so.
        affordable = affordable_tokens(chosen, seeds, chosen.depth if _is_cubic(chosen) else furthest)
        chosen = chosen.changed(tokens=affordable)
        if affordable < context:
            notes += (
                f"This is the prediction for a context of {affordable} tokens: the {context} of the design would take "
                f"minutes. tokens={context} (--tokens {context}) samples all of them.",
            )
    runs = follow_seeds(chosen, range(seed, seed + seeds), furthest, progress=progress)
    field = mean_field(chosen, chosen.tokens, ORACLE_BLOCKS)
    agreement = agreement_of(runs)
    kind, factor, reason = _class_of(chosen, runs, field)
    ends = np.array([run.log10_relative[min(chosen.depth, len(run.log10_relative) - 1)] for run in runs])
    final, (low, high) = float(ends.mean()), interval_of(ends)
    spread = float(ends.std(ddof=1)) if seeds > 1 and math.isfinite(final) else math.nan
    # in this order the minimum of NaN stays NaN
    facts = {"mean": final, "spread": spread, "low": low, "high": min(high, 0.0)}
    extra = {
        "design": {"name": name, **chosen.to_json()},
        "class": {"name": kind, "factor": factor, "reason": reason},
        "agreement": agreement.to_json(),
        "final": {name: value if math.isfinite(value) else None for name, value in facts.items()},
        "sampling": {"tokens": chosen.tokens, "context": context},
        "oracles": [_with_agreement(field)],
    }
    run = Run(
        kind="predict",
        provenance=_provenance(name, seed, seeds, chosen.tokens, time.perf_counter() - started),
        floor=exact_floors("float64"),
        verdict=predicted_sentence(name, chosen.depth, kind, factor, agreement, final, (low, high)),
        evidence=_evidence(agreement, final, chosen.depth),
        table=_table(runs, field),
        notes=notes,
        extra=extra,
    )
    return with_state(run, chosen.depth)


def _read(
    design: Design | str | Path, tokens: int | None, changes: Mapping[str, Any]
) -> tuple[str, Design, tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    if isinstance(design, Design):
        name, chosen = "a design", design
    else:
        name = str(design) if isinstance(design, (str, Path)) else type(design).__name__
        chosen, notes = design_of(design)
    if changes or tokens is not None:
        chosen = chosen.changed(**changes, **({} if tokens is None else {"tokens": tokens}))
    return name, chosen, notes


def _far(design: Design) -> int:
    """How many blocks to follow; at most twice the depth if tokens are known to converge very slowly."""
    return 2 * design.depth if _is_slowing(design) else max(2 * design.depth, MOST_BLOCKS)


def _is_slowing(design: Design) -> bool:
    return design.norm_place == "pre" and design.attention_skip >= 1


def _is_cubic(design: Design) -> bool:
    return visible_in(design) is None and design.is_position_free and design.attention_skip == 0


def _class_of(design: Design, runs: Sequence[Followed], field: OracleAnswer) -> tuple[CollapseName, float, str]:
    if _is_cubic(design):
        return (
            "order 3",
            math.nan,
            "complete mask, position-free scores and no skip around attention: no linear term is left",
        )
    if field.applies:
        factor, margin, source = _oracle_factor(field.log10_relative), ROUNDING, "of the mean field"
    else:
        factor, error = late_factor(runs)
        margin, source = ONE_SEED if math.isnan(error) else 3 * error, "of the sampled runs, over their last quarter"
    if _is_slowing(design):
        return (
            "slower than exponential",
            factor,
            f"pre-norm: the stream grows and each block weighs less; factor {source}",
        )
    if math.isnan(factor) or factor + margin >= 1:
        return "no collapse", factor, f"late factor {source}, not below 1 by more than {margin:.2g}"
    return "order 1", factor, f"a skip, a mask or positions leave a linear term; late factor {source}"


def _oracle_factor(logs: Sequence[float]) -> float:
    """Late factor of a curve whose last values may be too small to distinguish from zero."""
    known = np.array([value for value in logs if math.isfinite(value) and value > -100])
    return float(10 ** (known[-1] - known[-2])) if len(known) > 1 else math.nan


def _with_agreement(answer: OracleAnswer) -> dict[str, Any]:
    facts = answer.to_json()
    if answer.applies and answer.log10_relative:
        depth = crossing(np.array(answer.log10_relative), math.log10(AGREEMENT))
        facts["agreement_depth"] = depth if math.isfinite(depth) else None
    return facts


def _evidence(agreement: Agreement, final: float, depth: int) -> tuple[dict[str, Any], ...]:
    evidence: list[dict[str, Any]] = [{"metric": METRIC, "site": "block.out", "layer": depth - 1, "value": final}]
    if agreement.depth is not None:
        evidence.append(
            {"metric": "agreement_depth", "site": "block.out", "layer": agreement.block, "value": agreement.depth}
        )
    return tuple(evidence)


def _table(runs: Sequence[Followed], field: OracleAnswer) -> Any:
    writer = RowWriter(coordinates=("curve",))
    longest = max(len(run.log10_relative) for run in runs)
    for position, run in enumerate(runs):
        _add_curve(writer, SAMPLED, position, run.log10_relative)
    _add_curve(writer, field.name, 0, field.log10_relative[:longest])
    return writer.table()


def _add_curve(writer: RowWriter, name: str, sequence: int, curve: Sequence[float] | np.ndarray) -> None:
    for place, value in enumerate(curve):
        known = math.isfinite(value)
        writer.add(
            metric=METRIC,
            site="block.out" if place else "block.in",
            stack=None,
            layer=max(0, place - 1),
            first_sequence=sequence,
            values=np.array([value if known else math.nan]),
            statuses=np.array([STATUS_CODE[Status.OK if known else Status.UNDEFINED]]),
            head_axis=False,
            at={"curve": name},
        )


def _provenance(name: str, seed: int, seeds: int, tokens: int, seconds: float) -> Provenance:
    return Provenance(
        model=name,
        origin="design",
        seed=seed,
        weights_dtype="none",
        arithmetic_dtype="exact",
        sequences=seeds,
        lengths=(tokens,) * seeds,
        wall_seconds=round(seconds, 3),
    )


def _checked(changes: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if changes is not None and not isinstance(changes, Mapping):
        raise InputError(f"changes is {kind_of(changes)}; expected a dictionary such as {{'depth': 48}}, or None.")
    return {} if changes is None else changes
