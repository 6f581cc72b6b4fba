"""The numbers engineers look at first, against hooks and formulas written by hand for each model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Inputs, Model, measure
from rankscope.models import load, prepare_inputs
from rankscope.runs.run import Run
from rankscope.verbs.measure.outliers import TIMES_MEDIAN

UPDATES = ["write_ratio", "block_influence", "update_alignment"]


def by_hand(x: Tensor, y: Tensor, u: Tensor) -> dict[str, Tensor]:
    """The three metrics of an update, per sequence, from the tensors a hook saw."""
    x, y, u = x.double(), y.double(), u.double()
    ratio = np.median((u.norm(dim=-1) / x.norm(dim=-1)).numpy(), axis=-1)
    return {
        "write_ratio": torch.from_numpy(ratio),
        "block_influence": 1 - F.cosine_similarity(x, y, dim=-1, eps=0.0).mean(-1),
        "update_alignment": F.cosine_similarity(x, u, dim=-1, eps=0.0).mean(-1),
    }


def values(run: Run, metric: str, site: str, layer: int) -> Tensor:
    rows = [row for row in run.table.to_pylist() if (row["metric"], row["site"], row["layer"]) == (metric, site, layer)]
    return torch.tensor([row["value"] for row in rows], dtype=torch.float64)


def seen_by_hooks(model: nn.Module, modules: dict[str, nn.Module], run: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Input and output of each module, one entry per call, copied."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            entry = args[0] if args else kwargs["hidden_states"]
            found[name].append((entry.clone(), (output[0] if isinstance(output, tuple) else output).clone()))

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    with torch.no_grad():
        run(model)
    for handle in handles:
        handle.remove()
    return found


def blocks_of(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 3]
    return list(lists[0])


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-gpt2", "tiny-llama", "tiny-gpt-neox", "tiny-falcon", "tiny-olmo2"])
def test_blocks_change_the_stream_as_their_inputs_and_outputs_say(name: str) -> None:
    loaded = load(f"init:{name}", seed=0)
    model = loaded.model.eval()
    prepared = prepare_inputs(loaded, None, sequences=2, tokens=12)
    run = measure(model, prepared[0].inputs, metrics=[*UPDATES, "stream_rms"], sites=["block.update", "block.out"])
    blocks = {str(number): block for number, block in enumerate(blocks_of(model))}
    hooked = seen_by_hooks(model, blocks, prepared[0].run)
    for layer, ((x, y),) in enumerate(hooked.values()):
        for metric, want in by_hand(x, y, y.double() - x.double()).items():
            torch.testing.assert_close(values(run, metric, "block.update", layer), want, rtol=1e-9, atol=1e-13)
        rms = y.double().square().mean((1, 2)).sqrt()
        torch.testing.assert_close(values(run, "stream_rms", "block.out", layer), rms, rtol=1e-12, atol=0)


def test_branches_of_a_pre_norm_model_write_what_their_modules_return() -> None:
    loaded = load("init:tiny-llama", seed=0)
    model = loaded.model.eval()
    prepared = prepare_inputs(loaded, None, sequences=2, tokens=12)
    run = measure(model, prepared[0].inputs, metrics=UPDATES, sites=["attention.update", "mlp.update"])
    blocks = blocks_of(model)
    modules = {f"{i} {part}": m for i, b in enumerate(blocks) for part, m in
               (("block", b), ("attention", b.self_attn), ("mlp", b.mlp))}  # fmt: skip
    hooked = seen_by_hooks(model, modules, prepared[0].run)
    for layer in range(3):
        x = hooked[f"{layer} block"][0][0]
        for part in ("attention", "mlp"):
            u = hooked[f"{layer} {part}"][0][1]
            for metric, want in by_hand(x, x.double() + u.double(), u).items():
                torch.testing.assert_close(values(run, metric, f"{part}.update", layer), want, rtol=1e-6, atol=1e-9)
            x = x + u


class InPlace(nn.Module):
    """Adds its branches to the input tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(x, x, x, need_weights=False)[0]
        x += self.mlp(x)
        return x


