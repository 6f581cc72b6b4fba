"""What an exact verdict says about the formats it is compared with."""

from __future__ import annotations

import numpy as np

from rankscope._types import Status
from rankscope.ext.papers.measuring.parts import RowRecorder
from rankscope.runs.rows import RowWriter
from rankscope.verbs.exact.judge import judge_exact


def test_a_format_whose_own_pass_has_no_value_does_not_resolve_the_block() -> None:
    """Tokens whose size underflows differ well above the floor, and float32 has nothing to show for them."""
    writer = RowWriter(coordinates=("arithmetic",))
    rows = RowRecorder(writer)
    for layer in range(4):
        for metric, value in {
            "log10_residual": -50.0,
            "log10_relative_residual": -0.2,
            "order": 1.0,
            "factor": 1.0,
        }.items():
            rows.add(metric, value, "block.out", layer=layer, arithmetic="exact")
        for name, last in (("float32", 1), ("float64", 3)):
            known = layer <= last
            status = Status.OK if known else Status.UNDEFINED
            value = -0.2 if known else np.nan
            rows.add("log10_relative_residual", value, "block.out", layer=layer, status=status, arithmetic=name)
    sentence = str(judge_exact(writer.table(), {"float32": 5e-7, "float64": 9e-16}))
    assert "float32 cannot resolve block 2; float64 resolves every block." in sentence
