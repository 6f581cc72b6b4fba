"""The controls of the page, one per choice, and its theme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.ext.playground.choices import NO_REMEDY, OPTIONS, RANGES, Choices
from rankscope.remedies import REMEDIES
from rankscope.views.palette import DARK, LIGHT

LABELS: Mapping[str, tuple[str, str | None]] = {
    "skip_gain": ("skip gain", "What each skip adds of the stream. 0 cuts the skips."),
    "mlp": ("MLP", None),
    "norm": ("norm", None),
    "norm_place": ("norm placed", None),
    "mask": ("mask", None),
    "positions": ("positions", None),
    "remedy": ("remedy", None),
    "depth": ("number of blocks", None),
    "tokens": ("number of tokens", None),
    "width": ("width", None),
    "heads": ("heads", None),
    "weight_scale": ("weight scale", "1: every product keeps the size of its input."),
    "seed": ("seed", None),
}
ROWS = (
    ("skip_gain",),
    ("mlp", "mask"),
    ("norm", "norm_place"),
    ("positions", "remedy"),
    ("depth",),
    ("tokens",),
    ("width", "heads"),
    ("weight_scale",),
    ("seed",),
)
"""Order of the controls, top to bottom."""
STEPS: Mapping[str, float] = {"skip_gain": 0.05, "weight_scale": 0.05}


def controls_of(gradio: Any, start: Choices) -> dict[str, Any]:
    """One control per choice: the most important first, then the size."""
    controls: dict[str, Any] = {}
    for names in ROWS:
        with gradio.Row(elem_classes="pair"):
            for name in names:
                controls[name] = _control(gradio, name, getattr(start, name))
    return controls


def _control(gradio: Any, name: str, value: Any) -> Any:
    label, info = LABELS[name]
    words = {"label": label, "info": info, "elem_id": f"choose-{name}"}
    if name == "seed":
        return gradio.Number(value, precision=0, minimum=0, maximum=RANGES[name][1], **words)
    if name in RANGES:
        low, high = RANGES[name]
        return gradio.Slider(low, high, value, step=STEPS.get(name, 1), buttons=[], **words)
    options = [NO_REMEDY, *REMEDIES] if name == "remedy" else list(OPTIONS[name])
    return gradio.Dropdown(options, value=value, filterable=False, min_width=110, **words)


def theme_of(gradio: Any) -> Any:
    """The theme: system fonts and the colours of the report."""
    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "Noto Sans", "sans-serif")
    mono = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
    base = gradio.themes.Base(primary_hue="sky", neutral_hue="stone", font=sans, font_mono=mono, text_size="sm")
    return base.set(
        body_background_fill=LIGHT["bg"],
        body_background_fill_dark=DARK["bg"],
        body_text_color=LIGHT["ink"],
        body_text_color_dark=DARK["ink"],
        block_background_fill=LIGHT["card"],
        block_background_fill_dark=DARK["card"],
        block_border_color=LIGHT["line"],
        block_border_color_dark=DARK["line"],
        block_info_text_color=LIGHT["soft"],
        block_info_text_color_dark=DARK["soft"],
        block_label_text_color=LIGHT["ink"],
        block_title_text_color=LIGHT["ink"],
        block_title_text_color_dark=DARK["ink"],
        slider_color=LIGHT["accent"],
        slider_color_dark=DARK["accent"],
        input_background_fill=LIGHT["field"],
        input_background_fill_dark=DARK["field"],
    )
