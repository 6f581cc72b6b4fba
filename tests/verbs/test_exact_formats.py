"""What an exact verdict says about the formats it is compared with."""

from __future__ import annotations

import numpy as np

from rankscope._types import Status
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.verbs.exact.judge import judge_exact


def test_a_format_whose_own_pass_has_no_value_does_not_resolve_the_block() -> None:
    """Tokens whose size underflows differ well above the floor, and float32 has nothing to show for them."""
    writer = RowWriter(coordinates=("arithmetic",))

    def add(metric: str, value: float, layer: int, arithmetic: str, status: Status = Status.OK) -> None:
        writer.add(
            metric=metric, site="block.out", stack=None, layer=layer, first_sequence=0, values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]), head_axis=False, at={"arithmetic": arithmetic},
        )  # fmt: skip

    for layer in range(4):
        for metric, value in {
            "log10_residual": -50.0,
            "log10_relative_residual": -0.2,
            "order": 1.0,
            "factor": 1.0,
        }.items():
            add(metric, value, layer, "exact")
        for name, last in (("float32", 1), ("float64", 3)):
            known = layer <= last
            status = Status.OK if known else Status.UNDEFINED
            value = -0.2 if known else np.nan
            add("log10_relative_residual", value, layer, name, status)
    sentence = str(judge_exact(writer.table(), {"float32": 5e-7, "float64": 9e-16}))
    assert "float32 cannot resolve block 2; float64 resolves every block." in sentence
