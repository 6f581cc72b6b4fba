"""The twenty causes of DEFault++ outside of attention: inputs, norms, feed-forward parts, residuals, outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.parts import (
    CLASSES,
    IDS,
    SEQUENCES,
    TOKENS,
    Block,
    D,
    Decoder,
    Encoder,
    FeedForward,
    Padded,
    Program,
    case,
    classes,
    classify,
    classify_padded,
    per_token,
    predict,
)

# Inputs and embeddings


class Recurrent(nn.Module):
    """Measurements of several sensors over time, in a recurrence that takes time first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, D), nn.Linear(D, CLASSES)

    def time_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.time_first(x))[0][-1])


@case("embedding: input dimension", "TimeByView.time_first")
def time_first_by_view(faulty: bool) -> Program:
    """`view` instead of `transpose` mixes the sequences."""

    class TimeByView(Recurrent):
        def time_first(self, x: Tensor) -> Tensor:
            return x.view(x.shape[1], x.shape[0], -1)

    model = TimeByView() if faulty else Recurrent()
    return Program(model, torch.randn(SEQUENCES, TOKENS, 6), classes())


@case("embedding: input type", "Scaled.tokens")
def levels_become_zero(faulty: bool) -> Program:
    """Levels divided by 255 are cast to integers: all become 0."""

    class Scaled(Encoder):
        def tokens(self, ids: Tensor) -> Tensor:
            return self.embed((ids / 255.0).long()) + self.position

    model = Scaled() if faulty else Encoder()
    model.embed = nn.Embedding(256, D)
    return Program(model, torch.randint(0, 255, (SEQUENCES, TOKENS)), classes())


@case("embedding: input initialization", "model.embed")
def words_without_vectors(faulty: bool) -> Program:
    """Words without a pretrained vector are zeros, and frozen."""
    known = torch.rand(IDS, 1) < 0.2
    vectors = torch.randn(IDS, D)
    model = Encoder()
    if faulty:
        model.embed = nn.Embedding.from_pretrained(vectors * known)
    else:
        model.embed = nn.Embedding.from_pretrained(torch.where(known, vectors, 0.5 * torch.randn(IDS, D)), freeze=False)
    return classify(model)


# Norms


