"""Metrics of the same name in other libraries, on the same matrices: formula, value, and why it differs.

    python -m scripts.metric_conformance

Calls the libraries themselves, which need an environment of their own beside rankscope::

    pip install stable-pretraining reptrix weightwatcher scikit-dimension torchmetrics

Writes ``docs/data/metric_conformance.json`` and ``.inc``, with the versions. A library that is not installed is left
out and named.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scripts.architecture_models import declare_vision_operators
from torch import Tensor

from rankscope.metrics import METRICS

DATA = Path(__file__).resolve().parents[1] / "docs" / "data" / "metric_conformance.json"
TOKENS, WIDTH = 256, 128


def gaussian(seed: int, *shape: int) -> Tensor:
    """Independent normal entries."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRICES: dict[str, Tensor] = {
    "independent": gaussian(0, TOKENS, WIDTH),
    "offset ×3": gaussian(0, TOKENS, WIDTH) + 3,
    "collapsed to 1e-4": gaussian(1, 1, WIDTH) + 1e-4 * gaussian(0, TOKENS, WIDTH),
    "one token ×1000": gaussian(0, TOKENS, WIDTH) * torch.tensor([1e3] + [1.0] * (TOKENS - 1)).unsqueeze(1),
}


@dataclass(frozen=True)
class Other:
    """A function of another library.

    Attributes:
        metric: the metric of rankscope with its name, or of what it computes.
        package: as installed.
        call: the function, as a user writes it.
        formula: what it computes; s are singular values of X, c those of CX.
        differs: why its value is another one; empty if it is the same number.
        value: calls it.
    """

    metric: str
    package: str
    call: str
    formula: str
    differs: str
    value: Callable[[Tensor], float]


def stable_pretraining_rankme(x: Tensor) -> float:
    """What its callback logs for a queue that holds ``x``."""
    from stable_pretraining.callbacks.rankme import RankMe

    logged: dict[str, float] = {}
    callback = RankMe("rankme", "embedding", len(x), x.shape[1], verbose=False)
    callback._target_queue = SimpleNamespace(data=x.float())  # its queue holds float32
    module: Any = SimpleNamespace(log=logged.__setitem__)
    callback.on_validation_batch_end(SimpleNamespace(global_rank=0), module, {}, {}, 0)
    return logged["rankme"]


def reptrix_rankme(x: Tensor) -> float:
    """``get_rankme``."""
    from reptrix.rankme import get_rankme

    return float(get_rankme(x))


def reptrix_alpha(x: Tensor) -> float:
    """``get_alpha``, with its own range of the fit."""
    from reptrix.alpha import get_alpha

    return float(get_alpha(x)[0])


def weightwatcher_entropy(x: Tensor) -> float:
    """``matrix_entropy`` of the singular values."""
    from weightwatcher.RMT_Util import matrix_entropy

    return float(matrix_entropy(np.linalg.svd(x.numpy(), compute_uv=False), max(x.shape)))


def weightwatcher_stable_rank(x: Tensor) -> float:
    """``stable_rank`` of the eigenvalues of the Gram matrix."""
    from weightwatcher.RMT_Util import stable_rank

    return float(stable_rank(np.linalg.svd(x.numpy(), compute_uv=False) ** 2))


def weightwatcher_participation(x: Tensor) -> float:
    """``participation_ratio``, of the vector of singular values."""
    from weightwatcher.RMT_Util import participation_ratio

    return float(participation_ratio(np.linalg.svd(x.numpy(), compute_uv=False)))


def skdim_pca(x: Tensor, version: str) -> float:
    """``lPCA``."""
    from skdim.id import lPCA

    return float(lPCA(ver=version, alphaRatio=0.99).fit(x.numpy()).dimension_)


def sklearn_components(x: Tensor) -> float:
    """The number of components that keep 99% of the variance."""
    from sklearn.decomposition import PCA

    return float(PCA(n_components=0.99, svd_solver="full").fit(x.numpy()).n_components_)


