"""Activations on which a verdict once misled. 128 tokens of width 256 unless said."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope._types import Status
from rankscope.monitor.alarms import ALARMS, LayerState
from rankscope.runs.rows import RowWriter
from rankscope.verbs.exact.judge import judge_exact
from rankscope.verdicts.states import COLLAPSED_RESIDUAL, State, is_collapsed
from tests.verdicts.corpus import Stack, verdict_on

TOKENS, DIM = 128, 256


class Fixed(nn.Module):
    """Blocks whose outputs are given."""

    def __init__(self, layers: list[Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FixedBlock(x) for x in layers)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        for block in self.blocks:
            inputs_embeds = block(inputs_embeds)
        return inputs_embeds


class FixedBlock(nn.Module):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=output.dtype))
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        # A probe takes the only sequence of a batch twice.
        rows = torch.arange(len(x)) % len(self.output)
        return self.output[rows] * self.weight


def measured(layers: list[Tensor]) -> rs.Run:
    # The model does not read its inputs, so that no experiment can tell their axes.
    inputs = rs.Inputs({"inputs_embeds": torch.zeros_like(layers[0]) + 1}, axes="batch tokens")
    return rs.measure(rs.Model(Fixed(layers).eval(), blocks="blocks.*"), inputs)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(seed: int = 1) -> Tensor:
    return nn.functional.normalize(random(DIM, seed=seed), dim=0)


def test_a_stream_of_zeros_from_block_three_on_is_vanished() -> None:
    run = measured([random(2, TOKENS, DIM)] * 3 + [torch.zeros(2, TOKENS, DIM)] * 3)
    assert run.code == "vanished"
    assert run.verdict.startswith("Vanished from block 3 on: the stream is exactly zero.")
    assert "Where it is not zero: no collapse" in run.verdict


def test_one_of_two_sequences_is_counted_and_its_own_value_quoted() -> None:
    x = torch.stack([unit().expand(TOKENS, DIM) + 1e-4 * random(TOKENS, DIM), random(TOKENS, DIM)])
    run = measured([x] * 3)
    assert run.code == "collapsed"
    assert run.verdict.startswith("Collapsed in 1 of 2 sequences, in every block")
    assert "Relative residual 0.0016, after block" in run.verdict
    assert "The other sequence: no collapse" in run.verdict


def test_124_identical_tokens_of_128_are_copies() -> None:
    x = random(2, TOKENS, DIM)
    x[:, 4:] = math.sqrt(DIM) * unit()
    run = measured([x] * 3)
    assert run.code == "copies"
    assert "Largest cluster share 0.97, distinct tokens 5" in run.verdict


def test_copies_beside_one_token_with_two_fifths_of_the_energy() -> None:
    x = unit() + 0.01 / math.sqrt(DIM) * random(2, TOKENS, DIM)
    x[:, 0] = 9.2 * unit(2)
    assert verdict_on(Stack([x] * 3)).code == "copies"


@pytest.mark.parametrize(("blocks", "code"), [(6, "collapsed"), (4, "collapsing")])
def test_a_residual_that_halves_per_block(blocks: int, code: str) -> None:
    """From 0.44 to 0.0157 after six blocks; after four it is 0.06, and on its way."""
    stack = Stack([math.sqrt(DIM) * unit() + 0.5**k * random(2, TOKENS, DIM, seed=k) for k in range(1, blocks + 1)])
    assert verdict_on(stack).code == code


def test_equal_directions_of_different_lengths() -> None:
    length = torch.exp(0.6 * random(2, TOKENS, 1, seed=3))
    verdict = verdict_on(Stack([length * (unit() + 0.01 / math.sqrt(DIM) * random(2, TOKENS, DIM))] * 3))
    assert verdict.code == "same direction"
    assert "stay apart" not in verdict.sentence


def test_four_exact_clusters() -> None:
    x = random(4, DIM)[torch.arange(TOKENS) % 4].expand(2, TOKENS, DIM)
    verdict = verdict_on(Stack([x] * 3))
    assert verdict.code == "clusters"
    assert "Distinct tokens 4" in verdict.sentence


@pytest.mark.parametrize("larger", [26, 32, 40, 45])
def test_two_unequal_clusters_are_not_one_direction(larger: int) -> None:
    """Of 51 tokens; from 37 on most pairs are within one cluster, and a median over pairs is small."""
    centres = random(2, DIM)
    x = centres[(torch.arange(51) >= larger).long()].expand(1, 51, DIM) + 1e-4 * random(1, 51, DIM, seed=5)
    verdict = verdict_on(Stack([random(1, 51, DIM, seed=6), x]))
    assert verdict.code == "clusters"
    assert "Distinct tokens 2" in verdict.sentence


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1000.0), (torch.float16, 6000.0)])
def test_a_constant_channel_in_half_precision_hides_nothing(dtype: torch.dtype, size: float) -> None:
    x = random(2, 64, DIM)
    x[..., 7] = size
    run = measured([x.to(dtype)] * 2)
    assert run.code == "huge channel"
    assert "float floor" not in run.verdict
    assert set(run.select(metric="relative_residual", site="block.out")["status"].to_pylist()) == {"ok"}


@pytest.mark.parametrize("share", [0.5, 0.55, 0.7])
def test_two_tokens_are_not_one_huge_token(share: float) -> None:
    lengths = torch.tensor([math.sqrt(share), math.sqrt(1 - share)])[:, None]
    x = lengths * nn.functional.normalize(random(2, DIM), dim=-1)
    verdict = verdict_on(Stack([x[None]]))
    assert verdict.code in {"healthy", "mean offset"}
    assert "huge token" not in verdict.sentence.replace("not excluded: one huge token", "")


def fixed_residual(residual: float, seed: int = 0) -> Tensor:
    """Tokens of exactly this relative residual: a mean of unit length and orthogonal noise without mean."""
    noise = random(1, TOKENS, DIM, seed=seed).double()
    noise -= noise.mean(1, keepdim=True)
    mean = nn.functional.normalize(unit().double(), dim=0)
    noise -= (noise @ mean)[..., None] * mean
    noise *= residual / math.sqrt(1 - residual**2) * math.sqrt(TOKENS) / noise.norm()
    return mean + noise


def exact_table(logs: np.ndarray, residual_logs: np.ndarray | None = None) -> pa.Table:
    """An exact run of one sequence with these log10 relative residuals, no order and no factor."""
    writer = RowWriter(("arithmetic",))
    absolute = logs if residual_logs is None else residual_logs
    rows = {
        "log10_residual": absolute,
        "log10_relative_residual": logs,
        "order": np.ones(len(logs)),
        "factor": np.ones(len(logs)),
    }
    for metric, values in rows.items():
        for layer, value in enumerate(values):
            code = Status.UNDEFINED if math.isnan(value) else Status.OK
            place = {"metric": metric, "site": "block.out", "stack": None, "layer": layer, "first_sequence": 0}
            statuses = np.array([list(Status).index(code)])
            at = {"arithmetic": "exact"}
            writer.add(values=np.array([value]), statuses=statuses, head_axis=False, at=at, **place)
    table = writer.table()
    exact_zero = pc.equal(table["value"], -math.inf)
    status = pc.if_else(exact_zero, str(Status.OK), pc.cast(table["status"], pa.string()))
    return table.set_column(table.column_names.index("status"), "status", status)


def alarm(values: dict[str, float], undefined: frozenset[str] = frozenset()) -> bool:
    """Whether the gauge's alarm about collapsed tokens says so, without a start to compare with."""
    return ALARMS["token_collapse"].rule(LayerState(values, undefined=undefined)) is not None


