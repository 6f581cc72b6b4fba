"""``rankscope play``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.commands import COMMANDS, Command
from rankscope.cli.streams import remarks_console

Host = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; default: this machine only.")
]
Port = Annotated[
    int | None, typer.Option("--port", min=1, max=65535, help="Port; default: the first free one from 7860.")
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Also answer requests for this name; repeatable."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Initial value of a setting, e.g. skip_gain=0; repeatable."),
]
Write = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE", help="Write the picture to an HTML file instead of starting a server."),
]


def _announce(address: str) -> None:
    remarks_console().print(f"playing at {address} (Ctrl+C ends it)", markup=False)


def play_command(
    set_: Set = None,
    write: Write = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    allow_host: AllowHost = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """What does collapse look like? Starts a local page on which you build a small transformer and watch its tokens."""
    from rankscope.ext.playground.choices import choices_from

    chosen = choices_from(set_ or [])
    if write is None:
        from rankscope.ext.playground.page import serve

        serve(
            host,
            port,
            first=chosen,
            names=allow_host or (),
            browser=browser,
            announce=None if quiet else _announce,
        )
        return
    from rankscope.ext.playground.simulating import simulate
    from rankscope.ext.playground.writing import write_picture

    written = write_picture(simulate(chosen), write)
    if not quiet:
        remarks_console().print(f"wrote {written} ({written.stat().st_size / 1000:.0f} kB)", markup=False)


COMMANDS.add(
    "play", Command(play_command, ("play --set skip_gain=0 --set depth=6 --set tokens=16 --write picture.html",), 60)
)
