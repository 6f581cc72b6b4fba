"""Sixty refusals: each gives a true reason, and what it says to do next is done here and works.

A row is a network, the verb that is refused, words that the message must have (a part of the network and the reason),
and the step it suggests. ``FALSE`` are claims that would be untrue of every network of this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from tests.hostile.generated.judging import (
    Declared,
    Outcome,
    attempt,
    exact,
    hint,
    measure,
    operate,
    structure_found_once,
)
from tests.hostile.generated.networks import Network, Wanted
from tests.hostile.parts import Net, drawn, ids

SEED = 1
FALSE = {
    "skip0": r"already runs without|have no skip",
    "mlp": r"adds no MLP",
    "measure": r"none that were called|\.\.(?!\.)",
    "exact": r"already runs without|adds no MLP",
}


@dataclass(frozen=True)
class Refusal:
    """One row.

    Args:
        wanted: what is out of the ordinary about the network.
        verb: that is refused.
        words: a pattern of the reason.
        step: what the message suggests: ``"declare"`` the layout it prints, write a ``"plain sum"`` or call blocks
            ``"once"`` instead, ``"measure"`` instead, or None for a message whose reason leaves nothing to do.
    """

    wanted: Wanted
    verb: str
    words: str
    step: str | None


def outcome(wanted: Wanted, verb: str, declared: Declared | None = None) -> Outcome:
    network = Network(SEED, wanted.plain())
    for skip, mlp in ((1.0, True), (0.0, True), (1.0, False), (0.0, False)):
        network.twin(skip, mlp)
        network.twin(skip, mlp, 1e-13)
    declared = Declared() if declared is None else declared
    with structure_found_once():
        if verb in ("skip0", "mlp"):
            return operate(network, declared)[verb]
        return attempt({"measure": measure, "exact": exact}[verb], network, declared)


UNCUT = [
    "addcdiv",
    "twice_the_stream",
    "in_halves",
    "aten_add",
    "foreach_add",
    "nansum",
    "cumsum",
    "cumsum_mean",
    "aten_sum",
    "cat_unflatten_sum",
    "cat_first_sum",
    "cat_then_split",
    "movedim_sum",
    "einsum",
    "matvec",
    "tensordot",
    "multi_dot",
    "linear",
    "fourier",
    "complex_parts",
    "average_pool",
    "adaptive_pool",
    "convolution",
    "sparse",
    "segment_reduce",
    "embedding_bag",
    "scatter_add",
    "index_put",
    "through_numpy",
    "through_a_list",
    "deep_copy",
    "map",
]
ROWS = [
    *(Refusal(Wanted(sum=name), "skip0", r"\bh\.0\b", "plain sum") for name in UNCUT),
    *(Refusal(Wanted(sum=name), "mlp", r"\bh\.0\b", "plain sum") for name in ("addcdiv", "nansum", "einsum", "map")),
    *(
        Refusal(Wanted(mixer=name), "exact", r"Exact arithmetic cannot follow .* in ", "measure")
        for name in ("Sort", "Fourier", "SparseProduct", "Interpolate", "EnergyGradient")
    ),
    Refusal(
        Wanted(layout="batch tokens streams dim"), "exact", r"That of h\.0 lies as 'batch tokens streams", "measure"
    ),
    *(
        Refusal(Wanted(layout=name), "measure", r"\(\w+\.0\).*shape", "declare")
        for name in (
            "(batch tokens) dim",
            "(tokens batch) dim",
            "batch dim tokens",
            "image, channels first",
            "windows first",
            "windows of each sequence",
        )
    ),
    *(
        Refusal(Wanted(layout="batch dim tokens"), verb, r"\(h\.0\).*shape.*along axis 1, not 2", "declare")
        for verb in ("skip0", "mlp")
    ),
    *(
        Refusal(Wanted(pattern=name), "measure", r"\w\.0 \(call.*runs its blocks more than once", "once")
        for name in (
            "chunked",
            "chunked with a cache",
            "block by block in chunks",
            "sequence by sequence",
            "same input twice",
            "mean of two calls",
        )
    ),
    Refusal(Wanted(structure="mixer"), "mlp", r"adds an? MLP|adds no MLP", None),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.verb}-{'-'.join(map(str, _named(row.wanted)))}")
def test_a_refusal_is_true_and_its_next_step_works(row: Refusal) -> None:
    refused = outcome(row.wanted, row.verb)
    assert refused.kind == "refused", refused
    assert re.search(row.words, refused.message, re.DOTALL), refused.message
    if row.step is not None:
        assert not re.search(FALSE[row.verb], refused.message), f"not true of this network: {refused.message}"
    follow = {
        "declare": lambda: outcome(row.wanted, row.verb, hint(refused.message)),
        "plain sum": lambda: outcome(Wanted(**{**vars(row.wanted), "sum": "plus"}), row.verb),
        "once": lambda: outcome(Wanted(**{**vars(row.wanted), "pattern": "once"}), row.verb),
        "measure": lambda: outcome(row.wanted, "measure"),
    }
    said = {
        "declare": r"stream=",
        "plain sum": r"x \+ f\(x\)|x \+ ",
        "once": r"once|whole sequences",
        "measure": r"measure\(\) needs no rules|measure and the gauge can read",
    }
    if row.step is not None:
        assert re.search(said[row.step], refused.message), f"the step is not in the message: {refused.message}"
        assert follow[row.step]().kind == "right"


def _named(wanted: Wanted) -> list[object]:
    return [value for value in vars(wanted).values() if value is not None]


class Hidden(Net):
    """Blocks in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = list(self.blocks)
        del self.blocks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.steps:
            x = block(x)
        return self.close(x)