class Norm(nn.Module):
    """A layer norm written by hand."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return (x - mean) / (variance + 1e-5).sqrt() * self.gain + self.bias


def normed(norm: Any) -> Encoder:
    """An encoder with this norm in its blocks and at its end."""
    model = Encoder(lambda: Block(norm=norm))
    model.norm = norm(D)
    return model


@case("layer norm: bias parameter", "Swapped.forward")
def gain_and_bias_exchanged(faulty: bool) -> Program:
    """Gain and bias are exchanged: the norm returns ones."""

    class Swapped(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (x.shape[-1],), self.bias, self.gain)

    return classify(normed(Swapped if faulty else Norm))


@case("layer norm: scale parameter", "OverBatch.forward")
def spread_over_the_batch(faulty: bool) -> Program:
    """The spread is taken over the batch: sequences mix."""

    class OverBatch(Norm):
        def forward(self, x: Tensor) -> Tensor:
            mean, variance = x.mean(dim=0, keepdim=True), x.var(dim=0, keepdim=True, unbiased=False)
            return (x - mean) / (variance + 1e-5).sqrt() * self.gain + self.bias

    return classify(normed(OverBatch if faulty else Norm))


@case("layer norm: stability parameter", "NoEpsilon.forward")
def norm_without_epsilon(faulty: bool) -> Program:
    """Padded rows are zero, and are divided by zero."""

    class NoEpsilon(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(dim=-1, keepdim=True)) / x.std(dim=-1, keepdim=True) * self.gain + self.bias

    class ZeroPadding(Padded):
        def tokens(self, ids: Tensor) -> Tensor:
            return super().tokens(ids) * (ids != 0).unsqueeze(-1)

    model = ZeroPadding()
    model.blocks[0].norm1 = (NoEpsilon if faulty else Norm)(D)
    return classify_padded(model)


# Feed-forward parts


def fed(mlp: Any) -> Encoder:
    return Encoder(lambda: Block(mlp=mlp))


@case("feed-forward: weight scaling", "Large.spread")
def weights_drawn_too_large(faulty: bool) -> Program:
    """Weights are drawn with a spread of 5 instead of 0.02."""

    class Drawn(FeedForward):
        spread = 0.02

        def __init__(self) -> None:
            super().__init__()
            nn.init.normal_(self.up.weight, std=self.spread)
            nn.init.normal_(self.down.weight, std=self.spread)

    class Large(Drawn):
        spread = 5.0

    return classify(fed(Large if faulty else Drawn))


@case("feed-forward: neuron dropout", "Always.forward")
def dropout_that_never_stops(faulty: bool) -> Program:
    """`F.dropout` without `self.training` drops in evaluation too."""

    class Dropped(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.dropout(F.gelu(self.up(x)), 0.2, self.training))

    class Always(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.dropout(F.gelu(self.up(x)), 0.2))

    return classify(fed(Always if faulty else Dropped))


@case("feed-forward: activation function", "Linear.forward", decidable=False)
def no_activation(faulty: bool) -> Program:
    """The activation is forgotten: the part is linear."""

    class Linear(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    return classify(fed(Linear if faulty else FeedForward))


@case("feed-forward: regularization", "Kept.rate")
def share_to_keep_is_dropped(faulty: bool) -> Program:
    """The share to keep, 0.95, is given as the share to drop."""

    class Regular(FeedForward):
        rate = 0.05

        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(self.rate)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(super().forward(x))

    class Kept(Regular):
        rate = 0.95

    return classify(fed(Kept if faulty else Regular))


@case("feed-forward: weight initialization", "Constant.__init__")
def neurons_that_begin_equal(faulty: bool) -> Program:
    """All weights are equal: the neurons learn the same."""

    class Constant(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            for layer in (self.up, self.down):
                nn.init.constant_(layer.weight, 0.01)
                nn.init.zeros_(layer.bias)

    return classify(fed(Constant if faulty else FeedForward))


# Residuals


@case("residual: residual scaling", "Halved.forward")
def sums_that_are_halved(faulty: bool) -> Program:
    """Each sum is halved: 24 sums leave nothing of the first blocks."""

    class Halved(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = (x + self.attention(self.norm1(x), hidden)) / 2
            return (x + self.mlp(self.norm2(x))) / 2

    return classify(Encoder(Halved if faulty else Block, depth=12))


@case("residual: gradient clipping", "loss")
def clamped_loss(faulty: bool) -> Program:
    """The loss is clamped where gradients were to be: no gradient above 1."""

    def clamped(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels).clamp(max=1.0)

    return classify(Encoder(), loss=clamped if faulty else F.cross_entropy)


@case("residual: residual path", "Noisy.forward")
def noise_in_evaluation(faulty: bool) -> Program:
    """Noise for the training is added in evaluation too."""

    class Smoothed(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = super().forward(x, hidden)
            return x + 0.1 * torch.randn_like(x) if self.training else x

    class Noisy(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = super().forward(x, hidden)
            return x + 0.1 * torch.randn_like(x)

    return classify(Encoder(Noisy if faulty else Smoothed))


@case("residual: skip connection", "Plain.forward")
def no_skips(faulty: bool) -> Program:
    """No skip connection around attention and feed-forward part."""

    class Plain(Block):
        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            x = self.attention(self.norm1(x), hidden)
            return self.mlp(self.norm2(x))

    return classify(Encoder(Plain if faulty else Block, depth=8))


# Outputs


@case("output: output scaling", "Cosines.forward")
def cosines_without_a_scale(faulty: bool) -> Program:
    """Cosines of 40 classes without a scale: the loss stays above 1.8."""

    class Cosines(Decoder):
        scale = 1.0

        def forward(self, ids: Tensor) -> Tensor:
            directions = F.normalize(self.head.weight, dim=-1)
            return self.scale * F.normalize(self.states(ids), dim=-1) @ directions.T

    class Sharp(Cosines):
        scale = 20.0

    return predict(Cosines() if faulty else Sharp())


@case("output: output dimension", "loss")
def logits_in_another_order(faulty: bool) -> Program:
    """Logits are time first and labels are not: rows are of other tokens."""

    class TimeFirst(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).transpose(0, 1)

    def flat(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, IDS), labels.reshape(-1))

    def ordered(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, IDS), labels.T.reshape(-1))

    return predict(TimeFirst(), flat if faulty else ordered)


@case("output: output type", "Softmax.forward")
def softmax_twice(faulty: bool) -> Program:
    """Cross-entropy is given probabilities: the softmax is taken twice."""

    class Softmax(Encoder):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).softmax(dim=-1)

    return classify(Softmax() if faulty else Encoder())


# Reports


@case("report: transformers 47394", "loss")
def labels_shifted_twice(faulty: bool) -> Program:
    """The labels are the next ids already, and the loss shifts them again."""

    def shifting(logits: Tensor, labels: Tensor) -> Tensor:
        return per_token(logits[:, :-1], labels[:, 1:])

    return predict(Decoder(), shifting if faulty else per_token)


@case("report: MONAI GenerativeModels 314", "labels")
def labels_that_are_the_inputs(faulty: bool) -> Program:
    """The labels are not shifted: each token is asked for itself, which it sees."""
    program = predict(Decoder())
    program.labels = program.inputs if faulty else program.labels
    return program
