"""Train the 24-layer network of ``monitor_gallery.py`` with and without its skips, and show both records in a report.

Writes ``training-light.png``, ``training-dark.png`` and ``training-map.png`` into ``docs/_static/report``. Needs
Playwright and Chromium; two minutes on one core::

    python scripts/monitor_report.py --page report.html      # keep the page as well
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from monitor_gallery import FORMS, train
from report_gallery import SCHEMES, browser, keep

import rankscope as rs

WIDTH, HEIGHT = 1280, 1120


def main() -> None:
    """Train, report, photograph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--page", type=Path, help="keep the HTML file here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / form.replace(" ", "-") for form in reversed(FORMS)]
        for form, folder in zip(reversed(FORMS), folders, strict=True):
            train(form, 0, options.steps, folder)
        page = rs.report(folders, options.page or Path(scratch) / "report.html", title="24 layers, cut and with skips")
        photograph(page.resolve())


def photograph(file: Path) -> None:
    """The beginning of the page, light and dark, and its first map."""
    with browser() as running:
        for scheme in SCHEMES:
            context = running.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page = context.new_page()
            page.goto(file.as_uri())
            page.wait_for_timeout(300)
            keep(page.screenshot(), f"training-{scheme}.png")
            if scheme == "light":
                keep(page.locator(".chart-heat").first.screenshot(), "training-map.png")
            context.close()


if __name__ == "__main__":
    main()
