"""Objectives, labels and parameters that are odd on purpose: what is frozen, what a loss compares, what is not used."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.healthy.parts import (
    CLASSES,
    IDS,
    TOKENS,
    Block,
    Case,
    D,
    Language,
    Net,
    causal_block,
    classes,
    counting,
    ids,
    next_id,
    programs,
)

# What is frozen or added


def trained(case: Case) -> Net:
    """The model of a case after its training."""
    case.train()
    return case.model  # type: ignore[return-value]


def a_frozen_backbone_under_a_new_head() -> Case:
    given, labels = ids(), classes()
    model = trained(Case(Net(), given, labels)).requires_grad_(False)
    model.head = nn.Linear(D, CLASSES)
    return Case(model, given, (labels + 1) % CLASSES, optimizer=fast)


def trained_weights_under_new_labels() -> Case:
    given = ids()
    return Case(trained(Case(Net(), given, classes())), given, classes())


def frozen_embeddings() -> Case:
    model = Net()
    model.embed.requires_grad_(False)
    return Case(model, ids(), classes())


def frozen_norms() -> Case:
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    return Case(model, ids(), classes())


def the_first_half_frozen() -> Case:
    model = trained(Case(Net(depth=4), ids(), classes()))
    for part in (model.embed, *model.blocks[:2]):
        part.requires_grad_(False)
    return Case(model, ids(), classes())


def biases_only() -> Case:
    model = trained(Case(Net(), ids(), classes()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("head"))
    return Case(model, ids(), classes(), optimizer=lambda held: torch.optim.AdamW(held, 1e-2), steps=80)


class LowRank(nn.Module):
    """A frozen linear module and an update of rank four, one factor of which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(0.1 * torch.randn(4, D)), nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def low_rank_adapters() -> Case:
    model = trained(Case(Net(), ids(), classes()))
    model.requires_grad_(False)
    for block in model.blocks:
        block.mix.q, block.mix.v = LowRank(block.mix.q), LowRank(block.mix.v)
    model.head.requires_grad_(True)
    return Case(model, ids(), classes(), optimizer=lambda held: torch.optim.AdamW(held, 1e-2), steps=80)


def adapters_after_the_mlp() -> Case:
    class Adapter(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.mlp, self.down, self.up = mlp.requires_grad_(False), nn.Linear(D, 8), nn.Linear(8, D)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mlp(x)
            return x + self.up(F.relu(self.down(x)))

    model = trained(Case(Net(), ids(), classes())).requires_grad_(False)
    for block in model.blocks:
        block.mlp = Adapter(block.mlp)
    model.head.requires_grad_(True)
    return Case(model, ids(), classes(), optimizer=lambda held: torch.optim.AdamW(held, 1e-2), steps=80)


def a_prompt_of_vectors() -> Case:
    class Prompted(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net, self.prompt = net.requires_grad_(False), nn.Parameter(0.1 * torch.randn(4, D))

        def forward(self, given: Tensor) -> Tensor:
            x = torch.cat([self.prompt.expand(len(given), -1, -1), self.net.tokens(given)], 1)
            for block in self.net.blocks:
                x = block(x)
            return self.net.head(self.net.norm(x).mean(1))

    given, labels = ids(), classes()
    return Case(Prompted(trained(Case(Net(), given, labels))), given, labels.roll(1), optimizer=fast, steps=80)


def fast(held: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(held, 3e-2)


# What a loss compares


def smoothed_labels() -> Case:
    return Case(Net(), ids(), classes(), lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1))


def weighted_classes() -> Case:
    labels = (torch.rand(24) < 0.1).long()
    labels[0] = 1
    return Case(Net(), ids(), labels, lambda logits, y: F.cross_entropy(logits, y, torch.tensor([1.0, 9.0, 1.0])))


def focal_loss() -> Case:
    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels, reduction="none")
        return ((1 - (-loss).exp()) ** 2 * loss).mean()

    return Case(Net(), ids(), classes(), focal)


def several_labels_at_once() -> Case:
    return Case(Net(out=5), ids(), (torch.rand(24, 5) < 0.3).float(), F.binary_cross_entropy_with_logits)


def one_number() -> Case:
    class One(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given)[:, 0]

    return Case(One(out=1), ids(), torch.randn(24), F.mse_loss)


def quantiles_of_one_number() -> Case:
    def pinball(found: Tensor, wanted: Tensor) -> Tensor:
        quantiles, away = torch.tensor([0.1, 0.5, 0.9]), wanted[:, None] - found
        return torch.maximum(quantiles * away, (quantiles - 1) * away).mean()

    return Case(Net(), ids(), torch.randn(24), pinball)


def logarithms_of_probabilities() -> Case:
    class Logs(Net):
        def forward(self, given: Tensor) -> Tensor:
            return super().forward(given).log_softmax(-1)

    return Case(Logs(), ids(), classes(), F.nll_loss)


def masked_tokens() -> Case:
    given = counting()
    hidden = torch.rand(given.shape) < 0.15
    labels = given.masked_fill(~hidden, -100)
    return Case(
        Language(),
        given.masked_fill(hidden, 0),
        labels,
        lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100),
    )


