"""The documentation as it was built, in a real browser; ``./dev pages`` runs it after ``./dev docs``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from scripts.fetch_axe import axe_file

from tests.browser import launched, opened, serious_findings

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "docs" / "_build" / "html"
PAGES = ("index.html", "concepts.html", "using_with_agents.html", "howto/report.html", "gallery/index.html")
WIDE = (*PAGES, "quickstart.html", "howto/monitor.html", "compatibility.html", "adding.html", "solved_reports.html",
        "evidence.html", "howto/doctor.html", "gallery/mechanisms.html", "reference/metrics.html", "threat_model.html",
        "stability.html")  # fmt: skip
"""Pages on which no table and no code may be cut on a screen of 1400 pixels."""
QUESTIONS = {
    "Why is my loss stuck?": (["solved_reports.html"], "1.3863"),
    "Is my training run collapsing?": (["howto/monitor.html"], "rs.watch"),
    "Which remedy would help?": (["howto/remedy.html"], "best first"),
    "Will my design collapse?": (["howto/predict.html"], "rankscope predict"),
    "What does 0.03 mean?": (["faq.html#what-does-a-relative-residual-of-0-03-mean"], "3% of their size"),
    "Which number should I trust?": (["concepts.html#which-number-should-i-trust"], "Stable rank"),
    "Is my model supported?": (["compatibility.html"], "bit-identical"),
    "Does it run on my GPU?": (["howto/devices.html"], "--device"),
    "Does it slow training down?": (["faq.html#does-it-change-my-model-or-slow-training-down"], "bit by bit"),
    "How do I cite it?": (["faq.html#how-do-i-cite-it"], "@software"),
    "Where do I report a bug?": (["faq.html#where-do-i-ask-or-report-a-bug"], "/issues"),
    "How do I install it?": (["quickstart.html"], "pip install"),
    "Which of 36 mechanisms collapse?": (["gallery/index.html", "mechanisms.html"], "Mamba"),
}
"""What people ask: the links to follow from the landing page, and words of the answer."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (BUILT / "index.html").is_file():
        pytest.skip("the documentation is not built: run ./dev docs")
    with launched() as running:
        yield running


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
@pytest.mark.parametrize("page", PAGES)
def test_page_fits_and_is_accessible(browser: Any, page: str, scheme: str, width: int) -> None:
    with opened(browser, BUILT / page, width=width, scheme=scheme) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.evaluate(
            "[...document.images].filter((image) => image.complete && image.naturalWidth === 0).length === 0"
        )
        if not axe_file().is_file():
            pytest.skip("axe-core is not in the cache: run ./dev axe")
        assert serious_findings(seen.page, axe_file()) == []


def test_the_figure_of_many_rows_has_a_portrait_form_on_a_phone(browser: Any) -> None:
    shown = (
        "[...document.querySelectorAll('article p img')].filter((one) => one.clientWidth).map((one) => one.className)"
    )
    for width, form in ((390, "only-narrow"), (1400, "only-wide")):
        with opened(browser, BUILT / "gallery/mechanisms.html", width=width, scheme="light") as seen:
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            assert seen.page.evaluate(shown) == [form]


def test_of_three_ways_to_ask_one_is_shown(browser: Any) -> None:
    shown = "[...document.querySelectorAll('div.way')].map((way) => way.clientHeight > 0)"
    with opened(browser, BUILT / "index.html") as seen:
        for place, name in enumerate(("Python", "Command line", "In my loop")):
            seen.page.get_by_label(name, exact=True).check(force=True)
            assert seen.page.evaluate(shown) == [place == other for other in range(3)]
        seen.page.keyboard.press("ArrowLeft")
        assert seen.page.evaluate(shown) == [False, True, False]


def test_no_table_or_code_is_cut(browser: Any) -> None:
    """Regions that scroll sideways show only a part of what they hold."""
    with opened(browser, BUILT / WIDE[0], width=1400) as seen:
        for page in WIDE:
            seen.page.goto((BUILT / page).as_uri())
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= 1400, page
            assert (
                seen.page.evaluate(
                    "[...document.querySelectorAll('article pre, article .table-wrapper')]"
                    ".filter((region) => region.scrollWidth > region.clientWidth + 1)"
                    ".map((region) => region.innerText.slice(0, 80))"
                )
                == []
            ), page


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_two_clicks_away(question: str) -> None:
    if not (BUILT / "index.html").is_file():
        pytest.skip("the documentation is not built: run ./dev docs")
    clicks, answer = QUESTIONS[question]
    here = BUILT / "index.html"
    for click in clicks:
        # Only what is in the page itself counts: a menu has every page.
        article = here.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        assert f'href="{click}"' in article, f"{here.name} does not link to {click}"
        here = here.parent / click.partition("#")[0]
    anchor = clicks[-1].partition("#")[2]
    below = here.read_text(encoding="utf-8").partition(f'id="{anchor}"' if anchor else "<article")[2]
    assert answer in below or answer in re.sub(r"<[^>]+>", "", below)
    assert len(clicks) <= 2


