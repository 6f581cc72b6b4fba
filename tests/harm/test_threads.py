"""A measurement beside other threads: the same numbers as alone, and nothing of torch is left changed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import rankscope
from rankscope import Surgery

TORCH = (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward)


class Block(nn.Module):
    """Attention of torch itself, which asks for its weights or not, and an MLP."""

    def __init__(self, dim: int, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=self.need_weights)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Network(nn.Module):
    def __init__(self, dim: int, need_weights: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, dim), nn.Linear(dim, 50)
        self.blocks = nn.ModuleList(Block(dim, need_weights) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def values(model: nn.Module, ids: Tensor, surgery: Surgery | None = None) -> str:
    return repr(rankscope.measure(model, ids, surgery).table["value"].to_pylist())


def networks(count: int) -> tuple[list[nn.Module], list[Tensor]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [Network(16 + 8 * i, need_weights=i % 2 == 1) for i in range(count)]
    return models, [torch.randint(0, 50, (2, 12)) for _ in models]


def train_until(stopped: threading.Event, model: nn.Module, steps: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while not stopped.is_set():
        ids = torch.randint(0, 50, (2, 12))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps[0] += 1


@pytest.mark.parametrize("repetition", range(3))
def test_beside_a_thread_that_trains(repetition: int) -> None:
    (model,), (ids,) = networks(1)
    other = Network(16)
    alone = values(model, ids)
    other(ids).sum().backward()  # whatever torch imports for it is not imported by two threads at once
    torch.optim.SGD(other.parameters(), lr=0.0).step()
    stopped, steps = threading.Event(), [0]
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_until, stopped, other, steps)
        try:
            found = [values(model, ids) for _ in range(25)]
        finally:
            stopped.set()
        training.result()
    assert steps[0] > 0
    assert Counter(value == alone for value in found) == {True: 25}
    assert (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward) == TORCH
    assert values(model, ids) == alone


@pytest.mark.parametrize("surgery", [None, Surgery(skip=0.5, mask="window(2)")], ids=["as it is", "changed"])
def test_four_threads_with_a_model_each(surgery: Surgery | None) -> None:
    models, given = networks(4)
    alone = [values(model, ids, surgery) for model, ids in zip(models, given, strict=True)]

    def repeat(number: int) -> list[str]:
        return [values(models[number], given[number], surgery) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(repeat, range(4)))
    assert together == [[value] * 4 for value in alone]
    assert (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward) == TORCH
    assert [values(model, ids, surgery) for model, ids in zip(models, given, strict=True)] == alone


class Features(Dataset[Tensor]):
    """Each item is what another model makes of it, computed by the worker of a data loader."""

    def __init__(self, model: nn.Module, given: Tensor) -> None:
        self.model, self.given = model, given

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, row: int) -> Tensor:
        torch.set_num_threads(1)
        with torch.no_grad():
            features: Tensor = self.model(self.given[row : row + 1])[0]
        return features


class InAttention(TorchDispatchMode):
    """Does something in mid-pass, inside torch's own function of attention."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "softmax" in str(func) or "scaled_dot_product" in str(func):
            self.act()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_with_a_model_of_its_own(workers: int) -> None:
    """Workers are forked while the model is measured, and run their own attention to the end."""
    (model, other), (ids, given) = networks(2)
    dataset = Features(other, given.repeat(4, 1))
    expected, alone = [dataset[row] for row in range(len(dataset))], values(model, ids)
    stopped, found = threading.Event(), list[list[bool]]()

    def load() -> None:
        while not stopped.is_set():
            rows = [batch[0] for batch in DataLoader(dataset, num_workers=workers)]
            found.append([torch.equal(one, two) for one, two in zip(rows, expected, strict=True)])

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            measured = [values(model, ids) for _ in range(15)]
        finally:
            stopped.set()
        loading.result()
    assert Counter(value == alone for value in measured) == {True: 15}
    assert Counter(itertools.chain(*found)) == {True: len(expected) * len(found)}
    assert len(found) >= 1
    assert (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward) == TORCH


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_fork_in_mid_pass(need_weights: bool) -> None:
    """The child begins where the pass stood; its own model gives the values it always gave."""
    torch.manual_seed(0)
    model, other, ids = Network(16, need_weights), Network(16, True), torch.randint(0, 50, (2, 12))
    codes: list[int] = []
    with torch.no_grad():
        expected = other(ids)

    def fork() -> None:
        if len(codes) == 3:
            return
        child = os.fork()
        if child == 0:
            code = 2
            try:
                with torch.no_grad():
                    same = torch.equal(other(ids), expected)
                same = same and (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward) == TORCH
                code = 0 if same else 1
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with InAttention(fork):
        measured = values(model, ids)
    assert codes == [0, 0, 0]
    with InAttention(lambda: None):
        assert values(model, ids) == measured


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that run tests for another one ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("need_weights", [False, True])
def test_an_interrupt_in_mid_pass(need_weights: bool) -> None:
    """Ctrl-C inside attention, early, late and between: nothing stays, and the next measurement is right."""
    torch.manual_seed(0)
    model, ids, calls = Network(16, need_weights), torch.randint(0, 50, (2, 12)), [0, 0]

    def hooks(of: nn.Module) -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in of.modules())

    def interrupt() -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            signal.raise_signal(signal.SIGINT)

    with InAttention(interrupt):
        alone = values(model, ids)
    passed = calls[0]
    assert passed > 5
    for number in (1, 2, passed // 2, passed - 1, passed):
        fresh = Network(16, need_weights)  # its structure is not known yet, so all passes are made again
        fresh.load_state_dict(model.state_dict())
        calls[:] = 0, number
        with pytest.raises(KeyboardInterrupt), InAttention(interrupt):
            values(fresh, ids)
        assert hooks(fresh) == 0
        assert (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward) == TORCH
        assert torch.backends.mha.get_fastpath_enabled()
        with InAttention(lambda: None):
            assert values(fresh, ids) == alone


def test_torch_itself_is_never_replaced() -> None:
    """Not even while the attention runs: another thread could call it then."""
    model, ids = Network(16), torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    seen: set[tuple[Callable[..., object], ...]] = set()

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.add((F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward))
            return func(*args, **(kwargs or {}))

    with Looks():
        values(model, ids)
    assert seen == {TORCH}


def test_the_setting_of_the_fused_layer_is_what_was_found() -> None:
    """Threads that begin and end in any order."""
    from rankscope.models.wrapping import without_fastpath

    for order in itertools.permutations("aabb"):
        contexts = {name: without_fastpath() for name in "ab"}
        begun: set[str] = set()
        for name in order:
            context = contexts[name]
            if name in begun:
                context.__exit__(None, None, None)
            else:
                begun.add(name)
                context.__enter__()
                assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled()