class Stacked(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_adds_in_place_is_compared_with_what_it_was_given() -> None:
    torch.manual_seed(0)
    model = Stacked([InPlace() for _ in range(3)]).eval()
    x = torch.randn(2, 6, 8)
    run = measure(model, x, metrics=["write_ratio", "block_influence"], sites=["block.update", "mlp.update"])
    with torch.no_grad():
        before, stream = x, x.clone()
        for layer, block in enumerate(model.blocks):
            attended = before + block.attention(before, before, before, need_weights=False)[0]
            after = attended + block.mlp(attended)
            want = by_hand(before, after, after - before)
            assert values(run, "write_ratio", "block.update", layer).min() > 0.01
            torch.testing.assert_close(
                values(run, "write_ratio", "block.update", layer), want["write_ratio"], rtol=1e-5, atol=0
            )
            written = by_hand(attended, after, after - attended)["write_ratio"]
            torch.testing.assert_close(values(run, "write_ratio", "mlp.update", layer), written, rtol=1e-4, atol=0)
            before = after
    assert stream is not before


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("tiny-llama", "sdpa"), ("tiny-llama", "eager"), ("tiny-bert", "sdpa"), ("tiny-gemma2", "eager")],
)
def test_the_largest_logit_is_that_of_the_scores(name: str, implementation: str) -> None:
    """Against the eager softmax: its input is caught by a patched function."""
    loaded = load(f"init:{name}", seed=0)
    model = loaded.model.eval()
    model.set_attn_implementation("eager")
    prepared = prepare_inputs(loaded, None, sequences=2, tokens=12)
    caught: list[Tensor] = []
    own = F.softmax

    def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if scores.dim() == 4:
            caught.append(scores.clone())
        return own(scores, *args, **kwargs)

    F.softmax = softmax
    try:
        with torch.no_grad():
            prepared[0].run(model)
    finally:
        F.softmax = own
    model.set_attn_implementation(implementation)
    run = measure(model, prepared[0].inputs, metrics=["max_attention_logit"], sites=["attention.scores"])
    assert len(caught) == 3
    for layer, scores in enumerate(caught):
        want = scores.masked_fill(scores < -5000, -torch.inf).double().amax((-1, -2)).flatten()
        torch.testing.assert_close(
            values(run, "max_attention_logit", "attention.scores", layer), want, rtol=2e-5, atol=1e-8
        )


def test_scores_that_were_shifted_before_the_softmax_are_refused() -> None:
    run = measure(
        "init:tiny-gpt-oss",
        Inputs(sequences=1, tokens=8),
        metrics=["max_attention_logit", "diagonal_mass"],
        sites=["attention.scores", "attention.probs"],
    )
    assert set(run.table["metric"].to_pylist()) == {"diagonal_mass"}
    assert any("subtracts it before its softmax" in note for note in run.notes)


