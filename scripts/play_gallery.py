"""Photograph the playground for the documentation, at desktop and phone width, light and dark.

Starts ``rankscope play``, drives it with Playwright and writes into ``docs/_static/play``::

    python scripts/play_gallery.py
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import URLError

TARGET = Path(__file__).resolve().parents[1] / "docs/_static/play"
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
LARGEST = 200_000
SHOTS = {
    **{
        f"no-skips-{width}-{scheme}": (width, scheme, "No skips", "2")
        for width in (1280, 390)
        for scheme in ("light", "dark")
    },
    "rescued-1280-light": (1280, "light", "Rescued by a remedy", "3"),
    "post-norm-1280-light": (1280, "light", None, "6"),
}
"""Name of a picture: width, scheme, scene, and the block to stop at."""


@contextmanager
def served() -> Iterator[str]:
    """The address of a playground that runs for the length of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "rankscope", "play", "--port", str(port), "--quiet"])
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=30).close()
                break
            except (URLError, ConnectionError):
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def photograph(browser: Any, url: str, width: int, scheme: str, scene: str | None, block: str) -> bytes:
    """One picture of the whole page."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.locator(".play[data-order='1'] .token").first.wait_for(state="attached")
    if scene is not None:
        page.get_by_role("button", name=scene, exact=True).click()
        page.locator(".play[data-order='3']").wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(800)
    page.get_by_role("slider", name="block", exact=True).fill(block)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(400)
    picture = page.screenshot(full_page=True)
    context.close()
    return bytes(picture)


def smaller(picture: bytes, path: Path) -> None:
    """As it is where it is small enough, else in 256 colours."""
    from PIL import Image

    drawn = Image.open(BytesIO(picture)).convert("RGB")
    drawn.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        drawn.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """All of them."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("RANKSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    TARGET.mkdir(parents=True, exist_ok=True)
    with served() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(CHROMIUM))
        for name, shot in SHOTS.items():
            path = TARGET / f"{name}.png"
            smaller(photograph(browser, url, *shot), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
