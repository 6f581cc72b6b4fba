"""One bit flipped in one file that rankscope wrote: the answer stays the same, or an error names the file."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankscope.errors import RankscopeError
from rankscope.monitor import read_record
from rankscope.monitor.outlets import RecordWriter
from rankscope.runs.run import load_run
from tests.monitor.test_recording import reading
from tests.runs.builders import make_run, profile


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        name: in words.
        pattern: of the files below the folder.
        make: writes them into an empty folder.
        read: everything that can be read of them, as text.
        mends: whether a changed file is computed again instead of refused.
    """

    name: str
    pattern: str
    make: Callable[[Path], object]
    read: Callable[[Path], str]
    mends: bool = False


def _run(home: Path) -> None:
    values = np.linspace(0.9, 0.1, 12)
    make_run(profile({"relative_residual": list(values), "mean_cosine": list(1 - values)}).table()).save(home)


def _loaded(home: Path) -> str:
    return repr(load_run(home).to_json())


def _record(home: Path) -> None:
    for session in range(2):
        writer = RecordWriter(home, {"model": "Tiny", "session": session})
        for step in range(6):
            writer.write(reading(6 * session + step, 0.1 * step, alarm=step == 2))
        writer.close()


def _recorded(home: Path) -> str:
    record = read_record(home)
    return repr((dict(record.facts), [one.to_json() for one in record.readings], record.torn))


KINDS = (
    Kind("run: sidecar", "run.json", _run, _loaded),
    Kind("run: rows", "rows-*.parquet", _run, _loaded),
    Kind("gauge: record", "readings-*.jsonl", _record, _recorded),
)


def flips(kind: Kind, count: int, home: Path, seed: int = 0) -> Counter[str]:
    """Flip one random bit at a time and read; what came of it.

    Returns:
        Counts of ``"refused"`` (an error of ours that names the file), ``"same"`` and ``"wrong"``; anything else is
        the word for an error that is not ours or names no file.
    """
    whole, tried = home / "whole", home / "tried"
    whole.mkdir(parents=True)
    kind.make(whole)
    files = sorted(path.relative_to(whole) for path in whole.glob(kind.pattern) if path.is_file())
    assert files, kind.name
    shutil.copytree(whole, tried)
    answer = kind.read(tried)
    dice, found = random.Random(f"{kind.name} {seed}"), Counter[str]()
    for _ in range(count):
        shutil.rmtree(tried, ignore_errors=True)
        shutil.copytree(whole, tried)
        path = tried / dice.choice(files)
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        found[_outcome(kind, tried, path, answer)] += 1
    return found


def _outcome(kind: Kind, tried: Path, path: Path, answer: str) -> str:
    try:
        return "same" if kind.read(tried) == answer else "wrong"
    except RankscopeError as error:
        return "refused" if path.name in str(error) else f"names no file: {error}"
    except Exception as error:  # noqa: BLE001  (to be counted, whatever it is)
        return f"not ours: {error!r}"
