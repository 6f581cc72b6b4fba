"""A design followed block by block in exact arithmetic, over seeds, until its tokens agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from rankscope._errors import InputError
from rankscope.deviation.tensor import Deviation
from rankscope.masks import parse_mask
from rankscope.results.prediction import AGREEMENT, Agreement
from rankscope.theory.designs.design import Design
from rankscope.theory.designs.sampling import Sampler, span_of_rows

Floats = NDArray[np.float64]
LOG10 = math.log(10)
PLAIN = 1e-4
"""Relative residual down to which plain float64 has all the digits one can want, and is quicker."""


@dataclass(frozen=True, eq=False)
class Followed:
    """log10 of the relative residual of one seed, from the first tokens on; the design's own depth and what follows."""

    log10_relative: Floats

    def depth_at(self, log10_level: float) -> float:
        """Where the curve first crosses a level, in blocks, linear between blocks; inf where it does not."""
        return crossing(self.log10_relative, log10_level)


def crossing(curve: Floats, level: float) -> float:
    """Where a falling curve first reaches ``level``, linear between its points; inf where it does not.

    Example:
        >>> crossing(np.array([0.0, -2.0, -4.0]), -3.0)
        1.5
    """
    below = np.flatnonzero(curve <= level)
    if not len(below):
        return math.inf
    place = int(below[0])
    if place == 0:
        return 0.0
    before, after = float(curve[place - 1]), float(curve[place])
    return place - 1 + ((before - level) / (before - after) if math.isfinite(after) else 1.0)


def follow(design: Design, seed: int, tokens: int, blocks: int, most_blocks: int) -> Followed:
    """Run a design on fresh weights for ``blocks`` blocks, and on to ``most_blocks`` until tokens agree.

    Exactly in law at the design's width, and in exact arithmetic: see :mod:`rankscope.theory.designs.sampling` and
    :mod:`rankscope.deviation`.
    """
    sampler = Sampler(design, visible_in(design, tokens), torch.Generator().manual_seed(seed), span_of_either)
    logs: list[float] = []
    with torch.no_grad():
        x: Tensor = sampler.tokens(tokens)
        for block in range(most_blocks + 1):
            x, log_relative = _read(x)
            logs.append(log_relative)
            if not math.isfinite(log_relative) or (block >= blocks and log_relative <= math.log10(AGREEMENT)):
                break
            if block < most_blocks:
                x = sampler.block(x)
    return Followed(np.array(logs))


def follow_seeds(
    design: Design, seeds: Sequence[int], tokens: int, blocks: int, most_blocks: int, *, progress: bool = False
) -> list[Followed]:
    """The same for several seeds."""
    bar = tqdm(seeds, desc="predict", unit="seed", disable=not progress)
    return [follow(design, seed, tokens, blocks, most_blocks) for seed in bar]


def visible_in(design: Design, tokens: int) -> Tensor | None:
    """The mask of the design over so many tokens; None where all see all."""
    mask = parse_mask(design.mask)
    if tokens < 2:
        raise InputError(f"A design was to be run on {tokens} tokens. Expected two or more.")
    visible = mask.dense(tokens)
    return None if bool(visible.all()) else visible


def _read(x: Tensor) -> tuple[Tensor, float]:
    """Log10 of the relative residual; tokens that are nearly equal go on in exact arithmetic."""
    if not isinstance(x, Deviation):
        relative = float(torch.linalg.vector_norm(x - x.mean(1, keepdim=True)) / torch.linalg.vector_norm(x))
        if relative > PLAIN:
            return x, math.log10(relative)
        x = Deviation.from_tokens(x)
    x = x.recentred()
    return x, (x.log_residual() - x.log_norm()) / LOG10


def span_of_either(x: Tensor) -> Tensor:
    """An orthonormal basis of the tokens: of their common part and every deviation, however small its scale."""
    if not isinstance(x, Deviation):
        return span_of_rows(x)
    parts = [x.base, *(term.values for term in x.terms)]
    rows = [part.expand(*part.shape[:-1], x.shape[-1]).reshape(-1, x.shape[-1]) for part in parts]
    sizes = [torch.linalg.vector_norm(part) for part in rows]
    kept = [part / size for part, size in zip(rows, sizes, strict=True) if float(size) > 0]
    basis: Tensor = torch.linalg.qr(torch.cat(kept).T, mode="reduced").Q
    return basis


def agreement_of(runs: Sequence[Followed], level: float = AGREEMENT) -> Agreement:
    """Depth at which tokens agree, over seeds: mean and spread where all got there, else how many did."""
    depths = np.array([run.depth_at(math.log10(level)) for run in runs])
    reached = np.isfinite(depths)
    followed = min(len(run.log10_relative) - 1 for run in runs)
    if not reached.all():
        return Agreement(level, None, None, None, int(reached.sum()), len(runs), followed)
    mean = float(depths.mean())
    spread = float(depths.std(ddof=1)) if len(runs) > 1 else math.nan
    return Agreement(level, mean, spread, math.ceil(mean), len(runs), len(runs), followed)


def late_factor(runs: Sequence[Followed]) -> tuple[float, float]:
    """Factor per block over the last quarter of the blocks and its standard error over seeds; nan where unknown."""
    blocks = min(len(run.log10_relative) for run in runs)
    span = max(2, blocks // 4)
    ends = np.array([run.log10_relative[[blocks - span - 1, blocks - 1]] for run in runs]) if blocks > span else None
    if ends is None or not np.isfinite(ends).all():
        return math.nan, math.nan
    factors = 10 ** ((ends[:, 1] - ends[:, 0]) / span)
    error = float(factors.std(ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
    return float(factors.mean()), error
