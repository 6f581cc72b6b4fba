"""Run the command line in this process and look at what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rankscope.cli.app import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RANKSCOPE_DEBUG", raising=False)

    def call(*words: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["rankscope", *words])  # a run keeps the command it was made with
        with pytest.raises(SystemExit) as left:
            main(words)
        seen = capsys.readouterr()
        return Outcome(int(left.value.code or 0), seen.out, seen.err)

    return call
