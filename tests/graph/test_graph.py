"""A recorded pass is the pass that ran: replayed, it computes the same; and it keeps no more than it is told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.pass_graph.ir import Graph, Node, Value
from rankscope.pass_graph.record import GraphRecorder
from rankscope.pass_graph.replay import CannotReplayError, replay, result_of, unlike
from rankscope.stream.cuts import with_leaks
from rankscope.surgery.session import structure_of
from tests.stream.test_roles import IDS, Layer, Net, attention, mlp


def recorded(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Graph, Value, Value]:
    recorder = GraphRecorder(keeps=True)
    with torch.no_grad(), recorder:
        given = recorder.value_of(x)
        out = run(x)
    return recorder.graph, given, recorder.value_of(out)


def test_a_pass_becomes_what_the_package_draws() -> None:
    norm, weight = nn.LayerNorm(4), nn.Parameter(torch.randn(1, 4, 4))

    def block(x: Tensor) -> Tensor:
        h = norm(x)
        return x + torch.bmm(torch.bmm(h, h.mT).softmax(-1), h) @ weight

    graph, given, made = recorded(block, torch.randn(1, 3, 4))
    names = [node.name for node in graph.nodes if node.name not in ("expand", "view", "_unsafe_view", "clone")]
    assert names == ["native_layer_norm", "transpose", "bmm", "_softmax", "bmm", "bmm", "add"]
    assert graph.nodes[-1].inputs[0] is given
    assert graph.nodes[-1].outputs == (made,)


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    y = x.view(-1)
    x += 1
    x[:, 0] = x[:, 1] * 2
    return y * 3


def through_views(x: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(0, 1)[1:].mul_(2).sub_(x.T[1:])
    return y.unfold(0, 2, 1).sum(-1).relu_()


def out_of_place(x: Tensor) -> Tensor:
    room = torch.full_like(x, torch.nan)
    torch.add(x, x, out=room)
    return torch.cat([room, torch.zeros_like(x).index_add_(0, torch.tensor([2, 0]), x[:2])])


def chosen(x: Tensor) -> Tensor:
    best = x.topk(2, dim=-1)
    return torch.where(x > 0, x, -x).gather(-1, best.indices) + best.values


def listed(x: Tensor) -> Tensor:
    parts = [part.clone() for part in x.chunk(2)]
    torch._foreach_mul_(parts, 3.0)
    return torch.stack([parts[0], parts[0]]).nansum(0)


RUNS = [
    in_place, through_views, out_of_place, chosen, listed,
    lambda x: torch.fft.fft(x).real, lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: F.dropout(x, 0.5, training=True).exp(), lambda x: torch.vmap(torch.sin)(x).data + 1,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_every_operation_computes_once_more_what_it_computed(run: Callable[[Tensor], Tensor]) -> None:
    graph, _, _ = recorded(run, torch.randn(4, 4))
    for node in graph.nodes:
        is_defined = not node.is_random and not node.name.startswith("empty")
        for value, once_more in zip(node.outputs, result_of(node, {}) if is_defined else [], strict=False):
            assert value.content is not None
            assert once_more is None or not unlike(value.content, once_more), node.name


@pytest.mark.parametrize("run", [in_place, through_views, out_of_place, listed])
def test_a_replay_is_the_pass_on_other_numbers(run: Callable[[Tensor], Tensor]) -> None:
    graph, given, made = recorded(run, torch.randn(4, 4))
    other = torch.randn(4, 4)
    assert torch.equal(replay(graph.nodes, {given: other})[made], run(other))


def test_choices_stay_as_they_were() -> None:
    graph, given, made = recorded(chosen, torch.tensor([[1.0, -2.0, 3.0]]))
    # |x| is x, -x, x and its largest entries are the last and the first one: 1 + 5 and 5 + 1.
    assert replay(graph.nodes, {given: torch.tensor([[5.0, 1.0, 1.0]])})[made].tolist() == [[6.0, 6.0]]


def test_random_operations_draw_the_same_in_every_replay() -> None:
    graph, given, made = recorded(lambda x: F.dropout(x, 0.5, training=True), torch.randn(50))
    one, other = (replay(graph.nodes, {given: torch.ones(50)})[made] for _ in range(2))
    assert torch.equal(one, other)


def test_what_cannot_be_computed_once_more_is_said() -> None:
    value = Value(torch.Size([2]), torch.float32)
    made = Value(torch.Size([2]), torch.float32)
    node = Node("add", torch.ops.aten.add.Tensor, (value, torch.ones(3)), {}, (value,), (made,))
    with pytest.raises(CannotReplayError, match="not kept"):
        result_of(node, {})
    with pytest.raises(CannotReplayError, match="add does not run once more"):
        result_of(node, {value: torch.ones(2)})


def most_kept(depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes of the values that are kept at most where blocks are found, and where they are proven."""
    torch.manual_seed(0)
    model = Net(*(Layer(attention, mlp, ("op", "other")) for _ in range(depth))).eval()
    kept, release = [0], GraphRecorder.release

    def count(self: GraphRecorder) -> None:
        values = [value.content for values in self._kept.values() for value in values]
        memory = [one.untyped_storage() for one in values if one is not None]
        kept.append(sum({one.data_ptr(): one.nbytes() for one in memory}.values()))
        release(self)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(GraphRecorder, "release", count)
        view = structure_of(model, IDS)
        found = max(kept)
        kept.clear()
        with_leaks(view, lambda: model(IDS), len(IDS))
    return found, max(kept)


def test_only_one_block_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept does not grow with depth."""
    deep, shallow = most_kept(9, monkeypatch), most_kept(3, monkeypatch)
    assert all(0 < one <= 1.1 * other for one, other in zip(deep, shallow, strict=True))
