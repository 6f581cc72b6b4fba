"""The page: controls around one picture. It keeps nothing, asks nobody, and trusts no value it is sent."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from rankscope._errors import InputError, MissingExtraError, RankscopeError
from rankscope.playground.choices import NO_REMEDY, OPTIONS, RANGES, Choices
from rankscope.playground.rendering import refusal, rendered
from rankscope.playground.scenes import SCENES
from rankscope.playground.simulating import simulate
from rankscope.playground.writing import asset
from rankscope.remedies import REMEDIES

LOCAL = "127.0.0.1"
AT_ONCE = 2
"""Simulations that run at the same time; the others wait."""
WAITING = 64
"""Requests that may wait; the next is turned away."""
WARMING = Choices(depth=1, tokens=2, width=16, heads=1, remedy="stronger_skip")
"""Run before the first visitor comes, so that nobody waits for imports."""
NAMES = tuple(field.name for field in fields(Choices))
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
"""How the controls stand, top to bottom."""
STEPS: Mapping[str, float] = {"skip_gain": 0.05, "weight_scale": 0.05}


def answer(*values: Any) -> str:
    """HTML for values in the order of the fields of ``Choices``, whatever they are."""
    try:
        return _cached(Choices(**dict(zip(NAMES, values, strict=True))))
    except RankscopeError as error:
        return refusal(str(error))


@lru_cache(maxsize=128)
def _cached(choices: Choices) -> str:
    return rendered(simulate(choices))


def build(first: Choices | None = None) -> Any:
    """The page as ``gradio.Blocks``, not yet served.

    Args:
        first: what is shown at first.

    Raises:
        MissingExtraError: without Gradio.
    """
    gradio, start = _gradio(), first or Choices()
    with gradio.Blocks(title="rankscope play", analytics_enabled=False, fill_width=True) as page:
        gradio.HTML(asset("head.html"), elem_classes="intro", js_on_load=None)
        with gradio.Row(elem_classes="scenes"):
            buttons = {name: gradio.Button(name, size="sm") for name in SCENES}
        with gradio.Row(elem_classes="table"):
            with gradio.Column(scale=8, min_width=340):
                shown = gradio.HTML(
                    _cached(start), elem_id="picture", apply_default_css=False, js_on_load=asset("play.js")
                )
            with gradio.Column(scale=3, min_width=280, elem_classes="controls"):
                controls = _controls(gradio, start)
        inputs = [controls[name] for name in NAMES]
        gradio.on(
            [control.input for control in inputs],
            answer,
            inputs,
            shown,
            trigger_mode="always_last",
            show_progress="hidden",
            concurrency_limit=AT_ONCE,
            concurrency_id="simulate",
            api_visibility="private",
        )
        for name, button in buttons.items():
            _wire(button, SCENES[name], inputs, shown)
    page.queue(max_size=WAITING, api_open=False)
    return page


def serve(
    host: str = LOCAL,
    port: int | None = None,
    *,
    first: Choices | None = None,
    browser: bool = False,
    announce: Callable[[str], None] | None = None,
    block: bool = True,
) -> Any:
    """Serve the page until interrupted.

    Args:
        host: address to listen on; only this machine by default.
        port: None for the first free one from 7860 on.
        first: what is shown at first.
        browser: open it in a browser.
        announce: is told the address, once it answers.
        block: wait; False returns at once, and closing what is returned ends it.

    Raises:
        MissingExtraError: without Gradio.
        InputError: an address or port that cannot be listened on.
    """
    gradio = _gradio()
    page = build(first)
    simulate(WARMING)
    try:
        _launch(page, gradio, host, port, browser)
    except OSError as error:
        place = f"port {port} of {host}" if port else f"{host}, port 7860 and those after it,"
        raise InputError(
            f"The page cannot listen on {place}: it is taken or not this machine's. Give another."
        ) from error
    if announce is not None:
        announce(page.local_url)
    if block:
        page.block_thread()
    return page


def _launch(page: Any, gradio: Any, host: str, port: int | None, browser: bool) -> None:
    page.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        max_file_size=1,
        theme=_theme(gradio),
        head=f"<style>{asset('play.css')}</style>",
    )


def _wire(button: Any, scene: Choices, inputs: Sequence[Any], shown: Any) -> None:
    """A click sets every control to the scene, then shows it."""
    values = [asdict(scene)[name] for name in NAMES]
    button.click(
        lambda: [*values, answer(*values)],
        None,
        [*inputs, shown],
        show_progress="hidden",
        concurrency_limit=AT_ONCE,
        concurrency_id="simulate",
        api_visibility="private",
    )


def _controls(gradio: Any, start: Choices) -> dict[str, Any]:
    """One control per choice: those that decide first, then the size."""
    found: dict[str, Any] = {}
    for names in ROWS:
        with gradio.Row(elem_classes="pair"):
            for name in names:
                found[name] = _control(gradio, name, getattr(start, name))
    return found


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


def _theme(gradio: Any) -> Any:
    """Fonts that are on the machine, and the colours of the report."""
    sans = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "Noto Sans", "sans-serif")
    mono = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
    base = gradio.themes.Base(primary_hue="sky", neutral_hue="stone", font=sans, font_mono=mono, text_size="sm")
    return base.set(
        body_background_fill="#faf9f6",
        body_background_fill_dark="#14171b",
        body_text_color="#1d2126",
        body_text_color_dark="#ebe8e2",
        block_background_fill="#ffffff",
        block_background_fill_dark="#1b1f24",
        block_border_color="#e4e1da",
        block_border_color_dark="#31373f",
        block_info_text_color="#565c65",
        block_info_text_color_dark="#b0b5bd",
        block_label_text_color="#1d2126",
        block_title_text_color="#1d2126",
        block_title_text_color_dark="#ebe8e2",
        slider_color="#00629a",
        slider_color_dark="#7cc0ee",
        input_background_fill="#f4f2ec",
        input_background_fill_dark="#252b32",
    )


def _gradio() -> Any:
    """Gradio, told first to report nothing to anyone."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        return importlib.import_module("gradio")
    except ImportError as error:
        raise MissingExtraError("rankscope play", "gradio", "play") from error
