"""Every recipe runs, and reads what the same training reads without its trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.monitor.block_log import read_block_log
from tests.blockstats.nets import (
    DEPTH,
    SEQUENCES,
    TOKENS,
    WIDTH,
    Decoder,
    attached,
    batches,
    decoder,
    furthest,
    loss_of,
)
from tests.forked import run_program

ROOT = Path(__file__).resolve().parents[2]
EACH = SEQUENCES * TOKENS


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model)
    model(ids)
    return stats.flush()


def test_recipes_are_short() -> None:
    recipes = sorted((ROOT / "examples/block_statistics").glob("*.py"))
    assert len(recipes) == 5
    assert all(len(recipe.read_text().splitlines()) <= 30 for recipe in recipes)


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    run_program("tests/blockstats/recipe_program.py", folder, scenarios=[name])
    codes = json.loads((folder / name / "ended.json").read_text())["codes"]
    assert codes == [0] * len(codes)
    return [json.loads((folder / name / f"{rank}.json").read_text()) for rank in range(len(codes))]


@pytest.mark.slow
def test_plain_loop_with_ddp(tmp_path: Path, alone: dict[str, float]) -> None:
    rows = said(tmp_path, "ddp")[0]["rows"]
    assert [(row["step"], row["tokens/0"]) for row in rows] == [(0, EACH), (4, 2 * EACH), (8, 2 * EACH)]
    assert furthest(rows[0], alone) < 1e-7
    record, run = read_block_log(tmp_path / "ddp" / "rows.jsonl")
    assert len(record.readings) == 3
    assert run.code == "healthy"


@pytest.mark.slow
def test_torchtitan_shape(tmp_path: Path, alone: dict[str, float]) -> None:
    for rank in said(tmp_path, "torchtitan"):
        assert [row["step"] for row in rank["rows"]] == [2, 4]
        for row in rank["rows"]:
            assert furthest(row, alone) < 1e-7
            assert row["tokens/3"] == 2 * EACH  # two ranks of tensor parallelism hold every token


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path, alone: dict[str, float]) -> None:
    lightning = pytest.importorskip("lightning")
    from examples.block_statistics.lightning_callback import BlockStatistics
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = decoder()

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            return loss_of(self.net(ids), ids)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    rows: list[dict[str, Any]] = []

    class Rows(CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append({"step": step, **metrics})

    module, logger = Module(), Rows(tmp_path)
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=logger,
        callbacks=[BlockStatistics(module.net.layers, WIDTH, every=2, log_every=2)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        accumulate_grad_batches=2,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(1) * 8, batch_size=None))
    # Of two steps one counts, in two batches.
    assert [(row["step"], row["tokens/0"]) for row in rows] == [(2, 2 * EACH), (4, 2 * EACH)]
    assert furthest(rows[-1], alone) < 1e-7
    assert not any(block._forward_hooks for block in module.net.layers)


@pytest.mark.slow
def test_hugging_face_trainer_leaves_padding_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from examples.block_statistics.hugging_face_callback import BlockStatistics

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **shape))
    data = []
    for length in (9, 16, 5, 16):
        ids = torch.randint(5, 100, (16,))
        keep = torch.arange(16) < length
        data.append({"input_ids": ids, "attention_mask": keep.long(), "labels": ids.where(keep, -100)})
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    callback = BlockStatistics(model.model.layers, 32, tmp_path / "rows.jsonl")
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["step"], row["tokens/1"]) for row in rows] == [(1, 46.0), (2, 46.0)]
    assert rows[0]["group_tokens/0"] == 46 / 4


class SequenceFirst(nn.Module):
    """A layer as Megatron calls them: (sequence, batch, hidden) by name, and a tuple back."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return self.block(hidden_states.transpose(0, 1)).transpose(0, 1), None


@pytest.mark.slow
def test_megatron_microbatches(alone: dict[str, float]) -> None:
    from examples.block_statistics.megatron_microbatches import train

    model: Decoder = decoder()
    layers = nn.ModuleList(SequenceFirst(block) for block in model.layers)

    def forward_step(ids: Tensor) -> Tensor:
        assert model.embedding is not None
        x = model.embedding(ids).transpose(0, 1)
        for layer in layers:
            x, _ = layer(hidden_states=x)
        return x.square().mean()

    rows: dict[int, dict[str, float]] = {}
    microbatches = [ids.chunk(4) for ids in batches(1) * 5]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(layers, WIDTH, forward_step, microbatches, optimizer, rows.__setitem__)
    assert {step: row[f"tokens/{DEPTH - 1}"] for step, row in rows.items()} == {0: EACH, 4: 2 * EACH}
    assert all(furthest(row, alone) < 1e-7 for row in rows.values())
