"""What the report says about a metric is what the metric declares, and every formula can be drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts.write_facts import TARGET, written

import rankscope
from rankscope.metrics import METRICS
from rankscope.reporting.page.facts import FACTS, OWN_TERMS, markup
from rankscope.reporting.page.mathml import mathml
from rankscope.reporting.page.safe_text import clipped, slug, visible


def test_the_file_is_what_the_declarations_say() -> None:
    stored, now = json.loads(TARGET.read_text(encoding="utf-8")), json.loads(written())
    assert stored["metrics"].items() <= now["metrics"].items(), "run ./dev facts"
    assert stored["references"].items() <= now["references"].items(), "run ./dev facts"


def test_every_source_that_is_cited_has_its_words() -> None:
    sources = Path(rankscope.__file__).parent.rglob("*.py")
    cited = {key for path in sources for key in re.findall(r'Cite\("([^"]+)"', path.read_text(encoding="utf-8"))}
    assert len(cited) > 5
    assert cited - set(FACTS.references) == set(), "run ./dev facts"


def test_every_metric_is_explained_with_formula_and_source() -> None:
    for name in METRICS.keys() & FACTS.metrics.keys():
        fact = FACTS.metrics[name]
        assert fact.formula.startswith("<math "), name
        assert fact.summary
        assert re.search(r"\((19|20)\d\d\)", fact.sources[0]), name


@pytest.mark.parametrize("name", sorted(FACTS.metrics))
def test_no_formula_is_left_as_tex(name: str) -> None:
    fact = FACTS.metrics[name]
    assert "\\" not in fact.formula + fact.summary_markup + fact.says_markup
    assert ":math:" not in fact.summary_markup + fact.says_markup


def test_own_terms_do_not_shadow_metrics_and_cite_what_exists() -> None:
    assert not {term.name for term in OWN_TERMS} & set(METRICS)
    assert {cite.partition(", ")[0] for term in OWN_TERMS for cite in term.sources} <= set(FACTS.references)


@pytest.mark.parametrize("tex", [r"\input{file}", r"\unknown x"])
def test_an_unknown_command_is_refused_by_name(tex: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        mathml(tex)


def test_markup_escapes() -> None:
    drawn = markup("<b> ``<i>`` :math:`x < y`")
    assert drawn.startswith("&lt;b&gt; <code>&lt;i&gt;</code> <math ")
    assert drawn.count("<b>") == drawn.count("<i>") == 0
    assert "<mi>x</mi><mo>&#x0003C;</mo><mi>y</mi>" in drawn


def test_names_of_strangers() -> None:
    assert visible("a\x00\u202eb\ud800") == "a\\u0000\\u202eb\\ud800"
    assert visible("שלום") == "שלום"
    assert visible("\u200fשלום") == "\\u200fשלום"
    assert len(clipped("x" * 10_000)) == 80
    assert slug("<script>") == "script"
    assert slug("\u202e") == "x"
