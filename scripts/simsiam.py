"""A SimSiam-like training of a small encoder, with and without stop-gradient, under a gauge.

Two views of each sequence, in which a third of the words are replaced, go through one encoder; a predictor maps the
mean of one onto the mean of the other (cosine). Without the stop-gradient, the encoder may map everything to one
vector. Writes ``docs/data/monitor/simsiam.json``: for each seed, when the gauge raised which alarm, and the loss then.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rankscope import Inputs
from rankscope.monitor import Gauge

TARGET = Path(__file__).resolve().parents[1] / "docs/data/monitor/simsiam.json"
VOCABULARY, TOKENS, WIDTH, BLOCKS, BATCH = 60, 12, 32, 2, 32
STEPS, EVERY, SEEDS = 200, 5, (0, 1, 2)
TOPICS = 8


def sequences(count: int, generator: torch.Generator) -> Tensor:
    """Each sequence has a topic, from whose words two thirds of its words are drawn."""
    topic = torch.randint(TOPICS, (count, 1), generator=generator)
    own = 4 + 7 * topic + torch.randint(7, (count, TOKENS), generator=generator)
    return replaced(own, generator)


def replaced(ids: Tensor, generator: torch.Generator) -> Tensor:
    """A view: every third word, on average, is drawn anew."""
    other = torch.randint(4, VOCABULARY, ids.shape, generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 1 / 3, other, ids)


class Siamese(nn.Module):
    """The encoder, and a predictor with batch norm; the mean of the last block is compared, without a projector."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=2,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.predictor = nn.Sequential(
            nn.Linear(WIDTH, WIDTH // 2), nn.BatchNorm1d(WIDTH // 2), nn.ReLU(), nn.Linear(WIDTH // 2, WIDTH)
        )

    def loss(self, one: Tensor, other: Tensor, *, stop_gradient: bool) -> Tensor:
        """Minus the cosine of the prediction from each view and the other view."""
        z = [self.encoder(input_ids=view).last_hidden_state.mean(1) for view in (one, other)]
        p = [self.predictor(pooled) for pooled in z]
        target = [pooled.detach() if stop_gradient else pooled for pooled in z]
        return -(cosine_similarity(p[0], target[1]).mean() + cosine_similarity(p[1], target[0]).mean()) / 2


def train(seed: int, *, stop_gradient: bool, steps: int = STEPS) -> dict[str, Any]:
    """One training; what the gauge said, and the loss."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Siamese()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    probe = sequences(16, torch.Generator().manual_seed(1000))
    alarms, losses, residuals = [], [], []
    with Gauge(model.encoder, Inputs(probe, sequences=16), schedule=EVERY, actions=(), strict=True) as gauge:
        for step in range(steps):
            batch = sequences(BATCH, generator)
            loss = model.loss(replaced(batch, generator), replaced(batch, generator), stop_gradient=stop_gradient)
            optimiser.zero_grad()
            loss.backward()
            gauge.after_backward(step)
            optimiser.step()
            losses.append(float(loss.detach()))
            reading = gauge.step(step, loss=loss)
            if reading is not None:
                residuals.append(reading.values("inputs_relative_residual")[BLOCKS - 1])
                alarms += [
                    {"name": alarm.name, "state": alarm.state, "step": step, "layer": alarm.layer, "loss": losses[-1]}
                    for alarm in reading.alarms
                ]
    return {
        "seed": seed,
        "stop_gradient": stop_gradient,
        "alarms": alarms,
        "losses": [round(value, 5) for value in losses[::EVERY]],
        "inputs_relative_residual": [round(value, 5) for value in residuals],
    }


def main() -> int:
    """Train three seeds each way and write what happened."""
    torch.set_num_threads(1)
    runs = [train(seed, stop_gradient=stopped) for stopped in (False, True) for seed in SEEDS]
    TARGET.write_text(json.dumps({"date": date.today().isoformat(), "every": EVERY, "runs": runs}) + "\n")
    for run in runs:
        raised = [f"{alarm['name']} {alarm['state']} at {alarm['step']}" for alarm in run["alarms"]]
        print(run["seed"], run["stop_gradient"], raised, run["losses"][-1], run["inputs_relative_residual"][-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
