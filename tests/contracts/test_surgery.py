"""Surgery on every family of the compatibility table: exact, reversible, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
from rankscope.models.inputs import Batch, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.models.wrapping import without_fastpath
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.frames import tensors_in
from rankscope.stream.operators import is_norm
from rankscope.stream.sites import SITES, SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate, operating
from rankscope.surgery.operation import Operation
from tests.contracts.compatibility import OWN
from tests.contracts.test_families import NOT_FOUND
from tests.families import without_relatives
from tests.loops import unchanged
from tests.tiny_presets import TINY_PRESETS

ONLY_FLOAT32 = {"tiny-xlnet", "tiny-mra"}
NAMES = [name for name in TINY_PRESETS if name not in NOT_FOUND] + list(OWN)
IN_FLOAT64 = [name for name in NAMES if name not in ONLY_FLOAT32]
NO_MLP = {
    "tiny-mobilebert", "tiny-mamba", "tiny-mamba2", "tiny-falcon-mamba", "hand-written without skips",
    "tiny-rwkv",  # its feed-forward reads the token before, too: it mixes tokens
}  # fmt: skip
NO_SKIP = "hand-written without skips"
UNCUT = {"tiny-mobilebert"}
"""Families with skips inside a branch, which a cut would leave in place."""
CUT = [name for name in NAMES if name not in UNCUT and name != NO_SKIP]
NO_ATTENTION = (
    "tiny-mamba",
    "tiny-mamba2",
    "tiny-falcon-mamba",
    "tiny-rwkv",
    "tiny-fnet",
    "tiny-jamba",
    "tiny-longformer",
    "tiny-prophetnet",
)
PARALLEL = (
    "tiny-gptj",
    "tiny-codegen",
    "tiny-gpt-neox",
    "tiny-falcon",
    "tiny-phi",
    "tiny-cohere",
    "tiny-cohere2",
    "hand-written parallel",
)


@cache
def prepared(name: str) -> tuple[nn.Module, Batch, ModelView]:
    """A family in float64 where it can, its inputs, and its structure; shared by the tests of this file."""
    with quiet_transformers():
        if name in OWN:
            torch.manual_seed(0)
            build, inputs = OWN[name]
            x = inputs()
            loaded = load(build().double().eval())
            batch = prepare_inputs(loaded, x.double() if x.is_floating_point() else x, batch=2)[0]
        else:
            dtype = torch.float32 if name in ONLY_FLOAT32 else torch.float64
            loaded = load(f"init:{name}", dtype=dtype)
            batch = prepare_inputs(loaded, None, sequences=2, tokens=16, batch=2)[0]
        return loaded.model, batch, view_of(loaded.model, batch)


def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    with torch.no_grad(), without_fastpath(), quiet_transformers():
        return tensors_in(batch.run(model), depth=4)


def operated(name: str, **operation: Any) -> list[Tensor]:
    """By the way of a user, who shows the model's inputs and knows nothing of its structure."""
    model, batch, _ = prepared(name)
    with operate(model, Surgery(**operation), inputs=dict(batch.inputs) or batch.arguments[0]):
        return outputs(model, batch)


def under(name: str, operation: Operation) -> list[Tensor]:
    """The same, with the structure that is known already."""
    model, batch, view = prepared(name)
    with operating(model, operation, view=view):
        return outputs(model, batch)


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", without_relatives(NAMES))
def test_a_family_under_surgery(name: str) -> None:
    """Bit-equal under an operation that changes nothing, a cut that is undone, and half the stream plus the branch."""
    model, batch, view = prepared(name)
    bare = outputs(model, batch)
    everything = Operation(mlp="keep", norm="keep", temperature=1.0, attention="keep", attention_scale=1.0)
    with unchanged(model):
        assert equal(under(name, everything), bare)
        if name in CUT:
            cut = under(name, Operation(0.0, 0.0, mlp="keep" if name in NO_MLP else "drop"))
            assert not equal(cut, bare)
            assert all(bool(torch.isfinite(x).all()) for x in cut)
            assert equal(outputs(model, batch), bare)
            assert not _get_current_function_mode_stack()
        if name in CUT and name in IN_FLOAT64:
            assert not equal(halved(model, batch, view), bare)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", without_relatives(NAMES))