@pytest.mark.parametrize("residual", [0.9, 0.2, 0.05, 0.035, 0.031, 0.029, 0.0047, 0.0020, 1e-5])
def test_one_number_is_one_verdict_in_every_verb(residual: float) -> None:
    layers = [fixed_residual(0.9, seed=1), fixed_residual(0.9, seed=2), fixed_residual(residual)]
    model = Fixed(layers).eval()
    inputs = rs.Inputs({"inputs_embeds": torch.ones_like(layers[0])}, axes="batch tokens")
    gone = is_collapsed(residual)
    run = rs.measure(rs.Model(model, blocks="blocks.*"), inputs)
    ablation = rs.ablate(rs.Model(model, blocks="blocks.*"), inputs, variants=["full"])
    exactly = judge_exact(exact_table(np.log10([0.9, 0.9, residual])), {"float32": 5e-7})
    assert run.curve("relative_residual", "block.out").mean[-1] == pytest.approx(residual, rel=1e-9)
    assert run.code == ablation.code == exactly.code
    assert (run.code == "collapsed") == gone
    assert ("Collapsed" in run.verdict) == ("Collapsed" in exactly.sentence) == gone
    assert ("model collapses" in ablation.verdict) == gone
    assert alarm({"relative_residual": residual}) == gone


