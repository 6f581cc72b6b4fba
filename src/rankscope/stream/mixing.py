r"""Measures how each block mixes the residual streams of a token, without knowing how the model writes it down.

In a block with several streams per token, :math:`x'_k = \sum_j H_{kj}x_j + \text{what branches write}`. The matrix H
acts on the streams and leaves channels alone; everything else (attention, MLP, the maps that compute H from the
tokens) acts on the channels. This difference is used to measure H in one forward pass of the model's own code:

- Each stream j enters the block with its own tangent, a random direction :math:`r_j` over the channels. Forward-mode
  differentiation carries the tangents through the block.
- A tensor whose tangent is a combination of :math:`r_1, ..., r_n` along its channels is still a mixture of streams. If
  an operation returns anything else, it acted on the channels: its tangent is dropped, which holds branches and
  computed coefficients fixed at their values. A norm module always counts as acting on channels.
- The tangent of stream k at the end of the block is :math:`\sum_j H_{kj}r_j`, from which H is read, for every token.

A second pass scales the tangents by a random number per token. H has to be the same; if it is not, the block carries
the streams of one token to another, and there is no mixing matrix per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankscope.errors import UnsupportedConfigError
from rankscope.linalg.precision import as_float64, float64_home
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import without_fastpath
from rankscope.stream.frames import first_tensor, output_tensor, summands_of, tensors_in, with_output_tensor
from rankscope.stream.operators import (
    ADDED_MATRIX_PRODUCTS,
    ADDED_PRODUCTS,
    IN_PLACE_SUMS,
    INTERPOLATIONS,
    MOVES,
    is_norm,
)

_ROUNDINGS = 32
"""Roundings of the largest tangent by which a mixture of streams may differ from a combination of the directions."""
_SUMS_WITH_PRODUCTS = ADDED_PRODUCTS | ADDED_MATRIX_PRODUCTS | INTERPOLATIONS
_LEAST_SPARE = 4
"""Channels needed beyond one per stream, so that no combination of directions fits an arbitrary tangent."""


def mixing_matrices(
    view: ModelView, stack: Stack, batch: Batch
) -> dict[int, Float[Tensor, "batch tokens streams streams"]]:
    """The matrix by which each block mixes the streams of each token, in float64, by block.

    ``H[b, t, k, j]`` is the weight of stream j before the block in stream k after it. If blocks are modules that only
    write to streams, the streams that enter the first one are not seen, and it has no entry.

    Raises:
        UnsupportedConfigError: a block has no such matrix, or none that can be measured.
    """
    return _checked(view, stack, batch)[0]


def adds_only(view: ModelView, stack: Stack, batch: Batch) -> bool:
    """Whether every block passes each stream on as it is, and adds to it what branches write."""
    try:
        matrices, tolerance = _checked(view, stack, batch)
    except UnsupportedConfigError:
        return False
    return all(float((H - torch.eye(H.shape[-1]).to(H)).abs().max()) <= tolerance for H in matrices.values())


def _checked(view: ModelView, stack: Stack, batch: Batch) -> tuple[dict[int, Tensor], float]:
    """The matrices, and how much rounding may change an entry of them."""
    tangents = _Tangents(stack)
    matrices = _measured(view, stack, batch, tangents)
    again = _measured(view, stack, batch, _Tangents(stack, per_token=True))
    tolerance = 2 * _ROUNDINGS * torch.finfo(tangents.directions.dtype).eps
    for layer, matrix in matrices.items():
        _check(stack, layer, matrix, again[layer], tolerance)
    return matrices, tolerance


def _check(stack: Stack, layer: int, found: Tensor, again: Tensor, tolerance: float) -> None:
    where = f"Block {layer} ({stack.calls[layer].module_name})"
    size = float(found.abs().max())
    if not size > 0 or not bool(torch.isfinite(found).all()):
        raise UnsupportedConfigError(
            f"{where} returns streams that are not linear mixtures of those that entered it (after a norm of "
            "all of them, for example), or that are not finite: there is no mixing matrix."
        )
    lost = [k for k in range(found.shape[-2]) if not bool(found[..., k, :].any())]
    if lost:
        raise UnsupportedConfigError(
            f"{where} returns stream {lost[0]} without any of the streams that entered it: it is replaced or goes "
            "through a norm, and there is no mixing matrix."
        )
    if float((found - again).abs().max()) > tolerance * size:
        raise UnsupportedConfigError(
            f"{where} carries streams from one token to another, so there is no mixing matrix per token."
        )


class _Tangents:
    """One direction per stream, orthonormal, times a factor per token that is 1 unless ``per_token``."""

    def __init__(self, stack: Stack, *, per_token: bool = False) -> None:
        self.stack = stack
        self._generator = torch.Generator().manual_seed(1 if per_token else 0)
        self._per_token = per_token
        self._factors: Tensor | None = None
        self.directions = torch.empty(0)

    def like(self, x: Tensor, sequences: int) -> Tensor:
        """The tangent of streams ``x``, which lie as the stack declares."""
        batch, tokens, streams, dim = self.stack.stream.apart(x, sequences).shape
        if dim < streams + _LEAST_SPARE:
            raise UnsupportedConfigError(
                f"{streams} streams of {dim} channels are too narrow to measure how they are mixed; "
                f"{streams + _LEAST_SPARE} channels are needed."
            )
        if self.directions.shape != (streams, dim):
            drawn = torch.randn(dim, streams, generator=self._generator, dtype=torch.float64)
            self.directions = torch.linalg.qr(drawn).Q.T.to(x.dtype).to(x.device)
        if self._factors is None or self._factors.shape != (batch, tokens):
            drawn = torch.rand(batch, tokens, generator=self._generator, dtype=torch.float64)
            self._factors = (0.5 + drawn if self._per_token else torch.ones_like(drawn)).to(float64_home(x))
        tangent = self._factors[..., None, None].to(x.dtype).to(x.device) * self.directions
        return self.stack.stream.from_apart(tangent, x.shape, sequences)

    def read(self, tangent: Tensor, sequences: int) -> Tensor:
        """The weights of the directions in the tangent of streams, per token."""
        assert self._factors is not None
        apart = as_float64(self.stack.stream.apart(tangent, sequences))
        return apart @ as_float64(self.directions).T / self._factors[..., None, None]

    def is_mixture(self, tangent: Tensor, size: float = 0.0, *, loosely: bool = False) -> bool:
        """Whether a tangent is a combination of the directions along one of its axes.

        ``size`` is that of the tangents it was computed from, to which its rounding is relative. With ``loosely``, up
        to a quarter of it: for differences, which have few digits left.
        """
        relative = 0.25 if loosely else _ROUNDINGS * torch.finfo(tangent.dtype).eps
        limit = relative * max(size, float(tangent.abs().max()))
        dim = self.directions.shape[-1]
        directions = self.directions.to(tangent.dtype)
        for axis in reversed(range(tangent.dim())):
            if tangent.shape[axis] == dim:
                along = tangent.movedim(axis, -1)
                if float((along - along @ directions.T @ directions).abs().max()) <= limit:
                    return True
        return False


class _OnlyMixtures(TorchFunctionMode):
    """Drops the tangent of every tensor that is no longer a mixture of streams."""

    def __init__(self, tangents: _Tangents) -> None:
        super().__init__()
        self._tangents = tangents

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        terms = summands_of(func, args, kwargs) if func in _SUMS_WITH_PRODUCTS else None
        if terms is not None:
            # One call that adds a product to a stream: tested term by term, or the stream would be dropped with it.
            own, other = (self._kept(term.value(), args, kwargs) for term in terms)
            total = own + other
            return args[0].copy_(total) if func in IN_PLACE_SUMS else total
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            return self._without_derivative(func, args, kwargs)
        return out if func in MOVES else self._kept(out, args, kwargs)

    def _kept(self, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call returned, without the tangents that are no mixtures."""
        with torch._C.DisableTorchFunction():
            given = map(_tangent, tensors_in((args, kwargs), depth=3))
            sizes = [float(tangent.abs().max()) for tangent in given if tangent is not None]
            if not sizes:
                return out
            return _mapped(out, lambda tensor: self._tested(tensor, max(sizes), in_place=_is_any(tensor, args)))

    def _without_derivative(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a kernel without a forward derivative; a difference must show that no mixture comes out of it."""
        with torch._C.DisableTorchFunction():
            given, moved = _mapped((tuple(args), dict(kwargs)), _primal), _mapped((tuple(args), dict(kwargs)), _moved)
            out, other = func(*given[0], **given[1]), func(*moved[0], **moved[1])
            changes = [b - a for a, b in zip(tensors_in(out), tensors_in(other), strict=True)]
            if any(bool(change.any()) and self._tangents.is_mixture(change, loosely=True) for change in changes):
                raise UnsupportedConfigError(
                    f"The streams pass through {getattr(func, '__name__', func)}, which has no forward-mode "
                    "derivative: how they are mixed cannot be measured."
                )
            return out

    def _tested(self, tensor: Tensor, size: float, *, in_place: bool) -> Tensor:
        tangent = _tangent(tensor)
        if tangent is None or self._tangents.is_mixture(tangent, size):
            return tensor
        if in_place:
            tangent.zero_()
            return tensor
        return _primal(tensor)


def _measured(view: ModelView, stack: Stack, batch: Batch, tangents: _Tangents) -> dict[int, Tensor]:
    matrices: dict[int, Tensor] = {}
    calls = iter(range(len(stack.calls)))
    enters = stack.stream.takes == "stream"

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with torch._C.DisableTorchFunction():
            given = first_tensor(args, kwargs)
            assert given is not None
            # Other arguments, such as an earlier stream, have to enter without tangents.
            streams = _dual(_primal(given), tangents, batch.sequences)
            args, kwargs = _mapped((args, kwargs), lambda tensor: streams if tensor is given else _primal(tensor))
            return args, kwargs

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        with torch._C.DisableTorchFunction():
            layer = next(calls)
            out = output_tensor(output)
            assert out is not None
            tangent, bare = _tangent(out), _primal(out)
            if enters or layer > 0:
                matrices[layer] = tangents.read(torch.zeros_like(bare) if tangent is None else tangent, batch.sequences)
            return with_output_tensor(output, bare if enters else _dual(bare, tangents, batch.sequences))

    def after_norm(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # With equal gains, a norm looks like a number per token; with others, it acts on channels. Always the latter.
        with torch._C.DisableTorchFunction():
            return _mapped(output, _primal)

    modules = view.modules()
    with ExitStack() as hooks:
        for module in filter(is_norm, modules.values()):
            hooks.callback(module.register_forward_hook(after_norm).remove)
        for name in dict.fromkeys(call.module_name for call in stack.calls):
            if enters:
                hooks.callback(modules[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(modules[name].register_forward_hook(leave).remove)
        hooks.enter_context(without_fastpath())
        hooks.enter_context(torch.no_grad())
        hooks.enter_context(forward_ad.dual_level())
        hooks.enter_context(_OnlyMixtures(tangents))
        try:
            batch.run(view.model)
        except (NotImplementedError, RuntimeError) as error:
            # Sparse tensors and derivatives that the model takes by itself; without tangents it has run before.
            raise UnsupportedConfigError(
                f"{type(view.model).__name__} cannot run with forward-mode derivatives, so how its streams are mixed "
                f"cannot be measured: {' '.join(str(error).split())[:200]}"
            ) from error
    return matrices


def _dual(x: Tensor, tangents: _Tangents, sequences: int) -> Tensor:
    dual: Tensor = forward_ad.make_dual(x, tangents.like(x, sequences))  # type: ignore[no-untyped-call]
    return dual


def _tangent(tensor: Tensor) -> Tensor | None:
    if not tensor.is_floating_point():
        return None
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def _primal(tensor: Tensor) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call]
    return primal


def _moved(tensor: Tensor) -> Tensor:
    tangent = _tangent(tensor)
    return _primal(tensor) if tangent is None else _primal(tensor) + tangent


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested value with every floating tensor changed; other containers are left as they are."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    return value


def _is_any(tensor: Tensor, args: Sequence[Any]) -> bool:
    return any(tensor is arg for arg in args)
