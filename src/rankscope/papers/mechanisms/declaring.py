"""What a row of the table of mechanisms is: a model family at one common size, as data. No torch in this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Group = Literal["softmax", "positions", "local", "approximate", "recurrent", "hybrid"]
GROUPS: Mapping[Group, str] = {
    "softmax": "softmax attention",
    "positions": "positions inside attention",
    "local": "windows and sparse patterns",
    "approximate": "in the place of softmax",
    "recurrent": "linear and recurrent",
    "hybrid": "hybrids",
}


@dataclass(frozen=True)
class Size:
    """The size every mechanism is built at.

    Attributes:
        width: of the stream.
        depth: blocks.
        heads: where there are any.
        tokens: of a sequence; an image has as many patches.
        vocabulary: tokens a text model knows.
        sequences: how many are read in float64; exact arithmetic reads the first.
        seeds: random initialisations.
    """

    width: int = 128
    depth: int = 12
    heads: int = 4
    tokens: int = 64
    vocabulary: int = 512
    sequences: int = 2
    seeds: int = 3

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def side(self) -> int:
        """Patches along one side of a square image."""
        return math.isqrt(self.tokens)

    def every(self, period: int, offset: int) -> list[int]:
        """Numbers of the blocks ``offset``, ``offset + period``, ..."""
        return list(range(offset % period, self.depth, period))


FULL = Size()
SMALL = Size(width=32, depth=2, tokens=16, vocabulary=64, sequences=1, seeds=1)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Mechanism:
    """One row.

    Attributes:
        name: as it is written on the command line.
        model: the family of transformers it is taken from.
        words: what mixes tokens, in one line.
        group: where it stands in the table.
        model_type: of the transformers configuration.
        config: keys of that configuration, given the common size.
        model_class: the class to build.
        uncut: why its skips cannot all be cut, empty where they can.
    """

    name: str
    model: str
    words: str
    group: Group
    model_type: str
    config: Callable[[Size], Config]
    model_class: str = "AutoModel"
    uncut: str = ""


def encoder(size: Size) -> dict[str, Any]:
    """Keys most text models share."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def decoder(size: Size) -> dict[str, Any]:
    """The same with as many key-value heads as heads."""
    return {**encoder(size), "num_key_value_heads": size.heads}


def with_head_width(size: Size) -> dict[str, Any]:
    """The same where the width of a head is a key of its own."""
    return {**decoder(size), "head_dim": size.head}


def old_decoder(size: Size, **names: str) -> dict[str, Any]:
    """Keys of the first causal models, whose names for width, depth and heads differ."""
    width, depth, heads = (names.get(key, default) for key, default in _OLD.items())
    shape = {width: size.width, depth: size.depth, heads: size.heads}
    return {"vocab_size": size.vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **shape}


_OLD = {"width": "n_embd", "depth": "n_layer", "heads": "n_head"}


def vision(size: Size) -> dict[str, Any]:
    """Keys of a vision model whose image has as many patches as a text has tokens."""
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "intermediate_size": 4 * size.width,
        "patch_size": 8,
        "image_size": 8 * size.side,
    }


def mamba2_parts(size: Size, prefix: str) -> dict[str, Any]:
    """The state-space half of a hybrid with Mamba-2 layers: an inner width of twice the stream, in 8 heads."""
    return {
        f"{prefix}n_heads": 8,
        f"{prefix}d_head": size.width // 4,
        f"{prefix}d_state": 16,
        f"{prefix}chunk_size": 16,
    }
