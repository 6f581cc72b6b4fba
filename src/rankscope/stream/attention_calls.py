"""Reads attention where it happens: at ``scaled_dot_product_attention``, ``flex_attention`` and ``softmax``.

Observing the model's own call, instead of replacing it, keeps every output bit-identical and works in
any model, from any library, with the attention implementation that the user runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg import score_strips
from rankscope.linalg.attention_scores import blockwise_scores
from rankscope.linalg.precision import may_hold

HIDES = score_strips.HIDES
"""A number below this, added to a score, hides the key."""

_Given = TypeVar("_Given", Tensor, "Tensor | None")
_PART_BYTES = 1 << 21
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class AttentionCall:
    """One evaluation of softmax attention; the probabilities are computed on demand.

    Either ``weights`` is the model's own softmax output, or ``query``, ``key`` and the rest are the arguments of the
    fused kernel, from which the same probabilities follow; of ``flex_attention`` both are known. ``log_sums`` are the
    logarithms of the kernel's sums of exponentials, one per row, if it returned them. ``scores`` is the input of the
    model's own softmax, with the column of a learned sink if it has one. ``edit`` is what surgery does to the
    probabilities afterwards, a function of them and of the support.
    """

    weights: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    edit: Callable[[Tensor, Tensor | None], Tensor] | None = None
    log_sums: Tensor | None = None
    scores: Tensor | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of query and key tokens."""
        if self.weights is not None:
            return self.weights.shape[-2], self.weights.shape[-1]
        assert self.query is not None
        assert self.key is not None
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def sequences(self) -> int:
        """Number of matrices per head: one for each sequence, or for each window of each sequence."""
        seen = self.query if self.weights is None else self.weights
        assert seen is not None
        return seen.shape[0]

    @property
    def probs_bytes(self) -> int:
        """Memory that the probabilities of all heads take, or would take."""
        if self.weights is not None:
            return self.weights.numel() * self.weights.element_size()
        assert self.query is not None
        assert self.key is not None
        return self.query.shape[:-1].numel() * self.key.shape[-2] * max(4, self.query.element_size())

    def support(self) -> Tensor | None:
        """Which keys each query may see, broadcastable to the probabilities; ``None`` for all.

        The model's own softmax output does not show its mask: there, a key counts as masked if its probability
        is exactly zero.
        """
        if self.weights is not None:
            return self.weights > 0
        support = None
        if self.is_causal:
            assert self.query is not None
            support = torch.ones(self.lengths, dtype=torch.bool, device=self.query.device).tril()
        if self.mask is not None:
            seen = self.mask if self.mask.dtype == torch.bool else self.mask > HIDES
            support = seen if support is None else support & seen
        return support

    def largest_scores(self) -> Tensor:
        """The largest score of each row as it enters the softmax, ``batch heads query 1``, by tiles for a fused kernel.

        Raises:
            InputError: the model subtracts each row's maximum before its softmax, so that the scores are not known.
        """
        if self.scores is None:
            assert self.query is not None
            assert self.key is not None
            return blockwise_scores(self.query, self.key, mask=self.mask, is_causal=self.is_causal, scale=self.scale)
        assert self.weights is not None
        largest = self.scores.amax(-1, keepdim=True)
        sees = largest > HIDES
        lowest = self.scores.masked_fill(self.scores <= HIDES, 0.0).amin()
        if bool((largest[sees] == 0).all()) and float(lowest) < 0:
            raise InputError(
                "the largest score of every row is exactly 0: the model subtracts it before its softmax, and the "
                "scores themselves are not seen. Load the model with another attn_implementation."
            )
        return self.scores[..., : self.weights.shape[-1]].amax(-1, keepdim=True)

    def probs(self) -> Tensor:
        """Attention probabilities, ``batch heads query key``; zero in the row of a query that sees no key."""
        probs = self._probs_before_edits()
        return probs if self.edit is None else self.edit(probs, self.support())

    def _probs_before_edits(self) -> Tensor:
        """Computed a few sequences at a time on a CPU, where memory for all of them costs more than the work."""
        if self.weights is not None:
            return self.weights
        assert self.query is not None
        assert self.key is not None
        sequences = self.query.shape[0]
        at_once = max(1, _PART_BYTES * sequences // max(1, self.probs_bytes))
        if self.query.device.type != "cpu" or at_once >= sequences:
            return _probs(self.query, self.key, self.mask, self.is_causal, self.scale)
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        probs = torch.empty(*self.query.shape[:-1], self.key.shape[-2], dtype=dtype)
        for start in range(0, sequences, at_once):
            part = slice(start, start + at_once)
            key, mask = _of(self.key, part), _of(self.mask, part)
            _probs(self.query[part], key, mask, self.is_causal, self.scale, out=probs[part])
        return probs

    def mismatch(self) -> float:
        """Largest relative difference between ``P V`` with these probabilities and the output of the fused kernel."""
        if self.query is None or self.key is None or self.value is None:
            return 0.0
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (self.key, self.value))
        own = F.scaled_dot_product_attention(
            self.query, key, value, attn_mask=self.mask, is_causal=self.is_causal, scale=self.scale
        )
        ours = self.probs().to(value.dtype) @ value
        return float((ours - own).abs().max() / own.abs().max())


