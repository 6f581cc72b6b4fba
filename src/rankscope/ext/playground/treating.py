"""The playground's network under a remedy, in exact arithmetic."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise

from torch import Tensor

from rankscope.errors import UnsupportedArithmeticError, UnsupportedOperationError
from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.playground.model import Transformer, first_tokens
from rankscope.ext.playground.picture import Frame, TokenCourse, Treated
from rankscope.ext.playground.spheres import Projector
from rankscope.models.design import Design
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView, Stack
from rankscope.remedies import REMEDIES, applied
from rankscope.stream.sites import SiteRef
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.exact.readings import LOG10, SHRINK


def treated(design: Design, seed: int, tokens: Tensor, name: str) -> Treated:
    """Run a design under a remedy.

    The model is built with plain skips, which a remedy can find; the chosen gain is applied as surgery. This is the
    same network with the same weights.

    Args:
        design: the design to build.
        seed: seed of its weights.
        tokens: ``(1, tokens, width)``.
        name: name of the remedy.
    """
    plain = design.changed(skip_gain=1.0)
    model = Transformer(plain, seed)
    view = ModelView(model, _stacks(plain))
    batch = Batch({}, None, 0, 1, (tokens,))
    gain = design.attention_skip
    entry = REMEDIES[name]
    try:
        with ExitStack() as stack:
            if gain != 1:
                stack.enter_context(operating(model, Operation(attention_skip=gain, mlp_skip=gain), view=view))
            stack.enter_context(applied(model, name, view=view))
            logs, norms, frames = _follow(view, batch, 0.0)
            shrunk, _, _ = _follow(view, batch, SHRINK)
    except (UnsupportedOperationError, UnsupportedArithmeticError) as error:
        return Treated(name, entry.summary, None, _reason(error))
    if not all(map(math.isfinite, norms)):
        return Treated(name, entry.summary, None, "nothing is left of the tokens: no skip, and its branches give zero.")
    relative = tuple((value - norm) / LOG10 for value, norm in zip(logs, norms, strict=True))
    return Treated(name, entry.summary, TokenCourse(relative, _orders(logs, shrunk)), frames=frames)


def _follow(view: ModelView, batch: Batch, log_shrink: float) -> tuple[list[float], list[float], tuple[Frame, ...]]:
    """Natural logs of residual and norm, and the tokens on a sphere, starting with the first tokens."""
    logs: list[float] = []
    norms: list[float] = []
    frames: list[Frame] = []
    projector = Projector()

    def observe(number: int, ref: SiteRef, x: Deviation, keep: Tensor | None) -> None:
        logs.append(x.log_residual(keep))
        norms.append(x.log_norm(keep))
        frames.append(projector.frame(x.recentred()))

    exact_stream(view, batch, observe, log_shrink=log_shrink)
    return logs, norms, tuple(frames)


def _orders(logs: list[float], shrunk: list[float]) -> tuple[float, ...]:
    falls = [small - large for small, large in zip(shrunk, logs, strict=True)]
    ratios = [after / before if before else math.nan for before, after in pairwise(falls)]
    return tuple(ratio if math.isfinite(ratio) else math.nan for ratio in ratios)


@lru_cache(maxsize=32)
def _stacks(design: Design) -> tuple[Stack, ...]:
    """The structure of a design's model, which all its seeds share."""
    model = Transformer(design, 0)
    return view_of(model, Batch({}, None, 0, 1, (first_tokens(design, 0),))).stacks


def _reason(error: Exception) -> str:
    if isinstance(error, UnsupportedArithmeticError):
        return f"exact arithmetic has no rule for {error.operation}, which it uses."
    return str(error)
