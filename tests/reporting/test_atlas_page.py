"""The atlas of a sweep: what is on it, that strangers' words are only words, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.fetch_axe import axe_file

import rankscope as rs
from rankscope.errors import InputError, ResultError
from tests.browser import Opened, launched, opened, serious_findings
from tests.ext.sweeps.folders import made, rows, task

HOSTILE = "<img src=x onerror=alert(1)>\u202e</script><script>alert(2)</script>"
STEPS = (0, 100, 250)


def sweep_folder(home: Path, name: str = "plain") -> Path:
    """Three models, a run of three checkpoints, and a failure; or names that try something."""
    if name == "hostile":
        one = task(1, model=HOSTILE, variant=HOSTILE, checkpoint=HOSTILE, step=1)
        two = task(2, model=HOSTILE, variant=HOSTILE, checkpoint="b", step=2)
        tables = [(each, rows(each, {HOSTILE: [0.5], "relative_residual": [0.9, 0.8]})) for each in (one, two)]
        made(home, tables, {HOSTILE: HOSTILE}, verdict=HOSTILE)
        return home
    tables = []
    for number, (model, fall) in enumerate({"steady": 1.0, "falling": 0.4, "gone": 1e-3}.items()):
        for variant in ("full", "pure"):
            one = task(10 * number + (variant == "pure"), model=model, variant=variant)
            course = {
                "relative_residual": [0.9 * fall**layer for layer in range(4)],
                "mean_cosine": [0.1, 0.2, 0.3, 0.4],
            }
            tables.append((one, rows(one, course)))
    for number, step in enumerate(STEPS):
        one = task(100 + number, model="run", checkpoint=f"checkpoint-{step}", step=step)
        tables.append((one, rows(one, {"relative_residual": [0.9 - step / 1000, 0.5, 0.3]})))
    made(home, tables, {"broken": "no weights"})
    return home


def charts_in(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, flags=re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_profiles_and_trajectory_hold_the_numbers(tmp_path: Path) -> None:
    page = rs.atlas(sweep_folder(tmp_path / "s"), tmp_path / "atlas.html").read_text(encoding="utf-8")
    multiples, heat = charts_in(page)
    assert multiples["kind"] == "multiples"
    view = next(view for view in multiples["views"] if view["key"] == ["relative_residual", "full"])
    assert [one["name"] for one in view["series"]] == ["steady", "falling", "gone", "run"]
    assert view["series"][1]["y"] == pytest.approx([0.905, 0.365, 0.149, 0.0626], rel=1e-3)
    assert view["log"], "three decades and more"
    assert view["series"][3]["y"][0] == pytest.approx(0.655), "a run is shown by its last checkpoint"
    assert heat["kind"] == "heat"
    assert heat["views"][0]["columns"] == list(STEPS)
    assert heat["views"][0]["values"][0] == pytest.approx([0.905, 0.805, 0.655])
    assert heat["views"][0]["names"] == ["block", "step"]
    assert "no weights" in page
    assert "The sweep is not complete: 1 tasks failed." in page


def test_a_sweep_without_measurements_is_said(tmp_path: Path) -> None:
    made(tmp_path / "s", [], missing=1)
    with pytest.raises(InputError, match="measure"):
        rs.atlas(tmp_path / "s", tmp_path / "atlas.html")
    with pytest.raises(ResultError, match="no sweep"):
        rs.atlas(tmp_path, tmp_path / "atlas.html")


def test_strangers_words_are_only_words(tmp_path: Path) -> None:
    page = rs.atlas(sweep_folder(tmp_path / "s", "hostile"), tmp_path / "a.html", title=HOSTILE).read_text("utf-8")
    assert "<img" not in page
    assert "<script>alert" not in page
    assert "\u202e" not in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture
def seen(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    with opened(browser, rs.atlas(sweep_folder(tmp_path / "s"), tmp_path / "atlas.html")) as page:
        yield page


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("width", [1280, 390])
def test_opens_without_an_error_or_a_request(browser: Any, tmp_path: Path, name: str, width: int) -> None:
    file = rs.atlas(sweep_folder(tmp_path / "s", name), tmp_path / "atlas.html")
    with opened(browser, file, width=width) as page:
        assert page.said == []
        assert page.asked == [file.as_uri()]
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        drawn = page.page.locator(".plot").evaluate_all("nodes => nodes.every((node) => node.childElementCount > 0)")
        assert drawn
        page.page.locator(".plot").first.hover()


def test_panels_answer_pointer_and_keys(seen: Opened) -> None:
    figure = seen.page.locator("figure.chart-multiples")
    figure.locator(".plot").hover(position={"x": 100, "y": 60})
    hint = figure.locator(".hint")
    assert hint.inner_text().startswith("steady")
    figure.locator(".plot").focus()
    figure.locator(".plot").press("ArrowRight")
    assert hint.inner_text().startswith("falling")
    assert "over 4 blocks" in hint.inner_text()
    before = figure.locator("polyline").nth(1).get_attribute("points")
    figure.get_by_label("log axis").uncheck()
    assert figure.locator("polyline").nth(1).get_attribute("points") != before


def test_the_table_sorts_both_ways_by_number_and_by_name(seen: Opened) -> None:
    table = seen.page.locator("table.sortable")

    def first_column() -> list[str]:
        return table.locator("tbody th").all_inner_texts()

    last = table.get_by_role("button", name="Sort by relative residual, last")
    last.click()
    assert first_column()[0] == "gone"
    assert table.locator("th[aria-sort=ascending]").count() == 1
    last.click()
    assert first_column()[0] == "steady"
    table.get_by_role("button", name="Sort by model").click()
    assert first_column() == sorted(first_column())
    table.get_by_role("button", name="Sort by checkpoint").click()
    steps = table.locator("tbody tr").evaluate_all("rows => rows.slice(0, 3).map((row) => row.cells[1].innerText)")
    assert steps == [f"checkpoint-{step}" for step in STEPS]
    table.get_by_role("button", name="Sort by mean cosine, last").click()
    assert first_column()[-1] == "run", "what has no value comes last"
    table.get_by_role("button", name="Sort by mean cosine, last").click()
    assert first_column()[-1] == "run", "also when turned round"


def test_nothing_of_a_stranger_runs(browser: Any, tmp_path: Path) -> None:
    with opened(browser, rs.atlas(sweep_folder(tmp_path / "s", "hostile"), tmp_path / "a.html")) as page:
        alerts: list[str] = []
        page.page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        for select in page.page.locator("select").all():
            select.select_option(index=0)
        for button in page.page.locator(".sort").all():
            button.click()
        page.page.wait_for_timeout(100)
        assert (alerts, page.said) == ([], [])


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_accessible(browser: Any, tmp_path: Path, scheme: str) -> None:
    if not axe_file().is_file():
        pytest.skip("axe-core is not in the cache: run ./dev axe")
    with opened(browser, rs.atlas(sweep_folder(tmp_path / "s"), tmp_path / "atlas.html"), scheme=scheme) as page:
        page.page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        page.page.wait_for_timeout(100)
        assert serious_findings(page.page, axe_file(), only=("color-contrast",) if scheme == "dark" else ()) == []
