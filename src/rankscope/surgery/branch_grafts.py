"""Grafts at the skips: gains on stream and branch, and moved norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import BlockCall, Label, ModelView
from rankscope.stream.mode import observing
from rankscope.surgery.graft import Amount, BlockGains, Graft, Place, Spot, amount_at


class BranchGains(Graft):
    r"""Skips as :math:`s\,x + a\,f(x)`: a factor on the stream, one on attention branches, one on MLP branches.

    A block that adds both at once uses the attention factor.

    Args:
        view: the model.
        attention: factor on the attention branch.
        mlp: factor on the MLP branch.
        stream: factor on the stream.
        learnable: make the factors on branches parameters, one per block.
    """

    name: ClassVar[str] = "branch gains"
    touches: ClassVar[frozenset[Place]] = frozenset({"adds"})

    def __init__(
        self,
        view: ModelView,
        attention: Amount,
        mlp: Amount,
        *,
        stream: Amount = 1.0,
        learnable: bool = False,
    ) -> None:
        super().__init__()
        self.gains = BlockGains(view, {"attention": attention, "mlp": mlp}, learnable=learnable)
        self.stream = stream

    def add(self, at: Spot, label: Label, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Both summands, multiplied by their factors."""
        gain = self.gains.at(at, "mlp" if label == "mlp" else "attention")
        scaled = branch if isinstance(gain, float) and gain == 1.0 else gain * branch
        factor = amount_at(self.stream, at)
        return (stream if factor == 1.0 else factor * stream), scaled

    def describe(self) -> dict[str, Any]:
        """The factors."""
        return {**super().describe(), "stream": "by block" if callable(self.stream) else self.stream}


class MlpWeightGains(Graft):
    r"""Every weight matrix of the MLPs times a factor: :math:`(bW)x` is :math:`W(bx)`, so inputs are scaled.

    Args:
        factor: b.
    """

    def __init__(self, factor: Amount) -> None:
        super().__init__()
        self.factor = factor

    def hooks(self, view: ModelView) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """One hook per matrix outside attention."""
        modules = view.modules()
        for stack in view.stacks:
            first = {call.module_name: call for call in reversed(stack.calls)}
            for name, call in first.items():
                factor = amount_at(self.factor, Spot(stack.name, call.first_layer, stack.depth))
                matrices = [modules[part] for part in _matrices_of_mlps(call, modules)]
                if not matrices:
                    raise UnsupportedOperationError(
                        f"{name}: no weight matrix of an MLP is a module of its own in it, so none can be scaled."
                    )
                for matrix in matrices:
                    yield matrix.register_forward_pre_hook(partial(_scale_input, factor))

    def describe(self) -> dict[str, Any]:
        """The factor."""
        return {"graft": "mlp weight gains", "factor": "by block" if callable(self.factor) else self.factor}


def _scale_input(factor: float, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    with observing():
        return (args[0] * factor, *args[1:])


def _matrices_of_mlps(call: BlockCall, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The modules in a block with a matrix by which no branch that mixes tokens multiplies."""
    if call.parts is None:
        raise UnsupportedOperationError(
            f"{call.module_name}: its operations could not be run once more, to see which weights mix tokens and which "
            "are those of an MLP."
        )
    mixing = {id(part) for name in call.parts.mixing for part in modules[name].modules()}
    inside = {id(part) for part in modules[call.module_name].modules()}
    for name, module in modules.items():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2 and id(module) in inside and id(module) not in mixing:
            yield name


class PreNorming(Graft):
    """Runs a post-norm block as a pre-norm one: branches read a norm of the stream, and sums are not normalised.

    The norm is LayerNorm without weights, which is how a LayerNorm is initialised. The last norm of the last
    block is kept, as the final norm of a pre-norm stack.
    """

    name: ClassVar[str] = "pre-norm"
    touches: ClassVar[frozenset[Place]] = frozenset({"norms", "reads"})
    norms_last_axis: ClassVar[bool] = True

    def read(self, at: Spot, x: Tensor) -> Tensor:
        """The stream, normalised for a branch."""
        return F.layer_norm(x, x.shape[-1:])

    def norm(self, at: Spot, x: Tensor, out: Tensor, *, is_last: bool) -> Tensor:
        """The sum itself, or its norm after the last block."""
        return out if is_last and at.layer == at.depth - 1 else x.clone()
