"""The ledger on numbers that can be done in the head."""

from __future__ import annotations

import numpy as np

from rankscope.reporting.page.ledger import ledger_section, ledger_steps
from rankscope.runs.rows import RowWriter
from tests.runs.builders import make_run, profile

IN, ATTENTION, MLP, OUT = [1.0, 0.5], [0.1, 0.05], [1.0, 0.5], [0.5, 0.25]


def table(**sites: list[float]):
    writer = RowWriter()
    for site, values in sites.items():
        profile({"relative_residual": values}, site=site.replace("_", "."), sequences=3, writer=writer)
    return writer.table()


def moves(steps) -> list[tuple[int, str, float]]:
    return [(s.layer, s.who, round(float(np.mean(s.after - s.before)), 9)) for s in steps]


def test_each_part_is_booked_in_decades() -> None:
    steps = ledger_steps(
        table(block_in=IN, attention_sum=ATTENTION, mlp_sum=MLP, block_out=OUT), "relative_residual", None
    )
    half = round(np.log10(0.5), 9)
    assert moves(steps) == [
        (0, "attention", -1.0), (0, "MLP", 1.0), (0, "post-norm", half),
        (1, "attention", -1.0), (1, "MLP", 1.0), (1, "post-norm", half),
    ]  # fmt: skip


def test_without_the_block_input_the_block_before_is_taken() -> None:
    steps = ledger_steps(table(attention_sum=ATTENTION, block_out=OUT), "relative_residual", None)
    assert [(step.layer, step.who) for step in steps] == [(0, "post-norm"), (1, "attention"), (1, "post-norm")]
    assert moves(steps)[1][2] == -1.0


def test_a_block_that_ends_with_its_last_add_has_no_post_norm() -> None:
    steps = ledger_steps(table(block_in=IN, attention_sum=ATTENTION, block_out=ATTENTION), "relative_residual", None)
    assert [step.who for step in steps] == ["attention", "attention"]


def test_without_sites_inside_there_is_no_ledger() -> None:
    assert ledger_section(make_run(table(block_in=IN, block_out=OUT))) is None


def test_the_sentence_names_who_moves_most() -> None:
    run = make_run(table(block_in=IN, attention_sum=ATTENTION, mlp_sum=MLP, block_out=OUT))
    section = ledger_section(run)
    assert section is not None
    assert section.lead == (
        "Attention takes away most (-2.000 decades of relative residual over all blocks); MLP gives back most (+2.000)."
    )
