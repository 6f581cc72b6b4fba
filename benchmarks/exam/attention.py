"""The 25 causes that concern attention: masks, projections, kernels, positions, scores, caches and variants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.parts import (
    HEADS,
    TOKENS,
    Attention,
    Block,
    D,
    Decoder,
    Encoder,
    Padded,
    Program,
    case,
    classes,
    classify,
    classify_padded,
    padded_ids,
    predict,
)


def encoder(attention: Any) -> Encoder:
    return Encoder(lambda: Block(attention))


def decoder(attention: Any) -> Decoder:
    return Decoder(lambda: Block(attention))


# Masks


@case("masking: mask generation", "Ahead.mask")
def mask_that_shows_the_target(faulty: bool) -> Program:
    """The diagonal is off by one: each token sees the next, its target."""

    class Ahead(Decoder):
        def mask(self, ids: Tensor) -> Tensor:
            return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(diagonal=2)

    return predict(Ahead() if faulty else Decoder())


@case("masking: dynamic mask", "First.mask")
def mask_of_the_first_sequence(faulty: bool) -> Program:
    """The padding of the first sequence is used for all of them."""

    class First(Padded):
        def mask(self, ids: Tensor) -> Tensor:
            return (ids[0] == 0)[None, None, None, :]

    return classify_padded(First() if faulty else Padded())


@case("masking: mask application", "Inverted.mask")
def mask_that_is_inverted(faulty: bool) -> Program:
    """True marks what may be seen, and is what gets hidden."""

    class Inverted(Padded):
        def mask(self, ids: Tensor) -> Tensor:
            return (ids != 0)[:, None, None, :]

    given = padded_ids()
    given[:, -1] = 0
    return Program(Inverted() if faulty else Padded(), given, classes())


# Projections


@case("projection: dynamic parameter registration", "Listed.__init__")
def heads_in_a_list(faulty: bool) -> Program:
    """Heads in a plain list are not registered."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(D, 3 * D // HEADS) for _ in range(HEADS))

        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            found = [F.scaled_dot_product_attention(*head(x).chunk(3, dim=-1)) for head in self.heads]
            return torch.cat(found, dim=-1)

    class Listed(Heads):
        def __init__(self) -> None:
            super().__init__()
            del self.heads
            self.heads = [nn.Linear(D, 3 * D // HEADS) for _ in range(HEADS)]

    return classify(encoder(Listed if faulty else Heads))


@case("projection: dimension", "Viewed.heads")
def heads_split_by_view(faulty: bool) -> Program:
    """Heads are split by `view` without `transpose`: later tokens are seen."""

    class Viewed(Attention):
        def heads(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], HEADS, x.shape[1], -1)

    return predict(decoder(Viewed if faulty else Attention))


@case("projection: head interaction", "Reshaped.merge")
def heads_merged_by_reshape(faulty: bool) -> Program:
    """Heads are merged without `transpose`: tokens mix."""

    class Reshaped(Attention):
        def merge(self, mixed: Tensor) -> Tensor:
            return mixed.reshape(mixed.shape[0], mixed.shape[2], -1)

    return predict(decoder(Reshaped if faulty else Attention))


@case("projection: parameter initialization", "Zeros.__init__")
def queries_and_keys_of_zero(faulty: bool) -> Program:
    """Queries and keys are both zero: neither gets a gradient."""

    class Zeros(Attention):
        def __init__(self) -> None:
            super().__init__()
            for layer in (self.query, self.key):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    return classify(encoder(Zeros if faulty else Attention))


# Kernels


@case("kernel: feature constraints", "Fused.rate")
def kernel_that_always_drops(faulty: bool) -> Program:
    """The kernel drops out whenever it is told to: in evaluation too."""

    class InTraining(Attention):
        def rate(self) -> float:
            return 0.2 if self.training else 0.0

        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
            return self.out(self.merge(F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate())))

    class Fused(InTraining):
        def rate(self) -> float:
            return 0.2

    return classify(encoder(Fused if faulty else InTraining))


