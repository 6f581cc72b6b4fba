"""What rankscope knows about the structure of one model: its stacks, blocks and skip adds. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from rankscope.models.stream import Stream

Label = Literal["attention", "cross_attention", "mixer", "mlp", "both"]
Sums = Literal["plain", "any"]


@dataclass(frozen=True)
class BlockPlan:
    """What happens inside one block, in order: its skip adds and its attention calls.

    ``adds`` has one entry for each add onto the stream: the label of its branch, or ``None`` for an add
    that is no skip (a position term, say). ``has_norm`` tells whether the stream, or a branch of it, is normalised.
    ``parallel_mlp`` names the module whose output joins the attention branch before both are added at once.
    ``post_norm`` tells whether a branch is added to the norm of an earlier sum, instead of to the sum itself.
    ``joins`` marks adds of a parallel branch, one that was not computed from the sum it is added to: the block has one
    skip, where the first of its branches is added.
    """

    adds: tuple[Label | None, ...]
    attention: tuple[Literal["attention", "cross_attention"], ...]
    has_norm: bool = False
    parallel_mlp: str | None = None
    joins: tuple[bool, ...] = ()
    post_norm: bool = False

    def __post_init__(self) -> None:
        if not self.joins:
            object.__setattr__(self, "joins", (False,) * len(self.adds))

    @property
    def skips(self) -> tuple[Label, ...]:
        """Labels of the true skip adds."""
        return tuple(label for label in self.adds if label is not None)


@dataclass(frozen=True)
class BlockCall:
    """One call of one module that holds one block, or several in a row where blocks are not modules.

    ``final_norm_inside`` says that the call of a whole stack closes with the stack's final norm.
    """

    module_name: str
    first_layer: int
    blocks: tuple[BlockPlan, ...]
    final_norm_inside: bool = False


@dataclass(frozen=True)
class Carry:
    """An operation that hands the stream on beside the skips that surgery can edit, or a norm written by hand.

    Attributes:
        module: qualified name of the module that does it; empty for the model itself.
        operation: as the author wrote it.
        first: the first block it leads around, or the block it is in.
        last: the last one.
    """

    module: str
    operation: str
    first: int
    last: int

    @property
    def where(self) -> str:
        """Blocks, operation and module in words."""
        blocks = f"block {self.first}" if self.first == self.last else f"blocks {self.first} to {self.last}"
        return f"{blocks}: {self.operation} in {self.module or 'the model itself'}"


@dataclass(frozen=True)
class Stack:
    """A residual stream from its first block to its last.

    Attributes:
        name: ``None`` for the only stack of a model; else ``encoder``, ``decoder``, ``vision``, ...
        calls: the block calls in the order of the forward pass. A module that is shared by all layers
            appears once per call.
        stream: where the stream is in what the blocks take and give back.
        final_norm: qualified name of the norm after the last block, if there is one.
        agrees_with: what the shape of the stream was held against and found to agree with, in words.
        is_declared: whether the user said in which order its axes are.
        carries: what hands the stream on beside the skips of its blocks; a cut of these would leave it in place.
        own_norms: norms of the stream that are written out, where no norm module or function shows them.
        sums: ``"any"`` where its skips are not all written as ``x + f(x)``: gains that are computed, differences, ...
    """

    name: str | None
    calls: tuple[BlockCall, ...]
    stream: Stream
    final_norm: str | None
    agrees_with: tuple[str, ...] = ()
    is_declared: bool = False
    carries: tuple[Carry, ...] = field(default=(), kw_only=True)
    own_norms: tuple[Carry, ...] = field(default=(), kw_only=True)
    sums: Sums = field(default="plain", kw_only=True)

    @property
    def depth(self) -> int:
        """Number of blocks, counted by call."""
        return sum(len(call.blocks) for call in self.calls)

    @property
    def layout(self) -> str:
        """The order of axes inside the blocks."""
        return self.stream.axes or "batch tokens dim"

    @property
    def plans(self) -> tuple[BlockPlan, ...]:
        """One plan per block."""
        return tuple(plan for call in self.calls for plan in call.blocks)


@dataclass(frozen=True)
class ModelView:
    """A model and the structure found in it."""

    model: nn.Module
    stacks: tuple[Stack, ...]

    @property
    def depth(self) -> int:
        """Blocks in all stacks together."""
        return sum(stack.depth for stack in self.stacks)

    def modules(self) -> Mapping[str, nn.Module]:
        """Every named submodule of the model."""
        return dict(self.model.named_modules())
