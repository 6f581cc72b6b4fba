"""The page: controls around one picture. It stores nothing, makes no requests, and trusts no value it receives."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from rankscope.errors import InputError, MissingExtraError, RankscopeError
from rankscope.ext.playground.addresses import OnlyThisMachine
from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.controls import controls_of, theme_of
from rankscope.ext.playground.rendering import refusal, rendered
from rankscope.ext.playground.scenes import SCENES
from rankscope.ext.playground.simulating import simulate
from rankscope.ext.playground.writing import asset, style_sheet

LOCAL = "127.0.0.1"
AT_ONCE = 2
"""Simulations that run at the same time; the others wait."""
WAITING = 64
"""Requests that may wait; the next is turned away."""
WARMING = Choices(depth=1, tokens=2, width=16, heads=1, remedy="stronger_skip")
"""Simulated at start, so that the first visitor does not wait for imports."""
NAMES = tuple(field.name for field in fields(Choices))


def answer(*values: Any) -> str:
    """HTML for values in the order of the fields of ``Choices``; the values are not trusted."""
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
                controls = controls_of(gradio, start)
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
    names: Sequence[str] = (),
    browser: bool = False,
    announce: Callable[[str], None] | None = None,
    block: bool = True,
) -> Any:
    """Serve the page until interrupted.

    Args:
        host: address to listen on; only this machine by default.
        port: None for the first free one from 7860 on.
        first: what is shown at first.
        names: names under which it may be asked for, besides ``host`` and those of the loopback; others are refused.
        browser: open it in a browser.
        announce: called with the address once the page is served.
        block: wait until interrupted; False returns at once, and closing the returned object stops the server.

    Raises:
        MissingExtraError: without Gradio.
        InputError: the address or port is not available.
    """
    gradio = _gradio()
    page = build(first)
    simulate(WARMING)
    try:
        _launch(page, gradio, host, port, browser, names)
    except OSError as error:
        place = f"port {port} of {host}" if port else f"{host}, port 7860 and those after it,"
        raise InputError(
            f"The page cannot listen on {place}: it is in use or not an address of this machine. Give another."
        ) from error
    if announce is not None:
        announce(page.local_url)
    if block:
        page.block_thread()
    return page


def _launch(page: Any, gradio: Any, host: str, port: int | None, browser: bool, names: Sequence[str]) -> None:
    middleware = importlib.import_module("starlette.middleware").Middleware
    page.launch(
        app_kwargs={"middleware": [middleware(OnlyThisMachine, names=(host, *names))]},
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
        theme=theme_of(gradio),
        head=f"<style>{style_sheet()}</style>",
    )


def _wire(button: Any, scene: Choices, inputs: Sequence[Any], shown: Any) -> None:
    """Connect a scene's button: a click sets every control, then shows the picture."""
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


def _gradio() -> Any:
    """Import Gradio with its telemetry disabled."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        return importlib.import_module("gradio")
    except ImportError as error:
        raise MissingExtraError("rankscope play", "gradio", "play") from error
