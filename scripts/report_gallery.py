"""Make the runs, the reports and the screenshots that the documentation shows.

Needs the pretrained MiniLM (``./dev fetch minilm``), Playwright and Chromium. The fonts are those of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

import rankscope as rs
from rankscope.models.pretrained import pretrained_folder
from rankscope.runs.run import Run

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/_static/report"
SITES = ["block.in", "attention.sum", "mlp.sum", "block.out", "final", "attention.probs"]
LARGEST = 200_000
WIDTHS = {1280: 1120, 390: 1400}
SCHEMES = ("light", "dark")
CLOSE_UPS = {
    "ledger": ("measure", ".chart-waterfall"),
    "heads": ("measure", ".chart-heat"),
    "similarity": ("measure", ".chart-matrix"),
    "exact": ("exact", "figure"),
    "ablation": ("ablate", "figure"),
    "paths": ("decompose", "figure"),
    "theorems": ("bound", ".section .tabled"),
    "comparison": ("compare", "figure"),
}


def makers() -> Mapping[str, Callable[[], Run]]:
    """One run per verb, on MiniLM (6 layers, pretrained)."""
    model = str(pretrained_folder("minilm"))
    few = {"sequences": 4, "tokens": 48}
    return {
        "measure": lambda: rs.measure(
            model, rs.Inputs(sequences=8, tokens=64), sites=SITES, null=True, similarity=True
        ),
        "exact": lambda: rs.exact(model, rs.Inputs(**few), rs.Surgery(skip=0.0, mlp="drop")),
        "ablate": lambda: rs.ablate(model, rs.Inputs(**few), masks=["own", "causal"]),
        "decompose": lambda: rs.decompose(model, rs.Inputs(**few), marginals=["heads", "layers"]),
        "bound": lambda: rs.bound(model, rs.Inputs(sequences=2, tokens=32)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the reports into a folder and the screenshots into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path, help="keep the HTML files here; by default they are thrown away")
    chosen = parser.parse_args(arguments)
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        pages = chosen.pages or Path(scratch)
        files = write_pages(pages)
        with browser() as running:
            shoot_tops(running, files)
            shoot_close_ups(running, files)
    return 0


def write_pages(folder: Path) -> dict[str, Path]:
    """A report per verb, one of a comparison, and one of all together."""
    runs = {name: make() for name, make in makers().items()}
    files = {name: rs.report(run, folder / f"{name}.html") for name, run in runs.items()}
    model = str(pretrained_folder("minilm"))
    with rs.operate(loaded := rs.load(model).model, rs.Surgery(skip=0.5)):
        other = rs.measure(loaded, rs.Inputs(sequences=8, tokens=64), sites=SITES)
    difference = rs.compare(runs["measure"], other)
    files["compare"] = rs.report([runs["measure"], other], folder / "compare.html", comparison=difference)
    files["all"] = rs.report(list(runs.values()), folder / "all.html", title="MiniLM, every verb")
    for name, file in files.items():
        print(f"{name}: {file.stat().st_size / 1000:.0f} kB", flush=True)
    return files


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium under Playwright."""
    from playwright.sync_api import sync_playwright

    program = os.environ.get("RANKSCOPE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


def shoot_tops(running: Any, files: Mapping[str, Path]) -> None:
    """The beginning of the report of ``measure``, wide and narrow, light and dark; and of all verbs together."""
    for width, height in WIDTHS.items():
        for scheme in SCHEMES:
            context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            for name in ("measure", "all"):
                page.goto(files[name].as_uri())
                page.wait_for_timeout(300)
                keep(page.screenshot(), f"{name}-{width}-{scheme}.png")
            context.close()


def shoot_close_ups(running: Any, files: Mapping[str, Path]) -> None:
    """Single charts, wide and light."""
    context = running.new_context(viewport={"width": 1280, "height": 1200}, color_scheme="light")
    page = context.new_page()
    for name, (file, selector) in CLOSE_UPS.items():
        page.goto(files[file].as_uri())
        page.wait_for_timeout(300)
        if name == "similarity":
            page.locator(selector).get_by_role("slider").fill("4")
        keep(page.locator(selector).first.screenshot(), f"{name}.png")
    context.close()


def keep(picture: bytes, name: str) -> None:
    """Store a picture without its alpha channel, packed as far as it goes."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    target = TARGET / name
    image.save(target, optimize=True)
    size = target.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{target.name} has {size} bytes, more than {LARGEST}.")
    print(f"{target.name}: {size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
