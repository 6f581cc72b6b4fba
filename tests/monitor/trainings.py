"""Small real trainings, with or without a gauge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.monitor import Alarm, Gauge
from tests.own_models import checkpointed

VOCABULARY = 50
Run = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def bert(*, dropout: float = 0.1, checkpointing: bool = False, layers: int = 2) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(1)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    if checkpointing:
        checkpointed(model, use_reentrant=False)
    return model.train()


def gpt2(*, dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
    model.config.use_cache = False
    return model.train()


class Low(nn.Module):
    """A frozen map and a low-rank one that begins at zero."""

    def __init__(self, base: nn.Module, width: int = 16, out: int = 48) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merge(self, times: float = 1.0) -> None:
        self.base.weight.data += times * (self.up.weight.data @ self.down.weight.data).T


def adapted() -> Any:
    """A frozen GPT-2 with such adapters."""
    model = gpt2(dropout=0.0).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Low(block.attn.c_attn)
    return model


def batches(count: int, *, sequences: int = 4, tokens: int = 8, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(5, VOCABULARY, (sequences, tokens), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def probe(*, sequences: int = 3, tokens: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(sequences, tokens, dtype=torch.long)
    mask[0, tokens // 2 :] = 0
    ids = torch.randint(5, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(9))
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def train(
    model: nn.Module, gauge: Gauge | None = None, *, steps: int = 6, forward: Run = plain, seed: int = 5
) -> dict[str, Tensor]:
    """Final weights and the random state, after so many steps of AdamW."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(steps)):
        forward(model, batch).backward()
        if gauge is not None:
            gauge.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        if gauge is not None:
            gauge.step(step)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {"random state": torch.get_rng_state()}


def assert_bit_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def alarms_raised(
    model: Any, change: Callable[[Any, Any, int], float | None], *, steps: int, every: int = 1, **options: Any
) -> list[Alarm]:
    """The alarms and notes of a small training in which something is done before every step; it may scale the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})
    found: list[Alarm] = []
    with Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=every, actions=(), strict=True) as gauge:
        gauge.optimizers = (optimizer,)
        for step, given in enumerate(batches(steps)):
            factor = change(model, optimizer, step)
            optimizer.zero_grad()
            loss = model(**given).loss * (1.0 if factor is None else factor)
            loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            reading = gauge.step(step, loss=loss)
            told = () if reading is None else (*reading.alarms, *reading.notes)
            found += [one for one in told if one.state in ("raised", "noted")]
    return found