def torchmetrics_cosine(x: Tensor, **words: Any) -> float:
    """Mean of the matrix of cosines."""
    from torchmetrics.functional import pairwise_cosine_similarity

    return float(pairwise_cosine_similarity(x, **words).mean())


def sklearn_cosine(x: Tensor) -> float:
    """Mean of the matrix of cosines."""
    from sklearn.metrics.pairwise import cosine_similarity

    return float(cosine_similarity(x.numpy()).mean())


OTHERS: tuple[Other, ...] = (
    Other(
        "rankme",
        "stable-pretraining",
        "callbacks.RankMe",
        "exp(−Σ p log p), p = s/Σs + 1e-5, in float32",
        "ε = 1e-5 is added to every p, which adds up over the width: visible once X is near rank one",
        stable_pretraining_rankme,
    ),
    Other(
        "rankme",
        "reptrix",
        "rankme.get_rankme",
        "exp(−Σ p log p), p = c²/Σc² + 1e-7",
        "subtracts the mean token and takes eigenvalues, not singular values: noise around equal tokens has full rank",
        reptrix_rankme,
    ),
    Other(
        "effective_rank",
        "weightwatcher",
        "RMT_Util.matrix_entropy",
        "−Σ p log p / log rank(X), p = s²/Σs² + ε",
        "an entropy between 0 and 1, not its exponential; of eigenvalues s² instead of singular values",
        weightwatcher_entropy,
    ),
    Other(
        "stable_rank",
        "weightwatcher",
        "RMT_Util.stable_rank",
        "Σλ / max λ, λ = s²",
        "",
        weightwatcher_stable_rank,
    ),
    Other(
        "stable_rank",
        "numpy",
        "linalg.norm(X) ** 2 / linalg.norm(X, 2) ** 2",
        "‖X‖²_F / s₁²",
        "",
        lambda x: float(np.linalg.norm(x.numpy()) ** 2 / np.linalg.norm(x.numpy(), 2) ** 2),
    ),
    Other(
        "participation_ratio",
        "weightwatcher",
        "RMT_Util.participation_ratio(s)",
        "‖s‖₂ / ‖s‖₄",
        "the fourth root of ours: (‖s‖₂/‖s‖₄)⁴ = (Σs²)²/Σs⁴",
        weightwatcher_participation,
    ),
    Other(
        "centred_participation_ratio",
        "scikit-dimension",
        "id.lPCA(ver='participation_ratio')",
        "(Σc²)² / Σc⁴",
        "",
        lambda x: skdim_pca(x, "participation_ratio"),
    ),
    Other(
        "centred_energy_rank_99",
        "scikit-dimension",
        "id.lPCA(ver='ratio', alphaRatio=0.99)",
        "fewest k with Σ_{i≤k} c² ≥ 0.99 Σc²",
        "",
        lambda x: skdim_pca(x, "ratio"),
    ),
    Other(
        "centred_energy_rank_99",
        "scikit-learn",
        "PCA(n_components=0.99).n_components_",
        "fewest k with Σ_{i≤k} c² > 0.99 Σc²",
        "",
        sklearn_components,
    ),
    Other(
        "mean_cosine",
        "torchmetrics",
        "pairwise_cosine_similarity(x).mean()",
        "Σ_{i≠j} cos(xᵢ, xⱼ) / n²",
        "the diagonal is set to zero but stays in the mean: smaller by the factor (n−1)/n",
        torchmetrics_cosine,
    ),
    Other(
        "mean_cosine",
        "scikit-learn",
        "cosine_similarity(x).mean()",
        "Σ_{i,j} cos(xᵢ, xⱼ) / n²",
        "the cosine of each token with itself, 1, is in the mean: larger by (1 − value)/n",
        sklearn_cosine,
    ),
    Other(
        "alpha_req",
        "reptrix",
        "alpha.get_alpha",
        "minus the slope of log c² against log j, weights 1/j, 10 < j ≤ 100",
        "a fixed range of the fit, without the first ten values; ours takes all above 1e-4 of the largest",
        reptrix_alpha,
    ),
    Other(
        "affine_rank",
        "numpy",
        "linalg.matrix_rank(X - X.mean(0))",
        "#{c > c₁ max(n, d) ε}",
        "a threshold at rounding, relative to CX: full rank for any noise. Ours counts what is above 1% of the stream",
        lambda x: float(np.linalg.matrix_rank((x - x.mean(0)).numpy())),
    ),
    Other(
        "least_singular_value",
        "numpy",
        "1 / linalg.cond(X)",
        "s_min / s_max",
        "",
        lambda x: float(1 / np.linalg.cond(x.numpy())),
    ),
)