SEARCHES = {
    "1.3863": "solved_reports.html",
    "ln 4": "solved_reports.html",
    "loss does not decrease": "solved_reports.html",
    "same output for every input": "solved_reports.html",
    "loss is 1.3863 and stays": "solved_reports.html",
    "NaN loss": "solved_reports.html",
    "deep fails shallow trains": "solved_reports.html",
    "constant prediction": "solved_reports.html",
    "install": "quickstart.html",
    "own model": "howto/own_module.html",
    "nanoGPT": "howto/own_module.html",
    "wandb": "howto/monitor.html",
    "training loop": "howto/monitor.html",
    "huggingface trainer": "howto/trainers.html",
    "loss stuck": "howto/doctor.html",
    "does not train": "howto/doctor.html",
    "rank collapse": "concepts.html",
    "oversmoothing": "concepts.html",
    "rankme": "reference/metrics.html",
    "effective rank": "reference/metrics.html",
    "attention entropy": "reference/metrics.html",
    "cuda": "howto/devices.html",
    "FSDP": "howto/devices.html",
    "LoRA": "howto/wrapped_models.html",
    "out of memory": "howto/stream.html",
    "compare two runs": "howto/compare.html",
    "causal mask": "howto/graph.html",
    "own metric": "adding.html",
    "skip connections": "howto/ablate.html",
    "padding": "howto/measure.html",
    "embeddings": "howto/hidden_states.html",
}
"""What people search for, and the page that has to be among the first three results."""


def test_searches_lead_to_the_right_page(browser: Any) -> None:
    missed = {}
    with opened(browser, BUILT / "search.html") as seen:
        for words, page in SEARCHES.items():
            seen.page.goto((BUILT / "search.html").as_uri() + "?q=" + quote(words))
            seen.page.wait_for_selector("#search-results li a", timeout=20_000)
            seen.page.wait_for_function("document.querySelector('.search-summary')?.innerText.includes('found')")
            links = seen.page.eval_on_selector_all("#search-results li > a", "all => all.slice(0, 3).map(a => a.href)")
            found = [link.partition("/html/")[2].partition("#")[0].partition("?")[0] for link in links]
            if page not in found:
                missed[words] = found
    assert not missed


LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\ssrc(?:set)?=["']?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preload))[^>]*href=["']?(?:https?:)?//"""
)
"""What a browser asks for by itself when it opens a page."""


def built_pages() -> dict[Path, str]:
    """Every page with its source; those of a report have tests of their own."""
    found = (path for path in BUILT.rglob("*.html") if "_static" not in path.parts)
    return {path: path.read_text(encoding="utf-8") for path in found}


def test_no_page_loads_anything_from_the_network() -> None:
    if not (BUILT / "index.html").is_file():
        pytest.skip("the documentation is not built: run ./dev docs")
    assert [str(path.relative_to(BUILT)) for path, text in built_pages().items() if LOADED.search(text)] == []
    assert LOADED.search('<script async="async" src="https://cdn.example/mathjax.js">')
    assert LOADED.search('<link rel="stylesheet" href="//fonts.example/a.css">')


def test_formulas_are_drawn_without_a_network(browser: Any) -> None:
    with_formulas = [path for path, text in built_pages().items() if "<math" in text]
    assert {BUILT / "theory/cubic_law.html", BUILT / "reference/metrics.html"} <= set(with_formulas)
    drawn = """[...document.querySelectorAll("math")].map((formula) => {
        const box = formula.getBoundingClientRect();
        return [formula.textContent, formula.offsetParent === null || (box.width > 2 && box.height > 4)];
    }).filter(([text, seen]) => !seen).map(([text]) => text)"""
    with opened(browser, with_formulas[0]) as seen:
        for path in with_formulas:
            seen.page.goto(path.as_uri(), wait_until="load")
            assert seen.page.evaluate(drawn) == [], path
        assert [url for url in seen.asked if not url.startswith(("file:", "data:"))] == []
