"""Pages that moved: a file at the old address leads to the new one."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx

MOVED = {
    "exact": "howto/exact",
    "gallery/dong2021_paths_hull": "gallery/dong2021_paths",
    "gallery/dong2021_paths_memory": "gallery/dong2021_paths",
    "gallery/dong2021_paths_sort": "gallery/dong2021_paths",
    "howto/query": "howto/sweep",
    "howto/selftest": "howto/doctor",
    "security": "threat_model",
}
"""Names of pages, old and new."""


def write_redirects(app: Sphinx, exception: Exception | None) -> None:
    """Write one small page per moved one, after a build that succeeded."""
    if exception is not None or app.builder.name != "html":
        return
    for old, new in MOVED.items():
        if new not in app.env.found_docs or old in app.env.found_docs:
            raise ValueError(f"redirects.py sends {old} to {new}, which is not a page, or {old} still is one.")
        address = os.path.relpath(f"{new}.html", PurePosixPath(old).parent)
        Path(app.outdir, f"{old}.html").write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">This page moved.</a></html>\n',
            encoding="utf-8",
        )


def setup(app: Sphinx) -> dict[str, object]:
    """Register the last step of a build."""
    app.connect("build-finished", write_redirects)
    return {"version": "1", "parallel_read_safe": True}