def test_an_operation_that_changes_nothing_is_bit_equal(name: str) -> None:
    """By the way of a user, who shows inputs: the structure is found once more."""
    assert equal(operated(name), outputs(*prepared(name)[:2]))


class Recomputation:
    """Follows the stream by values alone: what a skip add under gain 0.5 must give, from what was captured."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.stream: Tensor | None = None
        self.normed: list[tuple[Tensor, Tensor]] = []
        self.branch: Tensor | None = None
        self.sums = 0

    def __call__(self, ref: SiteRef, value: Tensor | AttentionCall) -> None:
        if isinstance(value, AttentionCall):
            return
        kind = ref.site.rpartition(".")[2]
        if ref.site == "block.in":
            self.stream = value.clone()
        elif ref.site == "block.out":
            self.normed.clear()
        elif kind == "out":
            self.branch = value.clone()
        elif kind == "sum":
            self._check(ref, value)

    def _check(self, ref: SiteRef, total: Tensor) -> None:
        assert self.stream is not None
        assert self.branch is not None
        joins = ref.site == "mlp.sum" and any(self._plan(ref).joins)
        gain = 1.0 if joins else 0.5
        errors = [relative(gain * before + self.branch, total) for before in self._streams(ref, total)]
        assert min(errors) <= 1e-12, (str(ref), errors)
        self.sums += 1
        self.stream = total.clone()

    def _plan(self, ref: SiteRef) -> Any:
        return next(s for s in self.view.stacks if s.name == ref.stack).plans[ref.layer]

    def _streams(self, ref: SiteRef, total: Tensor) -> list[Tensor]:
        """The stream, or the model's own norm of it, or the stream times a gain the block itself puts on it."""
        assert self.stream is not None
        last = self.stream.reshape(-1, self.stream.shape[-1])
        found = [self.stream, self.stream.float().double()]  # mamba keeps its residual in float32
        for x, out in self.normed:
            if x.numel() == last.numel() and torch.equal(canonical(x, total), self.stream):
                found.append(canonical(out, total))
        stack = next(s for s in self.view.stacks if s.name == ref.stack)
        call = next(c for c in stack.calls if 0 <= ref.layer - c.first_layer < len(c.blocks))
        block = self.view.modules()[call.module_name]
        gains = [p.detach() for p in block.parameters(recurse=False) if p.shape == total.shape[-1:]]
        return found + [gain * self.stream for gain in gains]

    def hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.normed.append((args[0].detach().clone(), tensors_in(output)[0].detach().clone()))


def canonical(x: Tensor, like: Tensor) -> Tensor:
    if x.shape != like.shape and x.dim() == 3 and x.shape[:2] == like.shape[1::-1]:
        x = x.transpose(0, 1)
    return x.reshape(like.shape)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def halved(model: nn.Module, batch: Batch, view: ModelView) -> list[Tensor]:
    """Outputs under gain one half, each sum checked on the way."""
    check = Recomputation(view)
    with ExitStack() as stack:
        stack.enter_context(operating(model, Operation(0.5, 0.5), view=view))
        for module in filter(is_norm, model.modules()):
            stack.callback(module.register_forward_hook(check.hook).remove)
        stack.enter_context(trace(view, SiteSelection.parse(SITES), check))
        states = outputs(model, batch)
    assert check.sums == sum(len(plan.skips) for stack in view.stacks for plan in stack.plans) > 0
    return states


