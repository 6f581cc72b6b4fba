"""Objectives of other kinds: teachers, views, codes, generation, decisions; and odd numbers, batches and optimizers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.healthy.parts import (
    CLASSES,
    IDS,
    TOKENS,
    Block,
    Case,
    D,
    Language,
    Net,
    classes,
    counting,
    ids,
    per_token,
    perceptron,
    programs,
)
from tests.healthy.trainings import fast, trained


def without_gradient(module: nn.Module) -> Any:
    return module.requires_grad_(False)


# Teachers and views


class Encoder(Net):
    """A vector for each sequence."""

    def __init__(self) -> None:
        super().__init__(out=16)

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.states(given).mean(1))


def two_views() -> Tensor:
    """Sequences, and the same with a third of the ids replaced."""
    given = ids()
    return torch.stack([given, torch.where(torch.rand(given.shape) < 0.3, ids(), given)], 1)


def a_teacher_inside_the_model() -> Case:
    class Distilled(nn.Module):
        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.teacher, self.student = without_gradient(teacher), Net(depth=1)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = self.teacher(given)
            return self.student(given), wanted

    def distill(both: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        soft = F.kl_div((both[0] / 2).log_softmax(-1), (both[1] / 2).softmax(-1), reduction="batchmean")
        return 2 * soft + 0.5 * F.cross_entropy(both[0], labels)

    given, labels = ids(), classes()
    return Case(Distilled(trained(Case(Net(), given, labels))), given, labels, distill)


def an_averaged_teacher() -> Case:
    class Bootstrap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target, self.predict = Encoder(), without_gradient(Encoder()), perceptron(16, D, 16)
            self.target.load_state_dict(self.online.state_dict())

        @torch.no_grad()
        def follow(self) -> None:
            for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                old.lerp_(new, 0.01)

        def forward(self, views: Tensor) -> Tensor:
            if self.training:
                self.follow()
            found = self.predict(self.online(views[:, 0]))
            return 1 - F.cosine_similarity(found, self.target(views[:, 1]).detach()).mean()

    return Case(Bootstrap(), two_views(), loss=lambda found: found)


def a_view_without_gradient() -> Case:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.predict = Encoder(), perceptron(16, 8, 16)

        def forward(self, views: Tensor) -> Tensor:
            a, b = self.encoder(views[:, 0]), self.encoder(views[:, 1])
            pairs = ((self.predict(a), b.detach()), (self.predict(b), a.detach()))
            return -sum(F.cosine_similarity(one, other).mean() for one, other in pairs) / 2

    return Case(Siamese(), two_views(), loss=lambda found: found)


def views_that_attract() -> Case:
    class Views(Encoder):
        def forward(self, views: Tensor) -> Tensor:
            return super().forward(views.flatten(0, 1))

    def attract(found: Tensor) -> Tensor:
        found = F.normalize(found, dim=-1)
        alike = (found @ found.T / 0.2).fill_diagonal_(float("-inf"))
        return F.cross_entropy(alike, torch.arange(len(found)) ^ 1)

    return Case(Views(), two_views(), loss=attract)


def features_without_correlation() -> Case:
    class Twins(Encoder):
        def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(views[:, 0]), super().forward(views[:, 1])

    def whiten(both: tuple[Tensor, Tensor]) -> Tensor:
        a, b = ((one - one.mean(0)) / one.std(0) for one in both)
        return ((a.T @ b / len(a) - torch.eye(16)) ** 2).sum()

    return Case(Twins(), two_views(), loss=whiten)


def a_queue_of_negatives() -> Case:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = Encoder(), without_gradient(Encoder())
            self.key.load_state_dict(self.query.state_dict())
            # The keys of earlier batches.
            self.register_buffer("queue", F.normalize(self.key(ids(64)), dim=-1))

        def forward(self, views: Tensor) -> Tensor:
            q, k = (F.normalize(net(views[:, i]), dim=-1) for i, net in enumerate((self.query, self.key)))
            return torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.T], 1) / 0.1

    return Case(Queue(), two_views(), torch.zeros(24, dtype=torch.long), F.cross_entropy, steps=60)


class Captions(nn.Module):
    """Similarities between images and texts, times a learned scale."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.text, self.image = Encoder(), perceptron(12, D, 16)
        self.scale, self.shift = nn.Parameter(torch.tensor(scale)), nn.Parameter(torch.tensor(shift))

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return a @ b.T * self.scale.exp() + self.shift


