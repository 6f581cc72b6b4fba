"""What ``watch`` must never say, and what it must: by its line, its alarms, its notes and its record alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope import monitor
from tests.harm.healthy import Attention, Block, Classifier, Language, LowRank, marked, next_letters, of_letters

Loss = Callable[[Tensor, Tensor], Tensor]
DESTRUCTIVE = re.compile(
    r"reset_parameters|load_state_dict|[Rr]e-?initiali[sz]e|[Ii]nitiali[sz]e .* anew|[Rr]eload|Return to a checkpoint|"
    r"Restart from|\bdel model|[Rr]emove self|Lower the learning rate|lower the learning rate"
)
"""Changes that delete, re-initialise or overwrite what was trained, and those that were never tried."""


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Loss,
    steps: int,
    each: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Any:
    """A plain loop that is watched."""
    watch = rs.watch(model, optimizer, **{"schedule": 2, "actions": (), **options})
    for step in range(steps):
        each(step)
        inputs, targets = batch()
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return watch


def told(watch: Any) -> str:
    """Everything that was said."""
    return "\n".join([str(watch), *(one.sentence for one in (*watch.alarms, *watch.notes))])


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], rate)


class Adapted(Classifier):
    """A trained head on frozen blocks with adapters; the blocks may be under a reentrant checkpoint."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.body.requires_grad_(False)
        for block in self.body.blocks:
            block.attention.qkv, block.mlp[0] = LowRank(block.attention.qkv), LowRank(block.mlp[0])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body.tokens(ids) + self.body.positions(torch.arange(ids.shape[1]))
        for block in self.body.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointed and self.training else block(x)
        return self.head(self.body.norm(x).mean(1))


# Item 1: nothing destructive is advised.


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_adapters_that_get_no_gradient_are_found_and_nothing_is_to_be_initialised_anew() -> None:
    torch.manual_seed(0)
    model = Adapted(checkpointed=True)
    watch = train(model, adam(model), marked, F.cross_entropy, 40)
    assert watch.alarms
    assert "gradient" in told(watch)
    assert [one.name for one in watch.alarms] == ["shown_faults", "still_weights"]
    assert "see the fault that was shown at the first step" in watch.alarms[1].sentence
    assert "Cause:" not in watch.alarms[1].sentence, "one opinion"
    assert not DESTRUCTIVE.search(told(watch))
    assert "matrices that learn are zero" not in told(watch)


def test_healthy_adapters_are_no_alarm() -> None:
    torch.manual_seed(0)
    model = Adapted(checkpointed=False)
    watch = train(model, adam(model), marked, F.cross_entropy, 60)
    assert watch.alarms == ()


def test_no_sentence_of_the_monitor_advises_what_destroys() -> None:
    home = Path(monitor.__file__).parent
    found = [
        f"{file.name}: {line.strip()}"
        for file in home.rglob("*.py")
        for line in file.read_text().splitlines()
        if DESTRUCTIVE.search(line)
    ]
    assert found == []


# Item 2: a model that is random in evaluation mode.


