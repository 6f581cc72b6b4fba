"""The networks of the figure: as the authors cut them, family by family, and as the theorem means them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from rankscope._errors import UnsupportedOperationError
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named

if TYPE_CHECKING:
    from rankscope.models.loading import LoadedModel

Reading = Literal["authors", "theorem"]
CurveName = Literal["SAN", "SAN+MLP", "SAN+skip", "transformer"]


@dataclass(frozen=True)
class Network:
    """One curve of the figure.

    Attributes:
        name: as the paper labels it.
        reading: as the authors ran it, or as the theorem means it.
        operation: what surgery does.
        without_mlp: whether the authors' own way of taking the MLP out is applied besides.
    """

    name: CurveName
    reading: Reading
    operation: Operation
    without_mlp: bool = False


_NO_SKIP = Operation(attention_skip=0.0)

NETWORKS: tuple[Network, ...] = (
    Network("SAN", "authors", _NO_SKIP, without_mlp=True),
    Network("SAN+MLP", "authors", _NO_SKIP),
    Network("SAN+skip", "authors", Operation(), without_mlp=True),
    Network("transformer", "authors", Operation()),
    Network("SAN", "theorem", variant_named("pure").operation),
    Network("SAN+MLP", "theorem", variant_named("+mlp").operation),
    Network("SAN+skip", "theorem", variant_named("+skip").operation),
)
AUTHORS = tuple(network for network in NETWORKS if network.reading == "authors")


class _Bypass(nn.Module):
    """Hands its second argument on: BERT's MLP output, its skip and its norm in one module, all gone."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """``input_tensor``, as it came."""
        return input_tensor


def _without_bert_mlp(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """MLP, its skip and its norm go together."""
    return [
        swap
        for layer in _called(model, "Layer")
        for swap in ((layer, "intermediate", nn.Identity()), (layer, "output", _Bypass()))
    ]


def _without_albert_mlp(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Both matrices go; the activation between them stays, and so do the MLP's skip and norm: LN(x + gelu(x))."""
    return [
        swap
        for layer in _called(model, "Layer")
        for swap in ((layer, "ffn", nn.Identity()), (layer, "ffn_output", nn.Identity()))
    ]


def _without_xlnet_mlp(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """MLP, its skip and its norm go together."""
    return [(layer, "ff", nn.Identity()) for layer in _called(model, "Layer")]


def _called(model: nn.Module, ending: str) -> list[nn.Module]:
    names = {f"{family}{ending}" for family in ("Bert", "Albert", "XLNet")}
    return [module for module in model.modules() if type(module).__name__ in names]


Swaps = Callable[[nn.Module], list[tuple[nn.Module, str, nn.Module]]]
MLP_SWAPS: Mapping[str, Swaps] = MappingProxyType(
    {"bert": _without_bert_mlp, "albert": _without_albert_mlp, "xlnet": _without_xlnet_mlp}
)


@contextmanager
def mlp_taken_out(loaded: LoadedModel) -> Iterator[None]:
    """The MLPs taken out as the authors did it, for the length of the block; the model is put together again after.

    Raises:
        UnsupportedOperationError: for a family that the figure does not show.
    """
    family = "no transformers model" if loaded.config is None else str(loaded.config.model_type)
    if family not in MLP_SWAPS:
        raise UnsupportedOperationError(
            f"How the authors take the MLP out is known for {', '.join(MLP_SWAPS)}; {loaded.spec} is {family}."
        )
    with ExitStack() as restoring:
        for parent, name, replacement in MLP_SWAPS[family](loaded.model):
            restoring.callback(setattr, parent, name, getattr(parent, name))
            setattr(parent, name, replacement)
        yield


@contextmanager
def prepared_for(network: Network, loaded: LoadedModel) -> Iterator[None]:
    """Whatever the network needs besides surgery."""
    with mlp_taken_out(loaded) if network.without_mlp else nullcontext():
        yield
