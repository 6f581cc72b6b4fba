"""``simulate``: computes the picture for given choices. No page, no state, no network access."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.playground.choices import NO_REMEDY, Choices
from rankscope.ext.playground.model import Transformer, first_tokens
from rankscope.ext.playground.picture import Law, Picture, Sight, TokenCourse
from rankscope.ext.playground.spheres import Projector
from rankscope.ext.playground.treating import treated
from rankscope.ext.theory.classification import CollapseClass, LayerFacts, classify, float_visible_depth
from rankscope.ext.theory.predict.sampled_design import visible_in
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.models.design import Design
from rankscope.verbs.exact.readings import FAR, LOG10, SHRINK

SEEN_IN = (torch.float32, torch.bfloat16)
"""Finest first: the weights are rounded from one to the next."""
RESOLVED = 1e12
"""Logarithms up to this size have three decimals left."""
LATE = 0.25
"""Share of the blocks, the last ones, over which a factor is taken."""


def simulate(choices: Choices) -> Picture:
    r"""Build the transformer, follow its tokens in exact arithmetic, and apply the law to each block.

    **Exact** curves: the module's own blocks run on deviations (:mod:`rankscope.exact_arithmetic`), as under
    ``rankscope.exact``. The law of a block is its leading term on a residual that is small: the block is run once more
    on the same state drawn to its mean by :math:`e^{-200}`, which gives order p and constant c of
    :math:`\log r' = p \log r + c`, and these are applied to the residual that is there. It is an **Estimate** that
    becomes exact as the residual falls.

    Args:
        choices: the configuration, already validated.

    Raises:
        InputError: values overflow float64.

    Example:
        >>> picture = simulate(Choices(depth=4, tokens=8, width=16, heads=2, skip_gain=0.0))
        >>> picture.order, picture.law.order
        (3, (3, 3, 3, 3))
    """
    design = choices.design()
    model, tokens = Transformer(design, choices.seed), first_tokens(design, choices.seed)
    with torch.no_grad():
        states = [Deviation.from_tokens(tokens)]
        far: list[Deviation] = []
        shrunk: list[Deviation] = []
        for block in model.blocks:
            state = states[-1]
            # Each block runs three times: on its input, on the input shrunk by e (its order), and shrunk far
            # (the leading term, from which the law is read).
            states.append(block(state).recentred())
            shrunk.append(block(state.shrunk(SHRINK)).recentred())
            far.append(block(state.shrunk(FAR)).recentred())
        relative = [_log_relative(state) for state in states]
        projector = Projector()
        frames = tuple(projector.frame(state) for state in states)
        law, factors = _law(states, far)
        sights = {_name(dtype): _sight(model, tokens, dtype, relative) for dtype in SEEN_IN}
    kind = _kind(design, visible_in(design, design.tokens) is None, factors)
    remedied = None
    if choices.remedy != NO_REMEDY:
        remedied = treated(design, choices.seed, tokens, choices.remedy)
    return Picture(
        choices=choices,
        course=TokenCourse(
            tuple(value / LOG10 for value in relative),
            tuple(_order(s, b) for s, b in zip(shrunk, states[1:], strict=True)),
        ),
        law=law,
        order=kind.order,
        factor=math.nan if kind.order == 3 else kind.factor,
        reason=kind.reason,
        sights=dict(reversed(sights.items())),
        frames=frames,
        treated=remedied,
    )


def _log_relative(state: Deviation) -> float:
    value = state.log_residual() - state.log_norm()
    if math.isnan(value) or value == math.inf:
        raise InputError("This network leaves the range of float64. Take weights nearer to 1, fewer blocks or a norm.")
    return value


def _order(shrunk: Deviation, state: Deviation) -> float:
    """Change of the log-residual after a block, per unit change before it; nan if the logs are too large to tell."""
    log = state.log_residual()
    change = shrunk.log_residual() - log
    # Both logs are rounded to float64, and beyond 1e12 the three decimals that are shown would be rounding.
    return change / SHRINK if math.isfinite(change) and abs(log) < RESOLVED else math.nan


def _law(states: Sequence[Deviation], far: Sequence[Deviation]) -> tuple[Law, list[float]]:
    """The law of every block, and the factor of each on a small relative residual (nan if it is not linear)."""
    orders: list[int] = []
    logs: list[float] = []
    factors: list[float] = []
    for before, after in zip(states[:-1], far, strict=True):
        start = before.shrunk(FAR)
        small, moved = start.log_residual() - start.log_norm(), after.log_residual() - after.log_norm()
        if not (math.isfinite(small) and math.isfinite(moved)):
            orders, logs, factors = [*orders, 0], [*logs, -math.inf], [*factors, math.nan]
            continue
        # log r' = p log r + c. With log r near -200, c hardly changes the quotient, so rounding it gives p.
        order = max(1, round(moved / small))
        constant = moved - order * small
        orders.append(order)
        logs.append((order * _log_relative(before) + constant) / LOG10)
        factors.append(math.exp(min(constant, 700.0)) if order == 1 else math.nan)
    return Law(tuple(orders), tuple(logs)), factors


def _kind(design: Design, complete: bool, factors: Sequence[float]) -> CollapseClass:
    """Order of the network with its reason; the factor is the mean of the law's over the last blocks."""
    late = [value for value in factors[-max(1, round(LATE * len(factors))) :] if math.isfinite(value)]
    factor = math.exp(sum(map(math.log, late)) / len(late)) if late else math.nan
    free = design.is_position_free
    if complete and free and design.attention_skip != 0:
        # attention has no linear term here: the law's factor is that of the skip, times norms and MLP
        rows = factor / abs(design.attention_skip)
        return classify(LayerFacts(True, True, design.attention_skip, row_map_factor=rows))
    linear = None if math.isnan(factor) else factor
    return classify(LayerFacts(complete, free, design.attention_skip, linear_factor=linear))


def _sight(model: Transformer, tokens: Tensor, dtype: torch.dtype, relative: Sequence[float]) -> Sight:
    """The same forward pass in another float format; the model stays in that format."""
    model.to(dtype)
    x = tokens.to(dtype)
    seen = [_read(x)]
    for block in model.blocks:
        x = block(x)
        seen.append(_read(x))
    floor = float_floor(dtype)
    passed = float_visible_depth(relative[1:], floor)
    return Sight(floor, None if passed is None else passed - 1, tuple(seen))


def _read(x: Tensor) -> float:
    value = float(Tokens(x).relative_deviation[0])
    return math.log10(value) if value > 0 else -math.inf if value == 0 else math.nan


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
