"""MLPs linearised at their inputs: the model's own block runs again, with a tangent direction in its stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.paths.maps import IDENTITY, Chain, NormCall, departure, explain, tolerance
from rankscope.ext.paths.network import FrozenStep
from rankscope.models.loading.dtypes import default_dtype
from rankscope.models.stream import Stream
from rankscope.models.view import Label, ModelView
from rankscope.stream.frames import output_tensor
from rankscope.stream.mode import ActiveBlock, Perform, StreamMode
from rankscope.stream.operators import is_norm


@dataclass(frozen=True)
class Place:
    """Where the stream is replaced: at the block's entry, after an add, or at a norm, counted in the block."""

    kind: Literal["entry", "add", "norm"]
    number: int = 0


@dataclass(eq=False)
class BlockRun:
    """One call of one block, with what is needed to repeat it.

    Attributes:
        entry: the argument that is the stream; ``value`` is a copy of its value.
        parallel: the module whose output joins the attention branch, in a block that adds both at once.
    """

    view: ModelView
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    entry: Tensor
    value: Tensor
    parallel: nn.Module | None = None

    def branch(self, x: Tensor, place: Place, add: int | None, outlet: int | None) -> Tensor:
        """The output of the MLP if the stream is ``x`` (batch, tokens, dim) at ``place``.

        Read where it is added, where it joins attention (no ``add``), or at the input of the norm ``outlet``.
        """
        rerun = _Rerun(self.view, x, place, add, self.parallel, outlet)
        given = rerun.stream(self.module).native(x, self.value.shape) if place.kind == "entry" else self.value.clone()
        args = tuple(given if value is self.entry else value for value in self.args)
        kwargs = {name: given if value is self.entry else value for name, value in self.kwargs.items()}
        kwargs |= {name: None for name in kwargs if "past_key_value" in name}
        with rerun.active(), sdpa_kernel(SDPBackend.MATH), default_dtype(_default_for(self.value)):
            self.module(*args, **kwargs)
        assert rerun.seen is not None
        return rerun.seen

    def derivative(self, x: Tensor, direction: Tensor, place: Place, add: int | None, outlet: int | None) -> Tensor:
        """The Jacobian of :meth:`branch` at ``x`` times a direction."""
        dtype = self.value.dtype
        with torch.no_grad(), forward_ad.dual_level():
            moving = forward_ad.make_dual(x.to(dtype).clone(), direction.to(dtype).contiguous())  # type: ignore[no-untyped-call]
            try:
                branch = self.branch(moving, place, add, outlet)
                tangent: Tensor | None = forward_ad.unpack_dual(branch).tangent  # type: ignore[no-untyped-call]
            except NotImplementedError as error:
                raise UnsupportedConfigError(
                    f"The MLP of {type(self.module).__name__} has no forward derivative ({error}). "
                    "Decompose it with convention='sources'."
                ) from error
        return torch.zeros_like(direction) if tangent is None else tangent.to(direction.dtype).clone()


def linearised(
    step: FrozenStep,
    run: BlockRun,
    add: int | None,
    *,
    reads_sum: bool,
    way: Chain,
    state: Tensor,
    norms: Sequence[NormCall],
) -> FrozenStep:
    """The step with its MLP replaced by its Jacobian; norms around the MLP stay frozen, as elsewhere.

    Args:
        step: has the MLP's output as its source.
        run: the block.
        add: number of the add of the MLP in the block; None if it joins attention before both are added.
        reads_sum: whether the MLP reads the sum of the previous add, and not the block's input.
        way: maps ``state`` to the stream to which the MLP is added.
        state: (batch, tokens, dim).
        norms: those seen since ``state``.
    """
    assert step.source is not None
    offset = way.offset()
    at = way.linear(state) if offset is None else way.linear(state) + offset
    dtype, branch = state.dtype, step.source
    places = [(way, Place("add", add - 1) if reads_sum and add else Place("entry"), at)]
    if not way.is_identity:
        places = [(way, Place("norm", call.number), at) for call in norms if _near(call.given, at)]
    for call in norms:
        through = explain(state, call.given, norms, dtype)
        if through is not None and not through.is_identity:
            places.append((through, Place("norm", call.number), call.given.to(dtype)))
    after, outlet = IDENTITY, None
    for call in norms if add is not None else ():
        explained = explain(call.taken, branch.to(call.taken.dtype), norms, dtype)
        if explained is not None and not explained.is_identity:
            after, outlet = explained, call.number
    for way_in, place, x in reversed(places):
        probe = run.branch(2 * x.to(run.value.dtype), place, add, outlet)
        if not torch.equal(probe, run.branch(x.to(run.value.dtype), place, add, outlet)):
            moved = partial(run.derivative, x, place=place, add=add, outlet=outlet)
            return replace(step, tokenwise=moved, tokenwise_at=way_in, tokenwise_after=after, linearised_at=state)
    return step


def _default_for(x: Tensor) -> torch.dtype:
    """Set the default dtype as in a pass: constants that a model creates must not be float32 in a float64 model."""
    return torch.float64 if x.dtype is torch.float64 else torch.get_default_dtype()


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and departure(found, expected) <= tolerance(torch.float32)


class _Rerun(StreamMode):
    """Replaces the stream at one place and records what the MLP adds."""

    def __init__(
        self,
        view: ModelView,
        x: Tensor,
        place: Place,
        add: int | None,
        parallel: nn.Module | None,
        outlet: int | None,
    ) -> None:
        super().__init__(view)
        self._x, self._place, self._wanted, self._joins, self._outlet = x, place, add, parallel, outlet
        self._adds = self._norms = 0
        self.seen: Tensor | None = None

    def opens_outside_a_pass(self) -> bool:
        """A single block is run."""
        return True

    def stream(self, module: nn.Module) -> Stream:
        """Where the stream of this block's stack is."""
        modules = self.view.modules()
        return next(s.stream for s in self.view.stacks if any(modules[c.module_name] is module for c in s.calls))

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
        """Count adds, record the requested branch, and replace the sum before it."""
        if self._adds == self._wanted and self._outlet is None:
            self.seen = call.canonical(branch).clone()
        out: Tensor = perform()
        if self._place == Place("add", self._adds):
            out.copy_(call.native(self._x, out))
        self._adds += 1
        return out

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for module in block.modules():
            if is_norm(module):
                yield module.register_forward_hook(self._replace_norm)
            if self._wanted is None and module is self._joins:
                yield module.register_forward_hook(self._keep_parallel)
        yield from super()._inner_hooks(block)

    def _replace_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        number, self._norms = self._norms, self._norms + 1
        if self._open is None or not isinstance(output, Tensor):
            return
        if number == self._outlet:
            self.seen = self._open.canonical(args[0]).clone()
        if self._place == Place("norm", number):
            output.copy_(self._open.native(self._x, output))

    def _keep_parallel(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        out = output_tensor(output)
        assert self._open is not None
        assert out is not None
        self.seen = self._open.canonical(out).clone()
