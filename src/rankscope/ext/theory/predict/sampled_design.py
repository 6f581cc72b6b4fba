"""A design sampled at its full width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student_t
from torch import Tensor
from tqdm.auto import tqdm

from rankscope.errors import InputError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.theory.prediction import AGREEMENT, Agreement
from rankscope.ext.theory.sampling import Sampler, span_of_rows
from rankscope.masks import parse_mask
from rankscope.models.design import Design

Floats = NDArray[np.float64]
LOG10 = math.log(10)
LEAST_TOKENS = 64
"""The shortest context that is predicted in place of a longer one."""
MOST_WORK = 5e10
"""Multiplications of one prediction (5 to 15 s) above which a shorter context is predicted."""
LARGEST = 1e150
"""Size of tokens above which scores, which are products of two tokens, overflow float64."""
PLAIN = 1e-4
"""Relative residual down to which plain float64 is accurate enough, and faster."""


@dataclass(frozen=True, eq=False)
class Followed:
    """log10 of the relative residual of one seed at every depth, from the input on, also beyond the design's depth."""

    log10_relative: Floats

    def depth_at(self, log10_level: float) -> float:
        """The depth at which the curve first crosses a level, interpolated between blocks; inf if it never does."""
        return crossing(self.log10_relative, log10_level)


