"""The weights of a block's MLP, read through the family descriptions."""

# The names follow the algebra.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rankscope.errors import UnsupportedConfigError
from rankscope.models.heads.family import ABSENT, Family, config_value, family_of
from rankscope.models.linear_maps import linear_at

_GATED = ("gate_proj", "up_proj", "down_proj")
_PLAIN = (
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("lin1", "lin2"),
    ("up_proj", "down_proj"),
    ("layer_1", "layer_2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("w1", "w2"),
)
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "activation", "ff_activation")


@dataclass(frozen=True, eq=False)
class MlpWeights:
    r""":math:`\phi(xW_{in})W_{out}`, or with a gate :math:`(\phi(xW_{gate})\odot xW_{in})W_{out}`; biases are omitted.

    Attributes:
        W_in: (dim, width).
        W_out: (width, dim).
        W_gate: (dim, width), None without a gate.
        activation: its name in the configuration.
        radius: largest norm of a token after the norm before the MLP; None without a gate.
    """

    W_in: torch.Tensor
    W_out: torch.Tensor
    W_gate: torch.Tensor | None
    activation: str
    radius: float | None


def mlp_weights(block: torch.nn.Module, config: Any) -> MlpWeights:
    """The MLP of one block.

    Raises:
        UnsupportedConfigError: the MLP has experts, or an unknown layout.
    """
    family = family_of(config)
    parameters = {name: p.detach() for name, p in block.named_parameters(remove_duplicate=False)}
    activation = _activation(config)
    if len(family.mlp) == 2:
        W_in, W_out = (_matrix(block, path, family) for path in family.mlp)
        if W_in is not None and W_out is not None:
            return MlpWeights(W_in, W_out, None, activation, None)
    elif len(family.mlp) == 1:
        root = family.mlp[0]
        maps = [linear_at(block, f"{root}.{name}", transposed=family.transposed) for name in _GATED]
        gate, up, down = (None if read is None or read.weight.ndim != 2 else read.weight.T for read in maps)
        if gate is not None and up is not None and down is not None:
            biased = [
                name for name, read in zip(_GATED[:2], maps, strict=False) if read is not None and read.bias is not None
            ]
            if biased:
                raise UnsupportedConfigError(
                    f"The gated MLP of {config.model_type!r} has biases ({', '.join(biased)}): its Lipschitz constant "
                    "is certified only without."
                )
            return MlpWeights(up, down, gate, activation, _radius(family, parameters, config))
        for first, second in _PLAIN:
            W_in, W_out = (_matrix(block, f"{root}.{name}", family) for name in (first, second))
            if W_in is not None and W_out is not None:
                return MlpWeights(W_in, W_out, None, activation, None)
    raise UnsupportedConfigError(
        f"The MLP of {config.model_type!r} cannot be read: the family {family.name!r} has it at "
        f"{' and '.join(family.mlp) or 'no known place'}, and there are no two or three plain matrices there."
    )


def _matrix(block: torch.nn.Module, path: str, family: Family) -> torch.Tensor | None:
    """(in, out); None if no matrix is at this path."""
    read = linear_at(block, path, transposed=family.transposed)
    return None if read is None or read.weight.ndim != 2 else read.weight.T


def _activation(config: Any) -> str:
    for key in _ACTIVATION_KEYS:
        value = config_value(config, key)
        if value is not ABSENT and isinstance(value, str):
            return value
    raise UnsupportedConfigError(f"The configuration of {config.model_type!r} names no activation of its MLP.")


def _radius(family: Family, found: dict[str, torch.Tensor], config: Any) -> float:
    r"""Root mean square 1 times the gain, plus shift, :math:`\sqrt d\,\max|g| + \|b\|`; Gemma stores g - 1."""
    before = family.norms[-1] if len(family.norms) == 2 and "post_feedforward" not in family.norms[-1] else None
    gain = None if before is None else found.get(f"{before}.weight")
    if gain is None:
        raise UnsupportedConfigError(
            f"The gated MLP of {config.model_type!r} is Lipschitz only where its input is bounded, and the norm before "
            "it is not where its family has it."
        )
    size = (gain.double() + 1 if str(config.model_type).startswith("gemma") else gain.double()).abs().max()
    shift = found.get(f"{before}.bias")
    return float(size * gain.numel() ** 0.5 + (0.0 if shift is None else torch.linalg.vector_norm(shift.double())))
