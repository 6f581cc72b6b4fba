"""An observer in one of several processes: an error in it must not stop a forward pass that others take part in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from rankscope._errors import InputError
from rankscope.models.inputs import Batch
from rankscope.models.spread import is_distributed, whole
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef
from rankscope.stream.tracer import Observer


class Watch:
    """Hands on what is seen, whole; keeps an error until the forward pass is over.

    Args:
        observe: what looks.
        spread: whether activations may be spread over the ranks.

    Attributes:
        batch: what the forward pass that runs is of.
        gathered_heads: whether heads were seen as distributed tensors, and put together here.
    """

    def __init__(self, observe: Observer, *, spread: bool) -> None:
        self._observe = observe
        self._spread = spread
        self._still = False
        self._error: Exception | None = None
        self.batch: Batch | None = None
        self.gathered_heads = False

    def __call__(self, ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        """Look, unless told to keep still."""
        if self._spread:
            seen = self._whole(seen)
        if self._still or self._error is not None:
            return
        try:
            if self._spread and isinstance(seen, Tensor):
                self._need_all_tokens(ref, seen)
            self._observe(ref, seen)
        except Exception as error:  # noqa: BLE001  (raised by settle, when no rank waits for this one any more)
            self._error = error

    def settle(self) -> None:
        """The forward pass is over: raise what was kept."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Keep still for a while."""
        self._still = True
        try:
            yield
        finally:
            self._still = False

    def _need_all_tokens(self, ref: SiteRef, stream: Tensor) -> None:
        ids = None if self.batch is None else self.batch.inputs.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 2 and stream.shape[1] < ids.shape[1]:
            raise InputError(
                f"At {ref.site} of block {ref.layer} this process holds {stream.shape[1]} of {ids.shape[1]} tokens: "
                "the stream is cut along the sequence (sequence parallel). Load the model with a plan that keeps it "
                "whole."
            )

    def _whole(self, seen: Tensor | AttentionCall) -> Tensor | AttentionCall:
        if isinstance(seen, Tensor):
            return whole(seen)
        names = ("weights", "query", "key", "value", "mask")
        spread: dict[str, Any] = {
            name: whole(tensor) for name in names if is_distributed(tensor := getattr(seen, name))
        }
        self.gathered_heads |= bool(spread)
        return replace(seen, **spread) if spread else seen