def next_ids() -> Case:
    given = counting()
    return Case(Language(causal_block), given, given, next_id)


def next_ids_with_answers_only() -> Case:
    given = counting()
    labels = given.clone()
    labels[:, :6] = -100

    def answers(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    return Case(Language(causal_block), given, labels, answers)


def a_teacher() -> Case:
    def distill(logits: Tensor, wanted: Tensor) -> Tensor:
        return 4 * F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")

    return Case(Net(), ids(), torch.randn(24, CLASSES).mul(3).softmax(-1), distill)


def similarities_between_sequences() -> Case:
    class Two(Net):
        def forward(self, given: Tensor) -> Tensor:
            first, second = (F.normalize(self.head(self.states(part).mean(1)), dim=-1) for part in given.chunk(2, 1))
            return first @ second.T / 0.2

    given = ids(16, 6)
    return Case(Two(out=16), torch.cat([given, given.flip(1)], 1), torch.arange(16), F.cross_entropy)


def triplets() -> Case:
    def margin(found: Tensor, labels: Tensor) -> Tensor:
        away = torch.cdist(found, found)
        same = labels[:, None] == labels
        return F.relu(1 + (away * same).max(1).values - away.masked_fill(same, 1e3).min(1).values).mean()

    return Case(Net(out=8), ids(), classes(), margin)


def directions() -> Case:
    wanted = torch.randn(24, 8)
    return Case(Net(out=8), ids(), wanted, lambda found, y: 1 - F.cosine_similarity(found, y).mean())


def what_went_in() -> Case:
    class Auto(Net):
        def __init__(self) -> None:
            super().__init__(out=8)
            self.embed = nn.Linear(8, D)

        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given))

    given = torch.randn(24, TOKENS, 8)
    return Case(Auto(), given, given, F.mse_loss)


def noise_that_was_added() -> Case:
    class Denoiser(Net):
        def __init__(self) -> None:
            super().__init__(out=8)
            self.embed = nn.Linear(8, D)

        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given))

    noise = torch.randn(24, TOKENS, 8)
    return Case(Denoiser(), 0.5 * torch.randn(24, 1, 8) + noise, noise, F.mse_loss)


def advantages_of_actions() -> Case:
    def policy(logits: Tensor, taken: tuple[Tensor, Tensor]) -> Tensor:
        action, advantage = taken
        return (F.cross_entropy(logits, action, reduction="none") * advantage).mean()

    return Case(Net(), ids(), (classes(), torch.rand(24)), policy)


def preferences_between_answers() -> Case:
    class Reward(Net):
        def forward(self, given: Tensor) -> Tensor:
            return torch.stack([super(Reward, self).forward(part)[:, 0] for part in given.chunk(2, 1)], 1)

    def preferred(scores: Tensor, better: Tensor) -> Tensor:
        return F.softplus(-(scores[:, 0] - scores[:, 1]) * better).mean()

    return Case(Reward(out=1), ids(), torch.randint(0, 2, (24,)) * 2.0 - 1, preferred)


def alignment_of_sequences() -> Case:
    def ctc(logits: Tensor, wanted: Tensor) -> Tensor:
        lengths = torch.full((len(logits),), TOKENS), torch.full((len(logits),), wanted.shape[1])
        return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), wanted, *lengths)

    return Case(Language(), ids(), torch.randint(1, IDS, (24, 3)), ctc)