class Noisy(Block):
    """Dropout without ``training=``."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.3)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.3)


def test_a_model_that_is_random_in_evaluation_mode_is_the_one_before() -> None:
    torch.manual_seed(0)
    model = Language()
    model.body.blocks = nn.ModuleList(Noisy(32) for _ in range(3))
    watch = train(model, adam(model), next_letters, of_letters, 80)
    assert "not the one before" not in told(watch)
    assert not {"model_changed"} & {one.name for one in (*watch.alarms, *watch.notes)}


# Item 3: only what was read.


def test_an_update_with_finite_gradients_is_not_said_to_have_had_others() -> None:
    torch.manual_seed(0)
    model = Language().half()
    optimizer = adam(model, 3e-4)
    finite: list[bool] = []

    def gradients(*_: Any) -> None:
        finite.append(all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None))

    optimizer.register_step_pre_hook(gradients)
    watch = train(model, optimizer, next_letters, of_letters, 10)
    assert finite[0]
    assert not all(bool(one.isfinite().all()) for one in model.parameters())
    assert watch.alarms[0].name == "not_finite"
    assert "gradient was not finite" not in watch.alarms[0].sentence
    assert "Settings of the optimizer contradict" not in told(watch)


# Item 4: curves are notes.


def test_what_bends_a_curve_is_no_alarm_and_what_was_done_is_written_down_without_advice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Language()
    optimizer = adam(model, 1e-3)

    def each(step: int) -> None:
        if step == 60:  # everything bends at once: the rate, the data, the loss, the scores
            optimizer.param_groups[0]["lr"] = 0.05
            model.body.blocks[1].attention.qkv.weight.data *= 30.0

    calls = iter(range(10**6))

    def batch() -> tuple[Tensor, Tensor]:
        return next_letters() if next(calls) < 60 else tuple(torch.randint(0, 128, (2, 8, 32)))

    watch = train(model, optimizer, batch, of_letters, 90, each, record=tmp_path)
    assert watch.alarms == ()
    notes = rs.monitor.read_record(tmp_path).notes
    assert [one.sentence for one in notes] == [one.sentence for one in watch.notes]
    assert {"learning_rate", "weights_written"} <= {one.name for one in watch.notes if one.step == 60}
    assert "learning_rate" in str(watch)
    assert not DESTRUCTIVE.search(told(watch))
    assert "Look at" not in told(watch)


def test_weights_written_while_the_loss_did_not_rise_are_noted() -> None:
    torch.manual_seed(0)
    model = Language()

    def each(step: int) -> None:
        if step == 80:  # rotated within each head: the same function
            model.body.blocks[0].mlp[0].weight.data = model.body.blocks[0].mlp[0].weight.data.flip(0)
            model.body.blocks[0].mlp[0].bias.data = model.body.blocks[0].mlp[0].bias.data.flip(0)
            model.body.blocks[0].mlp[2].weight.data = model.body.blocks[0].mlp[2].weight.data.flip(1)

    watch = train(model, adam(model), next_letters, of_letters, 160, each)
    assert watch.alarms == ()
    assert "weights_written" in {one.name for one in watch.notes}
    assert "weights_written" in str(watch)


def test_weights_written_after_which_the_loss_stays_up_are_an_alarm() -> None:
    torch.manual_seed(0)
    model = Language()
    rate = adam(model, 2e-3)

    def each(step: int) -> None:
        if step == 120:
            for block in model.body.blocks:
                for one in block.parameters():
                    one.data = 3.0 * torch.randn_like(one)
            rate.param_groups[0]["lr"] = 1e-5

    watch = train(model, rate, next_letters, of_letters, 260, each)
    assert [one.component for one in watch.alarms if one.name == "loss_rises"] == ["weights"]
    assert not DESTRUCTIVE.search(told(watch))


# Item 5: one opinion.


class Bare(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x))
        return self.mlp(self.norm2(x))


def test_blocks_without_skips_are_said_as_the_doctor_says_them() -> None:
    torch.manual_seed(0)
    model = Language()
    model.body.blocks = nn.ModuleList(Bare(32) for _ in range(6))
    ids, targets = next_letters()
    (finding, *_) = rs.doctor(model, ids, loss=of_letters, labels=targets).findings
    watch = train(model, adam(model), next_letters, of_letters, 40)
    assert finding.sentence.rstrip(".") in str(watch)
    assert "Cause not found" not in told(watch)
    assert "neutreno" not in told(watch)
    assert "no addition of a skip was found" not in told(watch)


def test_a_model_that_is_operated_on_is_watched_and_not_examined(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Language()
    with rs.operate(model, rs.Surgery(skip=0.5), inputs=next_letters()[0]):
        watch = train(model, adam(model), next_letters, of_letters, 20)
    assert "only looked for outside operate()" in caplog.text
    assert "shown_faults" not in told(watch)


def test_no_remedy_is_named() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(12))
    model = Classifier()
    model.body.blocks = layers
    watch = train(model, torch.optim.Adam(model.parameters(), 1e-2), marked, F.cross_entropy, 40)
    names = [name for name in rs.remedies.REMEDIES if name in told(watch)]
    assert names == []
    assert "applied(" not in told(watch)


def test_blocks_that_begin_as_copies_are_no_alarm() -> None:
    torch.manual_seed(0)
    model = Classifier()
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model.body.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers
    watch = train(model, adam(model), marked, F.cross_entropy, 20)
    assert watch.alarms == ()


class Shares(Classifier):
    """A softmax before a loss that has its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).softmax(-1)


