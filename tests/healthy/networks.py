"""Networks that are built in other ways: of sets, images, signals, graphs, coordinates, tables, and odd stacks."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    perceptron,
    programs,
)


def pictures() -> Tensor:
    """Random images of three channels."""
    return torch.randn(24, 3, 8, 8)


def classified(body: nn.Module, width: int = D) -> nn.Module:
    """The mean over the pixels that a body of convolutions returns, and a class."""
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def with_mlp(mlp: Callable[[], nn.Module]) -> Case:
    return Case(Net(lambda: Block(mlp=mlp())), ids(), classes())


# Sets


def a_sum_over_a_set() -> Case:
    class DeepSets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.whole = perceptron(4, D, D), perceptron(D, D, CLASSES)

        def forward(self, points: Tensor) -> Tensor:
            return self.whole(self.each(points).sum(1))

    return Case(DeepSets(), torch.randn(24, TOKENS, 4), classes())


def induced_points_between_sets() -> Case:
    class SetTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.points = nn.Linear(4, D), nn.Linear(D, CLASSES), nn.Parameter(torch.randn(3, D))
            self.up, self.down = (nn.MultiheadAttention(D, 4, batch_first=True) for _ in range(2))

        def forward(self, given: Tensor) -> Tensor:
            x = self.embed(given)
            induced = self.up(self.points.expand(len(x), -1, -1), x, x, need_weights=False)[0]
            return self.head((x + self.down(x, induced, induced, need_weights=False)[0]).amax(1))

    return Case(SetTransformer(), torch.randn(24, TOKENS, 4), classes())


def slots_that_compete() -> Case:
    class Slots(Net):
        def __init__(self) -> None:
            super().__init__()
            self.slots, self.q, self.k = nn.Parameter(torch.randn(4, D)), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, given: Tensor) -> Tensor:
            x = self.states(given)
            weights = (self.q(self.slots) @ self.k(x).transpose(1, 2) / D**0.5).softmax(1)
            return self.head((weights / weights.sum(-1, keepdim=True) @ x).flatten(1))

    model = Slots()
    model.head = nn.Linear(4 * D, CLASSES)
    return Case(model, ids(), classes())


def queries_of_objects() -> Case:
    class Detector(Net):
        def __init__(self) -> None:
            super().__init__(out=4)
            self.queries = nn.Embedding(5, D)
            self.decoder = nn.TransformerDecoderLayer(D, 4, 2 * D, 0.0, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            x = self.states(given)
            # The objects begin at zero; only their queries tell them apart.
            objects = torch.zeros(len(x), 5, D) + self.queries.weight
            return self.head(self.decoder(objects, x)).sigmoid()

    return Case(Detector(), ids(), torch.rand(24, 5, 4), F.l1_loss, steps=80)


def outputs_that_read_latents() -> Case:
    class PerceiverIO(Language):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.asked = nn.Parameter(0.02 * torch.randn(8, D)), nn.Parameter(torch.randn(TOKENS, D))
            self.read, self.write = (nn.MultiheadAttention(D, 4, batch_first=True) for _ in range(2))

        def states(self, given: Tensor) -> Tensor:
            tokens, x = self.tokens(given), self.latents.expand(len(given), -1, -1)
            x = x + self.read(x, tokens, tokens, need_weights=False)[0]
            for block in self.blocks:
                x = block(x)
            return self.norm(self.write(self.asked.expand(len(x), -1, -1), x, x, need_weights=False)[0])

    given = counting()
    return Case(PerceiverIO(), given, given, per_token, steps=120)


# Images and signals


def a_residual_network_of_images() -> Case:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.c2, self.b2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            nn.init.zeros_(self.b2.weight)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))

    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(), Residual(), Residual())
    return Case(classified(body, 16), pictures(), classes(), steps=120)


def standardised_weights() -> Case:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            spread, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
            return self._conv_forward(x, (self.weight - mean) / (spread * self.weight[0].numel() ** 0.5), self.bias)

    layers = [nn.Sequential(Standardised(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()) for _ in range(3)]
    return Case(classified(nn.Sequential(nn.Conv2d(3, 16, 1), *layers), 16), pictures(), classes(), steps=80)


def a_u_net() -> Case:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, stride=2)])
            self.middle, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

        def forward(self, image: Tensor) -> Tensor:
            first = F.relu(self.down[0](image))
            deep = F.relu(self.middle(F.relu(self.down[1](first))))
            return self.up(torch.cat([first, F.interpolate(deep, scale_factor=2)], 1))

    given = pictures()
    return Case(UNet(), given, (given.mean(1) > 0).long(), F.cross_entropy, steps=80)


def patches_mixed_by_convolutions() -> Case:
    class ConvMixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise, self.pointwise = nn.Conv2d(D, D, 3, padding=1, groups=D), nn.Conv2d(D, D, 1)
            self.n1, self.n2 = nn.BatchNorm2d(D), nn.BatchNorm2d(D)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.n1(F.gelu(self.depthwise(x)))
            return self.n2(F.gelu(self.pointwise(x)))

    return Case(classified(nn.Sequential(nn.Conv2d(3, D, 2, 2), ConvMixer(), ConvMixer())), pictures(), classes())


def attention_over_rows_then_columns() -> Case:
    class Axial(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, D, 2, 2)

        def forward(self, image: Tensor) -> Tensor:
            x = self.embed(image).permute(0, 2, 3, 1)
            x = x + self.positions[:4] + self.positions[4:8, None]
            for block in self.blocks:
                x = block(x.flatten(0, 1)).view_as(x).transpose(1, 2)
            return self.head(self.norm(x).mean((1, 2)))

    return Case(Axial(), pictures(), classes())


def windows_that_shift() -> Case:
    class Shifted(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)
            for i, block in enumerate(self.blocks):
                shift = 2 * (i % 2)
                windows = x.roll(-shift, 1).unflatten(1, (3, 4)).flatten(0, 1)
                x = block(windows).view_as(x).roll(shift, 1)
            return self.norm(x)

    return Case(Shifted(), ids(), classes())


def space_and_time_in_turn() -> Case:
    class Video(Net):
        def __init__(self) -> None:
            super().__init__(depth=4)
            self.embed, self.frames = nn.Linear(6, D), nn.Parameter(0.02 * torch.randn(5, 1, D))

        def forward(self, clip: Tensor) -> Tensor:
            x = self.embed(clip) + self.frames + self.positions[: clip.shape[2]]
            for space, time in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = space(x.flatten(0, 1)).view_as(x).transpose(1, 2)
                x = time(x.flatten(0, 1)).view_as(x).transpose(1, 2)
            return self.head(self.norm(x).mean((1, 2)))

    return Case(Video(), torch.randn(24, 5, 4, 6), classes())


def register_tokens() -> Case:
    class Registers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.registers = nn.Linear(12, D), nn.Parameter(0.02 * torch.randn(4, D))

        def forward(self, patches: Tensor) -> Tensor:
            x = torch.cat([self.registers.expand(len(patches), -1, -1), self.tokens(patches)], 1)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x[:, 4:]).mean(1))

    return Case(Registers(), torch.randn(24, TOKENS, 12), classes())


def variables_as_tokens() -> Case:
    class Inverted(Net):
        def __init__(self) -> None:
            super().__init__(out=4)
            self.embed = nn.Linear(20, D)

        def tokens(self, series: Tensor) -> Tensor:
            return self.embed(series.transpose(1, 2))

        def forward(self, series: Tensor) -> Tensor:
            return self.head(self.states(series)).transpose(1, 2)

    model = Inverted()
    del model.positions
    waves = (torch.arange(24) / 4 + 6 * torch.rand(24, 5, 1)).sin().transpose(1, 2)
    return Case(model, waves[:, :20], waves[:, 20:], F.mse_loss)


def dilated_convolutions_with_gates() -> Case:
    class Dilated(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.conv, self.out, self.past = nn.Conv1d(D, 2 * D, 2, dilation=dilation), nn.Conv1d(D, D, 1), dilation

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.conv(F.pad(x, (self.past, 0))).chunk(2, 1)
            return x + self.out(a.tanh() * b.sigmoid())

    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(IDS, D), nn.Conv1d(D, IDS, 1)
            self.layers = nn.Sequential(*(Dilated(2**i) for i in range(4)))

        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.layers(self.embed(given).transpose(1, 2))).transpose(1, 2)

    return Case(Wave(), counting(), counting(), next_id, steps=60)


def layers_of_wide_spectra() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.local, self.down = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.weight = nn.Parameter(0.1 * torch.randn(5, 8, 8, dtype=torch.cfloat))

        def forward(self, signal: Tensor) -> Tensor:
            x = self.lift(signal)
            modes = torch.fft.rfft(x, dim=1)[:, :5]
            smooth = torch.fft.irfft(torch.einsum("bmi,mio->bmo", modes, self.weight), n=x.shape[1], dim=1)
            return self.down(F.gelu(smooth + self.local(x)))

    given = torch.randn(24, 16, 1).cumsum(1)
    return Case(Spectral(), given, given.cumsum(1) / 8, F.mse_loss, steps=150)


# Recurrences


def an_lstm_and_its_last_state() -> Case:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(IDS, D), nn.LSTM(D, D, 2), nn.Linear(D, CLASSES)

        def forward(self, given: Tensor) -> Tensor:
            _, (state, _) = self.lstm(self.embed(given.T))
            return self.head(state[-1])

    return Case(Last(), ids(), classes(), steps=80)


def a_diagonal_state_space() -> Case:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decay, self.into, self.out = nn.Parameter(torch.linspace(-2, 6, D)), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            keep, state, states = self.decay.sigmoid(), torch.zeros_like(x[:, 0]), []
            for step in self.into(x).unbind(1):
                state = keep * state + (1 - keep) * step
                states.append(state)
            return self.out(F.silu(torch.stack(states, 1)))

    return Case(Language(lambda: Block(Scan())), counting(), counting(), next_id)


def a_memory_that_decays() -> Case:
    class Retention(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            away = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
            kept = 1 - 2.0 ** -torch.arange(2, 2 + self.heads)[:, None, None]
            return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 * torch.where(away >= 0, kept ** away.clamp_min(0), 0.0)

    return Case(Language(lambda: Block(Retention())), counting(), counting(), next_id)


def small_steps_of_one_layer() -> Case:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.speed, self.head = nn.Linear(6, D), perceptron(D, D, D, act=nn.Tanh), nn.Linear(D, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            for _ in range(20):
                x = x + self.speed(x) / 20
            return self.head(x)

    return Case(Flow(), torch.randn(24, 6), classes(), steps=100)


# Graphs, coordinates and tables


def many_graphs_in_one() -> Case:
    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(4, D), nn.Linear(D, CLASSES)
            self.layers = nn.ModuleList(perceptron(2 * D, D, D) for _ in range(2))

        def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
            x = self.embed(nodes)
            for layer in self.layers:
                messages = layer(torch.cat([x[edges[0]], x[edges[1]]], -1))
                x = x + torch.zeros_like(x).index_add(0, edges[1], messages)
            return self.head(x.new_zeros(int(graph.max()) + 1, D).index_add(0, graph, x))

    graph = torch.arange(12).repeat_interleave(5)
    edges = torch.stack([torch.arange(60), torch.arange(60).view(12, 5).roll(1, 1).flatten()])
    given = {"nodes": torch.randn(60, 4), "edges": edges, "graph": graph}
    return Case(Messages(), given, classes(12))


def waves_of_coordinates() -> Case:
    class Sine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (10 * super().forward(x)).sin()

    model = nn.Sequential(Sine(2, D), Sine(D, D), nn.Linear(D, 1))
    nn.init.uniform_(model[1].weight, -((6 / D) ** 0.5) / 10, (6 / D) ** 0.5 / 10)
    where = torch.rand(256, 2) * 2 - 1
    return Case(model, where, (4 * where).sin().prod(1, keepdim=True), F.mse_loss, steps=100)


def frequencies_of_coordinates() -> Case:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = perceptron(18, D, D, act=nn.ReLU), perceptron(D + 18, D, 4, act=nn.ReLU)

        def forward(self, where: Tensor) -> Tensor:
            angles = (where[..., None] * 2.0 ** torch.arange(3)).flatten(1)
            x = torch.cat([angles.sin(), angles.cos()], -1)
            density, colour = self.second(torch.cat([self.first(x), x], -1)).split([1, 3], -1)
            return (1 - (-F.softplus(density)).exp()) * colour.sigmoid()

    where = torch.rand(256, 3)
    return Case(Field(), where, where.flip(1) ** 2, F.mse_loss, steps=100)


def weights_from_another_network() -> Case:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tasks, self.first, self.last = nn.Embedding(4, 8), nn.Linear(8, 6 * D), nn.Linear(8, D)

        def forward(self, x: Tensor, task: Tensor) -> Tensor:
            about = self.tasks(task)
            hidden = torch.einsum("bi,bio->bo", x, self.first(about).unflatten(1, (6, D)))
            return (hidden.relu() * self.last(about)).sum(1) / D**0.5

    given = {"x": torch.randn(24, 6), "task": torch.randint(0, 4, (24,))}
    return Case(Hyper(), given, torch.randn(24), F.mse_loss, steps=80)


def bags_of_items() -> Case:
    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(IDS, 8) for _ in range(3))
            self.dense, self.top = perceptron(5, D, 8), perceptron(8 + 6, D, 1)

        def forward(self, numbers: Tensor, items: Tensor) -> Tensor:
            found = [self.dense(numbers)] + [bag(items[:, i]) for i, bag in enumerate(self.bags)]
            x = torch.stack(found, 1)
            one, other = torch.triu_indices(4, 4, 1)
            pairs = (x @ x.transpose(1, 2))[:, one, other]
            return self.top(torch.cat([found[0], pairs], 1))[:, 0]

    given = {"numbers": torch.randn(48, 5), "items": torch.randint(0, IDS, (48, 3, 4))}
    labels = (torch.rand(48) < 0.3).float()
    return Case(Recommender(), given, labels, F.binary_cross_entropy_with_logits, steps=80)


def factors_of_users_and_items() -> Case:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(40, 8), nn.Embedding(60, 8)
            self.of_user, self.of_item = nn.Embedding(40, 1), nn.Embedding(60, 1)
            nn.init.zeros_(self.of_user.weight)
            nn.init.zeros_(self.of_item.weight)

        def forward(self, pairs: Tensor) -> Tensor:
            user, item = pairs.unbind(1)
            return 3 + (self.user(user) * self.item(item)).sum(1) + (self.of_user(user) + self.of_item(item))[:, 0]

    pairs = torch.stack([torch.randint(0, 40, (64,)), torch.randint(0, 60, (64,))], 1)
    return Case(Factors(), pairs, torch.randint(1, 6, (64,)).float(), F.mse_loss)


def columns_as_tokens() -> Case:
    class Table(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(0.1 * torch.randn(6, D)), nn.Parameter(0.1 * torch.randn(6, D))
            self.embed, self.first = nn.Embedding(20, D), nn.Parameter(torch.randn(1, D))
            del self.positions

        def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
            columns = numbers[..., None] * self.scale + self.shift
            x = torch.cat([self.first.expand(len(numbers), 1, D), columns, self.embed(kinds)], 1)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x[:, 0]))

    # The kinds of the second column continue after those of the first.
    kinds = torch.randint(0, 10, (24, 2)) + torch.tensor([0, 10])
    return Case(Table(), {"numbers": torch.randn(24, 6), "kinds": kinds}, classes())


def one_token_a_sequence() -> Case:
    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(10, D)

        def tokens(self, row: Tensor) -> Tensor:
            return self.embed(row)[:, None]

    model = Single()
    del model.positions
    return Case(model, torch.randn(24, 10), classes())


# Stacks


def long_skips_between_blocks() -> Case:
    class Long(Net):
        def __init__(self) -> None:
            super().__init__(depth=4)
            self.merge = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))

        def states(self, given: Tensor) -> Tensor:
            x, kept = self.tokens(given), []
            for block in self.blocks[:2]:
                x = block(x)
                kept.append(x)
            for block, merge in zip(self.blocks[2:], self.merge, strict=True):
                x = block(merge(torch.cat([x, kept.pop()], -1)))
            return self.norm(x)

    return Case(Long(), ids(), classes())


def tokens_pooled_and_repeated() -> Case:
    class Hourglass(Language):
        def states(self, given: Tensor) -> Tensor:
            x = self.blocks[0](self.tokens(given))
            short = self.blocks[1](x.unflatten(1, (-1, 3)).mean(2))
            return self.norm(self.blocks[2](x + short.repeat_interleave(3, 1)))

    given = ids()
    return Case(Hourglass(), given, given.roll(1, 1), per_token, steps=60)


def two_streams_that_reverse() -> Case:
    class Reversible(Net):
        def states(self, given: Tensor) -> Tensor:
            a = b = self.tokens(given)
            for block in self.blocks:
                a = a + block.mix(block.n1(b))
                b = b + block.mlp(block.n2(a))
            return self.norm(a + b)

    return Case(Reversible(), ids(), classes())


def two_copies_of_the_stream() -> Case:
    class Copies(Block):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.carry = nn.Parameter(torch.tensor([1.0, 0.0])), nn.Parameter(torch.eye(2))

        def forward(self, x: Tensor) -> Tensor:
            taken = torch.einsum("btcd,c->btd", x, self.read)
            change = super().forward(taken) - taken
            return torch.einsum("btcd,ce->bted", x, self.carry) + change[:, :, None]

    class Hyper(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)[:, :, None].repeat(1, 1, 2, 1)
            for block in self.blocks:
                x = block(x)
            return self.norm(x.sum(2))

    return Case(Hyper(Copies), ids(), classes())


def carry_gates_that_begin_closed() -> Case:
    class Highway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.change, self.gate = nn.Linear(D, D), nn.Linear(D, D)
            nn.init.constant_(self.gate.bias, -3.0)

        def forward(self, x: Tensor) -> Tensor:
            open_ = self.gate(x).sigmoid()
            return open_ * self.change(x).relu() + (1 - open_) * x

    layers = [Highway() for _ in range(8)]
    return Case(nn.Sequential(nn.Linear(6, D), *layers, nn.Linear(D, CLASSES)), torch.randn(24, 6), classes(), steps=80)


def features_that_are_concatenated() -> Case:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(perceptron(10 + 8 * i, 8, 8) for i in range(5))
            self.head = nn.Linear(50, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.cat([x, layer(x)], -1)
            return self.head(x)

    return Case(Dense(), torch.randn(24, 10), classes(), steps=80)


def layers_that_normalise_themselves() -> Case:
    model = perceptron(10, *[D] * 8, CLASSES, act=nn.SELU)
    for part in model[::2]:
        nn.init.normal_(part.weight, std=part.in_features**-0.5)
        nn.init.zeros_(part.bias)
    return Case(model, torch.randn(24, 10), classes())


def post_norms_with_a_strong_skip() -> Case:
    class DeepNorm(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.n1(2.0 * x + self.mix(x))
            return self.n2(2.0 * x + self.mlp(x))

    model = Net(DeepNorm, depth=8)
    for block in model.blocks:
        for part in (block.mix.v, block.mix.o, block.mlp.up, block.mlp.down):
            nn.init.xavier_normal_(part.weight, gain=0.35)
    return Case(model, ids(), classes(), steps=60)


def states_on_a_sphere() -> Case:
    class Sphere(Block):
        def __init__(self) -> None:
            super().__init__(norm=nn.Identity)
            self.rate = nn.Parameter(torch.full((2, D), 0.2))

        def forward(self, x: Tensor) -> Tensor:
            for rate, part in zip(self.rate, (self.mix, self.mlp), strict=True):
                x = F.normalize(x + rate * (F.normalize(part(x), dim=-1) - x), dim=-1)
            return x

    class Normalised(Net):
        def tokens(self, given: Tensor) -> Tensor:
            return F.normalize(super().tokens(given), dim=-1)

    return Case(Normalised(Sphere), ids(), classes())


def tanh_instead_of_norms() -> Case:
    class Bounded(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.slope, self.gain = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(d))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * (self.slope * x).tanh()

    return Case(Net(lambda: Block(norm=Bounded)), ids(), classes())


def rates_by_width() -> Case:
    class Scaled(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given) / (D / 8)

    def by_width(held: list[nn.Parameter]) -> torch.optim.Optimizer:
        wide = [one for one in held if one.ndim == 2 and one.shape == (D, D)]
        rest = [one for one in held if one.ndim != 2 or one.shape != (D, D)]
        return torch.optim.Adam([{"params": wide, "lr": 1e-2 / (D / 8)}, {"params": rest, "lr": 1e-2}])

    model = Scaled()
    nn.init.zeros_(model.head.weight)
    return Case(model, ids(), classes(), optimizer=by_width, steps=60)


# Attention


def grouped_queries() -> Case:
    class Grouped(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = nn.Linear(D, D // 2), nn.Linear(D, D // 2)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
            k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, 1) for f in (self.k, self.v))
            return self.o((self.weights(q, k) @ v).transpose(1, 2).flatten(2))

    return Case(Net(lambda: Block(Grouped())), ids(), classes())


def a_bias_that_all_blocks_share() -> Case:
    class Biased(Attention):
        def __init__(self, bias: nn.Embedding) -> None:
            super().__init__()
            self.bias = bias

        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            away = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
            bias = self.bias(away.clamp(-4, 4) + 4).permute(2, 0, 1)
            return (q @ k.transpose(-1, -2) + bias).softmax(-1)

    shared = nn.Embedding(9, 4)
    given = ids()
    return Case(Language(lambda: Block(Biased(shared))), given, given.roll(1, 1), per_token, steps=60)


def heads_that_talk() -> Case:
    class Talking(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Parameter(torch.eye(4)), nn.Parameter(torch.eye(4))

        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, self.before)
            return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), self.after)

    return Case(Net(lambda: Block(Talking())), ids(), classes())


def keys_that_are_parameters() -> Case:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.values = nn.Parameter(torch.randn(16, D)), nn.Parameter(torch.randn(16, D) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.keys.T / D**0.5).softmax(-1) @ self.values

    return with_mlp(Memory)


def keys_from_the_block_before() -> Case:
    class Shared(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.tokens(given)
            for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                h, mix = first.n1(x), first.mix
                k, v = mix.split(mix.k(h)), mix.split(mix.v(h))
                x = first(x)
                q = second.mix.split(second.mix.q(second.n1(x)))
                x = x + second.mix.o((mix.weights(q, k) @ v).transpose(1, 2).flatten(2))
                x = x + second.mlp(second.n2(x))
            return self.norm(x)

    model = Shared(depth=4)
    for block in model.blocks[1::2]:
        del block.mix.k, block.mix.v
    return Case(model, ids(), classes())


def a_prefix_seen_both_ways() -> Case:
    class Prefix(Attention):
        def weights(self, q: Tensor, k: Tensor) -> Tensor:
            seen = torch.ones(q.shape[2], k.shape[2]).tril().bool()
            seen[:, :6] = True
            return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1)

    def after_the_prefix(logits: Tensor, given: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, 5:-1].flatten(0, 1), given[:, 6:].flatten())

    return Case(Language(lambda: Block(Prefix())), counting(), counting(), after_the_prefix)


class Packed(Language):
    """Several texts in one row, each of which attends to itself alone."""

    def forward(self, given: Tensor, text: Tensor) -> Tensor:
        place = (torch.arange(given.shape[1]) - (text[:, :, None] > text[:, None]).sum(-1)).clamp_min(0)
        apart = (text[:, :, None] != text[:, None]) | torch.ones(TOKENS, TOKENS).triu(1).bool()
        x = self.embed(given) + self.positions[place]
        for block in self.blocks:
            h, mix = block.n1(x), block.mix
            q, k, v = (mix.split(f(h)) for f in (mix.q, mix.k, mix.v))
            mixed = F.scaled_dot_product_attention(q, k, v, ~apart[:, None])
            x = x + mix.o(mixed.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.n2(x))
        return self.head(self.norm(x))


def packed_texts() -> Case:
    given, text = counting(), (torch.arange(TOKENS) >= torch.randint(4, 9, (24, 1))).long()
    labels = given.roll(-1, 1)
    # The last token of each text has nothing to predict.
    labels[text != text.roll(-1, 1)] = -100
    return Case(Packed(), {"given": given, "text": text}, labels, per_token)


def padding_on_the_left() -> Case:
    class Left(Net):
        def forward(self, given: Tensor, seen: Tensor) -> Tensor:
            place = (seen.cumsum(1) - 1).clamp_min(0)
            x = self.embed(given) + self.positions[place]
            hidden = (1.0 - seen)[:, None, None] * torch.finfo(x.dtype).min
            for block in self.blocks:
                h, mix = block.n1(x), block.mix
                q, k, v = (mix.split(f(h)) for f in (mix.q, mix.k, mix.v))
                x = x + mix.o(F.scaled_dot_product_attention(q, k, v, hidden).transpose(1, 2).flatten(2))
                x = x + block.mlp(block.n2(x))
            return self.head(self.norm(x)[:, -1])

    seen = (torch.arange(TOKENS) >= torch.randint(0, 7, (24, 1))).long()
    return Case(Left(), {"given": ids() * seen, "seen": seen}, classes())


# Feed-forward parts and routes


def squared_relu() -> Case:
    class Squared(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(x)).square())

    return with_mlp(Squared)


def gated_feed_forward() -> Case:
    class Gated(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(D, 2 * D, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    return with_mlp(Gated)


def a_gate_over_tokens() -> Case:
    class Spatial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(D, 2 * D), nn.LayerNorm(D), nn.Linear(D, D)
            self.over = nn.Linear(TOKENS, TOKENS)
            nn.init.zeros_(self.over.weight)
            nn.init.ones_(self.over.bias)

        def forward(self, x: Tensor) -> Tensor:
            a, b = F.gelu(self.up(x)).chunk(2, -1)
            return self.down(a * self.over(self.norm(b).transpose(1, 2)).transpose(1, 2))

    class Once(Block):
        def __init__(self) -> None:
            super().__init__(Spatial())
            del self.n2, self.mlp

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mix(self.n1(x))

    return Case(Net(Once), ids(), classes())


def layers_of_languages() -> Case:
    class Languages(Net):
        def __init__(self) -> None:
            super().__init__()
            self.of = nn.ModuleList(Mlp() for _ in range(20))

        def forward(self, given: Tensor, language: int) -> Tensor:
            x = self.states(given)
            return self.head((x + self.of[language](x)).mean(1))

    return Case(Languages(), {"given": ids(), "language": 7}, classes())


def tokens_that_go_around_a_block() -> Case:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.router(x)[..., 0].topk(6, 1)
            index = chosen[..., None].expand(-1, -1, D)
            taken = x.gather(1, index)
            return x.scatter_add(1, index, (super().forward(taken) - taken) * weight.sigmoid()[..., None])

    return Case(Net(Routed), ids(), classes())


def half_of_the_tokens_dropped() -> Case:
    class Pruned(Net):
        def states(self, given: Tensor) -> Tensor:
            x = self.blocks[0](self.tokens(given))
            kept = x.norm(dim=-1).topk(6, 1).indices
            x = x.gather(1, kept[..., None].expand(-1, -1, D))
            return self.norm(self.blocks[2](self.blocks[1](x)))

    return Case(Pruned(), ids(), classes())


def orthogonal_weights() -> Case:
    model = Net()
    for block in model.blocks:
        parametrizations.orthogonal(block.mix.o)
    return Case(model, ids(), classes())


def branches_scaled_by_their_chance() -> Case:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            for norm, part in ((self.n1, self.mix), (self.n2, self.mlp)):
                taken = torch.rand(len(x), 1, 1) < 0.8 if self.training else 0.8
                x = x + taken * part(norm(x))
            return x

    return Case(Net(Dropped), ids(), classes(), steps=80)


def logits_scaled_by_the_width() -> Case:
    model = Language(causal_block)
    nn.init.normal_(model.embed.weight)
    model.head = nn.Linear(D, IDS, bias=False)
    model.head.weight = model.embed.weight

    def scaled(logits: Tensor, given: Tensor) -> Tensor:
        return next_id(logits / math.sqrt(D), given)

    return Case(model, counting(), counting(), scaled, steps=60)


PROGRAMS = programs(globals())