ATTENTION_EDITS: tuple[Mapping[str, Any], ...] = (
    {"mask": "causal"},
    {"temperature": 2.0},
    {"attention": "uniform"},
    {"attention": "centred"},
    {"attention_scale": 2.0},
    {"heads": [0]},
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NO_ATTENTION)
def test_attention_that_cannot_be_seen_is_not_changed(name: str) -> None:
    for edit in ATTENTION_EDITS:
        with pytest.raises(UnsupportedOperationError, match=r"block \d.*attention probabilities cannot be seen"):
            operated(name, **edit)


@pytest.mark.parametrize("name", PARALLEL)
def test_a_parallel_block_has_one_skip(name: str) -> None:
    with pytest.raises(UnsupportedOperationError, match="it has one skip"):
        operated(name, attention_skip=0.0)
    with pytest.raises(UnsupportedOperationError, match="it has one skip"):
        operated(name, mlp_skip=0.5)


@pytest.mark.parametrize("name", sorted(NO_MLP))
def test_an_mlp_that_is_not_there_is_not_dropped(name: str) -> None:
    told = r"MLP to the stream that could be dropped|what its MLP adds cannot be told apart"
    with pytest.raises(UnsupportedOperationError, match=told):
        operated(name, mlp="drop")


REFUSALS: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    (NO_SKIP, {"skip": 0.5}, "has no skip to scale"),
    (NO_SKIP, {"skip": 0.0}, "would change nothing: block 0 to block 2"),
    ("tiny-mobilebert", {"skip": 0.0}, r"Found at block 0: torch.add in encoder\.layer\.0\.attention\.output"),
    ("tiny-mobilebert", {"attention_skip": 0.5}, "Found at block 0: torch.add"),
    ("tiny-gpt-oss", {"attention": "uniform"}, "learned sink"),
    ("tiny-gpt-oss", {"attention": "centred"}, "learned sink"),
    ("tiny-swin", {"mask": "causal"}, "this attention runs among others: 16 queries"),
    ("tiny-pvt", {"mask": "causal"}, "this attention runs among others: 64 queries and 16 keys"),
    ("tiny-t5", {"mask": "complete", "stack": "decoder"}, r"cannot be made visible\. It adds a position bias"),
    ("tiny-bloom", {"mask": "complete"}, r"cannot be made visible\. Its own mask is already inside"),
    ("tiny-openai-gpt", {"mask": "complete"}, r"cannot be made visible\. Its own mask is already inside"),
    ("tiny-gpt2", {"heads": [4]}, r"heads=\[4\]: the block has heads 0 to 3"),
    ("hand-written, blocks inline", {"norm": "identity"}, "no block meant has a norm"),
    ("x-transformers encoder", {"norm": "identity", "layers": [1]}, "which of them a norm belongs to"),
)


@pytest.mark.parametrize(("name", "operation", "sentence"), REFUSALS)
def test_what_a_family_cannot_do_is_refused(name: str, operation: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=sentence):
        operated(name, **operation)
    model, batch, _ = prepared(name)
    assert hooks_of(model) == 0
    assert equal(outputs(model, batch), outputs(model, batch))


@pytest.mark.parametrize("name", PARALLEL)
def test_without_its_skip_a_parallel_block_keeps_both_branches(name: str) -> None:
    """Whatever the order of the adds, nothing but the stream is lost: gain 1 and gain 0 differ by the block's input."""
    model, batch, view = prepared(name)
    first: dict[float, dict[str, Tensor]] = {}
    for gain in (1.0, 0.0):
        seen = first.setdefault(gain, {})

        def keep(ref: SiteRef, value: Any, seen: dict[str, Tensor] = seen) -> None:
            seen[ref.site] = value.clone()

        sites = SiteSelection.parse(["block.in@0", "block.out@0"])
        with operating(model, Operation(gain, gain), view=view), trace(view, sites, keep):
            outputs(model, batch)
    assert relative(first[1.0]["block.out"] - first[1.0]["block.in"], first[0.0]["block.out"]) < 1e-12
