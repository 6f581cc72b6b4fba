from __future__ import annotations

from itertools import pairwise

from rankscope.monitor.history import History
from rankscope.monitor.readings import Alarm, LayerValue, Reading, fact


def reading(step: int) -> Reading:
    rows = tuple(LayerValue("mean_cosine", "block.out", None, layer, step + layer / 10, 0.0, 1.0) for layer in (0, 1))
    alarm = Alarm("token_collapse", "raised", step, None, 1, "", {}, "skip")
    about_data = Alarm("repeated_sequences", "raised", step, None, None, "", {}, "data")
    return Reading(step, {}, (*rows, fact("batch_copies", "batch", 0.0)), (alarm, about_data) if step == 7 else ())


def test_history_is_thinned_evenly_and_stays_small() -> None:
    history = History(columns=8)
    for step in range(100):
        history.take(reading(step))
    (heatmap,) = history.heatmaps()
    gaps = {later - earlier for earlier, later in pairwise(heatmap.steps)}
    assert len(heatmap.steps) <= 8
    assert len(gaps) == 1
    assert heatmap.steps[0] == 0
    assert heatmap.steps[-1] >= 100 - 2 * gaps.pop()
    assert heatmap.values[1] == tuple(step + 0.1 for step in heatmap.steps)
    assert heatmap.alarms == ((7, 1, "token_collapse"),)
