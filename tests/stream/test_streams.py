"""Several residual streams per token are found, counted and measured as hooks written by hand see them, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankscope import Inputs, Model, Stream, Surgery, doctor, exact, measure, operate
from rankscope.errors import DiscoveryError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.models.inputs import Batch
from rankscope.stream.viewing import view_of
from tests.flat_calls import flat
from tests.streams_nets import (
    DEPTH,
    DIM,
    KINDS,
    LAYOUTS,
    Attention,
    Ensemble,
    Mlp,
    Network,
    Written,
    given,
    relative_residual,
)

METRICS = ["relative_residual"]


def rows_of(run: object, site: str) -> dict[tuple[int, int], float]:
    table = run.select(metric="relative_residual", site=site).to_pylist()  # type: ignore[attr-defined]
    return {(row["layer"], row["sequence"]): row["value"] for row in table}


def by_hand(seen: list[Tensor]) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Of tokens, with the streams of each joined; and of streams, the mean over tokens."""
    tokens = [relative_residual(x.flatten(2)) for x in seen]
    streams = [relative_residual(x).mean(1) for x in seen]
    tables = [
        {(layer, n): float(v) for layer, row in enumerate(found) for n, v in enumerate(row)}
        for found in (tokens, streams)
    ]
    return tables[0], tables[1]


def check(model: nn.Module, ids: Tensor, seen: list[Tensor], layout: str, rel: float, **options: object) -> None:
    run = flat(measure, model, ids, metrics=METRICS, **options)  # type: ignore[arg-type]
    tokens, streams = by_hand(seen)
    assert rows_of(run, "block.out") == pytest.approx(tokens, rel=rel)
    assert rows_of(run, "streams.out") == pytest.approx(streams, rel=rel)
    assert run.extra["streams"][0]["layout"] == layout
    assert run.extra["streams"][0]["count"] == seen[0].shape[2]
    assert run.extra["axes"][0]["axis"] == "streams"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_found_in_every_layout(layout: str) -> None:
    model, ids = Network("dynamic", layout=layout), given()
    with torch.no_grad():
        model(ids)
    check(model, ids, list(model.seen), layout, 1e-10)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dynamic"])
def test_found_however_they_are_mixed(kind: str) -> None:
    model, ids = Network(kind, layout="streams batch tokens dim"), given()
    with torch.no_grad():
        model(ids)
    check(model, ids, list(model.seen), "streams batch tokens dim", 1e-10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("streams", "rows", "tokens"),
    [
        (2, 2, 7),
        (4, 1, 4),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(4, 3, 4), (3, 3, 3), (12, 1, 12)]),
    ],
)
def test_as_many_streams_as_sequences_or_tokens(layout: str, streams: int, rows: int, tokens: int) -> None:
    model, ids = Network("static", streams, layout), given(rows, tokens)
    stack = view_of(model, Batch({}, None, 0, rows, (ids,))).stacks[0]
    assert (stack.layout, stack.depth) == (layout, DEPTH)


@pytest.mark.parametrize("layout", ["(batch streams) tokens dim", "batch tokens streams dim"])
def test_modules_that_only_write_to_streams(layout: str) -> None:
    model, ids = Written("dynamic", layout=layout), given()
    with torch.no_grad():
        model(ids)
    seen = list(model.seen)
    check(model, ids, seen, f"{layout} takes=branch", 1e-10)
    run = measure(model, ids, metrics=METRICS)
    # What these modules take is a branch, and not the streams.
    assert not rows_of(run, "block.in")
    assert doctor(model, ids).trusted
    with pytest.raises(UnsupportedOperationError), operate(model, Surgery(skip=0.0), inputs=ids):
        pass


def test_an_ensemble_is_not_several_streams() -> None:
    with pytest.raises(DiscoveryError):
        measure(Ensemble(), given(), metrics=METRICS)


def test_one_token_shows_no_streams() -> None:
    model, ids = Network("static"), given(3, 1)
    with pytest.raises(DiscoveryError):
        measure(model, ids, metrics=METRICS)
    run = measure(Model(model, stream=Stream("batch tokens streams dim")), ids, metrics=METRICS)
    assert run.extra["streams"][0]["count"] == 4


def test_sums_of_mixed_streams_are_not_skips() -> None:
    model, ids = Network("altup"), given()
    stack = view_of(model, Batch({}, None, 0, 3, (ids,))).stacks[0]
    assert stack.depth == DEPTH
    assert not any(plan.skips for plan in stack.plans)
    with pytest.raises(UnsupportedOperationError), operate(model, Surgery(skip=0.0), inputs=ids):
        pass
    with pytest.raises(UnsupportedConfigError, match="exact reads"):
        exact(model, ids)


def test_padding_is_left_out_of_the_streams() -> None:
    model, ids = Network("static"), given(2, 8)
    with torch.no_grad():
        model(ids)
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[1, 5:] = True
    run = measure(model, Inputs(ids, padding=padding), metrics=METRICS)
    value = rows_of(run, "streams.out")[0, 1]
    assert value == pytest.approx(float(relative_residual(model.seen[0])[1, :5].mean()), rel=1e-10)


