"""Inputs and formats at the edge: the number is right, or it is said that there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankscope as rs
from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.models.loading import load
from rankscope.runs.rows import within_sequences
from rankscope.runs.run import Run

FAMILIES = ("init:tiny-bert", "init:tiny-gpt2", "init:tiny-llama")
NORMS = ("relative_residual", "mean_cosine", "stable_rank", "effective_rank")
TIGHT = 1e-9
"""Relative; the models below run in float64, and another order of additions moves the last digits only."""


def ids(sequences: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 60, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def wide(spec: str) -> Any:
    return load(spec, dtype="float64").model


def rows(run: Run) -> dict[tuple[Any, ...], dict[int, tuple[str, float]]]:
    """Status and value by sequence, for each metric, site, layer and head; a value at the float floor says nothing."""
    found: dict[tuple[Any, ...], dict[int, tuple[str, float]]] = {}
    for row in within_sequences(run.table).to_pylist():
        key = (row["metric"], row["site"], row["stack"], row["layer"], row["head"])
        value = row["value"] if row["status"] == Status.OK else 0.0
        found.setdefault(key, {})[row["sequence"]] = (row["status"], value)
    return found


def assert_same(one: Run, other: Run, sequence_of: dict[int, int] | None = None) -> None:
    """The same rows, where sequence s of ``one`` is ``sequence_of[s]`` of ``other``."""
    first, second = rows(one), rows(other)
    assert first.keys() == second.keys()
    for key, values in first.items():
        partner = [second[key][sequence_of[s] if sequence_of else s] for s in values]
        assert [status for status, _ in values.values()] == [status for status, _ in partner], key
        seen, expected = [value for _, value in values.values()], [value for _, value in partner]
        np.testing.assert_allclose(seen, expected, rtol=TIGHT, atol=0, err_msg=str(key))


def statuses(run: Run, metric: str, site: str = "block.out") -> set[str]:
    return set(run.select(metric=metric, site=site)["status"].to_pylist())


@pytest.mark.parametrize("spec", FAMILIES)
def test_one_token_has_no_residual_and_rank_one(spec: str) -> None:
    run = rs.measure(spec, ids(2, 1))
    assert statuses(run, "relative_residual") == statuses(run, "mean_cosine") == {str(Status.UNDEFINED)}
    ranks = run.select(metric="stable_rank", site="block.out")["value"].to_numpy()
    np.testing.assert_allclose(ranks, 1.0, rtol=1e-12)
    assert run.verdict.startswith("No verdict: the sequences have one token each, and a residual needs two.")
    assert run.code == "unknown"


@pytest.mark.parametrize("spec", FAMILIES)
def test_no_tokens_are_refused(spec: str) -> None:
    model = load(spec).model
    for given in (ids(2, 0), {"input_ids": ids(2, 0)}, [ids(1, 0)], ids(0, 4), {"input_ids": ids(0, 4)}, [""], []):
        with pytest.raises(InputError):
            rs.measure(model, given)


@pytest.mark.parametrize("spec", FAMILIES)
def test_a_sequence_of_padding_only_is_named(spec: str) -> None:
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(InputError, match="sequence 1"):
        rs.measure(load(spec).model, {"input_ids": ids(3, 6), "attention_mask": mask})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_equal_tokens_stay_equal_and_are_at_the_floor(dtype: str) -> None:
    """Rotary positions turn queries and keys, not values: equal ids give equal tokens in every layer."""
    run = rs.measure(rs.Model("init:tiny-llama", dtype=dtype), torch.full((2, 12), 7))
    assert statuses(run, "relative_residual") == {str(Status.FLOOR)}
    residual = run.select(metric="relative_residual", site="block.out")["value"].to_numpy()
    assert (residual <= run.floor["relative"]).all()
    cosine = run.select(metric="mean_cosine", site="block.out")["value"].to_numpy()
    np.testing.assert_allclose(cosine, 1.0, rtol=float(run.floor["relative"]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", FAMILIES)
def test_padding_changes_nothing(spec: str, side: str) -> None:
    model, tokens = wide(spec), ids(3, 7)
    bare = rs.measure(model, tokens)
    for extra in (1, 5):
        before, behind = (extra, 0) if side == "left" else (0, extra)
        padded = torch.nn.functional.pad(tokens, (before, behind), value=3)
        mask = torch.nn.functional.pad(torch.ones_like(tokens), (before, behind))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        run = rs.measure(model, {"input_ids": padded, "attention_mask": mask, "position_ids": positions})
        assert run.provenance.lengths == (7, 7, 7)
        assert_same(bare, run)


def test_sequences_of_different_lengths_are_what_they_are_alone() -> None:
    model, tokens, lengths = wide("init:tiny-llama"), ids(4, 9), (9, 2, 5, 1)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    together = rs.measure(model, rs.Inputs({"input_ids": tokens, "attention_mask": mask}, batch=4))
    for number, length in enumerate(lengths):
        alone = rs.measure(model, tokens[number : number + 1, :length])
        table = within_sequences(together.table)
        kept = table.filter(np.equal(table["sequence"].to_numpy(), number))
        mine, own = kept["value"].to_numpy(), alone.table["value"].to_numpy()
        np.testing.assert_allclose(mine, own, rtol=TIGHT, atol=0, equal_nan=True)
        assert kept["status"].to_pylist() == alone.table["status"].to_pylist()


def test_packed_sequences_are_those_they_are_made_of() -> None:
    """Two sequences in one row, under a block-diagonal mask and with positions of their own."""
    model, first, second = wide("init:tiny-llama"), ids(1, 6), ids(1, 4, seed=1)
    same = torch.block_diag(torch.ones(6, 6), torch.ones(4, 4)).bool()
    seen = same & torch.ones(10, 10).tril().bool()
    mask = torch.zeros(10, 10, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)[None, None]
    positions = torch.cat([torch.arange(6), torch.arange(4)])[None]
    packed = {"input_ids": torch.cat([first, second], 1), "attention_mask": mask, "position_ids": positions}
    run = rs.measure(model, packed)
    with torch.no_grad():
        states = [model(input_ids=part, output_hidden_states=True).hidden_states for part in (first, second)]
    by_layer = {
        row["layer"]: row["value"] for row in run.select(metric="relative_residual", site="block.out").to_pylist()
    }
    for layer in range(len(by_layer) - 1):  # the last of transformers' states is behind the final norm
        joined = torch.cat([state[layer + 1][0] for state in states]).numpy()
        expected = np.linalg.norm(joined - joined.mean(0)) / np.linalg.norm(joined)
        assert by_layer[layer] == pytest.approx(expected, rel=TIGHT)
    alone = [rows(rs.measure(model, part)) for part in (first, second)]
    for key, values in rows(run).items():
        if key[0] == "attention_entropy":  # the mean over queries that may choose: all but the first of each sequence
            weighted = (5 * alone[0][key][0][1] + 3 * alone[1][key][0][1]) / 8
            assert values[0][1] == pytest.approx(weighted, rel=TIGHT), key


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", FAMILIES)
def test_batches_are_their_sequences_one_by_one(spec: str) -> None:
    model, tokens = wide(spec), ids(6, 9)
    single = rs.measure(model, rs.Inputs(tokens, batch=1))
    for batch in (2, 4, 6):
        assert_same(single, rs.measure(model, rs.Inputs(tokens, batch=batch)))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [FAMILIES[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in FAMILIES[1:])])
def test_the_order_of_sequences_does_not_matter(spec: str) -> None:
    model, tokens = wide(spec), ids(6, 9)
    order = [3, 0, 5, 1, 4, 2]
    where = dict(enumerate(order))
    for batch in (1, 4):
        plain, shuffled = (rs.measure(model, rs.Inputs(given, batch=batch)) for given in (tokens, tokens[order]))
        assert_same(shuffled, plain, where)
    single = {
        key: [values[s] for s in order] for key, values in rows(rs.measure(model, rs.Inputs(tokens, batch=1))).items()
    }
    moved = {
        key: list(values.values()) for key, values in rows(rs.measure(model, rs.Inputs(tokens[order], batch=1))).items()
    }
    assert single == moved, "one by one, a sequence is the same to the bit wherever it stands"


def test_float16_that_overflows_is_located_and_bfloat16_does_not() -> None:
    """A branch of 3e5 is beyond float16 (65,504) and within bfloat16 (3e38)."""
    found = {}
    for dtype in ("float16", "bfloat16"):
        model = load("init:tiny-gpt2", dtype=dtype).model
        with torch.no_grad():
            model.h[1].mlp.c_proj.weight.fill_(0.0)
            model.h[1].mlp.c_proj.bias.copy_(torch.linspace(5e4, 6e4, 32))
            model.h[0].mlp.c_proj.bias.copy_(torch.linspace(2e4, 3e4, 32))
        found[dtype] = rs.measure(model, ids(2, 8))
    lost = found["float16"]
    assert lost.verdict.startswith("Not finite: NaN or infinity at block 1 (block.out)")
    assert statuses(lost, "relative_residual") >= {str(Status.NOT_FINITE)}
    assert (
        not lost.select(metric="relative_residual", site="block.out", layer=1)["value"]
        .is_valid()
        .to_pylist()
        .count(False)
    )
    assert all(
        math.isnan(v) for v in lost.select(metric="relative_residual", site="block.out", layer=1)["value"].to_pylist()
    )
    assert not found["bfloat16"].verdict.startswith("Not finite")


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_short_formats_have_their_own_floor_and_agree_above_it(dtype: str, bits: int) -> None:
    short, long = (rs.measure(rs.Model("init:tiny-bert", dtype=name), ids(2, 12)) for name in (dtype, "float64"))
    assert short.floor["dtype"] == dtype
    assert short.floor["relative"] == 4 * 2.0 ** (1 - bits)
    for metric in NORMS:
        values = [run.select(metric=metric, site="block.out")["value"].to_numpy() for run in (short, long)]
        np.testing.assert_allclose(values[0], values[1], rtol=float(short.floor["relative"]), atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "power"), [("float32", -130), ("float64", -1040), ("float64", 960), ("float32", 100)]
)
def test_subnormal_and_huge_streams_keep_their_shape(dtype: str, power: int) -> None:
    """Embeddings scaled by a power of two, at the entry of the first block, against integer arithmetic."""
    model = load("init:tiny-gpt2", dtype=dtype).model
    with torch.no_grad():
        for table in (model.wte.weight, model.wpe.weight):
            table.mul_(2.0**power)
    tokens = ids(1, 6)
    run = rs.measure(model, tokens, sites=["block.in@0"], metrics=NORMS)
    with torch.no_grad():
        stream = model.wte(tokens) + model.wpe(torch.arange(6))
    assert bool((stream != 0).any())
    # Exact: every entry is a whole multiple of the least subnormal (or of a unit in the last place of the smallest).
    unit = min(math.ulp(float(v)) for v in stream.double().flatten().abs().tolist() if v)
    whole = np.array([[int(float(v) / unit) for v in row] for row in stream[0].double().tolist()], dtype=object)
    centred = 6 * whole - whole.sum(axis=0)
    expected = math.sqrt(float(_ratio((centred**2).sum(), 36 * (whole**2).sum())))
    (seen,) = run.select(metric="relative_residual", site="block.in")["value"].to_pylist()
    assert seen == pytest.approx(expected, rel=1e-12)
    plain = rs.measure(load("init:tiny-gpt2", dtype=dtype).model, tokens, sites=["block.in@0"], metrics=NORMS)
    loose = 2.0**-10 if power < 0 else 1e-6  # subnormal entries have lost digits before they are measured
    for metric in NORMS:
        pair = [one.select(metric=metric, site="block.in")["value"].to_pylist()[0] for one in (run, plain)]
        assert pair[0] == pytest.approx(pair[1], rel=loose, abs=loose), metric


def _ratio(above: int, below: int) -> float:
    from fractions import Fraction

    return float(Fraction(int(above), int(below)))


def built(folder: Path, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return load(f"init:{folder}", dtype="float64").model


@pytest.mark.slow
def test_two_hundred_layers_are_those_of_the_model_itself(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 200, "n_embd": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model, tokens = built(tmp_path, **config), ids(1, 6)
    run = rs.measure(model, tokens, metrics=["relative_residual", "stable_rank"], sites=["block.out"])
    curve = run.curve("relative_residual", "block.out")
    assert curve.layers.tolist() == list(range(200))
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    for layer in (0, 57, 198):  # behind the last block transformers gives the final norm's output
        X = states[layer + 1][0].numpy()
        expected = np.linalg.norm(X - X.mean(0)) / np.linalg.norm(X)
        assert curve.mean[layer] == pytest.approx(expected, rel=TIGHT)


def test_width_one(tmp_path: Path) -> None:
    """A matrix of one column has rank one; behind a post-norm of width one it is zero, and has no shape at all."""
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 1, "n_head": 1, "vocab_size": 64, "n_positions": 16}
    run = rs.measure(built(tmp_path, **gpt2), ids(2, 6))
    for metric in ("stable_rank", "effective_rank", "participation_ratio"):
        found = run.select(metric=metric, site="block.out")["value"].to_numpy()
        np.testing.assert_allclose(found, 1.0, rtol=1e-12)
    bert = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 1, "num_attention_heads": 1,
            "intermediate_size": 2, "vocab_size": 64}  # fmt: skip
    run = rs.measure(built(tmp_path, **bert), ids(2, 6))
    for metric in NORMS:
        assert statuses(run, metric) == {str(Status.UNDEFINED)}, metric
    assert str(run)
