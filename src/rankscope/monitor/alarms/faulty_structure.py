"""A model that is built wrongly, from the start."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("structure_faults",), title="The model has a fault from the start", confirm=1, is_event=True)
def faulty_structure(layer: LayerState) -> Judgement | None:
    """**Exact**: ``doctor`` shows a fault by an experiment on the probe, at the first reading.

    What is only possible is not reported. Not looked for if weights are spread over processes or take more than 1 GB.
    """
    if not layer.has("structure_faults"):
        return None
    number = layer.now["structure_faults"]
    return Judgement(2.0 * number, {"structure_faults": number}, f"{number:.0f} shown by experiments on the probe")
