"""The figures of the reliability page and of its appendix are those of the recorded campaigns."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
RENAMED = {"damaged input files": "damaged input", "mutation testing": "mutants"}
DERIVED = {"2,000,035": ("1,000,022", "1,000,013")}
"""Figures of the page that add up figures of the appendix."""


def rows(page: str) -> dict[str, str]:
    """Name and rest of each row of the first table."""
    text = (DOCS / page).read_text(encoding="utf-8")
    table = text[text.index("|---|") :].split("\n\n")[0]
    found = (line.strip("|").split("|", 1) for line in table.splitlines()[1:])
    return {name.strip(): rest for name, rest in found}


def recorded(name: str):
    return json.loads((DOCS / f"data/{name}.json").read_text(encoding="utf-8"))


def figures(words: str) -> set[str]:
    return set(re.findall(r"\d[\d,]*(?:\.\d+)?%?", words.replace(", ", "; ")))


def test_every_figure_of_the_page_is_in_its_appendix() -> None:
    page, appendix = rows("reliability.md"), rows("reliability_tests.md")
    assert {RENAMED.get(name, name) for name in page} == set(appendix)
    for name, words in page.items():
        parts = {part for figure in figures(words) for part in DERIVED.get(figure, (figure,))}
        assert parts <= figures(appendix[RENAMED.get(name, name)]), name
    for total, parts in DERIVED.items():
        assert int(total.replace(",", "")) == sum(int(part.replace(",", "")) for part in parts)


def test_the_appendix_says_what_was_recorded() -> None:
    campaigns = [one for one in recorded("fuzz")["campaigns"] if one.get("kind")]
    random = [one for one in campaigns if one["kind"] == "random" and one["cases"] >= 10**6]
    guided = sum(one["cases"] for one in campaigns if one["kind"] == "guided")
    faults, soak, versions = recorded("faults"), recorded("soak"), recorded("versions")
    assert {one["outcome"] for one in faults} <= {"as expected", "not run here: it has a test of its own"}
    assert soak["finished"]
    assert {one["failed"] for one in versions} == {0}
    second = Counter(
        (one["first"], one["outcome"])
        for one in recorded("mutants")["tried"]
        if one["seed"] == 7 and one["first"] != "none"
    )
    killed, since = second["killed", "killed"], second["survived", "killed"]
    expected = {
        "damaged input": [*(one["cases"] for one in random), guided] + [len(one["targets"]) for one in random],
        "faults injected into real processes": [len(faults)],
        "soak": [soak["measured"], soak["families"], soak["samples"][-1][3]],
        "mutants": [sum(second.values()), killed, killed + since, sum(recorded("mutants")["possible"].values())],
        "versions": [one["passed"] for one in versions],
    }
    appendix = rows("reliability_tests.md")
    for name, numbers in expected.items():
        assert {f"{number:,}" for number in numbers} <= figures(appendix[name]), name
    assert f"{killed / (killed + since):.0%}" in appendix["mutants"]
