"""Terminal output tells the same with and without colour, in UTF-8 and in ASCII."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from rankscope.reporting.terminal import print_run
from rankscope.verbs.doctor.checks import Check, DoctorReport, StackFacts
from rankscope.verbs.doctor.show import document
from rankscope.views.terminal import print_document
from rankscope.views.trends import sparkline
from tests.runs.builders import SMOLLM2_RESIDUAL, SMOLLM2_TOKEN, make_run, profile

ESCAPE = "\x1b["


def console(encoding: str = "utf-8", *, width: int = 100, terminal: bool = False) -> tuple[Console, io.TextIOWrapper]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(
        file=stream, width=width, force_terminal=terminal, color_system="standard" if terminal else None
    ), stream


def written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode(stream.encoding)


@pytest.fixture
def smollm2():
    curves = {"relative_residual": SMOLLM2_RESIDUAL, "largest_token_share": SMOLLM2_TOKEN}
    return make_run(profile(curves).table(), model="SmolLM2-135M", notes=("sample text",))


def test_run_has_a_line_per_block_the_course_and_the_verdict(smollm2) -> None:
    target, stream = console()
    print_run(smollm2, target)
    text = written(stream)
    assert ESCAPE not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["11", "0.660", "0.0300"] in rows
    assert sum(len(row) == 3 and row[0].isdigit() for row in rows) == 30
    assert "One of the tokens carries most of the energy" in text
    assert "note: sample text" in text
    assert "█" in text


def test_ascii_terminals_get_ascii(smollm2) -> None:
    target, stream = console("ascii")
    print_run(smollm2, target)
    assert written(stream).isascii()


def test_colour_adds_nothing_but_colour(smollm2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, coloured_stream = console(terminal=True)
    print_run(smollm2, coloured)
    assert ESCAPE in written(coloured_stream)
    monkeypatch.setenv("NO_COLOR", "1")
    plain, plain_stream = console(terminal=True)
    print_run(smollm2, plain)
    assert "\x1b[3" not in written(plain_stream)  # no foreground colour is set


def test_floor_values_are_marked_and_explained() -> None:
    run = make_run(profile({"relative_residual": [0.5, 1e-8]}, floor_below=1e-7).table())
    target, stream = console()
    print_run(run, target)
    text = written(stream)
    assert "1.00e-08*" in text
    assert "* at the float floor (float32" in text


def test_each_stack_has_a_table() -> None:
    writer = profile({"relative_residual": [0.9]}, stack="encoder")
    run = make_run(profile({"relative_residual": [0.8]}, stack="decoder", writer=writer).table())
    target, stream = console()
    print_run(run, target)
    lines = [line.strip() for line in written(stream).splitlines()]
    assert lines.index("encoder") < lines.index("decoder")


def test_markup_in_names_is_not_interpreted() -> None:
    run = make_run(profile({"[red]m[/red]": [0.9]}).table(), model="[bold]x", verdict="[link=y]")
    target, stream = console()
    print_run(run, target)
    text = written(stream)
    for words in ("[red]m[/red]", "[bold]x", "[link=y]"):
        assert words in text


@pytest.mark.parametrize("curves", [{}, {"relative_residual": [math.nan] * 2}])
def test_runs_without_values_print(curves: dict[str, list[float]]) -> None:
    target, stream = console()
    print_run(make_run(profile(curves).table()), target)
    assert "No verdict" in written(stream)


def test_checks() -> None:
    checks = [
        Check("parity", "pass", "bit-identical"),
        Check("skips", "fail", "1 of 2 [found]"),
        Check("heads", "refused", "why"),
    ]
    target, stream = console()
    print_document(document(DoctorReport("m", "Model", (), tuple(checks), details=True)), target)
    text = written(stream)
    for words in ("ok", "FAIL", "refused", "1 of 2 [found]", "these checks of them failed: skips"):
        assert words in text
    facts = StackFacts(None, 2, "blocks.*", (("attention", "mlp"),) * 2, (1, 1), "batch tokens dim", None)
    target, stream = console()
    print_document(document(DoctorReport("m", "Model", (facts,), (checks[0],))), target)
    assert "the numbers can be trusted" in written(stream)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 0.5, 1.0], "_+@"),
        ([3.0, 3.0], "++"),
        ([0.0, 0.0], "++"),
        ([0.817, 0.818, 0.817], "=+="),
        ([1.0, math.nan, 0.0], "@ _"),
        ([math.nan], ""),
        ([], ""),
        ([1e-300, 2e-300], "_@"),
    ],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values, plain=True) == line
