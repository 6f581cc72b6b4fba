"""How large the gradients of query, key and value weights are, block by block."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope._errors import UnsupportedConfigError
from rankscope.models.heads import head_weights
from rankscope.models.inputs import Batch
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace


@dataclass(frozen=True)
class GradientNorms:
    """Frobenius norms of the gradients of one block's weights, all heads together."""

    stack: str | None
    layer: int
    query: float
    key: float
    value: float


def gradient_norms(loaded: LoadedModel, view: ModelView, batch: Batch, seed: int = 0) -> list[GradientNorms]:
    r"""Gradients of :math:`\langle G, X_L\rangle / \sqrt{nd}`, with G a fixed Gaussian matrix and X_L the last block.

    Exact, for that loss and these inputs. At collapse those of queries and keys vanish and those of values do not
    [noci2022signal]; their ratio does not depend on the scale of the loss. A block that is called in several layers
    has one gradient, given for the first. The model's own ``.grad`` fields are left alone.

    Raises:
        UnsupportedConfigError: where the head weights of this model are is not known.
    """
    if loaded.config is None:
        raise UnsupportedConfigError(f"{loaded.spec} is not a transformers model: its head weights are not known.")
    modules = view.modules()
    parameters = [p for p in loaded.model.parameters() if p.is_floating_point()]
    with _differentiable(parameters), torch.enable_grad():
        loss = _projection(loaded.model, view, batch, seed)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {id(p): g for p, g in zip(parameters, found, strict=True)}
    norms = []
    for stack in view.stacks:
        for name, layer in {call.module_name: call.first_layer for call in reversed(stack.calls)}.items():
            heads = head_weights(_with_gradients_for_weights(modules[name], gradients), loaded.config)
            sizes = (float(w.double().norm()) for w in (heads.W_Q, heads.W_K_groups, heads.W_V_groups))
            norms.append(GradientNorms(stack.name, layer, *sizes))
    return sorted(norms, key=lambda entry: (str(entry.stack), entry.layer))


def _projection(model: nn.Module, view: ModelView, batch: Batch, seed: int) -> Tensor:
    """The loss: every stack's last block, on a Gaussian matrix."""
    parts: list[Tensor] = []

    def take(ref: SiteRef, x: Tensor | AttentionCall) -> None:
        assert isinstance(x, Tensor)
        if ref.layer == depths[ref.stack] - 1:
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            parts.append((direction * x).sum() / (x.shape[-1] * x.shape[-2]) ** 0.5)

    depths = {stack.name: stack.depth for stack in view.stacks}
    with trace(view, SiteSelection.parse(("block.out",)), take):
        batch.run(model)
    return torch.stack(parts).sum()


@contextmanager
def _differentiable(parameters: list[nn.Parameter]) -> Iterator[None]:
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _with_gradients_for_weights(module: nn.Module, gradients: Mapping[int, Tensor | None]) -> nn.Module:
    """A shallow copy of a module whose weights are their gradients, so that they are cut into heads as weights are.

    It is read and never run: its hooks are those of the module, which a deep copy would copy too.
    """
    twin = copy.copy(module)
    twin._parameters = {
        name: None if own is None else nn.Parameter(_or_zeros(gradients.get(id(own)), own), requires_grad=False)
        for name, own in module._parameters.items()
    }
    twin._modules = {
        name: None if child is None else _with_gradients_for_weights(child, gradients)
        for name, child in module._modules.items()
    }
    return twin


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach()
