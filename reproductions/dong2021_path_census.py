"""Most paths through a transformer are long (Dong, Cordonnier and Loukas 2021, theorem 2.1).

A network of L blocks with H heads and skips is a sum over paths, of which C(L, k) H^k pass through k blocks. The counts
are whole numbers; no model is run. They say how many paths of each length there are, not how much a path contributes.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from output import COLOURS, MARKERS, options, panels, table, write

# Heads per block and number of blocks, as the paper lists them (theorem 2.1 and section 3.1).
MODELS = {
    "DistilBERT": (12, 6),
    "MobileBERT": (4, 12),
    "DeiT-T": (3, 12),
    "BERT-base, ViT-B": (12, 12),
    "BERT-large, ViT-L": (16, 24),
    "ViT-H": (16, 32),
    "T5-3B": (32, 24),
    "T5-11B": (128, 24),
    "GPT-3": (96, 96),
}
DRAWN = ("DistilBERT", "MobileBERT", "BERT-base, ViT-B", "BERT-large, ViT-L", "ViT-H")
SHORT = 6


def path_counts(heads: int, blocks: int) -> list[int]:
    """Paths of length 0, 1, ... in a network with skips."""
    return [math.comb(blocks, length) * heads**length for length in range(blocks + 1)]


def shares(heads: int, blocks: int) -> np.ndarray:
    """Share of all paths, by length."""
    counts = path_counts(heads, blocks)
    return np.array([float(Fraction(count, sum(counts))) for count in counts])


def main() -> None:
    """Count, print the table, draw."""
    given = options(__doc__).parse_args()
    models = dict(list(MODELS.items())[:3]) if given.small else MODELS
    numbers = {}
    for name, (heads, blocks) in models.items():
        share = shares(heads, blocks)
        numbers[name] = {
            "paths": float(sum(path_counts(heads, blocks))),
            "mean_length": float((np.arange(blocks + 1) * share).sum()),
            "share_up_to_6": float(share[: SHORT + 1].sum()),
        }
    rows = [
        [name, *map(str, models[name]), f"{n['paths']:.3g}", f"{n['mean_length']:.2f}", f"{n['share_up_to_6']:.2g}"]
        for name, n in numbers.items()
    ]
    print(table(["model", "heads", "blocks", "paths", "mean length", "share with length <= 6"], rows))

    figure, ((left, right),) = panels(1, 2, title="How long are the paths through a transformer with skips?")
    for name, colour, marker in zip([name for name in DRAWN if name in models], COLOURS, MARKERS, strict=False):
        share, look = shares(*models[name]), {"color": colour, "marker": marker, "markersize": 3}
        left.plot(share, label=f"{name} {models[name]}", **look)
        right.semilogy(np.cumsum(share), **look)
    left.set(ylabel="share of all paths", xlabel="path length (blocks passed through)")
    left.legend(title="model (heads, blocks)", fontsize=6)
    right.set(ylabel="share of paths of at most this length", xlabel="path length", ylim=(1e-12, 2))
    write("dong2021_path_census", {"models": numbers}, figure, given)


if __name__ == "__main__":
    main()