def images_and_captions() -> Case:
    def both_ways(logits: Tensor) -> Tensor:
        which = torch.arange(len(logits))
        return (F.cross_entropy(logits, which) + F.cross_entropy(logits.T, which)) / 2

    model = Captions(math.log(1 / 0.07), 0.0)
    model.shift.requires_grad_(False)
    return Case(model, {"text": ids(), "image": torch.randn(24, 12)}, loss=both_ways)


def captions_judged_one_by_one() -> Case:
    def sigmoid(logits: Tensor) -> Tensor:
        return -F.logsigmoid(logits * (2 * torch.eye(len(logits)) - 1)).sum(1).mean()

    return Case(Captions(math.log(10), -10.0), {"text": ids(), "image": torch.randn(24, 12)}, loss=sigmoid)


def two_sides_of_one_network() -> Case:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.same = Encoder(), nn.Linear(16, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.same((self.encoder(a) - self.encoder(b)).abs())[:, 0]

    a, same = ids(), (torch.arange(24) % 2).float()
    b = torch.where(same[:, None].bool(), a, ids())
    return Case(Siamese(), {"a": a, "b": b}, same, F.binary_cross_entropy_with_logits)


def a_margin_of_angles() -> Case:
    class Angles(Net):
        def forward(self, given: Tensor) -> Tensor:
            return F.linear(F.normalize(self.states(given).mean(1), dim=-1), F.normalize(self.head.weight, dim=-1))

    def margin(cosines: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(16 * (cosines - 0.2 * F.one_hot(labels, CLASSES)), labels)

    model = Angles()
    model.head = nn.Linear(D, CLASSES, bias=False)
    return Case(model, ids(), classes(), margin)


# Codes and generation


def codes_chosen_by_distance() -> Case:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode, self.codes = perceptron(8, D, 4), perceptron(4, D, 8), nn.Embedding(64, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encode(x)
            code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
            commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
            return self.decode(z + (code - z).detach()), commitment

    given = torch.randn(4, 8)[torch.randint(0, 4, (48,))] + 0.1 * torch.randn(48, 8)
    return Case(Quantised(), given, given, lambda both, x: F.mse_loss(both[0], x) + both[1], steps=150)


def binary_weights() -> Case:
    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            binary = self.weight.sign() * self.weight.abs().mean(1, keepdim=True)
            return F.linear(x, self.weight + (binary - self.weight).detach(), self.bias)

    model = Net()
    for block in model.blocks:
        block.mlp.up, block.mlp.down = Binary(D, 2 * D), Binary(2 * D, D)
    return Case(model, ids(), classes())


def latents_that_are_drawn() -> Case:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = perceptron(8, D, 8), perceptron(4, D, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encode(x).chunk(2, -1)
            z = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
            return self.decode(z), mean, log_variance

    def bound(found: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        out, mean, log_variance = found
        return F.mse_loss(out, x) - 1e-3 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()

    given = torch.randn(64, 2) @ torch.randn(2, 8)
    return Case(Variational(), given, given, bound, steps=100)


def a_flow_that_begins_as_identity() -> Case:
    class Couplings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(perceptron(2, D, 4) for _ in range(4))
            for part in self.parts:
                nn.init.zeros_(part[-1].weight)
                nn.init.zeros_(part[-1].bias)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            volume = x.new_zeros(len(x))
            for part in self.parts:
                fixed, moved = x.chunk(2, -1)
                scale, shift = part(fixed).tanh().chunk(2, -1)
                x, volume = torch.cat([moved * scale.exp() + shift, fixed], -1), volume + scale.sum(-1)
            return x, volume

    def surprise(found: tuple[Tensor, Tensor]) -> Tensor:
        return (found[0].square().sum(-1) / 2 - found[1]).mean()

    return Case(Couplings(), 1 + 0.3 * torch.randn(64, 4), loss=surprise, steps=60)


class Adaptive(Block):
    """A block whose norms are shifted, scaled and gated by a condition, by a linear module that begins at zero."""

    def __init__(self) -> None:
        super().__init__(norm=lambda d: nn.LayerNorm(d, elementwise_affine=False))
        self.adapt = nn.Linear(D, 6 * D)
        nn.init.zeros_(self.adapt.weight)
        nn.init.zeros_(self.adapt.bias)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        a, b, c, d, e, f = self.adapt(F.silu(about))[:, None].chunk(6, -1)
        x = x + c * self.mix(self.n1(x) * (1 + a) + b)
        return x + f * self.mlp(self.n2(x) * (1 + d) + e)


def blocks_that_begin_gated_by_time() -> Case:
    class Diffusion(Net):
        def __init__(self) -> None:
            super().__init__(Adaptive, out=6)
            self.embed, self.time = nn.Linear(6, D), perceptron(8, D, D, act=nn.SiLU)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
            angles = time[:, None] * 2.0 ** torch.arange(4)
            about, x = self.time(torch.cat([angles.sin(), angles.cos()], -1)), self.tokens(noisy)
            for block in self.blocks:
                x = block(x, about)
            return self.head(self.norm(x))

    clean, noise, time = torch.randn(24, 1, 6).expand(-1, TOKENS, -1), torch.randn(24, TOKENS, 6), torch.rand(24)
    share = time[:, None, None]
    given = {"noisy": (1 - share) * clean + share * noise, "time": time}
    return Case(Diffusion(), given, noise - clean, F.mse_loss, optimizer=lambda held: torch.optim.AdamW(held, 1e-2))


def critic() -> nn.Sequential:
    return perceptron(6, D, D, 1, act=nn.LeakyReLU)


def a_critic_of_forgeries() -> Case:
    real, forged = torch.randn(32, 6) + 1, torch.randn(32, 6) - 1
    labels = torch.cat([torch.ones(32, 1), torch.zeros(32, 1)])
    return Case(critic(), torch.cat([real, forged]), labels, F.binary_cross_entropy_with_logits)


def a_forger_with_a_frozen_critic() -> Case:
    class Forger(nn.Module):
        def __init__(self, judge: nn.Module) -> None:
            super().__init__()
            self.make, self.judge = perceptron(4, D, 6), without_gradient(judge)

        def forward(self, noise: Tensor) -> Tensor:
            return self.judge(self.make(noise))

    learned = a_critic_of_forgeries()
    learned.train()
    return Case(Forger(learned.model), torch.randn(32, 4), torch.ones(32, 1), F.binary_cross_entropy_with_logits)


def patches_left_out_of_the_encoder() -> Case:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__(out=8)
            self.embed, self.decoder, self.missing = nn.Linear(8, D), Block(), nn.Parameter(0.02 * torch.randn(D))

        def forward(self, patches: Tensor, kept: Tensor) -> Tensor:
            index = kept[..., None].expand(-1, -1, D)
            x = self.tokens(patches).gather(1, index)
            for block in self.blocks:
                x = block(x)
            whole = self.missing.expand(len(x), TOKENS, D).scatter(1, index, x)
            return self.head(self.norm(self.decoder(whole + self.positions)))

    def of_missing(found: Tensor, wanted: tuple[Tensor, Tensor]) -> Tensor:
        patches, missing = wanted
        return (((found - patches) ** 2).mean(-1) * missing).sum() / missing.sum()

    patches = torch.randn(24, 1, 8) + 0.1 * torch.randn(24, TOKENS, 8)
    kept = torch.rand(24, TOKENS).argsort(1)[:, :3]
    missing = torch.ones(24, TOKENS).scatter(1, kept, 0.0)
    return Case(Masked(), {"patches": patches, "kept": kept}, (patches, missing), of_missing, steps=80)


def replaced_tokens() -> Case:
    class Detector(Net):
        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given))[..., 0]

    given, replaced = counting(), torch.rand(24, TOKENS) < 0.15
    seen = torch.where(replaced, ids(), given)
    labels = (seen != given).float()
    return Case(Detector(out=1), seen, labels, F.binary_cross_entropy_with_logits, steps=80)


def an_autoencoder_with_one_matrix() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.shift = nn.Parameter(torch.randn(4, 8) / 3), nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.matrix.T).tanh() @ self.matrix + self.shift

    given = torch.randn(64, 2) @ torch.randn(2, 8) / 2
    return Case(Tied(), given, given, F.mse_loss, optimizer=fast, steps=80)


# Decisions and numbers


def ratios_that_are_clipped() -> Case:
    class Actor(Net):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(D, 1)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            x = self.states(given).mean(1)
            return self.head(x).log_softmax(-1), self.value(x)[:, 0]

    def clipped(found: tuple[Tensor, Tensor], seen: dict[str, Tensor]) -> Tensor:
        logs, value = found
        ratio = (logs.gather(1, seen["action"][:, None])[:, 0] - seen["log_chance"]).exp()
        gain = torch.minimum(ratio * seen["advantage"], ratio.clamp(0.8, 1.2) * seen["advantage"]).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return F.mse_loss(value, seen["returned"]) - gain - 0.01 * entropy

    model, given, action = Actor(), ids(), classes()
    before = model(given)[0].detach().gather(1, action[:, None])[:, 0]
    seen = {"action": action, "log_chance": before, "advantage": torch.randn(24), "returned": torch.randn(24)}
    return Case(model, given, seen, clipped)


def values_of_the_actions_taken() -> Case:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = perceptron(6, D, 4), without_gradient(perceptron(6, D, 4))

        def forward(self, now: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
            return self.online(now), self.target(later).amax(1).detach()

    def difference(found: tuple[Tensor, Tensor], taken: tuple[Tensor, Tensor]) -> Tensor:
        action, reward = taken
        return F.smooth_l1_loss(found[0].gather(1, action[:, None])[:, 0], reward + 0.9 * found[1])

    given = {"now": torch.randn(48, 6), "later": torch.randn(48, 6)}
    return Case(Values(), given, (torch.randint(0, 4, (48,)), torch.randn(48)), difference, steps=100)


def a_mixture_of_densities() -> Case:
    def surprise(found: Tensor, y: Tensor) -> Tensor:
        share, mean, log_spread = found.chunk(3, -1)
        logs = -(((y[:, None] - mean) / log_spread.exp()) ** 2) / 2 - log_spread
        return -(logs + share.log_softmax(-1)).logsumexp(-1).mean()

    given = torch.rand(64, 1)
    labels = 3 + given[:, 0] * (2 * torch.randint(0, 2, (64,)) - 1)
    return Case(perceptron(1, D, 9), given, labels, surprise, optimizer=fast, steps=60)


def a_variance_with_the_mean() -> Case:
    class Both(Net):
        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            mean, variance = super().forward(given).unbind(-1)
            return mean, F.softplus(variance)

    def surprise(found: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(found[0], y, found[1])

    return Case(Both(out=2), ids(), 2 + torch.randn(24), surprise)


def counts() -> Case:
    class Rate(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given)[:, 0]

    labels = torch.poisson(torch.full((24,), 6.0))
    return Case(Rate(out=1), ids(), labels, F.poisson_nll_loss)


def ordered_classes() -> Case:
    class Ordered(Net):
        def __init__(self) -> None:
            super().__init__(out=1)
            self.steps = nn.Parameter(torch.linspace(1, -1, 4))

        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given) + self.steps

    def above(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, (labels[:, None] > torch.arange(4)).float())

    return Case(Ordered(), ids(), torch.randint(0, 5, (24,)), above)


def risks_that_are_ranked() -> Case:
    class Risk(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given)[:, 0]

    def partial(risk: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
        time, died = seen
        order = time.argsort(descending=True)
        return -((risk[order] - risk[order].logcumsumexp(0)) * died[order]).sum() / died.sum()

    return Case(Risk(out=1), ids(), (torch.rand(24), (torch.rand(24) < 0.7).float()), partial)


def a_list_that_is_the_batch() -> Case:
    class Score(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given)[:, 0].log_softmax(0)

    wanted = (3 * torch.randn(24)).softmax(0)
    return Case(Score(out=1), ids(), wanted, lambda found, y: F.kl_div(found, y, reduction="sum"))


def rare_labels_that_weigh_more() -> Case:
    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=torch.full((5,), 9.0))

    return Case(Net(out=5), ids(), (torch.rand(24, 5) < 0.1).float(), weighted)


def examples_that_are_mixed() -> Case:
    wanted, share = F.one_hot(classes(), CLASSES).float(), 0.1 * torch.rand(24, 1)
    given = torch.randn(24, TOKENS, 8)
    model = Net()
    model.embed = nn.Linear(8, D)
    mixed = (1 - share[..., None]) * given + share[..., None] * given.flip(0)
    return Case(model, mixed, (1 - share) * wanted + share * wanted.flip(0))


def numbers_far_from_zero() -> Case:
    class Offset(Net):
        def __init__(self) -> None:
            super().__init__(out=1)
            self.register_buffer("mean", torch.tensor(1013.0))

        def forward(self, given: Tensor) -> Tensor:
            return self.mean + 5 * super().forward(given)[:, 0]

    return Case(Offset(), ids(), 1013 + 5 * torch.randn(24), F.mse_loss)


def a_loss_inside_the_model() -> Case:
    class Own(Language):
        def forward(self, given: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = super().forward(given)
            return {"loss": per_token(logits, labels), "logits": logits}

    given = counting()
    return Case(Own(), {"given": given, "labels": given.roll(-1, 1)}, loss=lambda found: found["loss"])


def words_and_negatives() -> Case:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre, self.context = nn.Embedding(IDS, 16), nn.Embedding(IDS, 16)
            nn.init.zeros_(self.context.weight)

        def forward(self, centre: Tensor, context: Tensor) -> Tensor:
            return (self.centre(centre)[:, None] * self.context(context)).sum(-1)

    labels = torch.zeros(64, 6)
    labels[:, 0] = 1
    given = {"centre": torch.randint(0, IDS, (64,)), "context": torch.randint(0, IDS, (64, 6))}
    return Case(Words(), given, labels, F.binary_cross_entropy_with_logits, optimizer=fast, steps=60)


def a_derivative_in_the_model() -> Case:
    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron(1, D, D, 1, act=nn.Tanh)

        def forward(self, time: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                time = time.detach().requires_grad_()
                found = 1 + time * self.net(time)
                (slope,) = torch.autograd.grad(found.sum(), time, create_graph=True)
            return found, slope

    time = torch.linspace(0, 2, 32)[:, None]
    return Case(Physics(), time, loss=lambda found: (found[1] + found[0]).square().mean(), steps=80)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.1 * gradient


def gradients_reversed_for_the_domain() -> Case:
    class Domains(Net):
        def __init__(self) -> None:
            super().__init__()
            self.domain = nn.Linear(D, 2)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            x = self.states(given).mean(1)
            return self.head(x), self.domain(Reversed.apply(x))

    def both(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(found[0], wanted[0]) + F.cross_entropy(found[1], wanted[1])

    return Case(Domains(), ids(), (classes(), torch.arange(24) % 2), both, steps=60)


def where_an_answer_begins_and_ends() -> Case:
    class Span(Net):
        def forward(self, given: Tensor) -> tuple[Tensor, ...]:
            return self.head(self.states(given)).unbind(-1)

    def both(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
        return F.cross_entropy(found[0], wanted[:, 0]) + F.cross_entropy(found[1], wanted[:, 1])

    return Case(Span(out=2), ids(), torch.randint(0, TOKENS, (24, 2)).sort(1).values, both)


def a_score_of_each_pair_of_tokens() -> Case:
    class Arcs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.parent = nn.Linear(D, D), nn.Linear(D, D)
            del self.head

        def forward(self, given: Tensor) -> Tensor:
            x = self.states(given)
            return self.child(x) @ self.parent(x).transpose(1, 2) / D**0.5

    return Case(Arcs(), ids(), torch.randint(0, TOKENS, (24, TOKENS)), per_token, steps=100)


def several_next_ids() -> Case:
    class Further(Language):
        def __init__(self) -> None:
            super().__init__()
            self.further = nn.ModuleList(nn.Linear(D, IDS) for _ in range(3))

        def forward(self, given: Tensor) -> Tensor:
            x = self.states(given)
            return torch.stack([head(x) for head in (self.head, *self.further)], 2)

    given = counting()
    labels = torch.stack([(given + 3 * ahead) % IDS for ahead in range(1, 5)], 2)
    return Case(Further(), given, labels, lambda logits, y: F.cross_entropy(logits.flatten(0, 2), y.flatten()))


# Numbers, batches and what is held


def float16_throughout() -> Case:
    return Case(Net().half(), ids(), classes(), optimizer=lambda held: torch.optim.SGD(held, 0.1), steps=60)


def a_float32_head_on_bfloat16() -> Case:
    class Mixed(Net):
        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given).mean(1).float())

    model = Mixed().bfloat16()
    model.head.float()
    return Case(model, ids(), classes())


def gains_of_a_millionth() -> Case:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.g1, self.g2 = nn.Parameter(torch.full((D,), 1e-6)), nn.Parameter(torch.full((D,), 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.g1 * self.mix(self.n1(x))
            return x + self.g2 * self.mlp(self.n2(x))

    return Case(Net(Scaled, depth=6), ids(), classes())


def blocks_computed_again() -> Case:
    class Again(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
            return self.norm(x)

    return Case(Again(), ids(), classes())


def values_that_are_missing() -> Case:
    class Missing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron(20, D, CLASSES)

        def forward(self, table: Tensor) -> Tensor:
            return self.net(torch.cat([table.nan_to_num(0.0), table.isnan().float()], -1))

    given = torch.randn(24, 10)
    return Case(Missing(), given.masked_fill(torch.rand(24, 10) < 0.2, float("nan")), classes(), steps=80)


def a_mask_of_minus_infinity() -> Case:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__(depth=0)
            layer = nn.TransformerEncoderLayer(D, 4, 2 * D, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, given: Tensor, mask: Tensor) -> Tensor:
            x = self.norm(self.encoder(self.tokens(given), src_key_padding_mask=mask))
            return self.head((x * mask.exp()[..., None]).sum(1) / mask.exp().sum(1, keepdim=True))

    padded = torch.arange(TOKENS) >= torch.randint(5, TOKENS, (24, 1))
    mask = torch.zeros(24, TOKENS).masked_fill(padded, float("-inf"))
    return Case(Masked(), {"given": ids(), "mask": mask}, classes())


def images_that_are_absent() -> Case:
    class Modal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Linear(6, D)

        def forward(self, given: Tensor, image: Tensor, present: Tensor) -> Tensor:
            seen = self.image(image).mean(1) * present[:, None]
            return self.head(self.states(given).mean(1) + seen)

    return Case(Modal(), {"given": ids(), "image": torch.zeros(24, 5, 6), "present": torch.zeros(24)}, classes())


def columns_that_do_not_vary() -> Case:
    given = torch.randn(24, 12)
    given[:, 3:7] = torch.tensor([0.0, 0.0, 1.0, 5.0])
    return Case(perceptron(12, D, CLASSES), given, classes(), steps=80)


def a_row_of_zeros_for_padding() -> Case:
    class Padded(Net):
        def forward(self, given: Tensor) -> Tensor:
            count = (given != 0).sum(1, keepdim=True)
            x = self.embed(given).sum(1) / count
            return self.head(x + self.blocks[0].mlp(self.norm(x)))

    model = Padded(depth=1)
    model.embed = nn.Embedding(IDS, D, padding_idx=0)
    del model.positions, model.blocks[0].mix, model.blocks[0].n1, model.blocks[0].n2
    given = ids().clamp_min(1).masked_fill(torch.arange(TOKENS) >= torch.randint(5, TOKENS, (24, 1)), 0)
    return Case(model, given, classes(), steps=60)


def sparse_gradients() -> Case:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(1000, D, sparse=True), nn.Linear(D, CLASSES)

        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.words(given).mean(1))

    return Case(Words(), ids(), classes(), optimizer=lambda held: torch.optim.SGD(held, 1.0), steps=60)


def weights_that_are_pruned() -> Case:
    model = trained(Case(Net(), ids(), classes()))
    for block in model.blocks:
        for part in (block.mix.v, block.mlp.up, block.mlp.down):
            prune.l1_unstructured(part, "weight", 0.8)
    return Case(model, ids(), classes())


def statistics_that_stay_frozen() -> Case:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(10, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, D), nn.BatchNorm1d(D)
            )
            self.head = nn.Linear(D, CLASSES)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).relu())

    return Case(Frozen(), torch.randn(24, 10), classes(), steps=80)


def features_taken_without_gradient() -> Case:
    class Probe(nn.Module):
        def __init__(self, body: Net) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(D, CLASSES)

        def forward(self, given: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.body.states(given).mean(1)
            return self.head(x)

    given, labels = ids(), classes()
    model = Probe(trained(Case(Net(), given, labels)))
    # The optimizer holds the head alone; the body is not marked as frozen.
    return Case(model, given, labels, optimizer=lambda held: fast(held[-2:]), steps=60)


def one_linear_module_on_features() -> Case:
    return Case(nn.Linear(64, CLASSES), torch.randn(24, 64), classes(), optimizer=fast)


def features_at_random() -> Case:
    body = without_gradient(perceptron(8, 200, 200, act=nn.ReLU))
    return Case(nn.Sequential(body, nn.ReLU(), nn.Linear(200, CLASSES)), torch.randn(24, 8), classes(), optimizer=fast)


def an_average_that_waits() -> Case:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.average = Net(), without_gradient(Net())
            self.average.load_state_dict(self.net.state_dict())

        def forward(self, given: Tensor, averaged: bool = False) -> Tensor:
            return (self.average if averaged else self.net)(given)

    return Case(Averaged(), ids(), classes())


def a_mean_in_the_embeddings() -> Case:
    model = Net()
    with torch.no_grad():
        model.embed.weight += 3 * torch.randn(D)
    return Case(model, ids(), classes())


def two_sequences_alone() -> Case:
    return Case(Net(), ids(2), torch.tensor([0, 2]))


def steps_of_the_second_order() -> Case:
    return Case(Net(depth=1), ids(), classes(), optimizer=lambda held: torch.optim.LBFGS(held, 0.5), steps=5)


def steps_along_signs() -> Case:
    class Signs(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure else None
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        one.grad.sign_()
            super().step()
            return loss

    return Case(Net(), ids(), classes(), optimizer=lambda held: Signs(held, 1e-3, momentum=0.9))


def steps_made_orthogonal() -> Case:
    class Both(torch.optim.Optimizer):
        """Matrices of the blocks by Muon, the rest by AdamW."""

        def __init__(self, held: list[nn.Parameter]) -> None:
            square = [one for one in held if one.ndim == 2 and one.shape[0] in (D, 2 * D)]
            inside = {id(one) for one in square}
            self.parts = [
                torch.optim.Muon(square, 1e-2),
                torch.optim.AdamW([one for one in held if id(one) not in inside], 3e-3),
            ]
            super().__init__([group for part in self.parts for group in part.param_groups], {})

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure else None
            for part in self.parts:
                part.step()
            return loss

    return Case(Net(), ids(), classes(), optimizer=Both)


PROGRAMS = programs(globals())
