"""SIGTERM ends a command wherever it arrives."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rankscope.cli.interrupting import Terminated, ending_on_request


class Interrupted:
    """An object that is destroyed just when the signal arrives; Python ignores what is raised there."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)


def test_a_signal_that_arrives_in_del_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        Interrupted()
        time.sleep(5)

    with pytest.raises(Terminated), ending_on_request():
        work()
    assert capsys.readouterr().err == "", "no 'Exception ignored in __del__'"
