"""Which axis of the inputs counts sequences: found by experiment, declared, or asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.models.inputs import Axes, prepare_inputs
from rankscope.models.loading import load
from tests.flat_calls import flat

DIM, VOCABULARY = 16, 40


class Encoder(nn.Module):
    """PyTorch's own encoder, by default with tokens first."""

    def __init__(self, *, batch_first: bool = False, causal: bool = True, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first, self.causal = batch_first, causal
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, src: Tensor, src_mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        tokens = src.shape[1] if self.batch_first else src.shape[0]
        if src_mask is None and self.causal:
            src_mask = nn.Transformer.generate_square_subsequent_mask(tokens)
        x = src if src.is_floating_point() else self.embedding(src)
        return self.head(self.encoder(x, src_mask, src_key_padding_mask=pad_mask))


class Pooled(Encoder):
    """One output per sequence."""

    def forward(self, src: Tensor, src_mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        return super().forward(src, src_mask, pad_mask).mean(dim=1 if self.batch_first else 0)


class Loss(Encoder):
    """One number for the whole batch."""

    def forward(self, src: Tensor, src_mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        return super().forward(src, src_mask, pad_mask).square().mean()


class FixedLength(Encoder):
    """Runs on sequences of 12 tokens only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.positions = nn.Parameter(torch.randn(12, 1, DIM).transpose(0, int(self.batch_first)))

    def forward(self, src: Tensor, src_mask: Tensor | None = None, pad_mask: Tensor | None = None) -> Tensor:
        return super().forward(self.embedding(src) + self.positions, src_mask, pad_mask)


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def by_hand(model: Encoder, ids_first: Tensor, **inputs: Any) -> list[list[float]]:
    """Relative residual after each block, per sequence, of ids (tokens, sequences)."""
    states: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda *call: states.append(call[2].detach().double()))
        for layer in model.encoder.layers
    ]
    with torch.no_grad():
        model(ids_first, **inputs)
    for handle in handles:
        handle.remove()
    return [[float((x - x.mean(0)).norm() / x.norm()) for x in state.transpose(0, 1).unbind(0)] for state in states]


def measured(model: nn.Module, inputs: Any, **options: Any) -> list[list[float]]:
    run = flat(rs.measure, model, inputs, metrics=["relative_residual"], sites=["block.out"], **options)
    rows = run.select(metric="relative_residual", site="block.out").to_pylist()
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["layer"], {})[row["sequence"]] = row["value"]
    return [[value for _, value in sorted(found[layer].items())] for layer in sorted(found)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "shape", "causal"),
    [
        (Encoder, (12, 5), True),
        (Encoder, (12, 5), False),
        (Encoder, (5, 12), True),
        (Encoder, (6, 6), True),
        (Encoder, (12, 1), True),
        (Pooled, (6, 6), False),
        (Loss, (12, 5), True),
    ],
)
def test_item_3_tokens_first_is_found_and_equals_the_hand_written_twin(
    kind: type[Encoder], shape: tuple[int, int], causal: bool
) -> None:
    model = kind(causal=causal).eval()
    found = measured(model, ids(*shape), batch=2)
    assert [len(row) for row in found] == [shape[1]] * 2
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_hand(model, ids(*shape))), rtol=1e-4, atol=0)
    # The same network with batch first, and the ids turned, is the same measurement.
    usual = kind(batch_first=True, causal=causal).eval()
    usual.load_state_dict(model.state_dict())
    torch.testing.assert_close(measured(usual, ids(*shape).T), found, rtol=1e-4, atol=0)


def test_item_3_vectors_and_sequences_of_a_fixed_length() -> None:
    model = Encoder().eval()
    x = torch.randn(12, 5, DIM, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(measured(model, x), by_hand(model, x), rtol=1e-4, atol=0)
    fixed = FixedLength().eval()  # cannot be tried with two entries along the first axis
    torch.testing.assert_close(measured(fixed, ids(12, 5), batch=2), by_hand(fixed, ids(12, 5)), rtol=1e-4, atol=0)


def test_item_3_masks_beside_tokens_first() -> None:
    """(sequences, tokens) for padding and (tokens, tokens) between tokens, in batches of two sequences."""
    model = Encoder(causal=False).eval()
    lengths = torch.tensor([12, 7, 9, 4, 12])
    is_padding = torch.arange(12) >= lengths[:, None]
    found = measured(model, {"src": ids(12, 5), "pad_mask": is_padding}, batch=2)
    for number, length in enumerate(lengths.tolist()):
        alone = by_hand(model, ids(12, 5)[:length, number : number + 1])
        torch.testing.assert_close([layer[number] for layer in found], [layer[0] for layer in alone], rtol=1e-4, atol=0)
    causal = nn.Transformer.generate_square_subsequent_mask(12)
    found = measured(model, {"src": ids(12, 5), "src_mask": causal}, batch=2)
    torch.testing.assert_close(found, by_hand(model, ids(12, 5), src_mask=causal), rtol=1e-4, atol=0)
    with pytest.raises(InputError, match="one sequence fewer"):
        measured(model, {"src": ids(6, 6), "pad_mask": is_padding[:, :6][:1].expand(6, 6)})


def test_item_3_two_streams_of_ids_with_other_lengths() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, DIM)
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, 2, 32), 2, enable_nested_tensor=False)
            self.both = nn.Transformer(DIM, 2, 2, 2, 32, custom_encoder=encoder)

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            out: Tensor = self.both(self.embedding(src), self.embedding(tgt))
            return out

    prepared = prepare_inputs(load(Translator().eval()), {"src": ids(12, 5), "tgt": ids(7, 5)}, batch=2)
    assert [part.sequences for part in prepared] == [2, 2, 1]
    assert [tuple(part.inputs["tgt"].shape) for part in prepared] == [(7, 2), (7, 2), (7, 1)]


class NothingMixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class EverythingMixes(NothingMixes):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x + x.mean(dim=(0, 1), keepdim=True)


@pytest.mark.parametrize(
    ("build", "axes", "why"),
    [
        (NothingMixes, None, "no tokens act on each other"),
        (EverythingMixes, None, "along both"),
        (Encoder, "batch tokens", "reads the inputs as 'tokens batch'"),
        (lambda: Encoder(batch_first=True), "tokens batch", "reads the inputs as 'batch tokens'"),
    ],
)
def test_item_3_what_cannot_be_told_is_asked_and_a_false_declaration_refused(
    build: Callable[[], nn.Module], axes: Axes | None, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        prepare_inputs(load(build().eval()), ids(12, 5), axes=axes)


@pytest.mark.parametrize("axes", ["batch tokens", "tokens batch"])
def test_item_3_a_declaration_decides_where_the_experiment_cannot(axes: Axes) -> None:
    for build in (NothingMixes, EverythingMixes):
        prepared = prepare_inputs(load(build().eval()), ids(12, 5), axes=axes)
        assert prepared.sequences == (12 if axes == "batch tokens" else 5)


def test_item_3_the_proof_costs_four_passes_once_and_leaves_no_trace() -> None:
    model = Encoder(batch_first=True).train()
    calls: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: calls.append(tuple(args[0].shape)))
    state = torch.random.get_rng_state()
    prepare_inputs(load(model), ids(5, 12))
    assert calls == [(2, 12)] * 4
    prepare_inputs(load(model), ids(9, 7))
    assert len(calls) == 4
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 0