def _of(given: _Given, part: slice) -> _Given:
    """The part that belongs to a few of the sequences; unchanged if all sequences share it."""
    return given if given is None or given.dim() < 4 or given.shape[0] == 1 else given[part]


def _probs(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, out: Tensor | None = None
) -> Tensor:
    """Probabilities as in the fused kernel, at least in float32; zero in the row of a query that sees no key."""
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
    scores = _products(query, key, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        # tril_ sets hidden scores to zero, even NaN, before -inf is added. On a CPU masked_fill_ is five times slower.
        later = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
        scores.tril_().add_(later)
    if mask is None:
        return torch.softmax(scores, -1, out=out)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sees_nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
    if not may_hold(sees_nothing):
        return torch.softmax(scores, -1, out=out)
    return torch.softmax(scores.masked_fill(sees_nothing, 0.0), -1, out=out).masked_fill_(sees_nothing, 0.0)


def _products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled products of queries and keys; heads that share keys are stacked as rows of one product."""
    if key.dim() < 4:
        return (query @ key.mT).mul_(scale)
    key = key.expand(query.shape[0], -1, -1, -1)
    groups, heads = key.shape[1], query.shape[1]
    rows = query.reshape(query.shape[0] * groups, heads // groups * query.shape[2], query.shape[3])
    # The product scales its result itself, which saves a pass over all scores.
    scores = torch.baddbmm(query.new_empty(1, 1, 1), rows, key.flatten(0, 1).mT, beta=0, alpha=scale)
    return scores.view(query.shape[0], heads, query.shape[2], key.shape[2])


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``scaled_dot_product_attention`` by name."""
    return dict(zip(_SDPA_NAMES, args, strict=False)) | dict(kwargs)


def from_sdpa(args: Sequence[Any], kwargs: Mapping[str, Any], log_sums: Tensor | None = None) -> AttentionCall | None:
    """Read the arguments of ``scaled_dot_product_attention``."""
    bound = sdpa_arguments(args, kwargs)
    query, key = bound["query"], bound["key"]
    if query.dim() != 4:
        return None
    return AttentionCall(
        query=query,
        key=key,
        value=bound["value"],
        mask=bound.get("attn_mask"),
        is_causal=bool(bound.get("is_causal", False)),
        scale=bound.get("scale"),
        log_sums=log_sums,
    )


def from_flex(operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Read a call of the operator of ``flex_attention``, whose scores only its own functions know.

    The operator itself is asked, with the identity as values: it then returns the probabilities, and the log-sums give
    the scores. Uncompiled, it computes the whole matrix anyway.
    """
    query, key, value, *rest = (arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
    ones = torch.eye(key.shape[-2], dtype=query.dtype, device=query.device)
    with torch.no_grad():
        probs, log_sums, *_ = operator(query, key, ones.expand(*value.shape[:2], -1, -1), *rest, **kwargs)
        scores = probs.log() + (log_sums * _log_unit(operator, query, rest, kwargs)).to(probs.dtype)[..., None]
    return AttentionCall(weights=probs, query=args[0].detach(), key=args[1].detach(), scores=scores)


def _log_unit(operator: Callable[..., Any], query: Tensor, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """What one unit of the operator's log-sums is: releases use logarithms of base 2 or e. Two equal scores tell."""
    like = query.new_zeros(1, 1, 2, 1)
    told = operator(like[..., :1, :], like, like, _same, (*rest[1][:-1], _sees), 1.0, *rest[3:], **kwargs)[1]
    return math.log(2.0) / float(told)


def _same(score: Tensor, *_: Tensor) -> Tensor:
    return score


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= 0


def is_attention_shaped(scores: object, batch: int, tokens: int) -> bool:
    """Whether a softmax over these scores can be attention, judged by their shape.

    The shape must be ``batch heads query key`` or ``batch*heads query key``, with one row per token. A router's softmax
    may have three axes as well: what its scores are made of decides.
    """
    if not isinstance(scores, Tensor) or scores.dim() not in (3, 4) or scores.shape[-2] != tokens:
        return False
    return scores.shape[0] == batch if scores.dim() == 4 else scores.shape[0] % batch == 0


def is_over_keys(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a softmax call is over the last axis of its scores."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    return bool(args) and isinstance(args[0], Tensor) and axis in (-1, args[0].dim() - 1)


def from_softmax(probs: Tensor, tokens: int, scores: Tensor | None = None) -> AttentionCall:
    """Take a softmax output ``batch heads query key``, and its input if given, as attention.

    A learned sink column (one key more than there are tokens) is removed: the rows then sum to less than one, as
    in the model.
    """
    if probs.shape[-1] == tokens + 1:
        probs = probs[..., :-1]
    return AttentionCall(weights=probs, scores=scores)


_HEARD: ContextVar[list[AttentionCall] | None] = ContextVar("_HEARD", default=None)


@contextmanager
def listening() -> Iterator[list[AttentionCall]]:
    """Collect the attention calls that surgery announces while a fused kernel runs under it."""
    heard: list[AttentionCall] = []
    token = _HEARD.set(heard)
    try:
        yield heard
    finally:
        _HEARD.reset(token)


def announce(call: AttentionCall) -> None:
    """Report the attention that really happens, if it is not the one the model requested."""
    heard = _HEARD.get()
    if heard is not None:
        heard.append(call)


Handler = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


def inside_multi_head(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], fused: Handler, softmax: Handler
) -> Any:
    """Run ``F.multi_head_attention_forward``, which a function mode sees as one opaque call.

    A copy of the function runs, in which the two functions that it looks up by module-level name are the handlers;
    torch itself stays as it is, so that other threads notice nothing. Its softmax has the axes
    ``batch*heads query key``; the handler receives and returns ``batch heads query key``. If several modes see the
    call, the handlers of the first one are outermost, as with any other call.
    """
    token = _CHAIN.set((*_CHAIN.get(), (fused, softmax)))
    try:
        if isinstance(func, FunctionType):  # else another mode has made the copy
            query = args[0] if args else kwargs["query"]
            func = _MultiHead(func, query.shape[1] if query.dim() == 3 else 1)
        return func(*args, **kwargs)
    finally:
        _CHAIN.reset(token)


_CHAIN: ContextVar[tuple[tuple[Handler, Handler], ...]] = ContextVar("_CHAIN", default=())


class _MultiHead:
    """A copy of a function whose attention kernel and softmax pass a call through all handlers to torch's own.

    It hands itself on to the other modes that see the call, and is equal to the function, so that they know it.
    """

    __wrapped__: FunctionType

    def __init__(self, func: FunctionType, batch: int) -> None:
        own = func.__globals__["scaled_dot_product_attention"], func.__globals__["softmax"]

        def fused(*args: Any, **kwargs: Any) -> Any:
            return _through(0, own[0], args, kwargs)

        def softmax(scores: Tensor, *rest: Any, **options: Any) -> Tensor:
            split = scores.reshape(batch, -1, *scores.shape[-2:])
            out: Tensor = _through(1, own[1], (split, *rest), options)
            return out.reshape(scores.shape)

        names = {"scaled_dot_product_attention": fused, "softmax": softmax, func.__name__: self}
        self._run = FunctionType(
            func.__code__, func.__globals__ | names, func.__name__, func.__defaults__, func.__closure__
        )
        update_wrapper(self, func)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


def _through(kind: int, own: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    perform = own
    for handlers in reversed(_CHAIN.get()):
        perform = partial(_handled, handlers[kind], perform)
    return perform(*args, **kwargs)


def _handled(handler: Handler, perform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return handler(perform, args, kwargs)
