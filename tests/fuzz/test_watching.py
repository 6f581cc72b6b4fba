"""The harness notices what it is there for: crashes, hangs, changes elsewhere, programs, connections, lost memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.errors import LoadError
from tests.fuzz.target import Target, outcome
from tests.fuzz.watching import Board, Guard, Trespass, in_a_child, watched


def found_by_the_guard(act: Callable[[Path], object], folder: Path) -> bool:
    """Whether it is a trespass, tried in a child because an audit hook stays for good."""
    board = Board()

    def work() -> None:
        guard = Guard()
        try:
            with watched(guard, folder):
                act(folder)
        except Trespass:
            board.end("found")

    assert in_a_child(board, work) is None
    board.look()
    return board.counts[2] == 1


TRESPASSES = {
    "write beside": lambda folder: (folder.parent / "beside").write_text("x"),
    "remove beside": lambda folder: os.remove(folder.parent / "kept"),
    "folder beside": lambda folder: os.mkdir(folder.parent / "more"),
    "a program": lambda folder: subprocess.run([sys.executable, "-c", ""], check=False),
    "a shell": lambda folder: os.system("true"),
    "a connection": lambda folder: socket.create_connection(("127.0.0.1", 9), timeout=1),
}


@pytest.mark.parametrize("case", TRESPASSES)
def test_a_trespass_is_noticed(case: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    (tmp_path / "own").mkdir()
    assert found_by_the_guard(TRESPASSES[case], tmp_path / "own")
    assert (tmp_path / "kept").exists()
    assert not (tmp_path / "beside").exists()


def test_its_own_folder_is_the_readers_to_use(tmp_path: Path) -> None:
    def act(folder: Path) -> None:
        (folder / "a").write_text("x")
        (folder / "a").unlink()

    assert not found_by_the_guard(act, tmp_path)


def test_a_crash_is_told_with_its_case() -> None:
    board = Board()

    def work() -> None:
        board.begin(0, b"harmless")
        board.end("read")
        board.begin(1, b"deadly")
        os.kill(os.getpid(), signal.SIGKILL)

    assert "died (-9)" in str(in_a_child(board, work))
    number, _, data = board.look()
    assert (number, data, board.counts) == (1, b"deadly", [1, 0, 0])


def test_memory_that_was_asked_for_first_is_a_finding(tmp_path: Path) -> None:
    def read(data: bytes, folder: Path) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise LoadError("It could not be read.") from error

    with pytest.raises(AssertionError, match="memory was asked for"):
        outcome(Target("greedy", lambda: (b"",), read), b"", tmp_path)
