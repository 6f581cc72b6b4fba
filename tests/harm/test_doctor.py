"""``doctor`` does no harm: no false claim, and no change that was not carried out on a copy and helped."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope.errors import RankscopeError
from rankscope.examination import examine, find
from rankscope.models.inputs import Batch


class Block(nn.Module):
    """A pre-norm block written by hand."""

    def __init__(self, d: int = 32, *, drop: float = 0.0, always: bool = False) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down, self.drop, self.always = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Dropout(drop), always

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, 4, d // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(-1, -2) / (d // 4) ** 0.5).softmax(-1) @ v
        out = self.o(mixed.transpose(1, 2).reshape(b, t, d))
        x = x + (F.dropout(out, 0.3) if self.always else self.drop(out))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    """A classifier of token ids."""

    def __init__(self, depth: int = 3, **options: Any) -> None:
        super().__init__()
        self.e, self.p = nn.Embedding(50, 32), nn.Parameter(0.02 * torch.randn(12, 32))
        self.blocks, self.head = nn.ModuleList(Block(**options) for _ in range(depth)), nn.Linear(32, 3)

    def states(self, ids: Tensor) -> Tensor:
        x = self.e(ids) + self.p
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.states(ids).mean(1))


class Adapted(nn.Module):
    """A linear layer that is frozen, and an adapter that is trained."""

    def __init__(self, base: nn.Linear, *, both: bool = False) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter((0 if both else 0.02) * torch.randn(4, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


IDS = torch.randint(0, 50, (16, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(1))


def asked(model: nn.Module, inputs: Any = IDS, labels: Any = LABELS, **given: Any) -> Any:
    return rs.doctor(model, inputs, labels=labels, loss=given.pop("loss", F.cross_entropy), **given)


def seeded(make: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def lines_of(report: Any) -> list[str]:
    """The lines of Python that are printed to be run."""
    return [line for one in report.findings for line in re.findall(r"[Rr]un `([^`]+)`", one.change)]


def faults(report: Any) -> list[str]:
    return [one["sentence"] for one in report.to_json()["findings"] if one["kind"] == "fault"]


# Parts that are not used.


class Pooled(nn.Module):
    """The mean of the tokens, of a library's encoder that also has a pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.head = rs.Model("init:tiny-bert").loaded.model, nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=ids).last_hidden_state.mean(1))


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 5)

    def forward(self, ids: Tensor, task: int = 0) -> Tensor:
        return (self.other if task else self.head)(self.states(ids).mean(1))


@pytest.mark.parametrize(("make", "unused"), [(Pooled, "bert.pooler.dense"), (TwoHeads, "other")])
def test_what_another_pass_uses_is_a_note_that_names_the_part_itself(make: Any, unused: str) -> None:
    report = asked(seeded(make))
    assert not faults(report)
    assert report.answer == "Nothing wrong was found."
    (note,) = [one for one in report.findings if "not used in this pass" in one.sentence]
    assert unused in note.sentence
    assert "not used in this pass" in str(report)
    assert not re.search(r"\bdel |[Rr]emove|find_unused", str(report) + note.change)


class Dropped(Net):
    """The result of the last block is computed and not kept."""

    def states(self, ids: Tensor) -> Tensor:
        x = self.e(ids) + self.p
        for block in self.blocks[:-1]:
            x = block(x)
        self.blocks[-1](x)
        return x


