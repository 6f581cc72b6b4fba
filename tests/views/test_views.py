"""One description, every medium: the same cells everywhere, marks as data, and nothing read back from text."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rankscope.reporting.terminal import print_run
from rankscope.runs.presenting import document_of
from rankscope.runs.run import load_run
from rankscope.views import (
    BarChart,
    Cell,
    Column,
    Document,
    Guide,
    Line,
    LineChart,
    Note,
    Plot,
    Section,
    Style,
    Table,
    measured,
)
from rankscope.views.documents import Remark, tables_in
from rankscope.views.notebook import document_html
from rankscope.views.palette import DARK, LIGHT, css_variables
from rankscope.views.terminal import print_document, print_table
from rankscope.views.text import document_text, markdown_text, part_text, table_text

SAVED = Path(__file__).parents[1] / "golden" / "saved"
NAMES = sorted(path.name for path in SAVED.iterdir() if path.is_dir())
TABLE = Table(
    [Column("variant", align="left"), "block 0", Column("block 1", trend=[1.0, 0.5])],
    [["pure", measured(0.6), measured(3e-8, floor=True)], ["full", "", Cell("0.8", ("good",))]],
    caption="residuals",
)


def at_terminal(show, *, width: int = 100, colour: bool = False) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None))
    return stream.getvalue()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [80, 200])
def test_print_and_the_command_line_show_the_same_tables(name: str, width: int) -> None:
    run = load_run(SAVED / name)
    text, terminal, notebook = str(run), at_terminal(lambda c: print_run(run, c), width=width), run._repr_html_()
    tables = tables_in(document_of(run).parts)
    assert tables
    assert all(len(line) <= width for line in terminal.splitlines())
    said = re.findall(r"Left out at a width of \d+: ([^.]*)\.", terminal)
    left_out = {name for names in said for name in re.split(r",\s+", names)}
    assert width == 80 or not left_out
    for table in tables:
        assert table_text(table) in text
        for place, column in enumerate(table.head):
            is_shown = column.name not in left_out
            for words in (str(row[place]) for row in table.body):
                assert words in terminal or not is_shown or column.width
                assert html.escape(words) in notebook
            assert all(word in terminal for word in re.split(r"[_ ]", column.name))


def test_a_table_as_text() -> None:
    assert part_text(TABLE).splitlines() == [
        "residuals",
        "variant  block 0    block 1",
        "-------  -------  ---------",
        "pure       0.600  3.00e-08*",
        "full                    0.8",
    ]


def test_a_table_as_markdown() -> None:
    assert markdown_text(TABLE).splitlines()[:3] == [
        "| variant | block 0 | block 1 |",
        "|---|---|---|",
        "| pure | 0.600 | 3.00e-08* |",
    ]
    assert markdown_text(Table(["a", "b"], [["", "1"]])).splitlines()[2] == "| | 1 |"


def test_a_remark_without_a_line_is_its_sentence() -> None:
    document = Document("title", "", parts=(Remark("Nothing was measured.", ()),))
    assert part_text(document.parts[0]) == "Nothing was measured."
    assert "Nothing was measured." in document_html(document)
    stream = io.StringIO()
    print_document(document, Console(file=stream))
    assert "Nothing was measured." in stream.getvalue()


def test_the_legend_explains_only_marks_that_are_used() -> None:
    legend = {"floor": "* at the float floor", "apart": "* the interval excludes zero"}
    document = Document("run", parts=(Section("inside", parts=(TABLE,)),), legend=legend)
    assert document.explained == ["* at the float floor"]
    assert "excludes zero" not in document_text(document)


def test_no_renderer_reads_its_text() -> None:
    """What used to steer them is only text now: stars, blank lines, the words Verdict and Note."""
    tricky = Table(["Verdict: ", "Note: x"], [["1*", "2*"]])
    document = Document("a\n\nb", "Verdict: c\n\nNote: d", parts=("Verdict: e\n\nf", tricky), legend={"floor": "floor"})
    assert document.explained == []
    coloured = at_terminal(lambda c: print_document(document, c), colour=True)
    assert "\x1b[35m" not in coloured  # the colour of the float floor
    assert "opacity:.6'" not in document_html(document)
    for words in ("Verdict: c", "Verdict: e", "1*"):
        assert words in document_text(document)
        assert words in coloured
        assert words in document_html(document)


def test_both_themes_name_the_same_colours() -> None:
    assert set(LIGHT) == set(DARK)
    assert css_variables(LIGHT).count("--") == len(LIGHT)


def draw(*panels: LineChart | BarChart, **given: object):
    pytest.importorskip("matplotlib")
    from rankscope.views.figures import draw as drawn

    figure = drawn(Plot("title", "a sentence", panels, columns=len(panels), **given))
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    return figure


def words_in(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_lines_have_a_legend_a_floor_and_hollow_points() -> None:
    lines = (
        Line("a", [0, 1, 2], [1.0, 1e-3, 1e-8], floor=[False, False, True]),
        Line("b", [0, 1], [0.5, np.nan], [0.4, np.nan], [0.6, np.nan]),
        Line("", [0, 1], [0.5, 0.5]),
    )
    guides = (Guide(1e-7, "float32", "floor"), Guide(0.1, "a level"), Guide(1.5, "here", axis="x"))
    chart = LineChart("residual", lines, guides=guides, notes=(Note("note", 1, 0.5),), log=True)
    axes = draw(chart).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "here"]
    assert words_in(axes) == ["float32", "a level", "note"]
    assert [line.get_markerfacecolor() for line in axes.lines if line.get_label() == "_floor"] == ["white"]
    assert axes.get_ylim()[0] <= 1e-8


@pytest.mark.parametrize("y", [[], [np.nan, np.nan]])
def test_lines_without_values_say_so(y: list[float]) -> None:
    chart = LineChart("residual", (Line("a", range(len(y)), y),), empty="nothing here")
    assert words_in(draw(chart).axes[0]) == ["nothing here"]


def test_bars_without_a_value_say_so() -> None:
    styles = (Style("#000000"),) * 3
    axes = draw(BarChart("ends", ("a", "b", "c"), (0.5, None, 0.0), styles, missing="none")).axes[0]
    assert [word.strip() for word in words_in(axes)] == ["0.500", "none", "none"]
    assert len(axes.patches) == 1


def test_panels_in_rows_share_their_x_label() -> None:
    chart = LineChart("residual", (Line("a", [0, 1], [1.0, 0.5]), Line("b", [0, 1], [1.0, 0.2])))
    pytest.importorskip("matplotlib")
    from rankscope.views.figures import draw as drawn

    figure = drawn(Plot("title", "", (chart, chart, chart), columns=2))
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "block", "block"]


def test_columns_that_do_not_fit_are_named_and_the_spare_ones_go_first() -> None:
    columns = [Column("mask", align="left"), Column("gap", spare=2), Column("pairs", spare=1), "radius"]
    table = Table(columns, [["causal", "0." + "1" * 20, "1" * 20, "7" * 30]])
    wide, narrow, narrowest = (at_terminal(lambda c: print_table(table, c), width=width) for width in (100, 70, 45))
    assert "Left out" not in wide
    assert "Left out at a width of 70: gap." in narrow
    assert "1" * 20 in narrow
    assert "gap, pairs." in narrowest
    assert "7" * 30 in narrowest
    assert max(map(len, narrowest.splitlines())) <= 45
