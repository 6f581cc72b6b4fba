"""A run in a notebook: whole, escaped, with a curve per metric, and readable when there is nothing to show."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest

import rankscope as rs
from rankscope.runs.presenting import document_of
from rankscope.views.documents import tables_in
from tests.runs.builders import make_run, profile

KINDS = {
    "measure": lambda: rs.measure("init:tiny-bert", rs.Inputs(sequences=1, tokens=8)),
    "ablate": lambda: rs.ablate("init:tiny-bert", rs.Inputs(sequences=1, tokens=8), variants=["pure", "full"]),
    "exact": lambda: rs.exact("init:tiny-bert", rs.Inputs(sequences=1, tokens=8), rs.Surgery(skip=0.0)),
    "decompose": lambda: rs.decompose("init:tiny-bert", rs.Inputs(sequences=1, tokens=8), marginals=["heads"]),
}


class Tags(HTMLParser):
    """Checks that every tag is closed in order, and collects text and attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attributes}
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attributes}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_shows_its_verdict_and_tables(kind: str) -> None:
    run = KINDS[kind]()
    tables = tables_in(document_of(run).parts)
    assert tables
    html = run._repr_html_()
    tags = read(html)
    assert all(line in tags.text for line in run.verdict.splitlines())
    assert html.count("<table") == len(tables)
    for table in tables:
        assert all(len(row) == len(table.head) for row in table.body)
        assert all(str(cell) in tags.text for row in table.body for cell in row)


def test_words_of_others_are_escaped() -> None:
    bad = "<script>alert(1)</script>&'\""
    run = make_run(profile({bad: [0.9, 0.8]}, stack=bad).table(), model=bad, verdict=bad, notes=(bad,))
    tags = read(run._repr_html_())
    assert "script" not in tags.open
    assert "<script" not in run._repr_html_()
    assert tags.text.count(bad) == 5
    assert not any(name.startswith("on") for name in tags.attributes)


@pytest.mark.parametrize("curves", [{}, {"relative_residual": [math.nan] * 3}])
def test_a_run_without_values_is_shown(curves: dict[str, list[float]]) -> None:
    read(make_run(profile(curves).table())._repr_html_())


def test_a_figure_is_matplotlibs_and_can_be_styled() -> None:
    from matplotlib.figure import Figure

    figure = KINDS["measure"]().plot(metrics=["relative_residual"])
    assert isinstance(figure, Figure)
    axes = figure.axes[0]
    axes.set_title("mine")
    axes.lines[0].set_color("red")
    assert figure.axes[0].get_title() == "mine"
