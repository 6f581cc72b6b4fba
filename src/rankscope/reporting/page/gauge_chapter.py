"""Chapter of a training run under a gauge: the readings at each step, layer by layer, and the alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from rankscope.monitor.history import History
from rankscope.monitor.readings import (
    ENOUGH,
    FAULTS,
    LAYERS_READ,
    LOSS,
    NOT_LEARNING,
    Alarm,
    Heatmap,
)
from rankscope.monitor.record import Record
from rankscope.reporting.page.charts import Chart, heat_view, plain, plain_list
from rankscope.reporting.page.rendering import Chapter
from rankscope.reporting.page.safe_text import clipped, readable, spoken, visible
from rankscope.views import Cell, Column, Row, Section, Table, number, spans_decades

FIRST = ("relative_residual", "mean_cosine", "stable_rank", "qk_to_v_gradient", "attention_entropy")
COLUMNS = 256
MOST_LINES = 6
MOST_ALARMS = 60
MOST_BARS = 12
MOST_REASONS = 12
LONGEST_TEXT = 2000


def training_chapter(record: Record) -> Chapter:
    """Everything the report says about one record."""
    raised = [alarm for alarm in record.alarms if alarm.state == "raised"]
    history = History(COLUMNS)
    for reading in record.readings:
        history.take(reading)
    maps = sorted(history.heatmaps(), key=lambda one: (_place(one.metric), one.metric, one.stack or ""))
    sections = [_loss(record, raised), _layers(maps, raised), _alarms(record, raised)]
    headline, verdict = _verdict(record, raised)
    return Chapter(
        title=f"monitor · {clipped(record.name or record.facts.get('model', 'a run'))}",
        question="Is my training run collapsing?",
        state=_state(record, raised),
        headline=headline,
        verdict=verdict,
        tiles=_tiles(record),
        sections=tuple(section for section in sections if section is not None),
        notes=_torn(record),
        origin=[
            *(
                (str(key).replace("_", " "), clipped(_words(value), 400))
                for key, value in record.facts.items()
                if key not in ("structure", "status")
            ),
            *_status(record),
        ],
    )


def _state(record: Record, raised: Sequence[Alarm]) -> str:
    # A fault of the model is not over while training goes on.
    if any(alarm.name == FAULTS for alarm in raised) or (record.readings and record.readings[-1].active):
        return "bad"
    is_good = len(record.readings) >= ENOUGH and not record.readings[-1].is_stuck
    return "care" if raised else "good" if is_good else "plain"


def _verdict(record: Record, raised: Sequence[Alarm]) -> tuple[str, list[str]]:
    if not record.readings:
        return "Nothing was read yet", []
    steps = f"steps {record.readings[0].step} to {record.readings[-1].step}"
    if not raised and len(record.readings) < ENOUGH:
        words = f"{len(record.readings)} of at least {ENOUGH} readings, over {steps}: too few to raise every alarm."
        return "Too few readings to judge", [words]
    if not raised and record.readings[-1].is_stuck:
        words = f"no alarm in {len(record.readings)} readings over {steps}, but the loss does not fall so far."
        return f"{NOT_LEARNING[0].upper()}{NOT_LEARNING[1:]}", [words.capitalize()]
    if not raised:
        return "No alarm", [f"{len(record.readings)} readings over {steps}, and none of them raised an alarm."]
    first = raised[0]
    faults = ["the fault"] if any(alarm.name == FAULTS for alarm in raised) else []
    standing = [*faults, *map(spoken, record.readings[-1].active)]
    after = f"standing at the end: {', '.join(standing)}" if standing else "none stands at the end"
    place = "" if first.layer is None else f", block {first.layer}"
    headline = f"{spoken(first.name).capitalize()} at step {first.step}{place}"
    lines = [_ended(readable(line)) for line in first.sentence.split("\n")]
    if first.name == FAULTS:
        # The finding itself; what comes before it says that the model has one, and since which step.
        headline = lines.pop(0).partition(f"step {first.step}: ")[2] or headline
    return headline, [*lines, f"{_counted(raised)} over {steps}; {after}."]


def _counted(raised: Sequence[Alarm]) -> str:
    """How many alarms there are, and how many causes they name."""
    causes = len({alarm.component for alarm in raised} - {"unknown"})
    unknown = sum(alarm.component == "unknown" for alarm in raised)
    named = [f"{causes} cause{'s' if causes > 1 else ''}"] * bool(causes) + [f"{unknown} not explained"] * bool(unknown)
    return ", ".join([f"{len(raised)} alarm{'s' if len(raised) > 1 else ''}", *named])


def _ended(text: str) -> str:
    """The text, or its first sentences if it is longer than any of ours."""
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT].rpartition(". ")[0] + ". …"


def _tiles(record: Record) -> list[tuple[str, str]]:
    tiles = [("model", clipped(record.facts.get("model", "unknown")))]
    if record.readings:
        first, last = record.readings[0], record.readings[-1]
        spent = math.fsum(reading.seconds for reading in record.readings)
        tiles += [("steps", f"{first.step}–{last.step}"), ("readings", str(len(record.readings)))]
        tiles.append(("alarms", str(sum(alarm.state == "raised" for alarm in record.alarms))))
        tiles.append(("cost", f"{number(spent)} s of {number(last.time - first.time + first.seconds)} s"))
    return tiles


def _torn(record: Record) -> list[str]:
    lines = "line was" if record.torn == 1 else "lines were"
    cut = f"{record.torn} {lines} cut off while being written (the process was killed) and left out."
    return [cut] * bool(record.torn)


def _status(record: Record) -> Iterator[tuple[str, str]]:
    """When the last reading was, which blocks it read on how many ranks, and what was not read."""
    if not record.readings:
        return
    last = record.readings[-1]
    yield "last reading", f"{datetime.fromtimestamp(last.time, timezone.utc):%Y-%m-%d %H:%M} UTC"
    if ranks := [row for row in last.table if row.metric == LAYERS_READ]:
        whole = sum(row.status == "ok" for row in ranks)
        of = f" on {whole} of {clipped(record.facts.get('ranks'), 20)} ranks" if record.facts.get("ranks") != 1 else ""
        yield "blocks read", f"{min(row.mean for row in ranks):g} of {max(row.most for row in ranks):g}{of}"
    status = record.facts.get("status")
    for key in ("not_read", "not_watched"):
        missed = status.get(key) if isinstance(status, Mapping) else None
        reasons: dict[str, list[str]] = {}
        for name, reason in missed.items() if isinstance(missed, Mapping) else ():
            reasons.setdefault(str(reason), []).append(spoken(str(name)))
        for reason, names in list(reasons.items())[:MOST_REASONS]:
            yield spoken(key), f"{clipped(', '.join(names), 200)} ({_ended(readable(reason))})"


def _layers(maps: Sequence[Heatmap], raised: Sequence[Alarm]) -> Section | None:
    if not maps:
        return None
    several = len({one.stack for one in maps}) > 1
    keys = [(one.metric, clipped(one.stack or "the model", 40)) for one in maps]
    choices = ("metric", "stack") if several else ("metric",)
    heat = Chart(
        "heat",
        "Layers over training",
        "One tile per reading and block; training runs to the right, blocks upwards. A ring marks an alarm.",
        choices,
        {key[: len(choices)]: _heat_view(one) for key, one in zip(keys, maps, strict=True)},
    )
    lines = Chart(
        "lines",
        "The same as curves",
        "A few blocks over the steps of training.",
        choices,
        {key[: len(choices)]: _line_view(one, raised) for key, one in zip(keys, maps, strict=True)},
        folded=True,
    )
    return Section("Layer by layer over training", "The gauge's readings, by step.", (heat, lines))


def _heat_view(one: Heatmap) -> dict[str, Any]:
    values = np.array(one.values, dtype=np.float64).reshape(len(one.layers), len(one.steps))
    places = {layer: row for row, layer in enumerate(reversed(one.layers))}
    marks = [
        [places[layer], _column(one.steps, step), spoken(name)] for step, layer, name in one.alarms if layer in places
    ]
    return heat_view(one.metric, one.steps, reversed(one.layers), values[::-1], ("block", "step"), marks)


def _column(steps: Sequence[int], step: int) -> int:
    """The last column at or before the step; thinning may have dropped the column of the step itself."""
    return max(0, int(np.searchsorted(steps, step, side="right")) - 1)


def _line_view(one: Heatmap, raised: Sequence[Alarm]) -> dict[str, Any]:
    chosen = np.unique(np.linspace(0, len(one.layers) - 1, min(MOST_LINES, len(one.layers))).round().astype(int))
    series = [_series(f"block {one.layers[row]}", one.steps, one.values[row]) for row in chosen]
    return {**_steps_view(one.metric, series), "when": _when(raised, one.stack)}


def _loss(record: Record, raised: Sequence[Alarm]) -> Section | None:
    told = [(reading.step, reading.scalars[LOSS]) for reading in record.readings if LOSS in reading.scalars]
    if len(told) < 2:
        return None
    every = -(-len(told) // (4 * COLUMNS))
    steps, values = zip(*told[::every], strict=True)
    constant = [row.mean for row in record.readings[-1].table if row.metric == "mean_answer_loss"]
    guides = [{"kind": "level", "value": value, "label": "the same answer for all inputs"} for value in constant]
    view = {**_steps_view("loss", [_series("", steps, values)]), "when": _when(raised, None, anywhere=True)}
    caption = "At the steps of the readings. Dashed: the loss of a constant prediction, on the last batch."
    chart = Chart("lines", "Loss", caption, (), {("loss",): {**view, "guides": guides}})
    return Section("The loss", "", (chart,))


def _series(name: str, steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "x": list(steps), "y": plain_list(values), "low": [], "high": [], "floor": []}


def _steps_view(metric: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    log = spans_decades([value for one in series for value in one["y"]])
    return {"metric": metric, "series": series, "guides": [], "log": log, "form": "number", "xlabel": "step"}


def _when(raised: Sequence[Alarm], stack: str | None, *, anywhere: bool = False) -> list[list[Any]]:
    """The first step of each kind of alarm, to mark on the axis of steps."""
    first: dict[str, int] = {}
    for alarm in raised:
        if anywhere or alarm.stack == stack:
            first.setdefault(alarm.name, alarm.step)
    return [[step, clipped(spoken(name), 40)] for name, step in first.items()]


def _alarms(record: Record, raised: Sequence[Alarm]) -> Section | None:
    """Each alarm as a bar over the steps at which it stood; the sentences, folded."""
    if not record.alarms:
        return None
    bars = [
        [clipped(spoken(alarm.name), 40), alarm.step, _end(alarm, record), clipped(alarm.component, 40)]
        for alarm in raised[:MOST_BARS]
    ]
    steps = sorted({reading.step for reading in record.readings} | {alarm.step for alarm in raised})
    view = {"metric": "alarms", "bars": bars, "steps": steps}
    chart = Chart("timeline", "When each was raised", "A bar ends where its alarm was over.", (), {("alarms",): view})
    rows: list[Row] = [
        [
            str(alarm.step),
            " ".join(str(part) for part in (clipped(alarm.stack or "", 20), alarm.layer) if part not in ("", None)),
            Cell(clipped(spoken(alarm.name), 40), ("bad",) if alarm.state == "raised" else ("good",)),
            alarm.state,
            _ended(readable(alarm.sentence)),
        ]
        for alarm in record.alarms[:MOST_ALARMS]
    ]
    sentence = Column("what was seen, and what to try", width="wide")
    columns = [*map(Column, ("step", "block", "alarm", "state")), sentence]
    cut = max(0, len(record.alarms) - MOST_ALARMS)
    table = Table(columns, rows, "Every alarm, in order", folded=True, left_out=cut)
    return Section(_counted(raised), "", (chart, table)) if raised else Section("Alarms that ended", "", (table,))


def _end(alarm: Alarm, record: Record) -> int | None:
    """The step at which it was over; None if it stood at the last reading."""
    over = (one for one in record.alarms if one.state == "cleared" and one.step >= alarm.step)
    return next((one.step for one in over if (one.name, one.stack) == (alarm.name, alarm.stack)), None)


def _place(metric: str) -> int:
    return FIRST.index(metric) if metric in FIRST else len(FIRST)


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(item) if isinstance(item, float) else item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else visible(value)
