"""The model is put together differently than before."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(
    metrics=("structure_changes",),
    title="The model is not the one before",
    confirm=1,
    to_do="Compare the code and the configuration with those of the earlier steps.",
    is_event=True,
    needs_loss=True,
)
def model_changed(layer: LayerState) -> Judgement | None:
    """**Exact**: shapes, skips, masks, or what the same weights give on the probe, differ from what was seen last.

    Shapes, skips and masks are also compared with those of an earlier session of the run.
    """
    if not layer.has("structure_changes"):
        return None
    number = layer.now["structure_changes"]
    return Judgement(
        2.0 * number,
        {"structure_changes": number},
        f"{number:.0f} of skips, masks, shapes and what weights compute differ" if number else "nothing differs",
    )
