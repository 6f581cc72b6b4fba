"""Train the 24-layer network of ``monitor_gallery.py`` with and without its skips, and show both in TensorBoard.

Writes event files with the gauge's own sink, starts TensorBoard on them and photographs what a browser shows, into
``docs/_static/monitor``. Needs tensorboard, Playwright and Chromium; some minutes on one core::

    python scripts/monitor_screenshot.py
    python scripts/monitor_screenshot.py --events FOLDER    # keep the event files, or show those that are there
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode

import torch
from monitor_gallery import FORMS, build, text_ids, windows

from rankscope import Surgery
from rankscope.monitor import Gauge
from rankscope.monitor.sinks.tensorboard import TensorBoardSink
from rankscope.surgery.operating import operate

TARGET = Path(__file__).resolve().parents[1] / "docs/_static/monitor"
WIDTH, HEIGHT, SETTLE_SECONDS, WIDER = 1280, 1000, 8, 3
TAGS = "^loss$|relative_residual/(least|layers)|rankscope/alarms"
CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def train(form: str, folder: Path, steps: int, seed: int = 0) -> None:
    """One run: its loss, and what the gauge sees, in one set of event files."""
    from torch.utils.tensorboard import SummaryWriter

    ids, vocabulary = text_ids()
    model = build(vocabulary, seed)
    data, probe = windows(ids, seed), {"input_ids": next(windows(ids, seed=10_000))[:8]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cut = operate(model, Surgery(**FORMS[form])) if FORMS[form] else nullcontext()
    with SummaryWriter(folder) as writer, cut, gauge_of(model, probe, writer) as gauge:
        for step in range(steps):
            batch = next(data)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            gauge.after_backward(step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            writer.add_scalar("loss", loss.detach(), step)
            reading = gauge.step(step)
            for alarm in () if reading is None else reading.alarms:
                print(f"{form}: {alarm}", flush=True)


def gauge_of(model: Any, probe: Any, writer: Any) -> Gauge:
    """A gauge every ten steps, into the writer of the run."""
    return Gauge(model, probe, schedule=10, sinks=[TensorBoardSink(writer)], actions=(), strict=True)


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """TensorBoard on this folder; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder.name, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--load_fast", "false"]
    with subprocess.Popen(command, cwd=folder.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"{address}/data/runs", len(FORMS))
            yield address
        finally:
            server.terminate()


def wait_for(url: str, count: int, patience: float = 180.0) -> None:
    """Until the server knows all the runs."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if len(json.load(answer)) >= count:
                    return
        except (URLError, ConnectionError):
            pass
        time.sleep(1.0)
    raise TimeoutError(f"TensorBoard did not show {count} runs within {patience:.0f} s")


def page(address: str) -> str:
    """The time series page with the cards we want, as anybody could link to it."""
    query = {"smoothing": "0", "darkMode": "false", "tagFilter": TAGS}
    return f"{address}/?{urlencode(query)}#timeseries"


def name(form: str) -> str:
    """Folder of a form, and with it the name of the run."""
    return form.replace(" ", "-")


def photograph(urls: dict[str, str], target: Path) -> None:
    """One picture per address, cut to a palette so that it stays small."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    executable = os.environ.get("RANKSCOPE_CHROMIUM") or shutil.which("chromium")
    target.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(CHROMIUM))
        view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for stem, url in urls.items():
            view.goto(url, wait_until="networkidle")
            tidy(view)
            view.wait_for_timeout(SETTLE_SECONDS * 1000)
            picture = Image.open(BytesIO(view.screenshot())).convert("RGB")
            picture.quantize(128, dither=Image.Dither.NONE).save(target / f"{stem}.png", optimize=True)
        browser.close()


def tidy(view: Any) -> None:
    """Two wide columns, without the table under each chart and the column of settings, where the page has them."""
    view.wait_for_timeout(SETTLE_SECONDS * 1000)
    table = view.get_by_text("Enable step selection")
    if table.count():
        table.first.click()
        view.locator("input[type=range]").first.focus()
        for _ in range(WIDER):
            view.keyboard.press("ArrowRight")
        view.get_by_role("button", name="Settings").last.click()


def main() -> None:
    """Train, unless event files are there already, and photograph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--events", type=Path, help="keep the event files here, or show those that are there")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        events = options.events or Path(scratch, "runs")
        for form in FORMS:
            if not (events / name(form)).is_dir():
                train(form, events / name(form), options.steps)
        with tensorboard(events) as address:
            photograph(
                {"tensorboard": page(address), "tensorboard-alarms": f"{address}/?darkMode=false#text"}, options.out
            )


if __name__ == "__main__":
    main()
