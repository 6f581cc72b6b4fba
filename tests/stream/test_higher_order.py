"""Operators that take functions: ``flex_attention``, ``cond`` and their like, each with a twin that does without."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope.errors import UnsupportedOperationError

TOKENS, WIDTH = 12, 16
BIAS = torch.randn(4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5))
METRICS = ("mu_over_norm", "attention_entropy", "max_attention_logit")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def biased(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + BIAS[head, query, key]


def flexible(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    mask = create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu") if "causal" in kind else None
    mixed = flex_attention(
        q, k, v, score_mod=biased if "bias" in kind else None, block_mask=mask, enable_gqa="groups" in kind
    )
    assert isinstance(mixed, Tensor)
    return mixed


def fused(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    bias = BIAS if "bias" in kind else torch.zeros_like(BIAS)
    if "causal" in kind:
        bias = bias.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Block(nn.Module):
    """A pre-norm block around the function that mixes."""

    def __init__(self, mix: Callable[..., Tensor], kind: str) -> None:
        super().__init__()
        self.mix, self.kind, self.shared = mix, kind, 2 if "groups" in kind else 4
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * 4 * self.shared)
        self.out, self.norm1, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(y), *self.kv(y).chunk(2, -1)))
        x = x + self.out(self.mix(q, k, v, self.kind).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def built(mix: Callable[..., Tensor], kind: str = "") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(mix, kind) for _ in range(3)))


def inputs() -> Tensor:
    return torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def values(run: Any) -> Tensor:
    return torch.tensor(run.table["value"].to_pylist(), dtype=torch.float64)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("", "causal", "bias", "groups causal")), "causal bias"],
)
def test_flex_attention_measures_what_its_twin_does(kind: str) -> None:
    ours, twin = (rs.measure(built(mix, kind), inputs(), metrics=METRICS) for mix in (flexible, fused))
    assert ours.table.num_rows == twin.table.num_rows > 20
    torch.testing.assert_close(values(ours), values(twin), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_surgery_on_flex_attention_is_refused_by_name_and_skips_are_cut() -> None:
    ours, twin = (
        rs.measure(built(mix), inputs(), {"skip": 0.5}, metrics=("mu_over_norm",)) for mix in (flexible, fused)
    )
    torch.testing.assert_close(values(ours), values(twin), rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedOperationError, match="flex_attention computes its scores"):
        rs.measure(built(flexible), inputs(), {"attention": "uniform"}, metrics=("mu_over_norm",))


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_with_flex_attention() -> None:
    report = rs.doctor(built(flexible, "causal"), inputs())
    assert report.passed, report
    assert report["attention"].status == "pass"
    assert not report.faults


class Branch(nn.Module):
    """A block whose MLP branch, or whose whole sum, runs inside an operator that takes functions."""

    def __init__(self, around: Callable[..., Tensor], *, whole: bool) -> None:
        super().__init__()
        self.around, self.whole, self.norm = around, whole, nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v)[:, 0]
        if self.whole:
            return self.around(lambda y: y + self.mlp(self.norm(y)), x)
        return x + self.around(self.mlp, self.norm(x))


def plain(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def chosen(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cond(x.abs().sum() > -1, function, lambda y: y.clone(), (x,))


def looped(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda n, y: n < 1, lambda n, y: (n + 1, function(y)), (torch.zeros((), dtype=torch.int64), x))[1]


def scanned(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    from torch._higher_order_ops import scan

    _, out = scan(lambda carry, y: (carry + 1, function(y)), torch.zeros(()), x, dim=0)
    return out


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


AROUND = {"cond": chosen, "while_loop": looped, "scan": scanned, "checkpoint": again}


def stacked(around: Callable[..., Tensor], *, whole: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Branch(around, whole=whole) for _ in range(3)))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in AROUND if name != "scan"), "scan"]
)
def test_a_branch_inside_an_operator_is_measured_as_its_twin(name: str) -> None:
    ours, twin = (
        rs.measure(stacked(around, whole=False), inputs(), {"skip": 0.5}, metrics=("mu_over_norm",))
        for around in (AROUND[name], plain)
    )
    torch.testing.assert_close(values(ours), values(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("cond", "while_loop")), "scan"]
)
def test_a_sum_inside_an_operator_is_measured_and_never_cut(name: str) -> None:
    ours, twin = (stacked(around, whole=True) for around in (AROUND[name], plain))
    one, other = (values(rs.measure(m, inputs(), metrics=("mu_over_norm",), sites="block.out")) for m in (ours, twin))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedOperationError, match=name):
        rs.measure(ours, inputs(), {"skip": 0.0}, metrics=("mu_over_norm",))


@pytest.mark.slow
def test_a_checkpointed_block_is_cut_as_its_twin() -> None:
    ours, twin = (
        rs.measure(stacked(around, whole=True), inputs(), {"skip": 0.0}, metrics=("mu_over_norm",))
        for around in (again, plain)
    )
    torch.testing.assert_close(values(ours), values(twin), rtol=1e-5, atol=1e-6)


class Sums(nn.Module):
    """A block whose mixer is a cumulative sum over tokens."""

    def __init__(self, sums: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.sums, self.norm, self.out = sums, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.sums(self.norm(x)))
        return x + self.mlp(self.norm(x))


def associative(x: Tensor) -> Tensor:
    from torch._higher_order_ops import associative_scan

    return associative_scan(torch.add, x, dim=1, combine_mode="generic")


@pytest.mark.slow
def test_a_mixer_inside_associative_scan_is_cut_as_its_twin() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(*(Sums(associative) for _ in range(3)))
    twin = nn.Sequential(*(Sums(lambda x: x.cumsum(1)) for _ in range(3)))
    twin.load_state_dict(ours.state_dict())
    one, other = (rs.measure(m, inputs(), {"skip": 0.5}, metrics=("mu_over_norm",)) for m in (ours, twin))
    torch.testing.assert_close(values(one), values(other), rtol=1e-5, atol=1e-6)
    assert set(one.table["site"].to_pylist()) == set(other.table["site"].to_pylist())


@pytest.mark.slow
def test_the_gauge_reads_flex_attention_as_its_twin() -> None:
    read = []
    for mix in (flexible, fused):
        with rs.Gauge(built(mix, "causal"), inputs(), schedule=1, strict=True) as gauge:
            found = gauge.step(0)
        assert found is not None
        read.append({name: value for name, value in found.scalars.items() if "second" not in name})
    assert len(read[0]) > 5
    assert read[0] == pytest.approx(read[1], rel=1e-4)


@pytest.mark.slow
def test_a_model_that_imports_the_compiler_while_it_runs_is_measured() -> None:
    program = """
        import sys, torch, rankscope as rs
        from torch import nn
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = nn.Linear(16, 48)
            def forward(self, x):
                from torch.nn.attention.flex_attention import flex_attention
                q, k, v = (t[:, None] for t in self.qkv(x).chunk(3, -1))
                return x + flex_attention(q, k, v)[:, 0]
        assert "torch._dynamo" not in sys.modules
        model = nn.Sequential(Block(), Block())
        run = rs.measure(model, rs.Inputs(torch.randn(3, 8, 16), axes="batch tokens"), metrics=("mu_over_norm",))
        assert run.table.num_rows
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=True)
