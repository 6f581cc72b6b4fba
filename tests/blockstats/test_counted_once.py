"""What counts: each training forward once, under every kind of checkpoint, eager and compiled; and what never does."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rankscope import blockstats
from tests.blockstats.nets import (
    CHECKPOINTS,
    COMPILED,
    DEPTH,
    SEQUENCES,
    TOKENS,
    WIDTH,
    Decoder,
    attached,
    batches,
    compiled,
    decoder,
    furthest,
    loss_of,
)

# Torch warns of compiled blocks in the middle of a model, and of reentrant checkpoints in evaluation.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
EACH = SEQUENCES * TOKENS
TOKENS_COUNTED = [f"tokens/{i}" for i in range(DEPTH)]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def train(
    model: Decoder, way: str, backend: str = "aot_eager", *, evaluated: bool = False
) -> tuple[list[float], list[Tensor]]:
    """Two steps of two microbatches; losses and parameters at the end."""
    run = compiled(model, way, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches(2):
        for part in ids.chunk(2):
            loss = loss_of(run(part), part)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if evaluated:
        model.eval()
        with torch.no_grad():
            model(ids)
        model.train()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    model = decoder()
    stats = attached(model)
    train(model, "eager")
    return stats.flush()


SLOW = pytest.mark.slow
UNSUPPORTED = ("selective", "blocks", "aot_eager")
"""What torch cannot run, see :func:`test_torch_runs_no_operator_that_writes_there`; with inductor it can."""
CELLS = [
    pytest.param(kept, way, backend, marks=[] if (kept, way, backend) in ORDINARY else SLOW)
    for ORDINARY in [
        {("none", "eager", ""), ("reentrant", "eager", ""), ("not reentrant", "eager", ""), ("selective", "eager", "")}
        | {("not reentrant", "blocks", "aot_eager")}
    ]
    for kept in CHECKPOINTS
    for way in COMPILED
    for backend in ([""] if way == "eager" else ["aot_eager", "inductor"])
    if (kept, way, backend) != UNSUPPORTED
]


@pytest.mark.parametrize(("kept", "way", "backend"), CELLS)
def test_every_forward_counts_once_and_training_keeps_its_bits(
    plain: dict[str, float], kept: str, way: str, backend: str
) -> None:
    bare = train(decoder(kept), way, backend)
    torch._dynamo.reset()
    counters.clear()
    model = decoder(kept)
    stats = attached(model)
    watched = train(model, way, backend, evaluated=True)
    found = stats.flush()
    assert [found[name] for name in TOKENS_COUNTED] == [2 * EACH] * DEPTH
    assert furthest(found, plain) < (1e-5 if backend == "inductor" else 1e-7)
    assert watched[0] == bare[0]
    assert all(map(torch.equal, watched[1], bare[1]))
    assert not counters["graph_break"]


@torch.library.custom_op("rankscope_tests::count", mutates_args=("held",))
def count_in(x: Tensor, held: Tensor) -> None:
    held.add_(x.shape[0])


@pytest.mark.slow
def test_torch_runs_no_operator_that_writes_there() -> None:
    """The bare control of the one cell that is left out: no operator that writes runs there, ours or any other."""
    kept, way, backend = UNSUPPORTED
    model, held = decoder(kept), torch.zeros(())
    for block in model.layers:
        block.register_forward_hook(lambda block, args, output: count_in(output.detach(), held))
    with pytest.raises(NotImplementedError, match=r"no rule registered for HigherOrderOperator auto_functionalized"):
        train(model, way, backend)


def naive(model: Decoder) -> list[Tensor]:
    """What everybody writes first: a forward hook that adds to a tensor."""
    counts = []
    for block in model.layers:
        count = torch.zeros(())

        def hook(block: nn.Module, args: Any, output: Tensor, count: Tensor = count) -> None:
            if block.training:
                count.add_(output.shape[0] * output.shape[1])

        block.register_forward_hook(hook)
        counts.append(count)
    return counts


@pytest.mark.parametrize(
    ("kept", "wanted"), [("none", [2, 2, 2, 2]), ("reentrant", [4, 4, 4, 4]), ("not reentrant", [4, 2, 4, 2])]
)
def test_a_naive_hook_fails_here(kept: str, wanted: list[int]) -> None:
    """So these tests can fail: with pairs of blocks under a checkpoint, the first of each pair counts twice."""
    model = decoder(kept)
    counts = naive(model)
    train(model, "eager")
    assert [count.item() / EACH for count in counts] == wanted


def test_without_early_stop() -> None:
    for kept in ("reentrant", "not reentrant"):
        model = decoder(kept)
        stats, (ids,) = attached(model), batches(1)
        with set_checkpoint_early_stop(False):
            loss_of(model(ids), ids).backward()
        found = stats.flush()
        assert [found[name] for name in TOKENS_COUNTED] == [EACH] * DEPTH


def test_it_is_off_until_it_is_switched_on_and_switching_does_not_compile_again() -> None:
    model, (ids,) = decoder(), batches(1)
    stats = blockstats.attach(model.layers, WIDTH)
    run = compiled(model, "whole", "eager")
    counters.clear()
    for on in (None, True, False, True):
        if on is not None:
            stats.count(on)
        loss_of(run(ids), ids).backward()
    found = stats.flush()
    assert [found[name] for name in TOKENS_COUNTED] == [2 * EACH] * DEPTH
    assert counters["stats"]["unique_graphs"] == 1


def test_twelve_blocks_compiled_one_by_one_share_the_graph_of_the_hook() -> None:
    """Beside that of the block: torch compiles what a hook calls as a frame of its own."""
    torch.manual_seed(0)
    model, (ids,) = Decoder(depth=12), batches(1)
    stats = attached(model)
    counters.clear()
    compiled(model, "blocks", "eager")(ids)
    assert stats.flush()["tokens/11"] == EACH
    assert counters["stats"]["unique_graphs"] == 2


def test_the_gate_on_the_device_decides_where_kernels_are_replayed() -> None:
    """A captured CUDA graph has the kernels and not the question; here they are run with the gate closed."""
    model, (ids,) = decoder(), batches(1)
    stats = attached(model, notes={"load": 2, "score": 0})
    stats.gate.zero_()  # as count(False), but the host still launches
    model(ids)
    for i in range(DEPTH):
        stats.notes[i, "load"](torch.ones(3, 2))
        stats.notes[i, "score"](torch.ones(3, 2))
    assert not any(tap.totals.any() or tap.largest.any() for tap in stats.taps.values())
    assert all(stats.notes[i, "score"].held == -torch.inf for i in range(DEPTH))
    assert not any(stats.notes[i, "load"].held.any() for i in range(DEPTH))


def test_two_are_counted_apart() -> None:
    one, other = decoder(), decoder()
    counted, idle = attached(one), blockstats.attach(other.layers, WIDTH)
    (ids,) = batches(1)
    one(ids), other(ids)
    assert counted.flush()["tokens/0"] == EACH
    with pytest.raises(RuntimeError, match="Counting was off"):
        idle.flush()


def test_a_forward_beside_a_backward_of_another_thread_counts() -> None:
    model, (ids,) = decoder("not reentrant"), batches(1)
    stats = attached(model)
    other = threading.Thread(target=lambda: loss_of(model(ids), ids).backward())
    other.start()
    model(ids)
    other.join()
    found = stats.flush()
    assert [found[name] for name in TOKENS_COUNTED] == [2 * EACH] * DEPTH


def test_attached_after_the_model_ran_compiled_says_so() -> None:
    model, (ids,) = decoder(), batches(1)
    run = compiled(model, "whole", "eager")
    run(ids)
    stats = attached(model)
    run(ids)
    with pytest.raises(RuntimeError, match=r"after blocks \[0, 1, 2, 3\].*compiled before attach"):
        stats.flush()


def test_attached_after_each_block_ran_compiled_counts() -> None:
    model, (ids,) = decoder(), batches(1)
    compiled(model, "blocks", "eager")(ids)
    stats = attached(model)
    loss_of(model(ids), ids).backward()
    found = stats.flush()
    assert [found[name] for name in TOKENS_COUNTED] == [EACH] * DEPTH


def test_blocks_that_never_ran_are_named() -> None:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model, total=6)
    model.layers[2].eval()
    model(ids)
    with pytest.raises(RuntimeError, match=r"after blocks \[2, 4, 5\].*training mode.*no rank has blocks"):
        stats.flush()
    model.layers[2].train()
    with pytest.raises(RuntimeError, match=r"\[0, 1, 2, 3, 4, 5\]"):
        stats.flush()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_not_count_and_says_so(copied: Any) -> None:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model)
    before = set(model.state_dict())
    with pytest.warns(UserWarning, match="copy of a block does not count"):
        average = copied(model)
    assert set(average.state_dict()) == before == set(decoder().state_dict())
    assert not list(model.buffers())
    average(ids)
    model(ids)
    assert stats.flush()["tokens/0"] == EACH
    of_copy = attached(average)  # the hook that came with the copy goes, or each forward would count twice
    average(ids)
    assert of_copy.flush()["tokens/0"] == EACH
    of_copy.detach()
    assert not any(block._forward_hooks for block in average.layers)


def test_averaged_model_of_torch() -> None:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model)
    with pytest.warns(UserWarning, match="copy of a block"):
        average = torch.optim.swa_utils.AveragedModel(model)
    average.train()(ids)
    model(ids)
    assert stats.flush()["tokens/3"] == EACH


def test_detached_blocks_can_be_attached_again_and_not_twice() -> None:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model)
    with pytest.raises(ValueError, match="block 0 counts already"):
        attached(model)
    stats.detach()
    assert not any(block._forward_hooks for block in model.layers)
    again = attached(model)
    model(ids)
    assert again.flush()["tokens/0"] == EACH
    for blocks, total in (([model.layers[0]] * 2, None), ({3: model.layers[0]}, 2)):
        with pytest.raises(ValueError, match="given twice, or a number is too large"):
            blockstats.attach(blocks, WIDTH, total=total)
    with torch.device("meta"), pytest.raises(ValueError, match="on meta"):
        blockstats.attach(Decoder().layers, WIDTH)


class Tapped(Decoder):
    """Calls the tap itself, for trainers that wrap blocks."""

    taps: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(x)
        for i, block in enumerate(self.layers):
            before, x = x, block(x)
            self.taps[i](x, before)
        return x


def test_a_tap_the_model_calls_reads_what_the_hook_does() -> None:
    (ids,) = batches(1)
    model = decoder()
    stats = attached(model)
    model(ids)
    torch.manual_seed(0)
    tapped = Tapped()
    own = attached(tapped, hook=False)
    assert not any(block._forward_hooks for block in tapped.layers)
    tapped.taps = own.taps
    compiled(tapped, "whole", "eager")(ids)
    assert own.flush() == pytest.approx(stats.flush(), rel=1e-9)


class Noting(nn.Module):
    """A block with a router, which hands in the load of its experts and its largest score."""

    load: Any = None
    score: Any = None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.router = block, nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        chosen = scores.topk(2).indices
        if self.load is not None:
            self.load(nn.functional.one_hot(chosen, 8).sum((0, 1, 2)))
            self.score(scores)
        return self.block(x) + 0.01 * scores.softmax(-1).gather(-1, chosen).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("kept", "way"),
    [
        ("not reentrant", "eager"),
        *(pytest.param(kept, way, marks=SLOW) for kept in CHECKPOINTS for way in COMPILED),
    ],
)
def test_notes_count_once(kept: str, way: str) -> None:
    model = decoder(kept)
    torch.manual_seed(1)
    model.layers = nn.ModuleList(Noting(block) for block in model.layers)
    stats = attached(model, notes={"load": 8, "score": 0})
    largest: list[float] = []
    for i, layer in enumerate(model.layers):
        if i:  # the first block is dense, as in many mixtures
            layer.load, layer.score = stats.notes[i, "load"], stats.notes[i, "score"]
    model.layers[3].router.register_forward_hook(lambda block, args, y: largest.append(float(y.detach().max())))
    if way != "eager":
        del model.layers[3].router._forward_hooks[next(iter(model.layers[3].router._forward_hooks))]
    train(model, way, "inductor" if (kept, way) == UNSUPPORTED[:2] else "aot_eager")
    found = stats.flush()
    assert sum(found[f"load/3/{expert}"] for expert in range(8)) == 2 * 2 * EACH
    assert not any(name in found for name in ("load/0/0", "score/0"))
    if largest:
        assert found["score/3"] == max(largest)


def test_a_note_that_never_came_is_missed() -> None:
    model, (ids,) = decoder(), batches(1)
    stats = attached(model, notes={"load": 8, "score": 0})
    model(ids)
    stats.notes[0, "load"](torch.ones(8))
    with pytest.raises(RuntimeError, match=r"nothing for \['score'\]"):
        stats.flush()
    model(ids)
    stats.notes[0, "load"](torch.ones(8))
    stats.notes[0, "score"](torch.tensor([1.0, torch.nan]))
    assert stats.flush()["score/0"] == torch.inf


def test_one_block_for_each_checkpoint_hides_the_error() -> None:
    """Why the tests use pairs: here early stop ends the second forward before the hook."""
    model, (ids,) = decoder(), batches(1)
    counts = naive(model)
    x = model.embedding(ids)  # type: ignore[misc]
    for block in model.layers:
        x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()
    assert [count.item() for count in counts] == [EACH] * DEPTH


def test_arguments_by_name_and_tuples() -> None:
    class Wrapped(nn.Module):
        def forward(self, *, hidden: Tensor) -> tuple[Tensor, None]:
            return hidden + 1, None

    block = Wrapped()
    stats = blockstats.attach([block], WIDTH)
    stats.count()
    block(hidden=torch.zeros(2, 3, WIDTH))
    assert stats.flush()["relative_write/0"] == pytest.approx(1, rel=1e-7)


@pytest.mark.slow
def test_compiled_autograd() -> None:
    """Compiled autograd runs recomputation as ordinary code of the backward."""
    model, (ids,) = decoder("not reentrant"), batches(1)
    stats = attached(model)
    run = compiled(model, "blocks", "aot_eager")
    step = torch.compile(partial(_step, run), backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        step(ids)
    found = stats.flush()
    assert [found[name] for name in TOKENS_COUNTED] == [EACH] * DEPTH


def _step(run: nn.Module, ids: Tensor) -> None:
    loss_of(run(ids), ids).backward()
