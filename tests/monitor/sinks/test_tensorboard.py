"""Event files, read back by TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankscope.errors import MissingExtraError
from rankscope.monitor.sinks.tensorboard import TensorBoardSink
from tests.monitor.sinks.readings import SENTENCE, curve, events, feed


def test_event_files_hold_scalars_and_alarms(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    feed(sink)
    sink.close()
    found = events(tmp_path)
    assert curve(found, "rankscope/relative_residual/least") == {10: 0.25, 20: 0.25}
    assert curve(found, "rankscope/alarms") == {10: 0.0, 20: 1.0}
    raised, cleared = found.Tensors("rankscope/alarm/token_collapse/text_summary")
    assert (raised.step, cleared.step) == (20, 30)
    text = raised.tensor_proto.string_val[0].decode()
    assert SENTENCE in text
    assert "| severity | inf |" in text
    assert "raised" in text
    assert "cleared" in cleared.tensor_proto.string_val[0].decode()


def test_a_reading_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path))
    sink.scalars(5, {"rankscope/alarms": 2.0})
    assert curve(events(tmp_path), "rankscope/alarms") == {5: 2.0}
    sink.close()


def test_a_writer_of_yours_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        sink = TensorBoardSink(writer)
        sink.scalars(1, {"rankscope/alarms": 0.0})
        sink.close()
        writer.add_scalar("loss", 0.5, 1)
    found = events(tmp_path)
    assert curve(found, "loss") == {1: 0.5}
    assert len(list(tmp_path.iterdir())) == 1, "a closed writer that is written to begins a second file"


def test_without_tensorboard_the_install_line_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
