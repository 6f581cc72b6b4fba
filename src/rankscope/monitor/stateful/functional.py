"""The metrics without state: the mean over the sequences of one batch, ``functional.relative_residual(x, mask)``.

Every registered metric is an attribute of this module. Those of :mod:`rankscope.metrics` return one value per sequence;
these return what the class of the same metric returns after one ``update``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import as_float64
from rankscope.metrics import METRICS, SIDES, MetricSpec
from rankscope.verbs.between_inputs import Pooling


@dataclass(frozen=True)
class Sums:
    """The sums of a batch that are needed for the mean over any number of batches.

    Attributes:
        total: sum of the values that are defined, float64.
        count: number of defined values.
        undefined: number of sequences (and heads) without a value.
    """

    total: Tensor
    count: Tensor
    undefined: Tensor

    @property
    def mean(self) -> Tensor:
        """NaN when no value is defined."""
        return self.total / self.count


def token_sums(spec: MetricSpec, x: Tensor, attention_mask: Tensor | None = None) -> Sums:
    """Reduce hidden states ``(*batch, tokens, dim)``; tokens whose mask is zero do not count."""
    return view_sums(spec, x, attention_mask=attention_mask)


def view_sums(spec: MetricSpec, *tensors: Tensor, attention_mask: Tensor | None = None) -> Sums:
    """Reduce the tensors of the metric's side (see ``SIDES``), each ``(*batch, tokens, ...)``."""
    return _sums(spec.function(SIDES[spec.side].view(*tensors, _as_bool(attention_mask))))


def attention_sums(
    spec: MetricSpec, probs: Tensor, attention_mask: Tensor | None = None, support: Tensor | None = None
) -> Sums:
    """Reduce probabilities ``(*batch, heads, query, key)``.

    Args:
        spec: a metric of attention.
        probs: probabilities returned by the softmax.
        attention_mask: ``(*batch, tokens)``; a token whose mask is zero is neither a query nor a key.
        support: booleans that broadcast to ``probs``, True where a query may see a key: pass the causal mask here.
    """
    keep = _as_bool(attention_mask)
    if keep is not None:
        keys = keep[..., None, None, :]
        support = keys if support is None else support & keys
    return _sums(spec.function(AttentionMatrix(probs, support, keep)))


def pooled_inputs(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """One float64 vector per input: ``(inputs, dim)`` as it is, of ``(inputs, tokens, dim)`` the mean over tokens.

    Example:
        >>> pooled_inputs(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]])).tolist()
        [[2.0]]
    """
    keep = _as_bool(attention_mask)
    if x.ndim == 2 and keep is None:
        return as_float64(x.detach())
    if x.ndim != 3 or (keep is not None and keep.shape != x.shape[:2]):
        raise InputError(
            f"Inputs were given as a tensor of shape {tuple(x.shape)}. Expected pooled vectors (inputs, dim), or "
            "hidden states (inputs, tokens, dim) with a mask (inputs, tokens)."
        )
    present = slice(None) if keep is None else keep.any(1)
    return Pooling("mean").pooled(x[present], None if keep is None else keep[present])


def token_mean(name: str, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Mean over the sequences of a batch of the token metric of this name.

    Example:
        >>> round(token_mean("relative_residual", torch.tensor([[[7.0], [1.0]]])).item(), 12)
        0.6
    """
    return token_sums(_of_side(name, "tokens"), x, attention_mask).mean


def attention_mean(
    name: str, probs: Tensor, attention_mask: Tensor | None = None, support: Tensor | None = None
) -> Tensor:
    """Mean over the sequences and heads of a batch of the attention metric of this name.

    Example:
        >>> round(attention_mean("attention_entropy", torch.full((1, 2, 4, 4), 0.25)).item(), 12)
        1.0
    """
    return attention_sums(_of_side(name, "attention"), probs, attention_mask, support).mean


def view_mean(name: str, *tensors: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Mean over the sequences of a batch of a metric of any other side.

    Example:
        >>> x = torch.tensor([[[3.0], [4.0]]])
        >>> view_mean("write_ratio", x, x / 2).item()
        0.5
    """
    return view_sums(METRICS[name], *tensors, attention_mask=attention_mask).mean


_TWINS: Mapping[str, Callable[..., Tensor]] = {"tokens": token_mean, "attention": attention_mean}


def __getattr__(name: str) -> Callable[..., Tensor]:
    if name not in METRICS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(METRICS))}")
    twin = _TWINS.get(METRICS[name].side, view_mean)
    made = update_wrapper(partial(twin, name), METRICS[name].function)
    globals()[name] = made
    return made


def _of_side(name: str, side: str) -> MetricSpec:
    spec = METRICS[name]
    if spec.side != side:
        raise InputError(f"{name} is a metric of {spec.side}, not of {side}.")
    return spec


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """A mask as booleans: masks of tokenizers are integers."""
    return None if mask is None else mask != 0


def _sums(values: Tensor) -> Sums:
    undefined = torch.isnan(values)
    return Sums(values.masked_fill(undefined, 0.0).sum(), (~undefined).sum(), undefined.sum())