def crossing(curve: Floats, level: float) -> float:
    """The point at which a falling curve first reaches ``level``, interpolated linearly; inf if it never does.

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


def follow(design: Design, seed: int, most_blocks: int) -> Followed:
    """Run a design on new random weights through its depth, then up to ``most_blocks`` until tokens agree.

    Exact in distribution at the design's width, and in exact arithmetic: see :mod:`rankscope.ext.theory.sampling`
    and :mod:`rankscope.exact_arithmetic`.
    """
    sampler = Sampler(design, visible_in(design), torch.Generator().manual_seed(seed), span_of_either)
    logs: list[float] = []
    with torch.no_grad():
        x: Tensor = sampler.tokens(design.tokens)
        for block in range(most_blocks + 1):
            x, log_relative = _read(x)
            if math.isnan(log_relative):
                if block <= design.depth:
                    raise InputError(_no_residual(x, block, design))
                break
            logs.append(log_relative)
            if log_relative == -math.inf or (block >= design.depth and log_relative <= math.log10(AGREEMENT)):
                break
            if block < most_blocks:
                x = sampler.block(x)
    return Followed(np.array(logs))


def _no_residual(x: Tensor, block: int, design: Design) -> str:
    if not float(torch.linalg.vector_norm(x.base if isinstance(x, Deviation) else x)):
        return (
            f"After {block} blocks of the design every token is zero, and a relative residual has no meaning. Give "
            "values or a skip a size other than 0 (value_std, output_std, skip_gain)."
        )
    if design.branch_norm and bool((x.base if isinstance(x, Deviation) else x).isnan().any()):
        return (
            f"Block {block - 1} of the design adds nothing, and branch_norm cannot give a branch of zeros a size. Give "
            "its weights a size other than 0 (value_std, output_std, mlp_in_std, mlp_out_std), or drop branch_norm."
        )
    return (
        f"The tokens of the design leave the range of float64 after {block} of {design.depth} blocks: it has norm="
        f"{design.norm!r}, and its stream grows in every block. Give it a norm, or a smaller branch_scale or "
        "weight_std."
    )


def affordable_tokens(design: Design, seeds: int, blocks: int) -> int:
    """The tokens of the design, halved until this many seeds and blocks are affordable; at least 64."""
    tokens = design.tokens
    while tokens > LEAST_TOKENS and seeds * blocks * _work(design, tokens) > MOST_WORK:
        tokens = max(LEAST_TOKENS, math.ceil(tokens / 2))
    return tokens


def _work(design: Design, tokens: int) -> float:
    """Multiplications of one block: matrices times tokens, bases, scores and their exponentials."""
    rank = min(tokens, design.width)
    inner = design.heads * design.head_dim
    maps = tokens * rank * (inner + 2 * design.kv_heads * design.head_dim + 2 * design.width + 2 * design.mlp_width)
    bases = 2 * rank**2 * (2 * design.width + inner + design.mlp_width)
    return maps + bases + tokens**2 * (2 * inner + 100 * design.heads)


def interval_of(values: Floats) -> tuple[float, float]:
    """95% prediction interval for one more seed, by Student's t; NaN with one seed or an infinite value.

    Example:
        >>> low, high = interval_of(np.array([-3.0, -1.0]))
        >>> round(low, 1), round(high, 1)
        (-24.0, 20.0)
    """
    seeds = len(values)
    if seeds < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    half = float(student_t.ppf(0.975, seeds - 1)) * float(values.std(ddof=1)) * math.sqrt(1 + 1 / seeds)
    return float(values.mean()) - half, float(values.mean()) + half


def follow_seeds(design: Design, seeds: Sequence[int], most_blocks: int, *, progress: bool = False) -> list[Followed]:
    """:func:`follow` for several seeds."""
    bar = tqdm(seeds, desc="predict", unit="seed", disable=not progress)
    return [follow(design, seed, most_blocks) for seed in bar]


def visible_in(design: Design) -> Tensor | None:
    """The mask of the design over its tokens; None if every token sees all tokens."""
    if design.tokens < 2:
        raise InputError(f"A design cannot be run on {design.tokens} tokens. Expected two or more.")
    visible = parse_mask(design.mask).dense(design.tokens)
    return None if bool(visible.all()) else visible


def _read(x: Tensor) -> tuple[Tensor, float]:
    """Log10 of the relative residual; tokens that are nearly equal continue in exact arithmetic.

    NaN if it does not exist: every token is zero, or larger than :data:`LARGEST`.
    """
    if not isinstance(x, Deviation):
        size = float(torch.linalg.vector_norm(x))
        if not 0 < size <= LARGEST:
            return x, math.nan
        relative = float(torch.linalg.vector_norm(x - x.mean(1, keepdim=True))) / size
        if relative > PLAIN:
            return x, math.log10(relative)
        x = Deviation.from_tokens(x)
    x = x.recentred()
    norm = x.log_norm()
    if not -math.inf < norm <= math.log(LARGEST):
        return x, math.nan
    return x, (x.log_residual() - norm) / LOG10


def span_of_either(x: Tensor) -> Tensor:
    """An orthonormal basis of the tokens: their common part and every deviation, however small its scale."""
    if not isinstance(x, Deviation):
        return span_of_rows(x)
    parts = [x.base, *(term.values for term in x.terms)]
    rows = [part.expand(*part.shape[:-1], x.shape[-1]).reshape(-1, x.shape[-1]) for part in parts]
    sizes = [torch.linalg.vector_norm(part) for part in rows]
    kept = [part / size for part, size in zip(rows, sizes, strict=True) if float(size) > 0]
    if not kept:  # all zero, or squares overflow: the residual computed next tells which
        return torch.zeros(x.shape[-1], 1, dtype=x.base.dtype)
    basis: Tensor = torch.linalg.qr(torch.cat(kept).T, mode="reduced").Q
    return basis


def agreement_of(runs: Sequence[Followed], level: float = AGREEMENT) -> Agreement:
    """Depth at which tokens agree, over seeds: mean and spread if they agree for all seeds, else for how many."""
    depths = np.array([run.depth_at(math.log10(level)) for run in runs])
    reached = np.isfinite(depths)
    followed = min(len(run.log10_relative) - 1 for run in runs)
    if not reached.all():
        return Agreement(level, None, None, None, int(reached.sum()), len(runs), followed)
    mean = float(depths.mean())
    spread = float(depths.std(ddof=1)) if len(runs) > 1 else math.nan
    return Agreement(level, mean, spread, math.ceil(mean), len(runs), len(runs), followed)


def late_factor(runs: Sequence[Followed]) -> tuple[float, float]:
    """Factor per block over the last quarter of the blocks and its standard error over seeds; nan if unknown."""
    blocks = min(len(run.log10_relative) for run in runs)
    span = max(2, blocks // 4)
    ends = np.array([run.log10_relative[[blocks - span - 1, blocks - 1]] for run in runs]) if blocks > span else None
    if ends is None or not np.isfinite(ends).all():
        return math.nan, math.nan
    factors = 10 ** ((ends[:, 1] - ends[:, 0]) / span)
    error = float(factors.std(ddof=1)) / math.sqrt(len(runs)) if len(runs) > 1 else math.nan
    return float(factors.mean()), error