MIXTURES = ["tiny-mixtral", "tiny-qwen2-moe", "tiny-olmoe", "tiny-deepseek-v3", "tiny-granitemoe", "tiny-gpt-oss"]
WITHOUT_PROBABILITIES = {"tiny-deepseek-v3", "tiny-granitemoe", "tiny-gpt-oss"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_routers_are_read_as_the_experts_receive_them(name: str) -> None:
    loaded = load(f"init:{name}", seed=0)
    model = loaded.model.eval()
    prepared = prepare_inputs(loaded, None, sequences=2, tokens=12)
    received: list[tuple[int, Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        (numbers,) = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype == torch.int64]
        received.append((next(iter(module.parameters())).shape[0], numbers.clone()))

    experts = [module for path, module in model.named_modules() if path.endswith(".experts")]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    with torch.no_grad():
        prepared[0].run(model)
    for handle in handles:
        handle.remove()
    run = measure(model, prepared[0].inputs)
    layers = sorted({row["layer"] for row in run.table.to_pylist() if row["site"] == "mlp.router"})
    assert len(layers) == len(received) > 0
    for layer, (count, numbers) in zip(layers, received, strict=True):
        for sequence, own in enumerate(numbers.reshape(2, 12, -1)):
            share = torch.bincount(own.flatten(), minlength=count).double() / own.numel()
            assert values(run, "largest_expert_share", "mlp.router", layer)[sequence] == share.max()
            entropy = -(share[share > 0] * share[share > 0].log()).sum()
            got = values(run, "effective_experts", "mlp.router", layer)[sequence]
            assert got.item() == pytest.approx(math.exp(entropy), rel=1e-12)
        known = values(run, "router_entropy", "mlp.router", layer).isfinite().all()
        assert bool(known) is (name not in WITHOUT_PROBABILITIES)
    assert any(axis["axis"] == "experts" for axis in run.extra["axes"])


class Mixture(nn.Module):
    """Experts in a list, and a softmax of the same size that is not the router."""

    def __init__(self, rankings: int) -> None:
        super().__init__()
        self.gate, self.other = nn.Linear(8, 4), nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.rankings = rankings
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        decoy = self.other(x).softmax(-1)
        for _ in range(self.rankings):
            self.chosen = self.gate(x).topk(1, dim=-1).indices
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return every.mean(-2) * decoy.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Gated(nn.Module):
    """A softmax over four groups of channels, and a top-k, without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return self.out(x) * weights.topk(1, dim=-1).values


def test_a_softmax_beside_experts_is_not_their_router() -> None:
    torch.manual_seed(0)
    mixture = Mixture(rankings=1)
    model, x = Stacked([Block(mixture)]).eval(), torch.randn(1, 9, 8)
    run = measure(Model(model, blocks="blocks.*"), x)
    assert values(run, "router_entropy", "mlp.router", 0).isnan().all()
    assert mixture.chosen is not None
    share = torch.bincount(mixture.chosen.flatten(), minlength=4).double() / 9
    assert values(run, "largest_expert_share", "mlp.router", 0).item() == share.max().item()


@pytest.mark.parametrize("rankings", [0, 2])
def test_a_routing_that_cannot_be_told_is_refused_by_name(rankings: int) -> None:
    run = measure(Model(Stacked([Block(Mixture(rankings))]).eval(), blocks="blocks.*"), torch.randn(1, 9, 8))
    assert "mlp.router" not in run.table["site"].to_pylist()
    assert any("the router of Mixture cannot be read" in note for note in run.notes)


def test_a_gate_without_experts_is_not_a_router() -> None:
    run = measure(Model(Stacked([Block(Gated())]).eval(), blocks="blocks.*"), torch.randn(1, 9, 8))
    assert "mlp.router" not in run.table["site"].to_pylist()
    assert run.notes == ()


class Spike(nn.Module):
    """Writes one huge entry in block 1 and takes it back in block 3."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.attention = layer, nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1e-7 * self.attention(x, x, x, need_weights=False)[0]
        spike = torch.zeros_like(x)
        spike[1, 2, 5] = {1: -1e5, 3: 1e5}.get(self.layer, 0.0)
        return x + (0.01 * torch.tanh(self.mlp(x)) + spike)


def test_outliers_are_those_of_a_search_by_hand() -> None:
    torch.manual_seed(0)
    model, x = Stacked([Spike(layer) for layer in range(5)]).eval(), torch.randn(2, 6, 8)
    run = measure(Model(model, blocks="blocks.*"), x)
    (found,) = run.extra["outliers"]
    known: dict[int, float] = {}
    with torch.no_grad():
        stream = x
        for layer, block in enumerate(model.blocks):
            stream = block(stream)
            for place in ((stream.abs() / stream.abs().flatten(1).median(-1).values[:, None, None]) > 1000).nonzero():
                assert place.tolist() == [1, 2, 5]
                known[layer] = stream[1, 2, 5].item()
    assert sorted(known) == [1, 2]
    assert (found["token"], found["channel"], found["born"], found["last"]) == (2, 5, 1, 2)
    assert (found["sequences"], found["of_sequences"], found["to_the_end"]) == (1, 2, False)
    assert found["value"] == pytest.approx(min(known.values()), rel=1e-6)
    assert found["times"] > TIMES_MEDIAN
    assert "Massive activations" in str(run)


def test_a_model_without_outliers_has_no_table() -> None:
    run = measure("init:tiny-bert", Inputs(sequences=1, tokens=8))
    assert "outliers" not in run.extra
    assert "Massive" not in str(run)
