"""Faults that were written without knowing what the doctor looks for, and that its first look did not name."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam import parts
from benchmarks.exam.parts import IDS, TOKENS, Block, D, Decoder, Encoder, Program, case, classify, predict


@case("masking: future of the targets", "attention")
def translator_without_a_mask(faulty: bool) -> Program:
    """The decoder of a translator has no causal mask: it sees the target ids that it has to predict."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(IDS, D), nn.Parameter(0.1 * torch.randn(TOKENS, D))
            self.body = nn.Transformer(D, parts.HEADS, 1, 1, 64, batch_first=True)
            self.head = nn.Linear(D, IDS)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            hidden = None if faulty else nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            x, y = (self.embed(one) + self.position[: one.shape[1]] for one in (source, target))
            return self.head(self.body(x, y, tgt_mask=hidden))

    source = parts.ids()
    target = torch.cat([torch.ones(len(source), 1, dtype=torch.long), source.flip(1)], dim=1)
    return Program(Translator(), {"source": source, "target": target[:, :-1]}, target[:, 1:], parts.per_token)


@case("embedding: vocabulary", "inputs")
def ids_beyond_the_vocabulary(faulty: bool) -> Program:
    """Ids are clamped to a vocabulary of eight: all others become one."""

    class Clamped(Encoder):
        def tokens(self, ids: Tensor) -> Tensor:
            return super().tokens(ids.clamp(max=7))

    return classify(Clamped() if faulty else Encoder())


@case("output: loss and activation", "loss")
def likelihood_of_raw_scores(faulty: bool) -> Program:
    """``nll_loss`` is given scores without a logarithm of a softmax: it has no lower bound."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(logits if faulty else logits.log_softmax(dim=-1), labels)

    return classify(Encoder(), loss=loss)


@case("output: weights of classes", "loss")
def weights_of_classes_are_zero(faulty: bool) -> Program:
    """Three of four classes have the weight 0: their examples count nothing."""
    weight = torch.tensor([1.0, 0.0, 0.0, 0.0]) if faulty else torch.tensor([1.0, 0.8, 1.2, 1.0])
    return classify(Encoder(), loss=partial(F.cross_entropy, weight=weight))


@case("output: reduction", "loss")
def loss_of_the_first_sequence(faulty: bool) -> Program:
    """The loss of the first sequence is returned, not the mean of all."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits, labels, reduction="none")
        return each[0] if faulty else each.mean()

    return classify(Encoder(), loss=loss)


@case("output: layout", "loss")
def scores_viewed_as_classes_first(faulty: bool) -> Program:
    """``view`` instead of ``transpose`` before the loss mixes classes and tokens."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        turned = logits.reshape(len(logits), IDS, -1) if faulty else logits.transpose(1, 2)
        return F.cross_entropy(turned, labels)

    return predict(Decoder(), loss)


@case("output: temperature", "loss")
def temperature_is_multiplied(faulty: bool) -> Program:
    """Cosines are multiplied by a temperature of .07, not divided: the loss stays near that of a guess."""

    class Pairs(Encoder):
        def forward(self, ids: Tensor) -> Tensor:
            pooled = F.normalize(self.states(ids).mean(dim=1), dim=-1)
            cosines = pooled @ F.normalize(self.head.weight, dim=-1).T
            return cosines * 0.07 if faulty else cosines / 0.07

    return classify(Pairs())


@case("optimizer: learning rate", "optimizer")
def rate_without_its_minus(faulty: bool) -> Program:
    """The rate is 3e4 instead of 3e-4: one step destroys the model."""
    rate = 3e4 if faulty else 3e-4
    return classify(Encoder(), optimizer=lambda model: torch.optim.SGD(model.parameters(), rate))


@case("layer norm: axis", "norm")
def norm_over_time(faulty: bool) -> Program:
    """The norm of a language model is taken over time: tokens hear later ones."""

    class OverTime(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.inner = nn.LayerNorm(TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(1, 2)).transpose(1, 2)

    return predict(Decoder(lambda: Block(norm=OverTime if faulty else nn.LayerNorm)))


@case("residual: missing", "residual")
def half_of_the_skips(faulty: bool) -> Program:
    """The feed-forward part of every block has no skip connection."""

    class Half(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = x + self.attention(self.norm1(x), hidden)
            return self.mlp(self.norm2(x))

    return predict(Decoder(Half if faulty else Block, depth=6))


@case("qkv: initialisation", "weights")
def all_weights_are_zero(faulty: bool) -> Program:
    """Every parameter is set to 0."""
    model = Encoder()
    for parameter in model.parameters() if faulty else ():
        nn.init.zeros_(parameter)
    return classify(model)
