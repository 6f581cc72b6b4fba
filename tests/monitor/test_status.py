"""What cannot be read is refused by name at the first reading, or said and recorded; and which blocks were read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import Inputs, Model
from rankscope.errors import InputError, ReadingError
from rankscope.models.loading import load
from rankscope.monitor import Gauge, Reading, read_record
from rankscope.monitor.hosts.hosting import HostedGauge
from rankscope.monitor.readings import LAYERS_READ
from tests.flat_calls import flat
from tests.monitor.trainings import batches, bert, probe


@torch.library.custom_op("rankscope_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in one operator, as a fused kernel of another library."""
    return ((query @ key.transpose(-1, -2)).softmax(-1) @ value).contiguous()


class Block(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.attend: Callable[..., Tensor] = attend if fused else nn.functional.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)]
        x = x + self.out(self.attend(*parts).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Three blocks; attention of those that are ``fused`` cannot be seen."""

    def __init__(self, *fused: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(fused=number in fused) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


STREAM = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(0))


def hidden(**options: Any) -> Gauge:
    """A gauge on a model that computes all attention in one operator."""
    return flat(Gauge, Net(0, 1, 2), STREAM, blocks="blocks.*", schedule=1, **options)


@pytest.mark.parametrize("name", ["attention_entropy", "max_attention_logit"])
def test_attention_in_a_custom_operator_is_refused_by_name(name: str) -> None:
    with pytest.raises(ReadingError, match=rf"{name}: .*rankscope_tests::attend"):
        hidden(metrics=["relative_residual", name]).step(0)


def test_what_a_default_includes_is_said_once_and_recorded(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, "rankscope.monitor"), hidden(record=tmp_path) as gauge:
        readings = [gauge.step(step) for step in range(2)]
    assert all(readings)
    said = [entry for entry in caplog.records if "does not read attention_entropy" in entry.message]
    assert [entry.levelname for entry in said] == ["WARNING"]
    status = read_record(tmp_path).facts["status"]
    assert list(status["not_read"]) == ["attention_entropy"]
    assert "rankscope_tests" in status["not_read"]["attention_entropy"]
    assert "after_backward" in status["not_watched"]["vanishing_qk_gradients"]
    assert {"entropy_collapse", "repeated_sequences", "not_finite_gradients"} <= set(status["not_watched"])
    assert not {"token_collapse", "input_collapse", "still_weights"} & set(status["not_watched"])
    assert status["ranks"]["0"] == {"step": 0, "layers": 3, "read": 3, "disabled": ""}


@pytest.mark.parametrize(
    ("metric", "preset"),
    [("max_attention_logit", "init:tiny-bert"), ("outside_span_share", "init:tiny-bert"),
     ("router_entropy", "init:tiny-mixtral")],
)  # fmt: skip
def test_metrics_of_every_side_are_read(metric: str, preset: str) -> None:
    gauge = Gauge(load(preset).model, Inputs(sequences=2, tokens=8), metrics=[metric], strict=True)
    reading = gauge.step(0)
    assert reading is not None
    assert all(value > 0.0 for value in reading.values(metric).values())
    assert len(reading.values(metric)) == row_of(reading).most


def test_router_of_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ReadingError, match="router_entropy: no mixture of experts"):
        Gauge(bert(), probe(), metrics=["router_entropy"]).step(0)


@pytest.mark.parametrize(
    ("alarm", "options", "words"),
    [
        ("entropy_collapse", {"metrics": ["mean_cosine"]}, "attention_entropy, which is not among the metrics"),
        ("input_collapse", {"metrics": ["mean_cosine"]}, "relative_residual, which is not among the metrics"),
    ],
)
def test_alarm_without_its_metric_is_refused_at_once(alarm: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        flat(Gauge, bert(), probe(), alarms=[alarm], **options)
    with pytest.raises(InputError, match=words):
        HostedGauge(probe(), alarms=[alarm], **options)


def gradient(gauge: Gauge, model: nn.Module) -> None:
    model(**batches(1)[0]).loss.backward()
    gauge.after_backward(0)


@pytest.mark.parametrize(
    ("alarm", "given", "words"),
    [
        ("vanishing_qk_gradients", {}, "after_backward"),
        ("not_finite_gradients", {}, "after_backward"),
        ("repeated_sequences", {}, "no batch was given"),
        ("repeated_sequences", {"batch": torch.ones(3)}, "no tensor of tokens"),
        ("padding_only", {"batch": torch.randn(2, 3, 4)}, "no tensor of tokens"),
        ("input_collapse", {}, "at least 8 different inputs"),
    ],
)
def test_alarm_that_cannot_be_watched_is_refused_at_the_first_reading(
    alarm: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ReadingError, match=rf"{alarm}: .*{words}"):
        Gauge(bert(), probe(), alarms=[alarm]).step(0, **given)


def test_gradients_of_frozen_projections_are_refused_by_name() -> None:
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "attention.self" not in name
    gauge = Gauge(model, probe(), alarms=["vanishing_qk_gradients"])
    gradient(gauge, model)
    with pytest.raises(ReadingError, match="no block has query, key and value weights"):
        gauge.step(0)


def test_what_was_asked_for_and_can_be_read_is_read() -> None:
    model = bert()
    names = ["vanishing_qk_gradients", "repeated_sequences", "input_collapse", "still_weights", "entropy_collapse"]
    gauge = Gauge(model, probe(sequences=8), schedule=1, alarms=names)
    gradient(gauge, model)
    assert gauge.step(0, batch=batches(1)[0]) is not None
    assert gauge.disabled is None


def test_probe_of_single_tokens_is_refused_by_name() -> None:
    with pytest.raises(ReadingError, match=r"mean_cosine: it is undefined in every block; .*single token"):
        Gauge(bert(), {"input_ids": torch.full((4, 1), 7)}, metrics=["mean_cosine"]).step(0)


def row_of(reading: Reading | None) -> Any:
    assert reading is not None
    (row,) = [row for row in reading.table if row.metric == LAYERS_READ]
    return row


def test_reading_tells_at_how_many_blocks_something_was_read() -> None:
    with Gauge(Model(Net(1), blocks="blocks.*"), STREAM, strict=True) as gauge:
        row = row_of(gauge.step(0))
    assert (row.site, row.mean, row.most, row.status) == ("rank 0", 3.0, 3.0, "ok")
    reading = Gauge(Model(Net(1), blocks="blocks.*"), STREAM, metrics=["attention_entropy"], strict=True).step(0)
    assert (row_of(reading).mean, row_of(reading).status) == (2.0, "1 of 3 layers not read")


def test_record_says_why_no_blocks_are_read_or_the_gauge_was_disabled(tmp_path: Path) -> None:
    given = {"input_ids": torch.full((2, 4), 10**6)}
    Gauge(bert(), given, record=tmp_path / "left out").step(0)
    assert "cannot run" in read_record(tmp_path / "left out").facts["status"]["not_read"]["relative_residual"]
    with pytest.raises(InputError):
        Gauge(bert(), given, strict=True).step(0)
    gauge = Gauge(bert(), probe(), record=tmp_path / "disabled", schedule=1)
    gauge.step(0)
    gauge._switch_off("a test wanted it")
    assert read_record(tmp_path / "disabled").facts["status"]["ranks"]["0"]["disabled"] == "a test wanted it"