class InModuleList(Hidden):
    def __init__(self) -> None:
        super().__init__()
        steps = self.steps
        del self.steps
        self.steps = nn.ModuleList(steps)


def net(build: Callable[[], nn.Module] = Net) -> nn.Module:
    return drawn(build(), 0).eval()


INPUTS: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "inputs and targets": (
        lambda: rs.measure(net(), (ids(), torch.zeros(2))),
        r"pass the inputs alone: inputs\[0\]",
        lambda: rs.measure(net(), (ids(), torch.zeros(2))[0]),
    ),
    "ids outside the vocabulary": (
        lambda: rs.measure(net(), ids() + 40),
        r"largest id is 79.* Its tables have .*40 \(embed\.weight\)",
        lambda: rs.measure(net(), ids().clamp(max=39)),
    ),
    "more tokens than positions": (
        lambda: rs.measure(net(), ids(2, 20)),
        r"inputs of shape \(2, 20\)\. Its tables have .*16 \(positions\)",
        lambda: rs.measure(net(), ids(2, 16)),
    ),
    "a file that is not there": (
        lambda: rs.measure("init:tiny-bert", "nowhere.txt"),
        r"'nowhere\.txt' looks like the name of a file, and there is no such file.*add a space",
        lambda: rs.measure("init:tiny-bert", "nowhere.txt "),
    ),
    "blocks in a plain list": (
        lambda: rs.measure(net(Hidden), ids()),
        r"steps is a plain list with 3 modules \(Block\).*nn\.ModuleList",
        lambda: rs.measure(net(InModuleList), ids()),
    ),
    "layers that are not there": (
        lambda: operated(skip=0.0, layers=[7]),
        r"layers=\[7\]: this model has blocks 0 to 2",
        lambda: operated(skip=0.0, layers=[2]),
    ),
    "a metric that does not exist": (
        lambda: rs.measure(net(), ids(), metrics=["stable_rnk"]),
        r"Did you mean 'stable_rank'",
        lambda: rs.measure(net(), ids(), metrics=["stable_rank"]),
    ),
    "norms that are not there": (
        lambda: operated(norm="identity", module=net(lambda: _without_norms())),
        r"no block meant has a norm of its own",
        lambda: operated(skip=0.0, module=net(lambda: _without_norms())),
    ),
}


def operated(module: nn.Module | None = None, **words: object) -> Tensor:
    module = net() if module is None else module
    with rs.operate(module, rs.Surgery(**words), inputs=ids()):
        return module(ids())


def _without_norms() -> nn.Module:
    network = Net()
    for block in network.blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()
    return network


@pytest.mark.parametrize("name", INPUTS)
def test_a_refused_input_says_what_to_pass(name: str) -> None:
    call, words, step = INPUTS[name]
    with pytest.raises(rs.RankscopeError) as refused:
        call()
    assert re.search(words, " ".join(str(refused.value).split())), refused.value
    step()


def test_there_are_sixty_rows() -> None:
    assert len(ROWS) + len(INPUTS) >= 60
