"""A run of a changed model says so in its title, header, verdict, figure and report, whatever was changed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

import rankscope as rs
from rankscope.masks import parse_mask
from rankscope.models.loading import load
from rankscope.reporting.page.safe_text import split_verdict
from rankscope.runs.changes import changes_in_words
from rankscope.runs.presenting import document_of
from rankscope.runs.provenance import Provenance
from rankscope.runs.showing import show_of
from rankscope.surgery.operation import Operation

SMALL = {"sequences": 1, "tokens": 8}
CHANGES = {
    "attention_skip": (0.0, "without attention skips"),
    "mlp_skip": (0.5, "with MLP skips scaled by 0.5"),
    "mlp": ("drop", "without MLPs"),
    "norm": ("rms", "with norms that only divide by the root mean square"),
    "mask": (parse_mask("causal"), "under the mask causal"),
    "temperature": (2.0, "at attention temperature 2"),
    "attention": ("uniform", "with uniform attention"),
    "attention_scale": (1.5, "with deviations from uniform attention scaled by 1.5"),
    "heads": (frozenset({0, 3}), "without heads 0 and 3"),
}
WHERE = {
    "mask_mode": ("unite", "with its mask united with causal"),
    "layers": (frozenset({1}), "under the mask causal (block 1)"),
    "stack": ("encoder", "under the mask causal (encoder only)"),
}


def test_every_field_of_an_operation_has_words() -> None:
    assert {*CHANGES, *WHERE} == {field.name for field in fields(Operation)}
    for name, (value, words) in CHANGES.items():
        assert changes_in_words([Operation(**{name: value}).describe()]) == words
    for name, (value, words) in WHERE.items():
        operation = replace(Operation(mask=parse_mask("causal")), **{name: value})
        assert changes_in_words([operation.describe()]) == words
    assert changes_in_words([Operation().describe()]) == ""


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"attention_skip": "none"}, "with changes that cannot be read"),
        ({"heads": 3}, "with changes that cannot be read"),
        ({"later_field": 2}, "with later_field 2"),
        ({"graft": "score cap", "cap": 3.0}, "with score cap added"),
    ],
)
def test_what_a_file_may_hold(described: dict[str, object], words: str) -> None:
    assert changes_in_words([described]) == words


def test_a_title_has_no_folders() -> None:
    assert Provenance(model="~/.cache/rankscope/minilm/", origin="folder").subject == "minilm"
    assert Provenance(model="org/name", origin="hub").subject == "org/name"


@pytest.fixture(scope="module")
def runs() -> dict[str, rs.Run]:
    model = load("init:tiny-bert").model
    with rs.operate(model, rs.Surgery(skip=0.0)):
        inside = {
            "measure": rs.measure(model, rs.Inputs(**SMALL)),
            "decompose": rs.decompose(model, rs.Inputs(**SMALL)),
        }
    return {**inside, "exact": rs.exact("init:tiny-bert", rs.Inputs(**SMALL), rs.Surgery(skip=0.0))}


@pytest.mark.parametrize("verb", ["measure", "decompose", "exact"])
def test_what_was_cut_is_named_everywhere(runs: dict[str, rs.Run], verb: str, tmp_path: Path) -> None:
    run, words = runs[verb], "without skip connections"
    assert words in document_of(run).title
    assert words in repr(run)
    assert run.verdict.startswith("Without skip connections: ")
    assert words in show_of(verb).plot(run).settings
    page = rs.report(run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"{verb} · {run.provenance.model} {words}" in page
    assert f"<title>{run.provenance.model} {words}" in page
    assert split_verdict(run.verdict)[0] != "Without skip connections"


def test_nothing_is_named_when_nothing_was_cut() -> None:
    run = rs.measure("init:tiny-bert", rs.Inputs(**SMALL))
    assert run.provenance.changes == ""
    assert "without" not in document_of(run).title
