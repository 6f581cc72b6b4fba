"""Models that are odd on purpose: tokens, positions, mixing, norms, what begins at zero, what is shared."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.healthy.parts import (
    CLASSES,
    IDS,
    TOKENS,
    Attention,
    Block,
    Case,
    D,
    Language,
    Mlp,
    Net,
    causal_block,
    classes,
    counting,
    ids,
    next_id,
    per_token,
    programs,
)

# Tokens and positions


def class_token_from_randn() -> Case:
    class Image(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, D, 4, 4)
            self.first, self.positions = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(10, D))

        def tokens(self, given: Tensor) -> Tensor:
            patches = self.embed(given).flatten(2).transpose(1, 2)
            return torch.cat([self.first.expand(len(given), -1, -1), patches], 1) + self.positions

        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given)[:, 0])

    return Case(Image(), torch.randn(24, 3, 12, 12), classes())


def no_positions() -> Case:
    class Bag(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.positions

        def tokens(self, given: Tensor) -> Tensor:
            return self.embed(given)

    given = ids()
    return Case(Bag(), given, (given < 25).sum(1) % CLASSES)


def sines_as_positions() -> Case:
    class Sines(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.positions
            angles = torch.arange(TOKENS)[:, None] / 10000 ** (torch.arange(D) // 2 * 2 / D)
            self.register_buffer("positions", torch.where(torch.arange(D) % 2 == 0, angles.sin(), angles.cos()))

    return Case(Sines(), ids(), classes())


def rotary_positions() -> Case:
    class Rotary(Attention):
        def split(self, x: Tensor) -> Tensor:
            x = super().split(x)
            angles = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(x.shape[3] // 2) * 2 / x.shape[3])
            a, b = x.chunk(2, -1)
            return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    given = ids()
    return Case(Language(lambda: Block(Rotary())), given, given.roll(1, 1), per_token)


def distances_as_bias() -> Case:
    class Alibi(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            away = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
            slopes = 2.0 ** -torch.arange(1, self.heads + 1)[:, None, None]
            return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - slopes * away).softmax(-1)

    return Case(Net(lambda: Block(Alibi())), ids(), classes())


def embeddings_times_the_root_of_the_width() -> Case:
    class Scaled(Net):
        def tokens(self, given: Tensor) -> Tensor:
            return self.embed(given) * math.sqrt(D) + self.positions

    return Case(Scaled(), ids(), classes())


def tied_head() -> Case:
    model = Language(causal_block)
    nn.init.normal_(model.embed.weight, std=0.02)
    model.head.weight = model.embed.weight
    return Case(model, counting(), counting(), next_id)


def padding_left_out() -> Case:
    class Padded(Net):
        def forward(self, given: Tensor) -> Tensor:
            real = (given != 0).float()[..., None]
            return self.head((self.states(given) * real).sum(1) / real.sum(1))

    given = ids().clamp_min(1)
    given[:, 9:] = 0
    return Case(Padded(), given, classes())


def bytes_of_which_few_occur() -> Case:
    model = Net()
    model.embed = nn.Embedding(256, D)
    return Case(model, 97 + ids() % 26, classes())


def a_window_of_patches_in_time() -> Case:
    class Series(Net):
        def __init__(self) -> None:
            super().__init__(out=4)
            self.embed = nn.Linear(4, D)

        def forward(self, given: Tensor) -> Tensor:
            mean, spread = given.mean(1, keepdim=True), given.std(1, keepdim=True)
            patches = ((given - mean) / spread).unfold(1, 4, 4)
            return self.head(self.states(patches)[:, -1]) * spread + mean

    time = torch.arange(52) / 3 + 6 * torch.rand(24, 1)
    series = 3 + time.sin() * (1 + torch.rand(24, 1))
    return Case(Series(), series[:, :48], series[:, 48:], F.mse_loss)


def flat_inputs() -> Case:
    class Flat(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, D)

        def tokens(self, given: Tensor) -> Tensor:
            x = self.embed(given.view(len(given), -1, 8))
            return x + self.positions[: x.shape[1]]

    return Case(Flat(), torch.randn(24, 48), classes())


def pixels_far_from_zero() -> Case:
    class Pixels(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, D))

    return Case(Pixels(), torch.randint(0, 256, (24, TOKENS, 16)).float(), classes())


def features_with_a_mean() -> Case:
    model = Net()
    model.embed = nn.Linear(16, D)
    return Case(model, 5 + torch.randn(24, TOKENS, 16), classes(), steps=120)


# Mixing


def mixing_case(mix: Any) -> Case:
    return Case(Net(lambda: Block(mix())), ids(), classes())


def averages_instead_of_attention() -> Case:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1, keepdim=True) - x

    return mixing_case(Mean)


def fourier_instead_of_attention() -> Case:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft2(x).real / 8

    return mixing_case(Fourier)


def a_matrix_over_tokens() -> Case:
    class Over(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(TOKENS, TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x.transpose(1, 2)).transpose(1, 2)

    return mixing_case(Over)


def a_convolution_over_tokens() -> Case:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.transpose(1, 2)).transpose(1, 2)

    return mixing_case(Conv)


def linear_attention() -> Case:
    class Linear(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = F.elu(self.split(self.q(x))) + 1, F.elu(self.split(self.k(x))) + 1, self.split(self.v(x))
            mixed = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(2, keepdim=True).transpose(-1, -2))
            return self.o(mixed.transpose(1, 2).flatten(2))

    return mixing_case(Linear)


def sigmoid_attention() -> Case:
    class Sigmoid(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - math.log(TOKENS)).sigmoid()

    return mixing_case(Sigmoid)


def softmax_plus_one() -> Case:
    class Plus(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp()
            return scores / (1 + scores.sum(-1, keepdim=True))

    return mixing_case(Plus)


def cosine_attention() -> Case:
    class Cosine(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((self.heads, 1, 1), math.log(10.0)))

        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.scale.exp()).softmax(-1)

    return mixing_case(Cosine)


def queries_that_are_the_keys() -> Case:
    class Same(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.k = self.q

    return mixing_case(Same)


def one_key_for_all_heads() -> Case:
    class Multi(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = nn.Linear(D, D // 4), nn.Linear(D, D // 4)

        def forward(self, x: Tensor) -> Tensor:
            mixed = self.weights(self.split(self.q(x)), self.k(x)[:, None]) @ self.v(x)[:, None]
            return self.o(mixed.transpose(1, 2).flatten(2))

    return mixing_case(Multi)


def a_window_of_attention() -> Case:
    class Window(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            away = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
            return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(away > 2, float("-inf")).softmax(-1)

    return mixing_case(Window)


def gated_attention() -> Case:
    class Gated(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gate(x).sigmoid()

    return mixing_case(Gated)


def a_recurrence() -> Case:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(D, D, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    return mixing_case(Recurrent)


def a_decoder_that_sees_all_tokens() -> Case:
    given = ids()
    return Case(Language(), given, given.roll(1, 1), per_token)


def the_future_hidden_by_torch() -> Case:
    class Fused(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return Case(Language(lambda: Block(Fused())), counting(), counting(), next_id)


def latents_that_read_the_tokens() -> Case:
    class Perceiver(Net):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(0.02 * torch.randn(4, D))
            self.read = nn.MultiheadAttention(D, 4, batch_first=True)

        def states(self, given: Tensor) -> Tensor:
            tokens, x = self.tokens(given), self.latents.expand(len(given), -1, -1)
            x = x + self.read(x, tokens, tokens, need_weights=False)[0]
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    return Case(Perceiver(), ids(), classes())


def one_query_that_pools() -> Case:
    class Pool(Net):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.pool = nn.Parameter(torch.zeros(1, 1, D)), nn.MultiheadAttention(D, 4, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            x = self.states(given)
            return self.head(self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0])

    return Case(Pool(), ids(), classes())


def experts_of_which_each_token_takes_one() -> Case:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(D, 8), nn.ModuleList(Mlp() for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            chance, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                out[chosen == i] = expert(x[chosen == i])
            return out * chance[..., None]

    return Case(Net(lambda: Block(mlp=Experts())), ids(8), classes(8))


# Norms


def root_mean_square_norms() -> Case:
    return Case(Net(lambda: Block(norm=nn.RMSNorm)), ids(), classes())


def norms_after_the_sums() -> Case:
    class Post(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.n1(x + self.mix(x))
            return self.n2(x + self.mlp(x))

    return Case(Net(Post), ids(), classes())


def norms_before_and_after() -> Case:
    class Sandwich(Block):
        def __init__(self) -> None:
            super().__init__()
            self.m1, self.m2 = nn.LayerNorm(D), nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.m1(self.mix(self.n1(x)))
            return x + self.m2(self.mlp(self.n2(x)))

    return Case(Net(Sandwich), ids(), classes())


def norms_of_queries_and_keys() -> Case:
    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8, bias=False)

        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            return super().weights(self.norm(q), self.norm(k))

    return mixing_case(Normed)


def no_norms() -> Case:
    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.3 * self.mix(x)
            return x + 0.3 * self.mlp(x)

    return Case(Net(lambda: Plain(norm=nn.Identity)), ids(), classes())


def normalised_weights() -> Case:
    model = Net()
    for block in model.blocks:
        parametrizations.weight_norm(block.mlp.up)
        parametrizations.spectral_norm(block.mlp.down)
    return Case(model, ids(), classes())


def batch_norm_of_channels() -> Case:
    class Channels(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    return Case(Net(lambda: Block(norm=Channels)), ids(), classes())


def mlp_and_attention_in_parallel() -> Case:
    class Parallel(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.n1(x)
            return x + self.mix(h) + self.mlp(h)

    class Once(Parallel):
        def __init__(self) -> None:
            super().__init__()
            del self.n2

    return Case(Net(Once), ids(), classes())


# What begins at zero, and what is scaled


def gates_that_begin_at_zero() -> Case:
    class ReZero(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.gate * self.mix(self.n1(x))
            return x + self.gate * self.mlp(self.n2(x))

    return Case(Net(ReZero), ids(), classes())


def small_gains_of_channels() -> Case:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.g1, self.g2 = nn.Parameter(torch.full((D,), 1e-4)), nn.Parameter(torch.full((D,), 1e-4))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.g1 * self.mix(self.n1(x))
            return x + self.g2 * self.mlp(self.n2(x))

    return Case(Net(Scaled), ids(), classes())


def branches_that_begin_at_zero() -> Case:
    model = Net()
    for block in model.blocks:
        for last in (block.mix.o, block.mlp.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    return Case(model, ids(), classes())


def a_head_that_begins_at_zero() -> Case:
    model = Net()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return Case(model, ids(), classes())


def a_gated_second_input() -> Case:
    class Flamingo(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.cross = nn.Parameter(torch.zeros(1)), nn.MultiheadAttention(D, 4, batch_first=True)

        def forward(self, given: Tensor, image: Tensor) -> Tensor:
            x = self.states(given)
            return self.head((x + self.gate.tanh() * self.cross(x, image, image, need_weights=False)[0]).mean(1))

    return Case(Flamingo(), {"given": ids(), "image": torch.randn(24, 5, D)}, classes())


def capped_logits() -> Case:
    class Capped(Net):
        def forward(self, given: Tensor) -> Tensor:
            return 30 * (super().forward(given) / 30).tanh()

    return Case(Capped(), ids(), classes())


def initialised_small_with_depth() -> Case:
    model = Language(causal_block, depth=6)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02 / (12**0.5 if name.endswith(("o.weight", "down.weight")) else 1))
    return Case(model, counting(), counting(), next_id)


# What is shared


def one_block_six_times() -> Case:
    class Albert(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)
            for _ in range(6):
                x = self.blocks[0](x)
            return self.norm(x)

    return Case(Albert(depth=1), ids(), classes())


def one_block_told_how_often() -> Case:
    class Universal(Net):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.times = nn.Parameter(0.02 * torch.randn(4, D))

        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)
            for time in self.times:
                x = self.blocks[0](x + time)
            return self.norm(x)

    return Case(Universal(), ids(), classes())


def layers_that_begin_as_copies() -> Case:
    class Encoder(Net):
        def __init__(self) -> None:
            super().__init__(depth=0)
            layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def states(self, given: Tensor) -> Tensor:
            return self.norm(self.encoder(self.tokens(given)))

    return Case(Encoder(), ids(), classes())


def encoder_and_decoder() -> Case:
    class Translator(Net):
        def __init__(self) -> None:
            super().__init__(depth=0, out=IDS)
            self.both = nn.Transformer(D, 4, 2, 2, 2 * D, dropout=0.0, batch_first=True)

        def forward(self, given: Tensor, target: Tensor) -> Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.head(self.both(self.tokens(given), self.tokens(target), tgt_mask=later))

    given = ids()
    target = given.flip(1)
    return Case(Translator(), {"given": given, "target": target[:, :-1]}, target[:, 1:], per_token)


# Numbers and chance


def bfloat16_throughout() -> Case:
    return Case(Net().bfloat16(), ids(), classes())


def float64_throughout() -> Case:
    return Case(Net().double(), ids(), classes())


def autocast_inside() -> Case:
    class Mixed(Net):
        def forward(self, given: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(given).float()

    return Case(Mixed(), ids(), classes())


def much_dropout() -> Case:
    return Case(Net(lambda: Block(mlp=nn.Sequential(Mlp(), nn.Dropout(0.5)))), ids(), classes(), steps=80)


def blocks_left_out_at_random() -> Case:
    class Stochastic(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and torch.rand(()) < 0.3 else super().forward(x)

    return Case(Net(Stochastic), ids(), classes(), steps=80)


def noise_in_training() -> Case:
    class Noisy(Net):
        def tokens(self, given: Tensor) -> Tensor:
            x = super().tokens(given)
            return x + 0.1 * torch.randn_like(x) if self.training else x

    return Case(Noisy(), ids(), classes())


PROGRAMS = programs(globals())