@case("kernel: silent fallback", "Fallback.weights")
def fallback_without_a_mask(faulty: bool) -> Program:
    """The path for a CPU, taken when there is no fast kernel, forgets the causal mask."""

    class Fallback(Attention):
        def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
            if scores.is_cuda:
                return super().weights(scores, hidden)
            return scores.float().softmax(dim=-1).to(scores.dtype)

    return predict(decoder(Fallback if faulty else Attention))


@case("kernel: numerical precision", "Half.scores")
def products_beyond_float16(faulty: bool) -> Program:
    """Products of large values are taken in float16: infinity by infinity is NaN."""

    class Cosine(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True).transpose(-2, -1)
            return 10 * (q @ k.transpose(-2, -1)) / lengths

    class Half(Cosine):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q.half(), k.half()).float()

    model = encoder(Half if faulty else Cosine)
    # Measurements in thousands reach the first block without a norm.
    model.embed, model.blocks[0].norm1 = nn.Linear(6, D), nn.Identity()
    return Program(model, 2000 * torch.randn(16, TOKENS, 6), classes())


# Positions


@case("positions: indexing", "ByRow.tokens")
def positions_by_row(faulty: bool) -> Program:
    """Positions are looked up by row of the batch, not by token."""

    class Table(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(64, D)
            del self.position

        def tokens(self, ids: Tensor) -> Tensor:
            return self.embed(ids) + self.places(torch.arange(ids.shape[1]))

    class ByRow(Table):
        def tokens(self, ids: Tensor) -> Tensor:
            return self.embed(ids) + self.places(torch.arange(ids.shape[0]))[:, None]

    return classify(ByRow() if faulty else Table())


@case("positions: interpolation", "Stretched.mode")
def positions_that_are_shared(faulty: bool) -> Program:
    """Positions are stretched by the nearest row: three tokens share one, and their order is lost."""

    class Smooth(Encoder):
        mode = "linear"

        def tokens(self, ids: Tensor) -> Tensor:
            rows = F.interpolate(self.position[:4].T[None], size=ids.shape[1], mode=self.mode)[0].T
            return self.embed(ids) + rows

    class Stretched(Smooth):
        mode = "nearest"

    return classify(Stretched() if faulty else Smooth())


# Scores


@case("score: implementation", "Queries.weights")
def softmax_over_queries(faulty: bool) -> Program:
    """The softmax is taken over queries: earlier tokens hear later ones."""

    class Queries(Attention):
        def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(dim=-2)

    return predict(decoder(Queries if faulty else Attention))


@case("score: normalization", "Multiplied.scores")
def scores_multiplied(faulty: bool) -> Program:
    """Scores are multiplied by the root of the width: one-hot attention."""

    class Drawn(Attention):
        def __init__(self) -> None:
            super().__init__()
            nn.init.xavier_uniform_(self.query.weight)
            nn.init.xavier_uniform_(self.key.weight)

    class Multiplied(Drawn):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.transpose(-2, -1) * q.shape[-1] ** 0.5

    return classify(encoder(Multiplied if faulty else Drawn))


@case("score: precision handling", "Small.weights")
def hidden_by_a_small_number(faulty: bool) -> Program:
    """-1e-9 stands where -1e9 was meant: nothing is hidden."""

    class Large(Attention):
        def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
            return scores.masked_fill(hidden, -1e9).softmax(dim=-1)

    class Small(Attention):
        def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
            return scores.masked_fill(hidden, -1e-9).softmax(dim=-1)

    return predict(decoder(Small if faulty else Large))


# Caches, of decoders that are trained token by token


class Stepwise(nn.Module):
    """Attention that takes one token after the other and keeps the keys and values of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def run(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        found = []
        for token in x.split(1, dim=1):
            q, k, v = self.qkv(token).chunk(3, dim=-1)
            keys.append(k)
            values.append(v)
            mixed = F.scaled_dot_product_attention(q, torch.cat(keys, dim=1), torch.cat(values, dim=1))
            found.append(self.out(mixed))
        return torch.cat(found, dim=1)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.run(x, [], [])


@case("cache: cache invalidation", "Kept.forward")
def cache_that_is_not_emptied(faulty: bool) -> Program:
    """Keys of the last batch are still there: two equal passes differ."""

    class Kept(Stepwise):
        cache: tuple[list[Tensor], list[Tensor]] = ([], [])

        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            keys, values = ([one for one in part if len(one) == len(x)] for part in self.cache)
            found = self.run(x, keys, values)
            self.cache = [one.detach() for one in keys[-TOKENS:]], [one.detach() for one in values[-TOKENS:]]
            return found

    return predict(decoder(Kept if faulty else Stepwise))


@case("cache: cache position", "Zero.tokens")
def position_zero_at_every_step(faulty: bool) -> Program:
    """Every step looks up position 0: the other positions are never used."""

    class Steps(Decoder):
        def tokens(self, ids: Tensor) -> Tensor:
            steps = [self.embed(one) + self.position[i] for i, one in enumerate(ids.unbind(dim=1))]
            return torch.stack(steps, dim=1)

    class Zero(Steps):
        def tokens(self, ids: Tensor) -> Tensor:
            steps = [self.embed(one) + self.position[0] for one in ids.unbind(dim=1)]
            return torch.stack(steps, dim=1)

    return predict((Zero if faulty else Steps)(lambda: Block(Stepwise)))


@case("cache: distributed synchronization", "Shared.forward")
def cache_shared_by_requests(faulty: bool) -> Program:
    """Requests share one cache: each sees those before it."""

    class Apart(Stepwise):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            return torch.cat([self.run(one, [], []) for one in x.split(1)])

    class Shared(Stepwise):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            keys: list[Tensor] = []
            values: list[Tensor] = []
            return torch.cat([self.run(one, keys, values) for one in x.split(1)])

    return predict(decoder(Shared if faulty else Apart))


# Variants


@case("variant: variant configuration", "First.merge")
def first_head_for_all(faulty: bool) -> Program:
    """The result of the first head is copied to all: the others are computed and not read."""

    class First(Attention):
        def merge(self, mixed: Tensor) -> Tensor:
            return super().merge(mixed[:, :1].expand_as(mixed))

    return classify(encoder(First if faulty else Attention))


@case("variant: dynamic dispatch", "InTraining.mask")
def mask_in_training_alone(faulty: bool) -> Program:
    """The causal mask is left out in evaluation."""

    class InTraining(Decoder):
        def mask(self, ids: Tensor) -> Tensor | None:
            return super().mask(ids) if self.training else None

    return predict(InTraining() if faulty else Decoder())


# Reports


class Adapted(nn.Module):
    """A linear module and an update of rank two that begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(2, D)), nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@case("report: diffusers 11903", "Fused.forward")
def adapters_beside_the_fused_projection(faulty: bool) -> Program:
    """The projections are fused, and adapters train the single ones, which nothing reads."""

    class Fused(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(D, 3 * D).requires_grad_(False)
            if faulty:
                self.query, self.key, self.value = Adapted(self.query), Adapted(self.key), Adapted(self.value)
            else:
                del self.query, self.key, self.value
                self.fused = Adapted(self.fused)

        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            q, k, v = (self.heads(part) for part in self.fused(x).chunk(3, dim=-1))
            return self.out(self.merge(self.weights(self.scores(q, k), hidden) @ v))

    return classify(encoder(Fused))


@case("report: jax 23349", "Unread.mask")
def lengths_that_are_not_read(faulty: bool) -> Program:
    """Lengths are accepted and not used: attention sees the padding, which the pooling leaves out."""

    class Unread(Padded):
        def mask(self, ids: Tensor) -> Tensor | None:
            return None

    return classify_padded(Unread() if faulty else Padded())
