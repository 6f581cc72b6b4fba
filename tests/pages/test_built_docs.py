"""The documentation as it was built, in a real browser; ``./dev pages`` runs it after ``./dev docs``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.fetch_axe import axe_file

from tests.browser import launched, opened, serious_findings

BUILT = Path(__file__).resolve().parents[2] / "docs" / "_build" / "html"
PAGES = ("index.html", "trust.html", "notebooks/first_look.html", "howto/report.html")


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
