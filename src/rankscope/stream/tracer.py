"""The tracer: shows the residual stream of a running model at every site.

The model's own code runs unchanged and the tracer only observes, so outputs are bit-identical. Observers receive
tensors of shape ``batch tokens dim``, at sites of several streams ``batch tokens streams dim``, and must reduce them
immediately: the tracer stores nothing.

A fused attention kernel does not expose the logarithm of each row's sum of exponentials in Python, but PyTorch's CPU
kernel returns it internally for the backward pass. Given these log-sums, the probabilities of any tile follow from
queries and keys alone, which saves one walk over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import ModelView, Stack
from rankscope.stream.attention_calls import AttentionCall, from_sdpa, from_softmax, listening, sdpa_arguments
from rankscope.stream.mode import ActiveBlock, Perform, SiteMode, unseen
from rankscope.stream.sites import SiteRef, SiteSelection

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WORTH_ENTRIES = 1 << 20


class KernelSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the log-sums while one fused call runs; the call itself is unchanged."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: list[Tensor] = []

    @property
    def log_sums(self) -> Tensor | None:
        """``(batch, heads, query)``, from the one kernel that ran; None if there was none, or several."""
        return self._found[0] if len(self._found) == 1 else None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _KERNEL:
            self._found.append(out[1])
        return out


def watching_kernel(query: Tensor, key: Tensor) -> AbstractContextManager[KernelSums | None]:
    """Record the log-sums if it pays off: for long sequences of plain tensors on a CPU."""
    plain = type(query) is Tensor and type(key) is Tensor
    if not plain or query.device.type != "cpu":
        return nullcontext()
    entries = query.shape[:-1].numel() * key.shape[-2]
    return KernelSums() if entries >= _WORTH_ENTRIES else nullcontext()


Observer = Callable[[SiteRef, "Tensor | AttentionCall"], None]


@contextmanager
def trace(view: ModelView, selection: SiteSelection, observe: Observer) -> Iterator[None]:
    """Observe the selected sites of every forward pass of ``view.model`` inside the ``with`` block.

    Blocks that run again in a backward pass (gradient checkpointing) are not shown a second time.

    Raises:
        SiteError: a block or a skip add does not occur as it did when the model was probed.
    """
    with Tracer(view, selection, observe).active():
        yield


class Tracer(SiteMode):
    """Shows the selected sites to an observer."""

    def __init__(self, view: ModelView, selection: SiteSelection, observe: Observer) -> None:
        super().__init__(view, selection)
        self._observe = observe

    def reads_attention(self) -> bool:
        """Whether attention was selected."""
        return self._selection.wants_attention

    def show(self, ref: SiteRef, x: Tensor | AttentionCall) -> None:
        """Pass the stream, or attention, on to the observer."""
        with unseen():
            self._observe(ref, x)

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Show fused attention, and its output."""
        named, shown = sdpa_arguments(args, kwargs), ref in self._selection
        watch = watching_kernel(named["query"], named["key"]) if shown else nullcontext()
        with listening() as heard, watch as told:
            out = perform(*args, **kwargs)
        seen = heard[-1] if heard else from_sdpa(args, kwargs, None if told is None else told.log_sums)
        if seen is not None and shown:
            self.show(ref, seen)
        mixed = replace(ref, site=ref.site.replace(".probs", ".mixed"))
        if mixed in self._selection:
            self.show(mixed, out)
        return out

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Show attention at its softmax."""
        out = perform(*args, **kwargs)
        assert self._open is not None
        if ref in self._selection:
            self.show(ref, from_softmax(out, self._open.batch_and_tokens()[1]))
        return out

    def on_leave(self, call: ActiveBlock, out: Tensor) -> None:
        """Show the stream as it leaves a block."""
        left = out if call.last_sum is None else call.last_sum
        self._show(call, "block.out", left)
        self._show_streams(call, "streams.out", left)
        if call.last_sum is not None:
            self._show(call, "final", out)

    def on_final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """Show the stream after the final norm."""
        ref = SiteRef(stack.name, stack.depth - 1, "final")
        if ref in self._selection:
            self.show(ref, stack.stream.canonical(out, sequences_in_pass()))
        return out
