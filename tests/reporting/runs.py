"""Runs to report on: one of each verb on tiny models, and hostile ones made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

import rankscope
from rankscope.monitor.readings import LOSS, Alarm, LayerValue, Reading
from rankscope.monitor.record import Record
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from tests.runs.builders import CODES, make_run, profile

LEDGER = ("block.in", "attention.sum", "mlp.sum", "block.out", "attention.probs")
SCRIPT = "<script>alert('x')</script>"
OVERRIDE = "\u202egnp.exe"
MARK = "\u200fשלום"
LONG_TOKEN = "x" * 10_000


@cache
def run_of(verb: str) -> Run:
    """A run of a verb on a tiny model, made once."""
    few = {"sequences": 2, "tokens": 16}
    if verb == "measure":
        return rankscope.measure("init:tiny-bert", rankscope.Inputs(**few), sites=LEDGER, null=True, similarity=True)
    if verb == "encoder-decoder":
        return rankscope.measure("init:tiny-t5", rankscope.Inputs(**few))
    if verb == "exact":
        return rankscope.exact("init:tiny-bert", rankscope.Inputs(**few), rankscope.Surgery(skip=0.0, mlp="drop"))
    if verb == "decompose":
        return rankscope.decompose(
            "init:tiny-bert", rankscope.Inputs(**few), marginals=["heads", "layers"], at_layers=[0]
        )
    if verb == "predict":
        return rankscope.predict("init:tiny-bert", tokens=64)
    if verb == "remedy":
        return rankscope.remedy("init:tiny-bert", rankscope.Inputs(**few))
    if verb == "bound":
        return rankscope.bound("init:tiny-bert", rankscope.Inputs(sequences=1, tokens=8))
    return rankscope.ablate("init:tiny-bert", rankscope.Inputs(**few))


VERBS = ("measure", "encoder-decoder", "ablate", "exact", "decompose", "bound", "predict", "remedy")


def hostile() -> Run:
    """A run whose every name attacks the page."""
    name = f"{SCRIPT}{OVERRIDE}{MARK}\"'&</title>{LONG_TOKEN}"
    writer = profile({"relative_residual": [0.9, 0.5], f"metric{SCRIPT}": [1.0, 2.0]}, stack=f"stack{SCRIPT}")
    profile({"relative_residual": [0.9, 0.4]}, stack=f"other{OVERRIDE}", site=f"site{SCRIPT}", writer=writer)
    cosines = {"tokens": 2, "positions": [0, 1], "labels": [f"a{SCRIPT}", LONG_TOKEN], "blocks": [0, 1],
               "cosines": [[1000, 500, 1000], [1000, None, 1000]]}  # fmt: skip
    similarity = {"sequence": 0, "site": "block.out", "stacks": {f"stack{SCRIPT}": cosines}}
    return make_run(
        writer.table(),
        model=name,
        verdict=f"Verdict {SCRIPT}: {LONG_TOKEN}{OVERRIDE}",
        notes=(f"note {SCRIPT}", LONG_TOKEN),
        extra={"similarity": similarity},
        null={"relative_residual": {"mean": 0.9, "sd": 0.1, "draws": 1}},
    )


def of_depth(layers: int, heads: int = 12) -> Run:
    """A run with many metrics and sites over ``layers`` blocks, collapsing to the float floor."""
    depth = np.arange(layers)
    curves: dict[str, list[float]] = {"relative_residual": list(0.9 * 10.0 ** (-8 * depth / max(1, layers - 1)))}
    for number in range(20):
        curves[f"metric_{number}"] = list(np.sin(depth / 9 + number) + 2.0)
    writer = RowWriter()
    for site in ("block.out", "block.in", "attention.sum", "mlp.sum"):
        profile(curves, site=site, floor_below=4.8e-7, writer=writer)
    add_heads(writer, layers, heads)
    return make_run(writer.table())


def undefined_everywhere() -> Run:
    """A run without a single number."""
    nothing = [float("nan")] * 3
    writer = profile({"relative_residual": nothing, "stable_rank": nothing})
    profile({"relative_residual": nothing}, site="attention.sum", writer=writer)
    profile({"relative_residual": nothing}, site="block.in", writer=writer)
    add_heads(writer, 3, 2, value=float("nan"))
    return make_run(writer.table(), verdict="No verdict.", evidence=())


def add_heads(writer: RowWriter, layers: int, heads: int, value: float | None = None) -> None:
    """Entropy per head."""
    for layer in range(layers):
        values = np.full((3, heads), 0.01 * layer / layers if value is None else value) + 0.02 * np.arange(heads)
        codes = np.full(values.shape, CODES["undefined" if value is not None else "ok"])
        writer.add(metric="attention_entropy", site="attention.probs", stack=None, layer=layer, first_sequence=0,
                   values=values, statuses=codes, head_axis=True)  # fmt: skip


def empty() -> Run:
    """A run without rows."""
    table: pa.Table = RowWriter().table()
    return make_run(table, verdict="Nothing was measured.", evidence=())


def training() -> Record:
    """A record of a gauge with an alarm in it, whose names attack the page."""

    def reading(step: int, levels: list[float], **more: Any) -> Reading:
        table = tuple(LayerValue("relative_residual", "block.out", None, i, v, v, v) for i, v in enumerate(levels))
        return Reading(step, {LOSS: 3.0 - step / 1000}, table, time=1000.0 + step, seconds=0.5, **more)

    words = f"Tokens collapse {SCRIPT}{OVERRIDE} {LONG_TOKEN}"
    alarm = Alarm(f"token_collapse{SCRIPT}", "raised", 10, None, 1, words, {"value": 0.1}, "skip")
    readings = (reading(0, [0.9, 0.8]), reading(10, [0.8, 1e-6], alarms=(alarm,)), reading(20, [0.8, float("nan")]))
    return Record({"model": SCRIPT, "schedule": LONG_TOKEN}, readings, 1, f"run{SCRIPT}")


EDGES: Mapping[str, object] = {
    "training": training,
    "hostile": hostile,
    "200 layers": lambda: of_depth(200),
    "1 layer": lambda: of_depth(1, heads=1),
    "undefined everywhere": undefined_everywhere,
    "empty": empty,
    "1 token": lambda: rankscope.measure(
        "init:tiny-bert", rankscope.Inputs(sequences=1, tokens=1, random_tokens=True), similarity=True
    ),
}
