"""The table of mechanisms: how fast each way of mixing tokens collapses, under one battery at one size."""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope._deferred import deferred
from rankscope.papers._recipe import RECIPES, Recipe
from rankscope.papers.mechanisms.table_rows import MECHANISMS

RECIPES.add(
    "mechanisms",
    Recipe(
        name="mechanisms",
        title="Three ways to meet collapse: order 3, order 1, order 0",
        cites=(Cite("dong2021attention", "thm. 2.2"), Cite("wu2024role", "thm. 1")),
        paper=(
            "The first proves that complete softmax attention without skips and MLPs collapses doubly exponentially "
            "(order 3), the second that masked attention collapses at least exponentially. Neither speaks of other "
            "mechanisms; no published table compares them."
        ),
        measure=deferred("papers.mechanisms.measuring:measure_mechanisms"),
        draw=deferred("papers.mechanisms.figure:draw_table"),
        describe=deferred("papers.mechanisms.text:describe_table"),
        conclude=deferred("papers.mechanisms.text:conclude_table"),
        minutes=8,
        rows=tuple(MECHANISMS),
    ),
)