def test_exact_compares_like_with_like() -> None:
    """A rise is called a rise, relative beside relative, and never 10^-0.0."""
    verdict = judge_exact(exact_table(np.array([-0.3, -0.04, -0.01]), np.array([0.1, 1.0, 1.6])), {"float32": 5e-7})
    assert verdict.code == "healthy"
    assert "Relative residual 10^0.0 after block 2, 10^-0.3 after block 0." in verdict.sentence
    assert "-0.0" not in verdict.sentence


def test_exact_zero_is_collapse() -> None:
    verdict = judge_exact(exact_table(np.array([-0.3, -math.inf, -math.inf])), {"float32": 5e-7})
    assert verdict.code == "collapsed"
    assert "After block 1 the tokens are exactly equal." in verdict.sentence
    assert "nan" not in verdict.sentence
    assert "float32 cannot resolve block 1" in verdict.sentence


def test_exact_says_what_is_undefined() -> None:
    verdict = judge_exact(exact_table(np.array([-0.3, -0.2, math.nan])), {"float32": 5e-7})
    assert "undefined after the last" in verdict.sentence
    assert "nan" not in verdict.sentence
    nothing = judge_exact(exact_table(np.full(3, math.nan)), {"float32": 5e-7})
    assert (nothing.code, nothing.sentence) == (
        "unknown",
        "No verdict: the relative residual is undefined after every block.",
    )
    zero = exact_table(np.array([-0.3, math.nan]), np.array([0.1, -math.inf]))  # the stream itself is zero
    assert judge_exact(zero, {"float32": 5e-7}).code == "vanished"


@pytest.mark.slow
def test_pure_attention_of_gpt2_does_not_keep_its_tokens_apart() -> None:
    run = rs.ablate("init:gpt2", rs.Inputs(sequences=1, tokens=48), variants=["pure", "full"])
    assert run.verdict.startswith("Pure attention collapses from block")
    assert "apart" not in run.verdict
    assert run.next_steps == ("rankscope exact init:gpt2 --skip 0",)
    states = {item["variant"]: item["state"] for item in run.evidence}
    assert states["pure"] == "collapsed"
    assert states["full"] in {"healthy", "mean offset"}


def test_the_gauge_sees_a_stream_of_zeros() -> None:
    undefined = frozenset({"relative_residual", "largest_token_share"})
    nothing = {"relative_residual": math.nan, "largest_token_share": math.nan}
    assert alarm(nothing, undefined)
    assert not alarm({"relative_residual": math.nan}, frozenset({"relative_residual"}))


def test_the_tolerance_of_copies_is_the_threshold_of_collapse() -> None:
    from rankscope.linalg.pairs import NEAR

    assert pytest.approx(math.sqrt(2) * COLLAPSED_RESIDUAL) == NEAR
    assert State.COLLAPSED.is_grave
