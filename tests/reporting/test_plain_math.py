"""Formulas on the terminal: no TeX is left."""

from __future__ import annotations

import pytest

from rankscope.ext.theory.theorems import THEOREMS
from rankscope.metrics import METRICS
from rankscope.remedies import REMEDIES
from rankscope.reporting.plain_math import plain_math, plain_sentence


def test_no_listed_formula_keeps_its_markup() -> None:
    listed = [*METRICS.values(), *THEOREMS.values(), *REMEDIES.values()]
    sentences = {entry.name: plain_sentence(entry.summary) for entry in listed}
    formulas = {theorem.name: plain_math(theorem.statement) for theorem in THEOREMS.values()}
    for name, text in {**sentences, **formulas}.items():
        assert not set("\\`$") & set(text), name
        assert ":math:" not in text, name
    assert sentences["dong_2021_skip"].startswith("With skips there are parameters, of any β,")
    assert sentences["stable_rank"].endswith("‖X‖_F²/‖X‖_2² (of X, not of XXᵀ).")


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\sum_{i\le k} s_i^2 \ge 0.99 \sum_i s_i^2", "∑_(i≤k) s_i² ≥ 0.99 ∑_i s_i²"),
        (r"\left(\tfrac{4\gamma\beta}{\sqrt{d}}\right)^{(3^L-1)/2}", "(4γβ/(√d))^((3^L − 1)/2)"),
        (r"-2\|u_i-u_j\|", "−2‖u_i − u_j‖"),
        (r"s_{\min(n,d)} / s_1", "s_(min(n,d))/s_1"),
        (r"\unknown x", r"\unknown x"),
    ],
)
def test_written_in_one_line(tex: str, text: str) -> None:
    assert plain_math(tex) == text