class Forgotten(Net):
    """An encoder runs, and nothing reads what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())

    def states(self, ids: Tensor) -> Tensor:
        x = self.e(ids) + self.p
        _memory = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("make", "part"), [(Dropped, "blocks.2"), (Forgotten, "encoder")])
def test_a_result_that_is_computed_and_dropped_is_the_finding(make: Any, part: str) -> None:
    report = asked(seeded(make))
    assert part in report.answer
    assert "dropped" in report.answer
    assert not re.search(r"\bdel |[Rr]emove", str(report))


# Gradients in training mode.


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool, trained_head: bool) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.reentrant = reentrant
        for block in self.blocks:
            block.q, block.v = Adapted(block.q), Adapted(block.v)
        self.head.requires_grad_(trained_head)

    def states(self, ids: Tensor) -> Tensor:
        x = self.e(ids) + self.p
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant and self.training else block(x)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("trained_head", [True, False])
def test_gradients_are_read_in_training_mode(trained_head: bool) -> None:
    model = seeded(lambda: Checkpointed(reentrant=True, trained_head=trained_head))
    before = {name: one.clone() for name, one in model.named_parameters()}
    report = asked(model)
    assert "12 parameters" in report.answer
    assert "no gradient in training mode" in report.answer
    assert "reentrant" in report.answer
    assert "reset" not in str(report)
    assert model.training
    assert all(one.grad is None and torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_an_adapter_that_begins_at_zero_is_healthy() -> None:
    report = asked(seeded(lambda: Checkpointed(reentrant=False, trained_head=True)))
    assert not faults(report)


# What is claimed of training.


class Vision(nn.Module):
    """Class token and positions as many implementations have them: normal numbers."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.patches = nn.Linear(64, d)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 17, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.unflatten(1, (4, 8)).unflatten(3, (4, 8)).transpose(2, 3).reshape(len(images), 16, 64)
        x = self.patches(x)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nothing_is_said_of_training_to_an_untrained_model(seed: int) -> None:
    model = seeded(Vision, seed)
    images = torch.randn(16, 32, 32)
    report = asked(model, rs.Inputs(images, axes="batch tokens"), torch.randint(0, 10, (16,)))
    assert not faults(report)
    assert "raining" not in str(report)


# Lines that are printed.


def adapters() -> Net:
    model = Net()
    for block in model.blocks:
        block.q, block.v = Adapted(block.q, both=True), Adapted(block.v, both=True)
    return model


def test_weights_are_drawn_by_the_user_alone() -> None:
    """Two factors that are both zero have to be drawn anew: said in words, and no line does it."""
    report = asked(seeded(adapters))
    assert faults(report)
    assert lines_of(report) == []
    assert not report.findings[0].tried
    assert "Change:" not in str(report)


