"""A real browser for tests: Playwright on an installed Chromium, or a skip that says what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SERIOUS = ("serious", "critical")


@dataclass
class Opened:
    """A page with everything it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def launched() -> Iterator[Any]:
    """A running browser; skips without Playwright or Chromium."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    program = os.environ.get("RANKSCOPE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium on the path ({', '.join(NAMES)}) and RANKSCOPE_CHROMIUM is not set")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(SWITCHES))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> Iterator[Opened]:
    """A file opened from disk without a network, its console and requests recorded."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, bypass_csp=False
    )
    page = context.new_page()
    seen = Opened(page)
    page.on("console", lambda message: seen.said.append(message.text))
    page.on("pageerror", lambda error: seen.said.append(str(error)))
    page.on("request", lambda request: seen.asked.append(request.url))
    try:
        page.goto(file.as_uri())
        page.wait_for_timeout(150)
        yield seen
    finally:
        context.close()


def serious_findings(page: Any, axe: Path, *, only: tuple[str, ...] = ()) -> list[str]:
    """What axe-core finds of impact serious or critical, one line each.

    Args:
        page: the opened page.
        axe: the program of axe-core.
        only: names of the rules to check; all of them if empty.
    """
    page.evaluate(axe.read_text(encoding="utf-8"))
    settings = {"resultTypes": ["violations"], **({"runOnly": list(only)} if only else {})}
    found = page.evaluate("(settings) => axe.run(document, settings).then((answer) => answer.violations)", settings)
    return [
        f"{finding['id']} ({finding['impact']}): {finding['help']}: {finding['nodes'][0]['html'][:160]} "
        f"{finding['nodes'][0].get('failureSummary', '')[:300]}"
        for finding in found
        if finding["impact"] in SERIOUS
    ]
