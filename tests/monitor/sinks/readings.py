"""What sinks are fed with, and how their stores are read back."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Any

from rankscope.monitor import Alarm, Sink

SCALARS = {"rankscope/relative_residual/least": 0.25, "rankscope/alarms": 1.0}
SENTENCE = "Tokens collapse at block 1, step 20: relative residual 0.01. Worth trying: pre_norm or stronger_skip."
ALARM = Alarm("token_collapse", "raised", 20, None, 1, SENTENCE, {"severity": math.inf, "now": 0.01}, "skip")
OVER = Alarm("token_collapse", "cleared", 30, None, 1, "Over since step 30: tokens collapse.", {}, "none")


def feed(sink: Sink) -> None:
    """Two readings; the second raises an alarm."""
    assert isinstance(sink, Sink)
    sink.scalars(10, {**SCALARS, "rankscope/alarms": 0.0})
    sink.scalars(20, SCALARS)
    sink.alarm(20, ALARM)
    sink.alarm(30, OVER)


def events(folder: Path) -> Any:
    """What TensorBoard itself reads from the event files under a folder, all of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (home,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    found = EventAccumulator(str(home), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    found.Reload()
    return found


def curve(found: Any, name: str) -> dict[int, float]:
    return {event.step: event.value for event in found.Scalars(name)}


def texts(found: Any, name: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in found.Tensors(f"{name}/text_summary")]


def wandb_records(folder: Path, patience: float = 30.0) -> list[Any]:
    """The records of the one offline run under a folder; W&B writes the last of them after ``finish`` returned."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found = _records(next(folder.rglob("run-*.wandb")).read_bytes())
        if found and found[-1].HasField("exit"):
            return found
        time.sleep(0.05)
    raise TimeoutError(f"the W&B run in {folder} was not finished after {patience} s")


def _records(data: bytes) -> list[Any]:
    """Framed records in blocks of 32 KiB, after seven bytes that say what the file is; W&B's own classes parse them."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, position, parts, found = 32768, 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            break  # still being written
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found
