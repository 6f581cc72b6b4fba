"""Processes to harm."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0
"""Seconds after which a process counts as hung; a busy machine is slow."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its code (minus the signal that killed it) and what it said."""

    code: int
    out: str
    err: str

    @property
    def explained(self) -> bool:
        """Refused in words: one line that begins with ``error:``, the code of wrong use, no traceback."""
        return self.code == 2 and self.err.startswith("error: ") and "Traceback" not in self.out + self.err


@dataclass
class Child:
    """A process under way."""

    pid: int
    streams: tuple[Path, Path]
    waited: Callable[[int], int]

    def wait(self) -> Outcome:
        code = self.waited(self.pid)
        return Outcome(code, *(path.read_text(encoding="utf-8", errors="backslashreplace") for path in self.streams))


class Warm:
    """Starts command lines without paying for their imports; see ``warm.py``."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            text=True,
        )
        self._started = 0
        self._answer()

    def start(
        self,
        words: list[str],
        folder: Path,
        fault: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Child:
        """A command line in a folder, with a fault of ``injecting.py`` in it."""
        self._started += 1
        logs = folder / ".logs"
        logs.mkdir(exist_ok=True)
        streams = logs / f"{self._started}.out", logs / f"{self._started}.err"
        request = {"words": words, "fault": fault, "options": options, "cwd": str(folder), "env": dict(env or {})}
        told = self._ask({**request, "stdout": str(streams[0]), "stderr": str(streams[1])})
        return Child(told["pid"], streams, self._wait)

    def run(
        self,
        words: list[str],
        folder: Path,
        fault: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Outcome:
        """The same, to its end."""
        return self.start(words, folder, fault, env, **options).wait()

    def _wait(self, pid: int) -> int:
        return int(self._ask({"wait": pid}, victim=pid)["code"])

    def _ask(self, request: Mapping[str, Any], victim: int | None = None) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer(victim)

    def _answer(self, victim: int | None = None) -> dict[str, Any]:
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], PATIENCE)
        if not ready and victim is not None:
            os.kill(victim, signal.SIGKILL)
            self._server.stdout.readline()
            pytest.fail(f"the process hung for {PATIENCE:.0f} s and was killed")
        line = self._server.stdout.readline()
        assert line, "the process that starts the others ended"
        return json.loads(line)

    def close(self) -> None:
        self._server.communicate(timeout=PATIENCE)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    server = Warm()
    yield server
    server.close()


def cold(
    words: list[str], folder: Path, *, env: Mapping[str, str] | None = None, program: str | None = None, **options: Any
) -> Outcome:
    """``python -m rankscope`` from nothing, or a program of its own that ends by calling it."""
    start = ["-m", "rankscope"] if program is None else ["-c", program]
    done = subprocess.run(
        [sys.executable, *start, *words],
        capture_output=True,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        timeout=PATIENCE,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )
    return Outcome(done.returncode, *(text.decode(errors="backslashreplace") for text in (done.stdout, done.stderr)))