def test_gemma_3n() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        vocab_size=50, vocab_size_per_layer_input=50, hidden_size=DIM, hidden_size_per_layer_input=8,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_kv_shared_layers=0, altup_num_inputs=4, laurel_rank=4, sliding_window=64,
        activation_sparsity_pattern=[0.0, 0.0], max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model, ids = transformers.Gemma3nTextModel(config).eval(), given()
    with torch.no_grad():
        for block in model.layers:
            block.altup.prediction_coefs.weight.normal_()
            block.altup.correction_coefs.weight.normal_()
    seen, matrices = [], []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        streams, altup = args[0].double(), module.altup
        routed = altup.compute_router_modalities(args[0][0])
        coefs = altup.prediction_coefs(routed).unflatten(-1, (4, 4)).double()
        predict = torch.eye(4) + coefs
        active = (predict @ streams.permute(1, 2, 0, 3))[..., 0, :]
        assert active.shape == (*args[0].shape[1:3], DIM)
        seen.append(out.permute(1, 2, 0, 3))
        matrices.append((predict, altup))

    hooks = [block.register_forward_hook(keep) for block in model.layers]
    corrections: list[Tensor] = []
    for block in model.layers:
        own = block.altup.correct

        def correct(predictions: Tensor, activated: Tensor, own=own, altup=block.altup) -> Tensor:  # type: ignore[no-untyped-def]
            corrections.append(altup.correction_coefs(altup.compute_router_modalities(activated)).double() + 1.0)
            return own(predictions, activated)

        block.altup.correct = correct
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    check(model, ids, seen, "streams batch tokens dim", 1e-5)
    from rankscope.stream.mixing import mixing_matrices

    batch = Batch({"input_ids": ids}, None, 0, 3)
    view = view_of(model, batch)
    found = mixing_matrices(view, view.stacks[0], batch)
    # The layer passes its own input on, divided by the root of two; corrections add what it changed to every stream.
    for layer, ((predict, _), gains) in enumerate(zip(matrices, corrections[: len(matrices)], strict=True)):
        expected = predict + gains[..., None] * (2**-0.5 - 1) * predict[..., :1, :]
        assert torch.allclose(found[layer], expected, rtol=0, atol=1e-5)


def test_deepseek_v4() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Model"):
        pytest.skip("this version of transformers has no DeepSeek-V4")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=50, hidden_size=DIM, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, hc_mult=4,
    )  # fmt: skip
    model, ids = transformers.DeepseekV4Model(config).eval(), given()
    with torch.no_grad():
        for block in model.layers:
            for connection in (block.attn_hc, block.ffn_hc):
                connection.base.normal_()
                connection.scale.normal_()
                connection.fn.normal_(std=0.3)
    seen: list[Tensor] = []
    combs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda *given: seen.append(given[2])) for block in model.layers]
    hooks += [
        connection.register_forward_hook(lambda *given: combs.append(given[2][1].double().mT))
        for block in model.layers
        for connection in (block.attn_hc, block.ffn_hc)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    products = [combs[1] @ combs[0], combs[3] @ combs[2]]
    check(model, ids, seen, "batch tokens streams dim", 1e-5)
    described = measure(model, ids, metrics=METRICS).extra["streams"][0]
    assert described["kind"] == "doubly stochastic"
    for layer, product in enumerate(products):
        assert torch.allclose(
            torch.tensor(described["mean_matrix"][layer]).double(), product.mean((0, 1)), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("streams", [2, 4])
def test_x_transformers(streams: int) -> None:
    library = pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    layers = library.Decoder(dim=DIM, depth=2, heads=2, attn_dim_head=8, num_residual_streams=streams)
    model = library.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers).eval()
    ids, seen = given(), []
    with torch.no_grad():
        model.attn_layers.stream_emb.normal_()
        for name, weight in model.named_parameters():
            if name.endswith("static_beta"):
                weight.normal_()

    def keep(module: nn.Module, args: object, out: Tensor) -> None:
        seen.append(out.unflatten(0, (len(ids), streams)).transpose(1, 2))

    hooks = [model.attn_layers.layers[number][2].register_forward_hook(keep) for number in (1, 3)]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    check(model, ids, list(seen), "(batch streams) tokens dim takes=branch", 1e-5)


class OverDepth(nn.Module):
    """Every block takes a weighted mean of all that was returned before it, with weights of each token's own or not."""

    def __init__(self, by_token: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_token = by_token
        self.embed, self.head = nn.Embedding(50, DIM), nn.Linear(DIM, 50)
        self.blocks = nn.ModuleList(_Plain() for _ in range(DEPTH))
        self.weights = nn.Parameter(torch.randn(DEPTH, DEPTH + 1))

    def forward(self, ids: Tensor) -> Tensor:
        outs = [self.embed(ids)]
        x = outs[0]
        for block, weights in zip(self.blocks, self.weights, strict=True):
            outs.append(block(x))
            every = torch.stack(outs)
            chosen = weights[: len(outs), None, None]
            chosen = chosen * every.mean(-1) if self.by_token else chosen
            x = (chosen.softmax(0)[..., None] * every).sum(0)
        return self.head(x)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


@pytest.mark.parametrize("by_token", [False, True])
def test_attention_over_depth_is_said(by_token: bool) -> None:
    notes = measure(OverDepth(by_token), given(), metrics=METRICS).notes
    assert any("block 2, take a combination of what several earlier blocks returned" in note for note in notes)
    plain = nn.Sequential(nn.Embedding(50, DIM), _Plain(), _Plain(), _Plain())
    assert not any("earlier blocks" in note for note in measure(plain, given(), metrics=METRICS).notes)
