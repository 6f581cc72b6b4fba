"""The documentation as it was built, in a real browser; ``./dev pages`` runs it after ``./dev docs``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.fetch_axe import axe_file

from tests.browser import launched, opened, serious_findings

BUILT = Path(__file__).resolve().parents[2] / "docs" / "_build" / "html"
PAGES = ("index.html", "trust.html", "notebooks/first_look.html", "howto/report.html", "gallery/index.html")
WIDE = (*PAGES, "quickstart.html", "howto/monitor.html", "compatibility.html", "adding.html", "models.html",
        "scale.html", "gallery/dong2021_fig2.html", "gallery/dong2021_paths.html",
        "gallery/long_paths.html", "reference/metrics.html", "reliability_tests.html")  # fmt: skip
"""Pages on which no table and no code may be cut on a screen of 1400 pixels."""
QUESTIONS = {
    "Is my training run collapsing?": (["howto/monitor.html"], "raises an alarm"),
    "Which remedy would help?": (["howto/remedy.html"], "best first"),
    "Will my design collapse?": (["howto/predict.html"], "rankscope predict"),
    "What does 0.03 mean?": (["faq.html#what-does-a-relative-residual-of-0-03-mean"], "3% of their size"),
    "Which number should I trust?": (["trust.html"], "stable rank"),
    "Is my model supported?": (["compatibility.html"], "bit-identical"),
    "Does it run on my GPU?": (["howto/accelerators.html"], "--device"),
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


def test_no_table_or_code_is_cut(browser: Any) -> None:
    """Regions that scroll sideways show only a part of what they hold."""
    with opened(browser, BUILT / WIDE[0], width=1400) as seen:
        for page in WIDE:
            seen.page.goto((BUILT / page).as_uri())
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
