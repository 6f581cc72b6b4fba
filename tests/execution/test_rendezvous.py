"""Stores of ranks that are threads here, with one store in memory between them; a process of a group that is killed."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from rankscope.errors import ProcessError
from rankscope.execution import rank_store
from rankscope.execution.rank_store import RankStore
from rankscope.models.wrapping import in_group
from rankscope.monitor.ranks import Ranks
from rankscope.monitor.readings import LayerValue


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], list[Any]]:
    """Opens the same thing on each of so many ranks, as they would find it in processes of their own."""
    store, now = HashStore(), threading.local()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: now.rank)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)

    def each(world: int, opened: Callable[[], Any]) -> list[Any]:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
        found = []
        for rank in range(world):
            now.rank = rank
            monkeypatch.setattr(rank_store, "_OPENED", {name: iter(range(9)) for name in ("test", "gauge")})
            found.append(opened())
        return found

    return each


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """What each gives back, or the error it ends with."""

    def told(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except ProcessError as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(told, acts))


def after(seconds: float, act: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        time.sleep(seconds)
        return act()

    return run


def test_without_a_group_there_is_none() -> None:
    assert not in_group()
    assert Ranks(patience=0.0).world == 1
    assert Ranks(patience=0.0).meet(3)


def test_all_come_and_the_entries_of_the_time_before_are_gone(group: Any) -> None:
    ranks = group(3, lambda: RankStore("test"))
    for name in ("a", "b"):
        meets = [partial(rank.meet, name, patience=30, unless="left") for rank in ranks]
        assert at_once(*meets) == [True] * 3
    assert not ranks[0].has("arrived.a")
    assert not ranks[0].has("verdict.a")
    assert ranks[0].has("arrived.b", "verdict.b")


def test_one_that_comes_too_late_hears_that_it_was_skipped(group: Any) -> None:
    first, second = group(2, lambda: RankStore("test"))
    assert not first.meet("a", patience=0.02, unless="left")
    assert not second.meet("a", patience=30, unless="left")


def test_nobody_waits_for_one_that_left(group: Any) -> None:
    first, second = group(2, lambda: RankStore("test"))
    started = time.monotonic()
    met, _ = at_once(lambda: first.meet("a", patience=30, unless="left"), after(0.1, lambda: second.write("left", "1")))
    assert not met
    assert time.monotonic() - started < 15


def test_first_note_stands(group: Any) -> None:
    first, second = group(2, lambda: RankStore("test"))
    assert [second.write_first("key", "b"), first.write_first("key", "a"), first.read("key")] == ["b", "b", b"b"]


def test_boards_of_different_purpose_do_not_meet(group: Any) -> None:
    (one,), (other,) = group(1, lambda: RankStore("test")), group(1, lambda: RankStore("gauge"))
    one.write("left", "0")
    assert not other.has("left")


KILLED = """
import os, signal, sys, time
from rankscope.errors import ProcessError
from rankscope.execution import rendezvous
from rankscope.execution.launching import joined
with joined(), rendezvous.rendezvous() as ranks:
    ranks.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        ranks.gather(b"x")
    except ProcessError as error:
        print(error)
        print(time.monotonic() - began < 30, flush=True)
        os._exit(0)
"""


@pytest.mark.slow
def test_killed_process_is_noticed_within_half_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    program = [sys.executable, "-c", KILLED]
    with (
        subprocess.Popen(program, env={**place, "RANK": "0"}, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(program, env={**place, "RANK": "1"}) as second,
    ):
        said = first.communicate(timeout=90)[0]
    assert second.wait(timeout=10) == -signal.SIGKILL
    assert "Not all 2 processes arrived within 1800 s, or one has stopped" in said
    assert said.strip().endswith("True")


def value(mean: float) -> LayerValue:
    return LayerValue("residual", "block.out", None, 0, mean, mean - 1, math.inf)


def test_numbers_of_the_first_rank_are_those_of_all(group: Any) -> None:
    first, second = group(2, lambda: Ranks(patience=30))
    for step, mean in enumerate((1 / 3, math.nan)):
        own, other = (value(mean),), (value(7.0),)
        here, there = at_once(partial(first.same_as_first, step, own), partial(second.same_as_first, step, other))
        assert repr(there) == repr(here) == repr((value(mean),))
    assert not first._store.has("values.0")


def test_first_rank_that_left_or_does_not_come_is_an_error(group: Any) -> None:
    first, second = group(2, lambda: Ranks(patience=0.02))
    with pytest.raises(ProcessError, match=r"first of 2 processes read nothing at step 5"):
        second.same_as_first(5, (value(1.0),))
    first.leave()
    with pytest.raises(ProcessError, match=r"step 6"):
        second.same_as_first(6, (value(1.0),))


def test_rank_that_read_other_values_holds_up_nobody(group: Any) -> None:
    first, second = group(2, lambda: Ranks(patience=30))

    def read() -> None:
        try:
            second.same_as_first(7, (value(1.0), value(2.0)))
        finally:
            second.leave()

    started = time.monotonic()
    here, there = at_once(lambda: first.same_as_first(7, (value(1.0),)), read)
    assert str(here) == (
        "Not all of 2 processes read the values of the first at step 7; one that failed says why in its log."
    )
    assert "Process 1 of 2 read 2 values at step 7, and the first read 1" in str(there)
    assert time.monotonic() - started < 15
