"""Runs saved by earlier versions, one per verb: they load with the same bits, are shown and compared.

Those without a number were saved on 15 November 2026 (version 0.1.0.dev0); those with ``-2`` a day later, before each
verb became a folder. Nothing here is ever deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rankscope.cli.app import main
from rankscope.metrics import METRICS
from rankscope.reporting.pages import report
from rankscope.runs.comparison import compare
from rankscope.runs.run import Run, load_run

HOME = Path(__file__).parents[1] / "golden" / "saved"
NAMES = sorted(path.name for path in HOME.iterdir() if path.is_dir())
HASHES = json.loads((HOME / "hashes.json").read_text())
OTHER_VALUES = {
    "exact": "since then every rule keeps more digits (decision 31); the values differ by 1e-14",
    "predict": "since then the tokens of the whole context are sampled (decision 32)",
    "bound": "since then bounds are measured on the module (decision 33)",
}
"""Saved runs whose values a later version computes differently on purpose."""
FEWER_ROWS = {
    "bound-2": "there is no Lanczos iteration any more, and some hypotheses have another name",
    "decompose": "the columns of pairs of paths have left",
    "decompose-2": "the columns of pairs of paths have left",
    "remedy": "remedies without evidence from training have left",
    "remedy-2": "remedies without evidence from training have left",
}
"""Saved runs of which a later version does not give every row."""
OTHER_DIGITS = {"gram": 1e-9, "spectrum": 2e-7}
"""Gram matrices are summed in another order now: how far metrics that need them, or their spectra, may be from what was
saved. Where tokens repeat, a singular value of zero is known to the root of a rounding (reference/accuracy), 1e-8."""
PROCESSOR = "AVX512"
"""The vector instructions with which all of them were made; others round differently."""


def digest(folder: Path) -> str:
    """Of every value, bit by bit, in the order of the rows."""
    return hashlib.sha256(load_run(folder).table["value"].to_numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_values_are_read_bit_by_bit(name: str) -> None:
    assert digest(HOME / name) == HASHES[name]


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_with_the_sentence_it_was_saved_with(name: str) -> None:
    run = load_run(HOME / name)
    saved = json.loads((HOME / name / "run.json").read_text())["verdict"]
    assert run.verdict == saved
    assert "".join(saved.split()) in "".join(str(run).split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_reported_and_names_its_command(name: str, tmp_path: Path) -> None:
    run = load_run(HOME / name)
    page = report(run, tmp_path / "page.html").read_text()
    assert run.provenance.model in page
    assert run.provenance.command[:2] == ("rankscope", name.split("-")[0])


@pytest.mark.parametrize("name", NAMES)
def test_it_is_compared_with_itself(name: str) -> None:
    run = load_run(HOME / name)
    rows = compare(run, run).to_json()["rows"]
    assert rows
    assert {row["difference"] for row in rows} - {None} == {0.0}, "None where a metric is undefined"


def bits_of(run: Run, columns: Sequence[str]) -> dict[tuple[object, ...], tuple[int, str]]:
    """Value, as its bits, and status of each row, by what is in the other columns."""
    values = run.table["value"].to_numpy().view("int64").tolist()
    where = [name for name in columns if name not in ("value", "status")]
    keys = zip(*(run.table[name].to_pylist() for name in where), strict=True)
    return dict(zip(keys, zip(values, run.table["status"].to_pylist(), strict=True), strict=True))


def as_float(bits: int) -> float:
    """The number of which these are the bits."""
    return np.array(bits).view("float64").item()


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Runs a command once, in this process, however many saved runs were made by it."""

    @cache
    def run(words: tuple[str, ...]) -> Run:
        place = tmp_path_factory.mktemp("again") / "run"
        with pytest.raises(SystemExit) as left:
            main([*words, "--quiet", "--out", str(place)])
        assert not left.value.code
        return load_run(place)

    return lambda name: run(tuple(without_places(load_run(HOME / name).provenance.command)))


def without_places(command: Sequence[str]) -> Iterator[str]:
    """The arguments of a command, without where it saved what it found."""
    words = iter(command[1:])
    for word in words:
        if word in ("--out", "--figure"):
            next(words)
        elif word not in ("--json", "--quiet"):
            yield word


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_its_command_still_gives_the_same_bits(name: str, again: Callable[[str], Run]) -> None:
    """Every row that was saved; a later version may add rows, for a new metric or remedy."""
    old, new = load_run(HOME / name), again(name)
    columns = [name for name in old.table.column_names if name in new.table.column_names]
    before, after = bits_of(old, columns), bits_of(new, columns)
    if name in OTHER_VALUES:
        assert before != after, f"{name} gives the same bits again: take it out of OTHER_VALUES"
        return
    gone = before.keys() - after.keys()
    assert bool(gone or columns != old.table.column_names) == (name in FEWER_ROWS), sorted(map(str, gone))[:5]
    before = {key: before[key] for key in before.keys() - gone}
    assert before
    if old.provenance.versions["torch"] != torch.__version__ or torch.backends.cpu.get_cpu_capability() != PROCESSOR:
        pytest.skip("saved with another version of torch, or on a processor with other vector instructions")
    close = {key for key in before if key[0] in METRICS and METRICS[key[0]].needs in OTHER_DIGITS}
    assert {key: after[key] for key in before.keys() - close} == {key: before[key] for key in before.keys() - close}
    for key in close:
        (was, status), (now, status_now) = before[key], after[key]
        assert status_now == status
        assert as_float(now) == pytest.approx(as_float(was), rel=OTHER_DIGITS[METRICS[key[0]].needs], abs=1e-8)
