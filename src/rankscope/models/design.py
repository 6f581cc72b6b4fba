"""A transformer without weights: the properties that determine its tokens at initialisation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rankscope._printing import brief
from rankscope.errors import InputError
from rankscope.masks import parse_mask

NormKind = Literal["layernorm", "rmsnorm", "none"]
NormPlace = Literal["pre", "post", "none"]
Mlp = Literal["gelu", "gelu_new", "relu", "silu", "swiglu", "geglu", "linear", "none"]
Positions = Literal["none", "learned", "rope", "alibi"]
CHOICES: dict[str, tuple[str, ...]] = {
    "norm": get_args(NormKind),
    "norm_place": get_args(NormPlace),
    "mlp": get_args(Mlp),
    "positions": get_args(Positions),
}
COUNTS = ("depth", "width", "heads", "kv_heads", "head_dim", "mlp_width", "tokens")
NOT_NEGATIVE = (
    "norm_eps",
    "qk_norm",
    "query_std",
    "key_std",
    "value_std",
    "output_std",
    "mlp_in_std",
    "mlp_out_std",
    "embedding_std",
)


@dataclass(frozen=True)
class Design:
    r"""A transformer at initialisation: Gaussian weights, no biases, norms with gain 1.

    Attributes:
        depth: number of blocks.
        width: width of the stream.
        heads: query heads.
        kv_heads: key and value heads; as many as heads by default.
        head_dim: width of a head; width / heads by default.
        tokens: context length.
        mask: an expression such as ``"causal"``.
        positions: ``"rope"`` and ``"alibi"`` act on scores; ``"learned"`` ones are part of the first tokens.
        norm: kind of norm.
        norm_place: before a branch, after its sum with the stream, or nowhere.
        norm_eps: added to the mean square.
        branch_norm: whether what a branch adds is divided by its root mean square first (Peri-LN, sandwich norm); gains
            of branches act after it.
        mlp: its activation, possibly gated; ``"none"`` for a block without MLP.
        mlp_width: inner width; four times the width by default.
        qk_norm: standard deviation of the scores of queries and keys that are normed in each head; 0 if they are not.
        attention_skip: gain of the stream where attention is added; 0 removes the skip.
        mlp_skip: the same for the MLP.
        attention_scale: gain of the attention branch.
        mlp_scale: gain of the MLP branch.
        query_std: standard deviation of the entries of W_Q; so for the others.
        key_std: of W_K.
        value_std: of W_V.
        output_std: of W_O.
        mlp_in_std: of the MLP's first (and gate) matrix.
        mlp_out_std: of its last.
        embedding_std: of an entry of a token where it enters the first block, for designs without a norm there.
        embedding_norm: whether the first tokens are normed.
        initial_cosine: mean cosine of different tokens where they enter the first block.

    Example:
        >>> round(Design(depth=12, width=768, heads=12).score_std, 4)
        0.3072
    """

    depth: int
    width: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    tokens: int = 128
    mask: str = "complete"
    positions: Positions = "none"
    norm: NormKind = "layernorm"
    norm_place: NormPlace = "post"
    norm_eps: float = 1e-12
    branch_norm: bool = False
    qk_norm: float = 0.0
    mlp: Mlp = "gelu"
    mlp_width: int = 0
    attention_skip: float = 1.0
    mlp_skip: float = 1.0
    attention_scale: float = 1.0
    mlp_scale: float = 1.0
    query_std: float = 0.02
    key_std: float = 0.02
    value_std: float = 0.02
    output_std: float = 0.02
    mlp_in_std: float = 0.02
    mlp_out_std: float = 0.02
    embedding_std: float = 1.0
    embedding_norm: bool = True
    initial_cosine: float = 0.0

    __repr__ = brief

    def __post_init__(self) -> None:
        for name, value in (("kv_heads", self.heads), ("mlp_width", 4 * self.width)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.head_dim == 0 and isinstance(self.heads, int) and self.heads > 0 and isinstance(self.width, int):
            if self.width % self.heads:
                raise InputError(
                    f"A width of {self.width} cannot be divided among {self.heads} heads. Take heads that divide it, "
                    f"or say how wide a head is: head_dim={max(1, self.width // self.heads)}."
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        _check(self)
        parse_mask(self.mask)

    @property
    def score_std(self) -> float:
        r"""Standard deviation of an attention score :math:`q\cdot k/\sqrt{d_{qk}}` on normed tokens."""
        return self.qk_norm or self.query_std * self.key_std * self.width

    @property
    def value_gain(self) -> float:
        """The factor by which W_V and W_O together multiply a mean square."""
        return self.value_std**2 * self.width * self.output_std**2 * self.heads * self.head_dim

    @property
    def is_complete(self) -> bool:
        """Whether every token sees every token."""
        return self.mask == "complete"

    @property
    def is_position_free(self) -> bool:
        """Whether scores depend on tokens only."""
        return self.positions in ("none", "learned")

    def changed(self, **values: Any) -> Design:
        """The same design with other values; ``skip_gain`` sets both skips, ``weight_std`` every matrix.

        Raises:
            InputError: a name that is not a parameter of a design, or an invalid value.

        Example:
            >>> Design(depth=2, width=8, heads=2).changed(skip_gain=0.0).mlp_skip
            0.0
        """
        wanted: dict[str, Any] = {}
        for name, value in values.items():
            for field in TOGETHER.get(name, (name,)):
                wanted[field] = value
        unknown = sorted(set(wanted) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise InputError(f"A design has no {unknown[0]!r}. It has {', '.join(parameter_names())}.")
        follow = {"mlp_width": "width", "head_dim": "width", "kv_heads": "heads"}
        for follower, leader in follow.items():
            if leader in wanted and follower not in wanted and leader != "heads":
                wanted[follower] = round(getattr(self, follower) * wanted[leader] / getattr(self, leader))
        if "heads" in wanted:
            wanted.setdefault(
                "kv_heads", min(self.kv_heads, wanted["heads"]) if self.kv_heads < self.heads else wanted["heads"]
            )
            wanted["head_dim"] = values.get("head_dim", wanted.get("width", self.width) // max(1, wanted["heads"]))
        return dataclasses.replace(self, **wanted)

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return dataclasses.asdict(self)


TOGETHER = {
    "skip_gain": ("attention_skip", "mlp_skip"),
    "branch_scale": ("attention_scale", "mlp_scale"),
    "weight_std": ("query_std", "key_std", "value_std", "output_std", "mlp_in_std", "mlp_out_std"),
    "query_key_std": ("query_std", "key_std"),
}
"""Names that set several fields at once."""


def parameter_names() -> tuple[str, ...]:
    """Fields of a design, and the names that set several of them."""
    return (*(field.name for field in dataclasses.fields(Design)), *TOGETHER)


def _check(design: Design) -> None:
    for name in COUNTS:
        value = getattr(design, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
            raise InputError(f"{name} of a design is {value!r}. Expected a whole number from 1 to {1 << 20:,}.")
    if design.heads % design.kv_heads:
        raise InputError(f"{design.heads} heads cannot share {design.kv_heads} key heads evenly. Give a divisor.")
    for name, known in CHOICES.items():
        if getattr(design, name) not in known:
            raise InputError(f"{name} of a design is {getattr(design, name)!r}. Expected one of {', '.join(known)}.")
    for name in NOT_NEGATIVE:
        value = getattr(design, name)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise InputError(f"{name} of a design is {value!r}. Expected a finite number, 0 or more.")
    for name in ("attention_skip", "mlp_skip", "attention_scale", "mlp_scale"):
        if not math.isfinite(getattr(design, name)):
            raise InputError(f"{name} of a design is {getattr(design, name)!r}. Expected a finite number.")
    if not 0 <= design.initial_cosine <= 1:
        raise InputError(f"initial_cosine is {design.initial_cosine!r}. Expected a number from 0 to 1.")
    if design.branch_norm and design.norm_place != "pre":
        raise InputError(f"branch_norm goes with norm_place='pre' only, and here it is {design.norm_place!r}.")
    if (design.norm == "none") != (design.norm_place == "none"):
        raise InputError(
            f"norm={design.norm!r} does not go with norm_place={design.norm_place!r}. Set both to 'none', or neither."
        )
