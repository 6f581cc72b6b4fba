"""A case of the suite: a network, what it is run on, and what must be right about it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.hostile.parts import Block, Net, drawn, ids
from tests.hostile.twin import Cut, Twin

READS = frozenset({"doctor", "measure", "exact_whole"})
SKIPS = frozenset({"skip0", "skip05", "one_block", "exact", "measure_cut", "ablate"})
EDITS = frozenset({"mlp", "norm", "uniform"})
ALL = READS | SKIPS | EDITS


@dataclass(frozen=True)
class Case:
    """One network.

    Args:
        name: of the test.
        build: makes the module; its parameters are drawn afterwards.
        equal: verbs whose answer must be that of the twin. All others may be refused by name instead.
        inputs: keyword arguments of ``forward``, or its one tensor.
        core: verbs that run with every change; the others are marked slow.
        declared: arguments of ``measure`` that tell it how to read the stream; with them it must be right.
        blocks: the ``blocks=`` argument of every verb.
        dtype: of the weights.
        skips: where its skips are, for a network that is about skips.
    """

    name: str
    build: Callable[[], nn.Module]
    equal: frozenset[str] = ALL
    inputs: Callable[[], Tensor | dict[str, Any]] = ids
    core: Collection[str] = ALL
    declared: Mapping[str, Any] | None = None
    blocks: str | None = None
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)
    skips: Literal["in a block", "between blocks"] | None = None

    @property
    def roundings(self) -> float:
        """What float32 may add to a difference, relative to the size of the tensor; nothing in float64."""
        return 0.0 if self.dtype == torch.float64 else 4e-6

    def model(self) -> nn.Module:
        return drawn(self.build().to(self.dtype), zlib.crc32(self.name.encode())).eval()

    def given(self) -> Tensor | dict[str, Any]:
        given = self.inputs()
        if isinstance(given, Tensor):
            return given.to(self.dtype) if given.is_floating_point() else given
        return given

    def run(self, model: nn.Module, given: Tensor | dict[str, Any]) -> Tensor:
        """The network's own output, one tensor."""
        with torch.no_grad():
            out = model(given) if isinstance(given, Tensor) else model(**given)
        return out if isinstance(out, Tensor) else tensor_of(out)

    def twin(self, model: nn.Module, given: Tensor | dict[str, Any], cut: Cut) -> Twin:
        with torch.no_grad():
            return model.twin(cut, given) if isinstance(given, Tensor) else model.twin(cut, **given)


def tensor_of(out: Any) -> Tensor:
    if isinstance(out, Mapping):
        return next(iter(out.values()))
    return out[0] if isinstance(out, tuple) else next(iter(vars(out).values()))


CASES: dict[str, Case] = {}


def case(name: str, build: Callable[[], nn.Module], **facts: Any) -> None:
    """Put a network into the suite."""
    assert name not in CASES, name
    CASES[name] = Case(name, build, **facts)


def block_case(name: str, block: type[Block], **facts: Any) -> None:
    """Put two blocks into the suite."""
    case(name, lambda: Net(block, depth=2), **facts)
