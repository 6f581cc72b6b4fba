"""The report in a real browser: opens from disk without an error or a request, and everything on it works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.fetch_axe import axe_file

import rankscope
from tests.browser import Opened, launched, opened, serious_findings
from tests.reporting.runs import EDGES, VERBS, run_of

WIDTHS = (1280, 390)
PIXELS = """(canvas) => {
  const seen = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let sum = 0;
  for (let i = 0; i < seen.length; i += 97) sum = (sum * 31 + seen[i]) % 1000003;
  return sum;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture
def axe() -> Path:
    if not axe_file().is_file():
        pytest.skip("axe-core is not in the cache: run ./dev axe")
    return axe_file()


def file_of(name: str, folder: Path) -> Path:
    """The report of a verb or of an edge case, written once."""
    path = folder / f"{name.replace(' ', '-')}.html"
    if not path.exists():
        if name == "all":
            one, other = run_of("measure"), EDGES["1 layer"]()
            rankscope.report(
                [one, other, *(run_of(verb) for verb in VERBS[1:])], path, comparison=rankscope.compare(one, other)
            )
        else:
            rankscope.report(run_of(name) if name in VERBS else EDGES[name](), path)
    return path


@pytest.fixture
def measured(browser: Any, folder: Path) -> Iterator[Opened]:
    with opened(browser, file_of("measure", folder)) as seen:
        yield seen


def is_clean(seen: Opened, file: Path) -> None:
    assert seen.said == []
    assert seen.asked == [file.as_uri()]


# The chapter of a verb is the same in the report of all verbs.
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [*(pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS), *EDGES, "all"])
def test_opens_without_an_error_or_a_request(browser: Any, folder: Path, name: str) -> None:
    file = file_of(name, folder)
    for width in WIDTHS[:1] if name in VERBS else WIDTHS:
        with opened(browser, file, width=width) as seen:
            is_clean(seen, file)
            wide = seen.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"the page is {wide} wide on a screen of {width}"
            drawn = seen.page.locator(".plot").evaluate_all(
                "nodes => nodes.every((node) => node.childElementCount > 0)"
            )
            assert drawn
            assert "NaN" not in seen.page.content()


@pytest.mark.parametrize("name", ["hostile"])
def test_no_stranger_speaks(browser: Any, folder: Path, name: str) -> None:
    with opened(browser, file_of(name, folder)) as seen:
        alerts: list[str] = []
        seen.page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        for select in seen.page.locator("select").all():
            select.select_option(index=1)
        seen.page.locator(".plot").first.hover()
        seen.page.wait_for_timeout(100)
        assert alerts == []
        assert seen.said == []


def test_the_metric_switch_draws_another_curve(measured: Opened) -> None:
    figure = measured.page.locator("figure").first
    before = figure.locator("polyline").last.get_attribute("points")
    figure.get_by_label("metric", exact=True).select_option("stable_rank")
    assert figure.locator(".shown .term").inner_text() == "stable rank"
    assert figure.locator("polyline").last.get_attribute("points") != before
    pressed = figure.locator(".cards button[aria-pressed=true]")
    assert "stable rank" in pressed.inner_text()
    figure.locator(".cards button", has_text="mean cosine").click()
    assert figure.get_by_label("metric", exact=True).input_value() == "mean_cosine"


def test_the_site_switch_keeps_to_what_was_measured(measured: Opened) -> None:
    figure = measured.page.locator("figure").first
    figure.get_by_label("site", exact=True).select_option("attention.probs")
    assert figure.get_by_label("metric", exact=True).input_value().startswith("attention_")


def test_the_log_switch_changes_the_axis(measured: Opened) -> None:
    figure = measured.page.locator("figure").first
    before = figure.locator("polyline").last.get_attribute("points")
    figure.get_by_label("log axis").check()
    assert figure.locator("polyline").last.get_attribute("points") != before


def test_hover_and_arrow_keys_read_the_values(measured: Opened) -> None:
    figure = measured.page.locator("figure").first
    plot = figure.locator(".plot")
    plot.hover(position={"x": 80, "y": 100})
    run = run_of("measure")
    value = run.curve("relative_residual", "block.out").mean
    hint = figure.locator(".hint")
    assert hint.is_visible()
    assert hint.inner_text().startswith("block 0")
    assert f"{value[0]:.3f}" in hint.inner_text()
    plot.focus()
    plot.press("ArrowRight")
    assert f"{value[1]:.3f}" in hint.inner_text()
    plot.press("Escape")
    assert not hint.is_visible()


def test_the_slider_shows_another_block(measured: Opened) -> None:
    figure = measured.page.locator("figure.chart-matrix")
    canvas = figure.locator("canvas")
    before = canvas.evaluate(PIXELS)
    assert figure.locator("output").inner_text() == "block 0"
    figure.get_by_role("slider").fill("2")
    assert figure.locator("output").inner_text() == "block 2"
    assert canvas.evaluate(PIXELS) != before
    figure.locator(".plot").hover(position={"x": 30, "y": 60})
    assert "cosine" in figure.locator(".hint").inner_text()


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_names_are_explained(measured: Opened, how: str) -> None:
    term = measured.page.locator(".term:visible").first
    tip = measured.page.locator("#tip")
    assert not tip.is_visible()
    term.hover() if how == "hover" else term.focus()
    assert tip.is_visible()
    assert tip.locator("math").count() >= 1
    assert "(20" in tip.inner_text(), "a source with its year"
    measured.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_ledger_and_the_map_answer(measured: Opened) -> None:
    for kind, word in (("waterfall", "decades"), ("heat", "head")):
        figure = measured.page.locator(f"figure.chart-{kind}")
        figure.locator(".plot").hover(position={"x": 90, "y": 40})
        assert word in figure.locator(".hint").inner_text()


def test_the_numbers_drawn_can_be_read(measured: Opened) -> None:
    figure = measured.page.locator("figure").first
    figure.locator(".live-numbers summary").click()
    figure.locator(".live-numbers td").first.wait_for()
    first = run_of("measure").curve("relative_residual", "block.out").mean[0]
    assert figure.locator(".live-numbers td").first.inner_text() == f"{first:.3f}"


def test_light_and_dark_and_paper(measured: Opened) -> None:
    page = measured.page
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.locator("#theme").click()
    assert page.evaluate(shade) != light
    page.emulate_media(media="print")
    assert page.evaluate(shade) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.pdf()[:5] == b"%PDF-"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_accessible(browser: Any, folder: Path, axe: Path, scheme: str) -> None:
    with opened(browser, file_of("all", folder), scheme=scheme) as seen:
        seen.page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        seen.page.wait_for_timeout(100)
        # The scheme changes colours and nothing else.
        assert serious_findings(seen.page, axe, only=("color-contrast",) if scheme == "dark" else ()) == []


def test_the_check_has_teeth(browser: Any, axe: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<html><body><input><p style='color:#ddd;background:#fff'>faint</p></body></html>"
    )
    with opened(browser, tmp_path / "bad.html") as seen:
        found = " ".join(serious_findings(seen.page, axe))
        (contrast,) = serious_findings(seen.page, axe, only=("color-contrast",))
    assert contrast in found
    assert "label" in found
