"""The stream of a model in plain float64, to hold exact arithmetic against where float64 can still see."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rankscope.exact_arithmetic.float64 import WideArithmetic, in_float64
from rankscope.exact_arithmetic.running import EXACT_SITES, exact_stream, single_sequences
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed

Place = tuple[int, SiteRef]
VISIBLE = 1e-6
"""Relative residual above which plain float64 has ten digits and more of it."""


def stronger(model: nn.Module, factor: float = 3.0) -> nn.Module:
    """Larger weight matrices, so that attention does something and float64 sees more layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.endswith("weight") and "embed" not in name:
                parameter.mul_(factor)
    return model


def exact_residuals(
    view: ModelView, batch: Batch, sites: Iterable[str] = EXACT_SITES, log_shrink: float = 0.0
) -> dict[Place, float]:
    """Natural logarithms of the residuals in exact arithmetic."""
    found: dict[Place, float] = {}

    def note(sequence: int, ref: SiteRef, x: Deviation, keep: Tensor | None) -> None:
        assert (sequence, ref) not in found
        found[sequence, ref] = x.log_residual(keep)

    exact_stream(view, batch, note, sites=SiteSelection.parse(sites), log_shrink=log_shrink)
    return found


def plain_residuals(
    view: ModelView, batch: Batch, sites: Iterable[str] = EXACT_SITES
) -> dict[Place, tuple[float, float]]:
    """The same in plain float64, and relative to the norm of the stream."""
    found: dict[Place, tuple[float, float]] = {}
    with undisturbed(view.model), in_float64(view.model), WideArithmetic():
        for number, single in enumerate(single_sequences(batch)):

            def note(ref: SiteRef, x: Tensor | AttentionCall, number: int = number, batch: Batch = single) -> None:
                assert isinstance(x, Tensor)
                rows = x.reshape(-1, x.shape[-1])
                if batch.keep is not None and batch.keep.numel() <= rows.shape[0]:
                    rows = rows[: batch.keep.numel()][batch.keep.reshape(-1)]
                residual, norm = float((rows - rows.mean(0)).norm()), float(rows.norm())
                relative = residual / norm if norm else 0.0
                found[number, ref] = (math.log(residual) if residual else -math.inf, relative)

            with trace(view, SiteSelection.parse(sites), note):
                single.run(view.model)
    return found


def assert_agree(exact: dict[Place, float], plain: dict[Place, tuple[float, float]]) -> int:
    """Hold one against the other wherever float64 sees; gives back at how many places it does."""
    assert set(exact) == set(plain)
    seen = 0
    for place, (log_residual, relative) in plain.items():
        assert math.isfinite(relative), place
        if relative > VISIBLE:
            assert abs(math.expm1(exact[place] - log_residual)) <= 1e-8, place
            seen += 1
        else:
            assert exact[place] <= log_residual + 1.0, place
    return seen
