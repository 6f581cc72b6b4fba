"""Prefixes of the same text at several lengths, and two prompts that become one vector."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import rankscope
from rankscope.errors import InputError
from rankscope.metrics import METRICS
from rankscope.models.inputs import InputPlan, prepare_prefixes
from rankscope.models.inputs.rows import hash_tokenizer
from rankscope.models.pretrained import pretrained_folder
from rankscope.runs.rows import RowWriter, only
from rankscope.verdicts.length import VARIANCE, length_finding, length_slopes

EXAMPLE = Path(__file__).parents[2] / "examples" / "same_vector.py"
PLAN = InputPlan(3, 128, 2, "content", 0, False)


@cache
def same_vector() -> ModuleType:
    """The example about two prompts that become one vector."""
    spec = importlib.util.spec_from_file_location("same_vector", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("spec", ["init:tiny-gpt2", "init:tiny-bert", "init:tiny-t5"])
def test_shorter_inputs_are_prefixes_of_the_longest(spec: str) -> None:
    """T5 closes a text with a special token, which has to close each prefix too."""
    loaded = rankscope.load(spec).loaded
    found = prepare_prefixes(loaded, None, PLAN, [24, 8, 16])
    assert list(found) == [8, 16, 24]
    closing = 1 if "t5" in spec else 0
    longest = [batch.inputs["input_ids"] for batch in found[24]]
    for length, prepared in found.items():
        assert prepared.lengths == (length,) * 3
        for batch, whole in zip(prepared, longest, strict=True):
            ids = batch.inputs["input_ids"]
            assert ids.shape == (whole.shape[0], length)
            assert torch.equal(ids[:, : length - closing], whole[:, : length - closing])
            assert torch.equal(ids[:, length - closing :], whole[:, 24 - closing :])
            if "decoder_input_ids" in batch.inputs:
                assert batch.inputs["decoder_input_ids"].shape == ids.shape


def test_rows_of_each_length_are_those_of_a_run_at_that_length() -> None:
    """A hand-written twin: the ids of the prefix, measured by themselves."""
    loaded = rankscope.load("init:tiny-bert").loaded
    run = rankscope.measure_lengths(
        loaded.model, rankscope.Inputs(sequences=3), lengths=[8, 16], metrics=["relative_residual"]
    )
    for length, prepared in prepare_prefixes(loaded, None, PLAN, [8, 16]).items():
        ids = torch.cat([batch.inputs["input_ids"] for batch in prepared])
        alone = rankscope.measure(loaded.model, {"input_ids": ids}, metrics=["relative_residual"])
        mine = only(run.table, length=length)
        block = only(mine, site="block.out")
        assert block["value"].to_pylist() == alone.select(site="block.out")["value"].to_pylist()
    assert run.provenance.lengths == (16, 16, 16)
    longest = only(only(run.table, length=16), site="block.out", layer=0)["value"].to_numpy()
    assert run.curve("relative_residual", "block.out", length=16).mean[0] == pytest.approx(longest.mean(), rel=1e-15)


def test_lengths_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    cases = {
        "at least two different lengths": {"lengths": [16]},
        "expected numbers of tokens": {"lengths": ["16", "many"]},
        "the inputs have 512": {"lengths": [8, 10**5]},
        "attention_mask": {
            "lengths": [4, 8],
            "inputs": ["a short text", "a text that is longer than eight words, by far"],
        },
    }
    for message, given in cases.items():
        with pytest.raises(InputError, match=message):
            rankscope.measure_lengths("init:tiny-bert", **given)
    with pytest.raises(InputError, match="reads something else"):
        rankscope.measure_lengths(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
            torch.randn(2, 8, 8),
            lengths=[4, 8],
        )
    with pytest.raises(InputError, match="reads something else"):
        rankscope.measure_lengths("init:tiny-vit", lengths=[4, 8])


def rows(values: dict[int, np.ndarray], metric: str = "relative_residual", site: str = "block.out") -> RowWriter:
    """A table of one block with the values of several sequences at each length."""
    writer = RowWriter(("length",))
    for length, given in values.items():
        writer.add(metric=metric, site=site, stack=None, layer=0, first_sequence=0, values=given,
                   statuses=np.zeros(given.size, dtype=int), head_axis=False, at={"length": length})  # fmt: skip
    return writer


def test_slope_is_that_of_a_straight_line_and_its_interval_covers_it() -> None:
    """v = a + b log2 n has slope b exactly; with noise over sequences, the interval is that of their mean."""
    lengths, random = [16, 64, 128], np.random.default_rng(0)
    offset, slope = random.uniform(size=6), 0.05 + 0.01 * random.normal(size=6)
    table = rows({n: offset + slope * math.log2(n) for n in lengths}, "stable_rank").table()
    (found,) = length_slopes(table, {n: n for n in lengths})
    assert found.slope == pytest.approx(slope.mean(), rel=1e-12)
    assert found.low < slope.mean() < found.high
    half = 2.571 * slope.std(ddof=1) / math.sqrt(6)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.25)


def test_variance_exponent_of_uniform_attention_is_minus_one() -> None:
    """Averages of n independent values have variance 1/n: the residual of n tokens is sqrt(n * 1/n)."""
    lengths = [16, 64, 256]
    table = rows({n: np.full(3, 2.0) for n in lengths}, "residual", "attention.out").table()
    found = {one.metric: one for one in length_slopes(table, {n: n for n in lengths})}
    assert found["residual"].slope == pytest.approx(0.0, abs=1e-15)
    assert found[VARIANCE].slope == pytest.approx(-1.0, rel=1e-12)


CASES = {
    "healthy": ([0.8, 0.7], "healthy", "healthy"),
    "falls, not threefold": ([0.8, 0.3], "healthy", "healthy"),
    "threefold": ([0.8, 0.2], "collapsing", "healthy"),
    "collapses at the longest": ([0.8, 0.01], "collapsed", "collapsed"),
}


@pytest.mark.parametrize("case", CASES)
def test_finding_along_the_length(case: str) -> None:
    (short, long), code, longest = CASES[case]
    noise = np.array([0.99, 1.0, 1.01, 1.0])
    table = rows({16: short * noise, 256: long * noise}).table()
    slopes = length_slopes(table, {16: 16, 256: 256})
    found = length_finding(slopes, [16, 256], {16: "healthy", 256: longest})
    assert (found.axis, found.code) == ("length", code)
    assert [(one["length"], one["value"]) for one in found.evidence] == [
        (16, pytest.approx(short)),
        (256, pytest.approx(long)),
    ]


def test_a_fall_that_all_sequences_share_is_a_trend_although_their_sizes_differ() -> None:
    """Each falls as n^-1/2. The intervals of plain slopes, whose sizes differ tenfold, reach beyond zero."""
    sizes = np.array([0.09, 0.011, 0.014, 0.089])
    table = rows({n: sizes * (n / 32) ** -0.5 for n in (32, 2048)}).table()
    (slope,) = length_slopes(table, {32: 32, 2048: 2048})
    assert (slope.slope, slope.low, slope.high) == pytest.approx((-0.5, -0.5, -0.5), rel=1e-12)
    assert length_finding([slope], [32, 2048], {32: "healthy", 2048: "healthy"}).code == "collapsing"


def test_a_fall_that_sequences_do_not_share_is_no_trend() -> None:
    table = rows({16: np.array([1.0, 0.05, 0.9, 0.05]), 256: np.array([0.05, 0.2, 0.05, 0.2])}).table()
    slopes = length_slopes(table, {16: 16, 256: 256})
    assert slopes[0].means[0] > 3 * slopes[0].means[1]
    assert length_finding(slopes, [16, 256], {16: "healthy", 256: "healthy"}).code == "healthy"


@pytest.mark.slow
def test_two_prompts_become_one_vector_in_bfloat16() -> None:
    """With weak attention, the share of a prompt in the last token soon falls below the rounding of bfloat16.

    The twin runs the two sequences by hand: they are equal at the length found and differ one token earlier, and in
    float32 they differ at the same length.
    """
    text, pair = " ".join(["one"] * 60), ("cat", "dog")
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = rankscope.load("init:tiny-gpt2", dtype=dtype).model
        with torch.no_grad():
            for block in model.h:
                block.attn.c_proj.weight.mul_(0.002)
        encoder = hash_tokenizer(model.config)
        first, second = ([*encoder.prefix, *encoder.encode(prompt)] for prompt in pair)
        found[dtype] = same_vector().same_from(model, first, second, encoder.encode(text)[:47])[0]
    assert found["float32"] is None
    assert found["bfloat16"] > 1
    last: list[torch.Tensor] = []
    hook = model.h[-1].register_forward_hook(lambda module, given, out: last.append(out[0, -1].clone()))
    for n in (found["bfloat16"], found["bfloat16"] - 1):
        for prompt in pair:
            ids = [*encoder.prefix, *encoder.encode(prompt), *encoder.encode(text)[:n]]
            with torch.no_grad():
                model(torch.tensor([ids]), use_cache=False)
    hook.remove()
    assert torch.equal(last[0], last[1])
    assert not torch.equal(last[2], last[3])


@pytest.mark.slow
def test_effective_rank_per_token_of_smollm2_falls_with_the_length() -> None:
    folder = pretrained_folder("smollm2-135m")
    run = rankscope.measure_lengths(
        folder, rankscope.Inputs(sequences=1), lengths=[32, 128, 512], metrics=["effective_rank"], sites=["final"]
    )
    found = [run.table["value"][place].as_py() / n for place, n in enumerate((32, 128, 512))]
    assert found == pytest.approx([0.715, 0.590, 0.416], abs=0.005)


def test_declared_dependence_on_the_length_agrees_with_independent_tokens() -> None:
    """A metric of independent tokens that changes by a tenth and by 0.05 between lengths has to be declared."""
    for name in METRICS:
        spec = METRICS[name]
        random = torch.Generator().manual_seed(0)
        common = 0.5 * torch.randn(96, generator=random, dtype=torch.float64)
        if spec.side not in ("tokens", "attention"):
            continue
        changes = []
        for shift in (0.0, 1.0):
            means = []
            for n in (24, 48, 96, 192):
                if spec.side == "tokens":
                    x = torch.randn(4, n, 96, generator=random, dtype=torch.float64) + shift * common
                else:
                    x = torch.softmax((1 + shift) * torch.randn(4, 2, n, n, generator=random, dtype=torch.float64), -1)
                means.append(float(spec.function(x).nanmean()))
            high, low = max(map(abs, means)), min(map(abs, means))
            changes.append(high > 1.1 * low and high - low > 0.05)
        # The entropy of attention misses its maximum by about 1/log n, which eight times the length hardly shows.
        declared = spec.depends_on_length and name != "attention_entropy"
        assert declared == any(changes), (name, means)
