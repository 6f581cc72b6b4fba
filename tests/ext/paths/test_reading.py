"""Rows of path sums: shares, logits and metrics by their definitions, on the tokens that count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.ext.paths.reading import COORDINATES, PathReader
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch
from rankscope.runs.rows import RowWriter


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


OUT, SUMS, DIRECTION = numbers(2, 4, 6), numbers(3, 2, 4, 6, seed=1), numbers(6, seed=2)
LEFT = torch.tensor([[False, True, True, True], [True, True, False, False]])


def reader(keep: Tensor | None = None, policy: str = "content") -> PathReader:
    made = PathReader([METRICS["mean_cosine"]], policy, RowWriter(coordinates=COORDINATES), DIRECTION)  # type: ignore[arg-type]
    made.batch = Batch({}, keep, 5, 2)
    return made


def rows(made: PathReader, metric: str) -> list[dict[str, object]]:
    return [row for row in made.writer.table().to_pylist() if row["metric"] == metric]


@pytest.mark.parametrize("keep", [None, LEFT])
def test_shares_logits_and_metrics_by_length(keep: Tensor | None) -> None:
    made = reader(keep)
    made.read(SUMS, OUT, site="final", stack=None, layer=7, at={"paths": "of a length"})
    kept = torch.ones(2, 4).bool() if keep is None else keep
    last = (3, 3) if keep is None else (3, 1)
    expected: dict[str, dict[tuple[int, int], float]] = {
        name: {} for name in ("projection_share", "norm_share", "logit")
    }
    for length in range(3):
        for sequence in range(2):
            s, x = SUMS[length, sequence][kept[sequence]], OUT[sequence][kept[sequence]]
            place = (length, 5 + sequence)
            expected["projection_share"][place] = float((s * x).sum() / (x * x).sum())
            expected["norm_share"][place] = float(s.norm() / x.norm())
            expected["logit"][place] = float(SUMS[length, sequence, last[sequence]] @ DIRECTION)
    for name, wanted in expected.items():
        found = rows(made, name)
        assert {(row["length"], row["sequence"]): row["value"] for row in found} == pytest.approx(wanted, rel=1e-12)
        assert {(row["site"], row["layer"], row["paths"]) for row in found} == {("final", 7, "of a length")}
        assert {row["status"] for row in found} == {"ok"}
    cosines = {(row["length"], row["sequence"]): row["value"] for row in rows(made, "mean_cosine")}
    unit = torch.nn.functional.normalize(SUMS[2, 1][kept[1]], dim=-1)
    pairs = (unit @ unit.T)[~torch.eye(len(unit), dtype=torch.bool)]
    assert cosines[2, 6] == pytest.approx(float(pairs.mean()), rel=1e-12)
    assert made.lengths == {None: {5: int(kept[0].sum()), 6: int(kept[1].sum())}}
    assert made.dtypes == {torch.float64}