class Mixed(Attention):
    """Heads are made by a view where a transposition is needed."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (t.reshape(batch, self.heads, tokens, -1) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -1e9)
        return self.out((scores.softmax(-1) @ v).reshape(batch, tokens, width))


def _mixed() -> nn.Module:
    model = Language()
    for block in model.body.blocks:
        block.attention = Mixed(32, 4, causal=True)
    return model


def _unshifted() -> tuple[Tensor, Tensor]:
    ids, _ = next_letters()
    return ids, ids


FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Loss, str]] = {
    "double softmax": (Shares, marked, F.cross_entropy, "softmax"),
    "unshifted labels": (Language, _unshifted, of_letters, "labels are the inputs"),
    "view for transpose": (_mixed, next_letters, of_letters, "mixes heads with tokens"),
    "no causal mask": (lambda: Language(causal=False), next_letters, of_letters, "tokens it has to predict"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_first_step_is_in_every_line(name: str) -> None:
    torch.manual_seed(0)
    make, batch, loss, words = FAULTS[name]
    model = make()
    watch = train(model, adam(model), batch, loss, 40)
    assert words in str(watch)
    assert "healthy" not in str(watch)


def test_an_optimizer_without_the_head_is_in_every_line() -> None:
    torch.manual_seed(0)
    model = Language()
    watch = train(model, torch.optim.AdamW(model.body.parameters(), 1e-3), next_letters, of_letters, 40)
    assert "head.weight" in str(watch)


def test_a_run_in_order_is_not_called_healthy() -> None:
    torch.manual_seed(0)
    model = Classifier()
    watch = train(model, adam(model), marked, F.cross_entropy, 40)
    assert watch.alarms == ()
    assert "healthy" not in str(watch)
    assert "no fault seen (" in str(watch)


def test_the_fixture_fails_where_the_verdict_says_collapsed(assert_keeps_rank: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, ids = Classifier(), torch.randint(0, 64, (2, 16))
    assert assert_keeps_rank(model, ids).code != "collapsed"
    with torch.no_grad():  # tokens keep a hundredth of their differences
        model.body.tokens.weight.mul_(0.012).add_(1.0)
        model.body.positions.weight.zero_()
        for block in model.body.blocks:
            for last in (block.attention.out, block.mlp[2]):
                last.weight.mul_(1e-3)
                last.bias.zero_()
    run = rs.measure(model, ids)
    assert run.code == "collapsed"
    assert 1e-3 < min(run.curve("relative_residual", "block.out").mean) < 0.03
    with pytest.raises(pytest.fail.Exception, match="Collapsed"):
        assert_keeps_rank(model, ids)


# Item 7: an axis mixed up.


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_sequences_that_act_on_each_other_are_said_so(caplog: pytest.LogCaptureFixture) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(16, 32))
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1), 3)
            self.head = nn.Linear(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.tokens(ids) + self.positions).mean(1))

    torch.manual_seed(0)
    model = Encoder()
    watch = train(model, adam(model), marked, F.cross_entropy, 20, actions=("log",))
    assert "Sequences of a batch influence each other" in str(watch)
    assert [one.name for one in watch.alarms] == ["shown_faults"]
    assert "axes=" not in told(watch)
    assert "Traceback" not in caplog.text
    assert all(one.exc_info is None for one in caplog.records)


# Item 9: nothing of the user's is compiled or replaced.


def test_no_source_is_compiled_and_no_forward_replaced_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    compiled = []
    plain = builtins.compile

    def heard(source: Any, filename: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        # torch compiles a template of its own when its remote calls are first imported.
        if mode == "exec" and "def forward" in str(source) and "torch.distributed.rpc" not in str(source):
            compiled.append(str(source)[:200])
        return plain(source, filename, mode, *args, **kwargs)

    torch.manual_seed(0)
    model = Language()
    model.body.blocks = nn.ModuleList(Bare(32) for _ in range(6))
    monkeypatch.setattr(builtins, "compile", heard)
    forward, code = Bare.forward, Bare.forward.__code__
    seen = set()

    class Watched(Bare):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((type(self).forward.__code__.co_filename, Bare.forward.__code__))
            return super().forward(x)

    model.body.blocks[0] = Watched(32)
    train(model, adam(model), next_letters, of_letters, 10)
    assert Bare.forward is forward
    assert Bare.forward.__code__ is code
    assert seen == {(__file__, code)}
    assert compiled == []


def test_what_an_examination_runs_is_not_the_loss_of_the_training() -> None:
    """The alarm of step 1 has the doctor look for a cause, whose own backward passes were heard as a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attending() for _ in range(6)))
    x = torch.randn(64, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    watch, losses = rs.watch(model, optimizer), []
    for _ in range(6):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    heard = {row["step"]: row["loss"] for row in watch._rows}
    assert heard == pytest.approx(dict(enumerate(losses)))
    watch.close()


class Attending(nn.Module):
    """Attention without a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.attention(h, h, h)[0]