def test_what_was_not_tried_is_no_change() -> None:
    class Rows(Net):
        """A module normalises over the sequences of the batch, through a name that cannot be edited."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Softmax(0)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.states(ids)
            return self.head((self.weights(x) * x).mean(1))

    report = asked(seeded(Rows))
    assert faults(report)
    assert not report.findings[0].tried
    assert "Change:" not in str(report)


def test_the_next_step_is_a_command_or_python() -> None:
    report = asked(seeded(Forgotten))
    next_steps = [line for line in str(report).splitlines() if line.startswith("Next:")]
    assert next_steps == ["Next: print(rankscope.measure(model, inputs))"]

    class Mine(Net):
        pass

    text = str(asked(seeded(Mine)))
    assert "<locals>" not in text
    assert "Next: print(rankscope.measure(model, inputs))" in text


# The inputs come first, and classes need no other objective.


class Language(Net):
    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
        x = self.e(ids) + self.p
        return nn.functional.linear(x.cumsum(1) * (~hidden).float().mean() + self.states_of(x), self.e.weight)

    def states_of(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.n2(x))))
        return x


def test_unknown_ids_come_first_and_no_objective_is_proposed() -> None:
    ids = torch.ones(16, 13, dtype=torch.long)
    ids[0, 3], ids[5, 7] = 4, 9

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.reshape(-1, 50), labels.reshape(-1))

    report = asked(seeded(Language), ids[:, :-1], ids[:, 1:], loss=loss)
    assert "of the tokens are the id 1" in report.answer
    assert "std(0)" not in json.dumps(report.to_json())
    assert "objective" not in str(report)
    assert "labels are the inputs" not in str(report), "the next token is the same one as often by chance"


# Two equal passes.


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_evaluation_mode_is_the_finding(training: bool) -> None:
    report = asked(seeded(lambda: Net(always=True)).train(training))
    assert len(faults(report)) == 1
    assert "not deterministic in evaluation mode" in report.answer
    assert "dropout" in report.answer
    assert "position" not in str(report)
    assert any("two equal passes differ" in why for why in report.not_examined.values())


class Sampling(Net):
    def forward(self, ids: Tensor) -> Tensor:
        states = self.states(ids).mean(1)
        return self.head(states + 0.1 * torch.randn_like(states))


def test_random_numbers_that_may_be_meant_are_a_note() -> None:
    report = asked(seeded(Sampling))
    assert not faults(report)
    assert any("not deterministic" in one.sentence for one in report.findings)


# Facts at hand.


def test_an_optimizer_of_other_tensors_and_nothing_that_learns() -> None:
    model = seeded(Net).requires_grad_(False)
    report = asked(model, optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(1))]))
    assert re.search("None of the [0-9]+ parameters of the model requires a gradient", report.answer)


def trained() -> Net:
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        F.cross_entropy(model(IDS), LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["q", "v", "up"])
def test_a_matrix_of_one_value_in_a_trained_block_is_said(name: str) -> None:
    model = trained()
    assert not faults(asked(model))
    nn.init.constant_(getattr(model.blocks[1], name).weight, 0.0)
    assert f"blocks.1.{name}.weight" in asked(model).answer


class Padded(nn.Module):
    """Marks with True the tokens to keep, or to hide."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.e, self.p = nn.Embedding(50, 32), nn.Parameter(0.02 * torch.randn(12, 32))
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 3)
        self.inverted = inverted

    def forward(self, ids: Tensor) -> Tensor:
        keep = ids != 0
        states = self.body(self.e(ids) + self.p, src_key_padding_mask=keep if self.inverted else ~keep)
        return self.head((states * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


def test_padding_that_alone_is_seen() -> None:
    ids = IDS.clamp_min(1).masked_fill(torch.arange(12) >= torch.arange(16)[:, None] % 6 + 4, 0)
    report = asked(seeded(lambda: Padded(inverted=True)), ids)
    assert "Padding is all that attention sees" in report.answer
    assert not faults(asked(seeded(lambda: Padded(inverted=False)), ids))


def test_one_block_object_many_times_and_a_head_alone_are_notes() -> None:
    model = seeded(Net)
    model.blocks = nn.ModuleList([Block()] * 12)
    report = asked(model)
    assert not faults(report)
    assert "12 entries of blocks are one Block object" in str(report)
    model = seeded(Net).requires_grad_(False)
    model.head.requires_grad_(True)
    report = asked(model, optimizer=torch.optim.AdamW(model.head.parameters()))
    assert not faults(report)
    assert "2 of 52 parameters require a gradient, those of head" in str(report)


def test_leaving_parameters_out_of_the_optimizer_may_be_meant() -> None:
    model = seeded(Net)
    report = asked(model, optimizer=torch.optim.AdamW(model.head.parameters()))
    assert report.answer.startswith("Possibly: The optimizer holds 2 of")
    assert not lines_of(report)


# Labels of any form.


@pytest.mark.parametrize("kind", [tuple, dict])
def test_labels_in_parts_are_given_to_the_loss_as_they_are(kind: type) -> None:
    seen: list[type] = []
    labels: Any = {"a": LABELS, "b": LABELS} if kind is dict else (LABELS, LABELS)

    def loss(output: Tensor, labels: Any) -> Tensor:
        seen.append(type(labels))
        one, two = labels.values() if isinstance(labels, dict) else labels
        return F.cross_entropy(output, one) + F.cross_entropy(output, two)

    report = asked(seeded(Net), labels=labels, loss=loss)
    assert seen
    assert set(seen) == {kind}
    assert not faults(report)


def test_a_model_that_is_operated_on_is_not_examined() -> None:
    ids = torch.randint(0, 50, (4, 12))
    model = Net()
    with rs.operate(model, rs.Surgery(skip=0.5), inputs=ids), pytest.raises(RankscopeError, match="outside"):
        rs.doctor(model, ids)
    examination = examine(model, Batch({"ids": ids}, None, 0, 4))
    with rs.operate(model, rs.Surgery(skip=0.5), inputs=ids), pytest.raises(RankscopeError, match="outside"):
        find(examination)


class TokensFirst(nn.Module):
    """Layers that take tokens first are given sequences first."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(50, 32)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, 0.0) for _ in range(3)))
        self.head = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.e(ids)).mean(1))


def test_an_axis_that_is_mixed_up_is_not_to_be_declared() -> None:
    report = asked(seeded(TokensFirst))
    assert "Sequences of a batch influence each other" in report.answer
    assert "Declare where the stream is" not in str(report)
    assert not report.trusted


def test_an_objective_that_compares_sequences_is_found_beside_classes() -> None:
    """Classes may be handed to a loss that pulls embeddings together."""

    def pull(output: Tensor, _: Tensor) -> Tensor:
        return (output[::2] - output[1::2]).square().mean()

    torch.manual_seed(0)
    found = rs.doctor(Net(), torch.randint(0, 50, (8, 12)), loss=pull, labels=torch.arange(8) // 2)
    assert found.faults[0].code == "collapsed_objective"


class Fused(Adapted):
    """An adapted layer whose forward still reads the matrix that was copied before the adapter was put in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


def test_adapters_that_are_not_read_are_no_dropped_result() -> None:
    torch.manual_seed(0)
    model = Net().requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.q = Fused(block.q)
    labels = torch.randint(0, 3, (8,))
    found = rs.doctor(model, torch.randint(0, 50, (8, 12)), loss=F.cross_entropy, labels=labels).faults
    assert [one.code for one in found] == ["unused_parameters"]
    assert "no step changes anything" in found[0].sentence
    assert "dropped" not in found[0].sentence


def test_a_last_token_that_is_looked_for_among_the_ids_is_no_attended_padding() -> None:
    """GPT-2 for classes answers at the last id that is no padding: other ids there move the answer, and no state."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=24, n_positions=12, n_embd=32, n_layer=2, n_head=4, num_labels=2, pad_token_id=0)
    )
    ids = torch.randint(3, 24, (8, 12))
    mask = (torch.arange(12) < torch.arange(4, 12)[:, None]).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    found = rs.doctor(model, batch, loss=lambda out, y: F.cross_entropy(out.logits, y), labels=torch.arange(8) % 2)
    assert "padding_attended" not in [one.code for one in found.findings]


class Share(nn.Module):
    """A softmax of one output, which is always 1, where a sigmoid was meant."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        z = self.head(self.embed(ids).mean(1))
        return F.softmax(z, dim=1)


def test_no_change_is_printed_under_which_the_loss_fails() -> None:
    """Without the softmax, outputs are no probabilities, which this loss refuses."""
    torch.manual_seed(0)
    labels = (torch.arange(8) % 2).float()[:, None]
    found = rs.doctor(Share(), torch.randint(0, 50, (8, 12)), loss=F.binary_cross_entropy, labels=labels)
    assert [one.code for one in found.faults] == ["inputs_ignored"]
    assert not found.faults[0].tried
    assert found.faults[0].edits == ()


class Actor(nn.Module):
    """States and actions in turn behind a causal mask: an action is predicted from its state, before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.action, self.place = nn.Linear(4, 32), nn.Embedding(3, 32), nn.Embedding(16, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(32, 3)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        x = torch.stack([self.state(states), self.action(actions)], 2).flatten(1, 2)
        x = x + self.place.weight[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.layer(x, mask)[:, ::2])


def test_actions_that_are_read_after_they_are_predicted_are_no_copied_labels() -> None:
    torch.manual_seed(0)
    states = torch.randn(12, 8, 4)
    actions = states[..., :3].argmax(-1)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    found = rs.doctor(Actor(), {"states": states, "actions": actions}, loss=loss, labels=actions)
    assert "labels_are_inputs" not in [one.code for one in found.findings]
