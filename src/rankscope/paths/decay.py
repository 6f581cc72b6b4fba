"""How the residual and the size of single paths fall with their length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics.residual import relative_residual
from rankscope.paths.lengths import lengths_of_interest
from rankscope.paths.network import FrozenNetwork
from rankscope.paths.single import Interval, median_interval, sample_paths

CITES = (Cite("dong2021attention", "thm. 2.2"),)


@dataclass(frozen=True)
class LengthReading:
    """Median path of one length; each path counts once, with its mean over the sequences of the batch.

    Attributes:
        length: of the paths.
        residual: relative residual of what a path carries.
        norm: its Frobenius norm over that of the output.
    """

    length: int
    residual: Interval
    norm: Interval


def path_decay(
    network: FrozenNetwork,
    number: int,
    *,
    lengths: Collection[int] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[LengthReading]:
    """Draw ``number`` paths of each length uniformly; the number is fixed before anything is seen. Estimate.

    There is one path of length 0: its interval is unbounded, as is that of any sample too small for the confidence.
    """
    found = []
    size = torch.linalg.vector_norm(network.out.double(), dim=(-2, -1))
    for length in lengths_of_interest(len(network.attention), lengths):
        streams = sample_paths(network, length, number if length else 1, seed=seed).streams.double()
        paths, batch = streams.shape[:2]
        residuals = relative_residual(Tokens(streams.flatten(0, 1), None)).view(paths, batch).mean(dim=1)
        norms = (torch.linalg.vector_norm(streams, dim=(-2, -1)) / size).mean(dim=1)
        found.append(LengthReading(length, median_interval(residuals, confidence), median_interval(norms, confidence)))
    return found


def decay_orders(readings: Sequence[LengthReading]) -> list[float]:
    r"""Ratio of successive log residuals, :math:`\log r_{k+1} / \log r_k`. Heuristic.

    Near 3 where a layer cubes the residual, as pure attention near collapse does; towards 1 where it multiplies it by a
    factor; below 1 where the residual grows again. NaN where a residual is 0 or 1 and its logarithm tells nothing.
    """
    logs = [math.log(r.residual.estimate) if r.residual.estimate > 0 else math.nan for r in readings]
    return [after / before if before else math.nan for before, after in itertools.pairwise(logs)]