def load_balanced_experts() -> Case:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(D, 4), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            self.shares = self.router(x).softmax(-1)
            top = self.shares.topk(2, -1)
            gates = torch.zeros_like(self.shares).scatter(-1, top.indices, top.values)
            return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    class Balanced(Net):
        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(given)
            return logits, sum((block.mlp.shares.mean((0, 1)) ** 2).sum() for block in self.blocks)

    model = Balanced(lambda: Block(mlp=Routed()))
    return Case(model, ids(), classes(), lambda both, y: F.cross_entropy(both[0], y) + 0.01 * both[1])


# What is returned, read and not used


def two_tasks() -> Case:
    class Both(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(D, 1)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            x = self.states(given).mean(1)
            return self.head(x), self.other(x)[:, 0]

    def both(found: Any, wanted: Any) -> Tensor:
        return F.cross_entropy(found[0], wanted[0]) + F.mse_loss(found[1], wanted[1])

    return Case(Both(), ids(), (classes(), torch.randn(24)), both)


def a_dictionary_of_outputs_and_labels() -> Case:
    class Named(Net):
        def forward(self, given: Tensor) -> dict[str, Tensor]:
            x = self.states(given)
            return {"logits": self.head(x.mean(1)), "states": x}

    return Case(Named(), ids(), {"y": classes()}, lambda found, y: F.cross_entropy(found["logits"], y["y"]))


def losses_after_each_block() -> Case:
    class Deep(Net):
        def forward(self, given: Tensor) -> list[Tensor]:
            x, found = self.tokens(given), []
            for block in self.blocks:
                x = block(x)
                found.append(self.head(self.norm(x).mean(1)))
            return found

    return Case(Deep(), ids(), classes(), lambda found, y: sum(F.cross_entropy(one, y) for one in found))


def the_head_of_another_task() -> Case:
    class Heads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(D, 7)

        def forward(self, given: Tensor, other: bool = False) -> Tensor:
            x = self.states(given).mean(1)
            return self.other(x) if other else self.head(x)

    return Case(Heads(), ids(), classes())


def an_input_that_is_ignored() -> Case:
    class Typed(Net):
        def forward(self, given: Tensor, kinds: Tensor | None = None) -> Tensor:
            return super().forward(given)

    return Case(Typed(), {"given": ids(), "kinds": torch.zeros(24, TOKENS, dtype=torch.long)}, classes())


def the_first_token_alone() -> Case:
    class First(Net):
        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given)[:, 0])

    return Case(First(), ids(), classes())


def the_last_token_alone() -> Case:
    class Last(Net):
        def forward(self, given: Tensor) -> Tensor:
            return self.head(self.states(given)[:, -1])

    return Case(Last(causal_block), ids(), classes())


def every_class_but_one_is_rare() -> Case:
    labels = torch.zeros(24, dtype=torch.long)
    labels[:2] = torch.tensor([1, 2])
    return Case(Net(), ids(), labels)


def edges_of_a_graph() -> Case:
    class Graph(Net):
        def forward(self, given: Tensor, edges: Tensor) -> Tensor:
            x = self.tokens(given)
            for block in self.blocks:
                x = x + block.mlp(block.n2(edges @ block.mix.v(block.n1(x))))
            return self.head(self.norm(x).mean(1))

    edges = ((torch.rand(24, TOKENS, TOKENS) < 0.3) | torch.eye(TOKENS, dtype=torch.bool)).float()
    return Case(Graph(), {"given": ids(), "edges": edges / edges.sum(-1, keepdim=True)}, classes())


def plain_descent_with_momentum() -> Case:
    return Case(Net(), ids(), classes(), optimizer=lambda held: torch.optim.SGD(held, 0.1, momentum=0.9))


def two_rates() -> Case:
    def groups(held: Any) -> torch.optim.Optimizer:
        held = list(held)
        return torch.optim.AdamW([{"params": held[:2], "lr": 3e-4}, {"params": held[2:], "lr": 3e-3}])

    return Case(Net(), ids(), classes(), optimizer=groups)


PROGRAMS = programs(globals())
