"""Runs a model in exact arithmetic, one sequence at a time, and shows its stream at the sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.exact_arithmetic.float64 import WideArithmetic, in_float64, widened
from rankscope.exact_arithmetic.registry import refuse
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.models.inputs import Batch
from rankscope.models.view import Label, ModelView
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.frames import first_tensor, with_another
from rankscope.stream.mode import Hooks, Perform, StreamMode
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Tracer
from rankscope.stream.viewing import undisturbed

ExactObserver = Callable[[int, SiteRef, Deviation, "Tensor | None"], None]
EXACT_SITES = ("block.in@0", "block.out")


class _LastBlockDone(Exception):  # noqa: N818  (no error: the way out of a forward pass whose rest is not needed)
    """Every block has run."""


def exact_stream(
    view: ModelView,
    batch: Batch,
    observe: ExactObserver,
    *,
    sites: SiteSelection | None = None,
    log_shrink: float = 0.0,
) -> None:
    """Run ``view.model`` on each sequence of a batch in exact arithmetic.

    The model runs in evaluation mode and in float64, without gradients, under any active surgery, up to its last
    block. It is restored afterwards.

    Args:
        view: the model and its structure.
        batch: the inputs.
        observe: receives the number of the sequence in the batch, the site, the stream there as ``1 tokens dim``, and
            which of its tokens count (``1 tokens``, None for all).
        sites: the sites to observe; by default the first block's input and every block's output.
        log_shrink: natural logarithm of a factor by which the tokens of each stack are first moved toward their mean.
            Far below zero, the run shows how the collapsed state reacts to a small deviation: its linear stability.

    Raises:
        UnsupportedArithmeticError: the model uses an operation without a rule.
    """
    selection = SiteSelection.parse(EXACT_SITES) if sites is None else sites
    with undisturbed(view.model), in_float64(view.model):
        for number, single in enumerate(single_sequences(batch)):
            show = partial(observe, number)
            with deviating(view, single.keep, show, selection, log_shrink=log_shrink):
                single.run(view.model)


@contextmanager
def deviating(
    view: ModelView,
    keep: Tensor | None,
    observe: Callable[[SiteRef, Deviation, Tensor | None], None],
    sites: SiteSelection,
    *,
    log_shrink: float = 0.0,
) -> Iterator[None]:
    """Inside the ``with`` block, the stream of ``view.model`` is a Deviation from its first block on.

    For one forward pass of one sequence. The pass, and with it the ``with`` block, ends after the model's last block.
    """
    deviation = _Deviation(view, keep, observe, sites, log_shrink)
    try:
        with WideArithmetic(), StreamMode(view, deviation).active():
            yield
    except _LastBlockDone:
        pass


def single_sequences(batch: Batch) -> Iterator[Batch]:
    """The sequences of a batch as separate batches, in float64."""
    batch = widened(batch)
    for row in range(batch.sequences):
        yield batch.taken(row, 1)


class _Deviation(Tracer):
    """Makes the stream a deviation at the entry of each block, and shows it."""

    def __init__(
        self,
        view: ModelView,
        keep: Tensor | None,
        observe: Callable[[SiteRef, Deviation, Tensor | None], None],
        sites: SiteSelection,
        log_shrink: float,
    ) -> None:
        super().__init__(sites, self._checked)
        self._log_shrink = log_shrink
        self._keep = keep
        self._pass_on = observe
        self._calls_left = sum(len(stack.calls) for stack in view.stacks)

    def hooks(self, modules: Mapping[str, nn.Module]) -> Hooks:
        """Replace the arguments of blocks, before any other hook sees them."""
        for name in {call.module_name for stack in self.mode.view.stacks for call in stack.calls}:
            yield modules[name].register_forward_pre_hook(self._deviate, prepend=True, with_kwargs=True)

    def _deviate(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook that replaces the incoming stream by a recentred deviation."""
        entry = first_tensor(args, kwargs)
        if entry is None:
            return None
        keep = self._fitting(entry)
        # Recentring at every block keeps the base at the mean token and the deviations as small as possible.
        if isinstance(entry, Deviation):
            new = entry.recentred(keep)
        else:
            new = Deviation.from_tokens(entry, keep).shrunk(self._log_shrink)
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = with_another((args, kwargs), entry, new)
        return replaced

    def _fitting(self, x: Tensor) -> Tensor | None:
        """Which tokens count, if they fit this stream; tokens that the model itself added as padding do not count."""
        rows = x.shape[:-1].numel()
        if self._keep is None or self._keep.numel() > rows:
            return None
        return torch.nn.functional.pad(self._keep, (0, rows - self._keep.numel()), value=False)

    def _checked(self, ref: SiteRef, x: Observed) -> None:
        """Pass the stream on to the observer, with the tokens that count."""
        if not isinstance(x, Deviation):
            refuse(f"what happens before {ref}", "the stream comes back as a plain tensor, its deviation lost")
        self._pass_on(ref, x, self._fitting(x))

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Show the branch and the sum, which must have a common part to rely on."""
        out = super().add(call, label, stream, branch, perform)
        if isinstance(out, Deviation):
            out.check_exact(self._fitting(out))
        return out

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """Show the stream as it leaves a block, and stop after the last block."""
        super().leave(call, module, output, left)
        self._calls_left -= 1
        if self._calls_left == 0:
            raise _LastBlockDone