def measured() -> tuple[list[dict[str, Any]], list[str]]:
    """Every function on every matrix, and the packages that are missing."""
    rows, missing = [], []
    for other in OTHERS:
        try:
            values = {name: other.value(matrix) for name, matrix in MATRICES.items()}
        except ImportError as error:
            missing.append(f"{other.package} ({error})")
            continue
        ours = {name: METRICS[other.metric].function(matrix).item() for name, matrix in MATRICES.items()}
        off = max(abs(values[name] - ours[name]) / abs(ours[name]) for name in MATRICES if ours[name])
        rows.append(
            {
                "metric": other.metric,
                "package": other.package,
                "version": importlib.metadata.version(other.package),
                "call": other.call,
                "formula": other.formula,
                "values": values,
                "ours": ours,
                "largest_relative_difference": off,
                "differs": other.differs,
            }
        )
        if bool(other.differs) != (off > 1e-9):
            raise SystemExit(f"{other.package} {other.call}: differs by {off:.1e}, declared {other.differs!r}")
    return rows, missing


def shown(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"


def table(rows: list[dict[str, Any]]) -> str:
    """Our row of each metric, then those of the others."""
    lines = [
        f"| metric | in | formula | {' | '.join(MATRICES)} | why it differs |",
        "|---|---|---|" + "---:|" * len(MATRICES) + "---|",
    ]
    formulas = {
        "rankme": "exp(−Σ p log p), p = s/Σs",
        "effective_rank": "exp(−Σ p log p), p = s/Σs",
        "stable_rank": "‖X‖²_F / s₁²",
        "participation_ratio": "(Σs²)² / Σs⁴",
        "centred_participation_ratio": "(Σc²)² / Σc⁴",
        "centred_energy_rank_99": "fewest k with Σ_{i≤k} c² ≥ 0.99 Σc²",
        "mean_cosine": "Σ_{i≠j} cos(xᵢ, xⱼ) / n(n−1)",
        "alpha_req": "minus the slope of log c² against log j, weights 1/j, c ≥ 1e-4 c₁",
        "affine_rank": "#{c > 0.01 s₁}",
        "least_singular_value": "s_min / s_max",
    }
    for metric in dict.fromkeys(row["metric"] for row in rows):
        some = [row for row in rows if row["metric"] == metric]
        cells = " | ".join(shown(some[0]["ours"][name]) for name in MATRICES)
        lines.append(f"| **`{metric}`** | rankscope | {formulas[metric]} | {cells} | |")
        for row in some:
            cells = " | ".join(shown(row["values"][name]) for name in MATRICES)
            where = f"{row['package']} {row['version']} `{row['call']}`"
            lines.append(f"| | {where} | {row['formula']} | {cells} | {row['differs'] or 'the same number'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Call all of them and write the files."""
    warnings.simplefilter("ignore")
    declare_vision_operators()
    rows, missing = measured()
    record = {"date": date.today().isoformat(), "tokens": TOKENS, "width": WIDTH, "missing": missing, "rows": rows}
    if missing:
        print("not installed:", "; ".join(missing))
    DATA.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    DATA.with_suffix(".inc").write_text(table(rows), encoding="utf-8")
    print(table(rows))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
