"""Writes a picture as a standalone file with its player: opens offline, needs no Gradio."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from rankscope.errors import ResultError
from rankscope.ext.playground.picture import Picture
from rankscope.ext.playground.rendering import rendered
from rankscope.runs.storage import write_page
from rankscope.views.palette import DARK, LIGHT, css_variables

_BEFORE = """const element = document, watch = () => {};
document.body.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
"""
_FRAME = f"""body {{ margin: 0; background: {LIGHT["bg"]}; }}
body {{ font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }}
body.dark {{ background: {DARK["bg"]}; }}
.gradio-container {{ padding: 1rem; box-sizing: border-box; }}
"""


def asset(name: str) -> str:
    """Read an asset file of the page."""
    return (files("rankscope.ext.playground") / "assets" / name).read_text(encoding="utf-8")


def style_sheet() -> str:
    """The style sheet of the page, with the colours of both themes; their names start with ``p-``, unlike Gradio's."""
    light, dark = (css_variables({f"p-{name}": value for name, value in theme.items()}) for theme in (LIGHT, DARK))
    return (
        f".gradio-container {{ {light} }}\n"
        f".dark .gradio-container, .gradio-container.dark {{ {dark} }}\n{asset('play.css')}"
    )


def standalone(picture: Picture) -> str:
    """One self-contained HTML document with the picture and its player."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>rankscope play: {escape(picture.choices.call())}</title>"
        f'<style>{_FRAME}{style_sheet()}</style></head><body><main class="gradio-container">'
        f"{asset('head.html')}{rendered(picture)}</main>"
        f"<script>(() => {{{_BEFORE}{asset('play.js')}}})();</script></body></html>"
    )


def write_picture(picture: Picture, path: str | Path) -> Path:
    """Write :func:`standalone` to a file.

    Raises:
        ResultError: the file cannot be written.
    """
    target = Path(path)
    try:
        write_page(target, standalone(picture))
    except OSError as error:
        raise ResultError(f"The picture cannot be written to {str(target)!r}: {error.strerror}.") from error
    return target
