"""Metrics with state: against plain loops, and over real processes."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.errors import InputError, MissingExtraError
from rankscope.metrics import METRICS
from tests.monitor.stateful.batches import attention_batches, batches_of, token_batches

pytest.importorskip("torchmetrics")
import rankscope.monitor.stateful as stateful
from rankscope.monitor.stateful import class_name

WORLD = 2
ROOT = Path(__file__).resolve().parents[3]


def batches_for(name: str) -> list[tuple[Any, ...]]:
    return list(token_batches() if METRICS[name].side == "tokens" else attention_batches())


def one_by_one(name: str) -> tuple[float, int, int]:
    """Each sequence alone, cut to its length, in a plain loop."""
    values = []
    for x, mask in batches_for(name):
        for sequence, keep in zip(x, mask.bool(), strict=True):
            alone = sequence[keep] if METRICS[name].side == "tokens" else sequence[:, keep][:, :, keep]
            values.append(METRICS[name].function(alone))
    flat = torch.cat([value.reshape(-1) for value in values])
    known = flat[~flat.isnan()]
    return math.fsum(known.tolist()) / max(len(known), 1), len(known), len(flat) - len(known)


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].side not in ("tokens", "attention")])
def test_other_sides_take_their_tensors_and_a_mask(name: str) -> None:
    metric = getattr(stateful, class_name(name))()
    values = []
    for tensors, mask in batches_of(METRICS[name].side):
        metric.update(*tensors, attention_mask=mask)
        for number, keep in enumerate(mask.bool()):
            cut = [t[number][:, keep] if t.ndim == 4 else t[number][keep] for t in tensors]
            cut = [t[:, :, keep] if METRICS[name].side == "scores" else t for t in cut]
            values += METRICS[name].function(*cut).reshape(-1).tolist()
    assert metric.compute().item() == pytest.approx(sum(values) / len(values), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].side in ("tokens", "attention")])
def test_the_mean_over_batches_is_the_mean_over_sequences(name: str) -> None:
    metric = getattr(stateful, class_name(name))()
    for batch in batches_for(name):
        metric.update(*batch)
    mean, count, undefined = one_by_one(name)
    assert metric.compute().item() == pytest.approx(mean, rel=1e-9)
    assert (int(metric.count), int(metric.undefined)) == (count, undefined)


@pytest.mark.parametrize("name", ["relative_residual", "centred_effective_rank", "uniformity", "rankme"])
def test_between_inputs_all_are_measured_together(name: str) -> None:
    tokens, pooled = (getattr(stateful, f"{class_name(name)}BetweenInputs")() for _ in range(2))
    for x, mask in token_batches():
        means = torch.stack([row[kept.bool()].double().mean(0) for row, kept in zip(x, mask, strict=True)])
        tokens.update(x, mask)
        pooled.update(means)
    want = METRICS[name].function(torch.cat(pooled.pooled)).item()
    assert pooled.compute().item() == want
    assert tokens.compute().item() == pytest.approx(want, rel=1e-12)
    tokens.reset()
    assert tokens.pooled == []


def test_between_inputs_refuses_what_is_not_inputs() -> None:
    with pytest.raises(InputError, match="pooled vectors"):
        stateful.MeanCosineBetweenInputs().update(torch.randn(2, 3, 4, 5))
    with pytest.raises(AttributeError, match="AttentionEntropyBetweenInputs"):
        _ = stateful.AttentionEntropyBetweenInputs
    assert "MeanCosineBetweenInputs" in dir(stateful)


def test_a_call_is_the_value_of_its_batch_and_a_reset_forgets_it() -> None:
    metric = stateful.AttentionEntropy()
    (batch, *_) = batches_for("attention_entropy")
    assert metric(*batch).item() == metric.compute().item()
    metric.reset()
    assert int(metric.count) == 0


def test_causal_attention_is_held_against_what_a_row_may_see() -> None:
    tokens = 6
    support = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    uniform = support / support.sum(-1, keepdim=True)
    metric = stateful.AttentionEntropy()
    assert metric(uniform[None, None], support=support).item() == pytest.approx(1.0, rel=1e-12)
    assert metric(uniform[None, None]).item() < 0.9


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    from tests.monitor.stateful.sync_program import results

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(__file__).with_name("sync_program.py")), str(WORLD), str(tmp_path)]
    subprocess.run(program, env=environment, check=True, timeout=300)
    alone = results(0, 1)
    for rank in range(WORLD):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == alone.keys()
        for name, (mean, count, undefined) in alone.items():
            assert found[name][0] == pytest.approx(mean, rel=1e-14)
            assert found[name][1:] == [count, undefined]


def test_states_stay_in_float64_and_survive_a_copy() -> None:
    metric = stateful.MeanCosine()
    metric.update(*token_batches()[0])
    assert metric.half().float().total.dtype == torch.float64
    assert pickle.loads(pickle.dumps(metric)).compute() == metric.compute()
    assert stateful.MeanCosine is type(metric)
    assert "mean_cosine" in (stateful.MeanCosine.__doc__ or "")


def test_nothing_defined_is_not_a_number() -> None:
    metric = stateful.RelativeResidual()
    metric.update(torch.randn(2, 1, 4))
    assert math.isnan(metric.compute().item())
    assert int(metric.undefined) == 2


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    with pytest.raises(AttributeError, match="StableRank"):
        _ = stateful.StabelRank
    assert "StableRank" in dir(stateful)


def test_without_torchmetrics_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "rankscope.monitor.stateful.metric", raising=False)
    monkeypatch.delitem(vars(stateful), "Correlation", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[torchmetrics\]'"):
        _ = stateful.Correlation
