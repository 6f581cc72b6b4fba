"""A predicted run as plain text: curves over depth, oracles and their assumptions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.runs.curves import names_in
from rankscope.runs.summary import shown_lines
from rankscope.runs.text import number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

SAMPLED = "sampled"
Floats = NDArray[np.float64]


def prediction_as_text(run: Run) -> str:
    """Verdict, then the relative residual by block for the sampled curve and each oracle that gives one."""
    design = run.extra["design"]
    facts = (
        f"{design['name']}: {design['depth']} blocks, width {design['width']}, {design['heads']} heads, mask "
        f"{design['mask']}, {design['norm_place']}-norm, mlp {design['mlp']}, skips {design['attention_skip']:g} and "
        f"{design['mlp_skip']:g}"
    )
    parts = [f"predict: {facts}", f"Verdict: {run.verdict}", _table(run), *_oracles(run)]
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part for part in parts if part)


def predicted_curves(run: Run) -> dict[str, Floats]:
    """For each curve its values, ``(sequences, blocks + 1)`` from the first tokens on; nan where there is none."""
    found = {}
    for name in names_in(run.table, "curve"):
        rows = run.table.filter(pc.equal(run.table["curve"], name))
        sequences, layers = rows["sequence"].to_numpy(), rows["layer"].to_numpy()
        places = np.where(np.array(rows["site"].to_pylist()) == "block.in", 0, layers + 1)
        grid = np.full((int(sequences.max()) + 1, int(places.max()) + 1), np.nan)
        grid[sequences, places] = rows["value"].to_numpy()
        found[name] = grid
    return found


def _table(run: Run) -> str:
    curves = predicted_curves(run)
    depth = run.extra["design"]["depth"]
    names = [SAMPLED, *(name for name in curves if name != SAMPLED)]
    head = ["block", SAMPLED, "spread", *names[1:]]
    rows = [head]
    for place in shown_lines(depth + 1):
        if place is None:
            rows.append(["..."] * len(head))
            continue
        own = curves[SAMPLED][:, place] if place < curves[SAMPLED].shape[1] else np.array([math.nan])
        spread = float(own.std(ddof=1)) if len(own) > 1 else math.nan
        others = [float(curves[name][0, place]) if place < curves[name].shape[1] else math.nan for name in names[1:]]
        label = "tokens" if place == 0 else str(place - 1)
        rows.append([label, *(_digits(v) for v in (float(own.mean()), spread, *others))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ("  ".join(w.rjust(n) for w, n in zip(row, widths, strict=True)) for row in rows)
    return "log10 of the relative residual at block.out\n" + "\n".join(lines)


def _oracles(run: Run) -> list[str]:
    lines = [f"{oracle['oracle']}: {_answer(oracle)}" for oracle in run.extra["oracles"]]
    return ["\n".join(lines)] if lines else []


def _answer(oracle: Any) -> str:
    if not oracle["applies"]:
        failed = [one for one in oracle["assumptions"] if not one["holds"]]
        return "does not apply: " + "; ".join(
            f"needs {one['assumption']} (found {_found(one['found'])})" for one in failed
        )
    words = [f"{name.replace('_', ' ')} {number(value)}" for name, value in oracle["values"].items()]
    depth = oracle.get("agreement_depth")
    if depth is not None:
        words.insert(0, f"agreement at depth {depth:.1f}")
    return ", ".join(words) or "tokens do not agree"


def _found(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _digits(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3e}"
