"""A run killed half-way goes on behind its last finished block, in another process, and ends with the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rankscope
from rankscope.errors import ResultError
from rankscope.ext.theory.bound.run import bound
from rankscope.runs.run import Run, load_run
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved
from tests.flat_calls import flat

PROGRAM = """
import os, signal, sys
from rankscope.ext.offload.schedule import BlockStage

own, seen = BlockStage.through, []

def through(stage, part, *words, **options):
    seen.append(stage.number)
    if seen.count(2) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(stage, part, *words, **options)

if sys.argv[1] == "killed":
    BlockStage.through = through
from rankscope.cli.app import main
main(sys.argv[2:])
"""
VERBS = {
    "measure": ["--sequences", "4", "--tokens", "12", "--batch", "2"],
    "ablate": ["--sequences", "4", "--tokens", "12", "--batch", "2", "--variants", "pure,full"],
    "exact": ["--sequences", "2", "--tokens", "12", "--skip", "0", "--mlp", "drop", "--norm", "identity"],
    "bound": ["--sequences", "4", "--tokens", "12", "--batch", "2"],
}


def run(how: str, *words: str) -> int:
    return subprocess.run([sys.executable, "-c", PROGRAM, how, *words], check=False, capture_output=True).returncode


def called(verb: str, folder: Path, **further: Any) -> Run:
    """The same in Python."""
    words = iter(VERBS[verb])
    options = {name.removeprefix("--"): value for name, value in zip(words, words, strict=True)}
    given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    if "variants" in given:
        given["variants"] = str(given["variants"]).split(",")
    found: Run = flat(getattr(rankscope, verb), folder, **given, **further)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["measure", "ablate"])
def test_signal_nine_half_way(tmp_path: Path, verb: str) -> None:
    folder = saved("init:tiny-bert", tmp_path / "bert")
    options = [verb, str(folder), *VERBS[verb], "-q"]
    assert run("killed", *options, "--offload", "--out", str(tmp_path / "run")) == -signal.SIGKILL
    assert len(list(tmp_path.glob("run.work/*/block-*.arrow"))) == 2
    assert run("whole", *options, "--offload", "--out", str(tmp_path / "run")) == 0
    assert not (tmp_path / "run.work").exists()
    resumed = load_run(tmp_path / "run")
    assert resumed.extra["offload"]["resumed_at"] == 2
    assert resumed.extra["offload"]["blocks_read"] == 1
    assert same_bits(resumed, called(verb, folder))


class StoppedError(Exception):
    """Somebody pressed a key."""


@contextmanager
def stopping_at(number: int) -> Iterator[None]:
    """Inside the block no run gets beyond that stage."""
    from rankscope.ext.offload.schedule import BlockStage

    own = BlockStage.through

    def through(stage: BlockStage, *words: object, **options: object) -> object:
        if stage.number == number:
            raise StoppedError
        return own(stage, *words, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BlockStage, "through", through)
        with pytest.raises(StoppedError):
            yield


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("number", "verb"),
    [
        pytest.param(number, verb, marks=pytest.mark.slow if (number, verb) == (1, "exact") else ())
        for number in (1, 2)
        for verb in sorted(VERBS)
    ],
)
def test_every_verb_goes_on(tmp_path: Path, verb: str, number: int) -> None:
    folder = saved("init:tiny-bert", tmp_path / "bert")
    whole = called(verb, folder)
    with stopping_at(number):
        called(verb, folder, offload=True, work=tmp_path / "work")
    resumed = called(verb, folder, offload=True, work=tmp_path / "work")
    assert resumed.extra["offload"]["resumed_at"] == number
    assert same_bits(whole, resumed)
    assert resumed.verdict == whole.verdict
    assert resumed.provenance.lengths == whole.provenance.lengths
    assert resumed.provenance.arithmetic_dtype == whole.provenance.arithmetic_dtype


def test_similarity_goes_on(tmp_path: Path) -> None:
    folder = saved("init:tiny-llama", tmp_path / "llama")
    options = {"sequences": 2, "tokens": 12, "similarity": True}
    with stopping_at(2):
        flat(measure, folder, offload=True, work=tmp_path / "work", **options)
    resumed = flat(measure, folder, offload=True, work=tmp_path / "work", **options)
    assert resumed.extra["similarity"] == flat(measure, folder, **options).extra["similarity"]


@pytest.mark.slow
def test_another_run_does_not_take_up_this_one(tmp_path: Path) -> None:
    folder = saved("init:tiny-bert", tmp_path / "bert")
    with stopping_at(1):
        measure(rankscope.Model(folder, offload=True, work=tmp_path / "work"), rankscope.Inputs(sequences=2, tokens=12))
    others = (
        measure(
            rankscope.Model(folder, offload=True, work=tmp_path / "work"), rankscope.Inputs(sequences=3, tokens=12)
        ),
        measure(
            rankscope.Model(folder, offload=True, work=tmp_path / "work", dtype="bfloat16"),
            rankscope.Inputs(sequences=2, tokens=12),
        ),
        measure(
            rankscope.Model(folder, offload=True, work=tmp_path / "work"),
            rankscope.Inputs(sequences=2, tokens=12),
            metrics=["residual"],
        ),
        bound(
            rankscope.Model(folder, offload=True, work=tmp_path / "work"),
            rankscope.Inputs(sequences=2, tokens=12),
        ),
    )
    assert [run.extra["offload"]["resumed_at"] for run in others] == [0, 0, 0, 0]
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes())
    changed = measure(
        rankscope.Model(folder, offload=True, work=tmp_path / "work"), rankscope.Inputs(sequences=2, tokens=12)
    )
    assert changed.extra["offload"]["resumed_at"] == 0


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    folder = saved("init:tiny-bert", tmp_path / "bert")
    with stopping_at(1):
        measure(rankscope.Model(folder, offload=True, work=tmp_path / "work"), rankscope.Inputs(sequences=2, tokens=12))
    next((tmp_path / "work").glob("*/block-*.arrow")).write_bytes(b"nothing of ours")
    with pytest.raises(ResultError, match="Remove"):
        measure(rankscope.Model(folder, offload=True, work=tmp_path / "work"), rankscope.Inputs(sequences=2, tokens=12))


def test_a_full_disk_is_told_and_the_run_resumes(tmp_path: Path) -> None:
    import resource

    folder = saved("init:tiny-bert", tmp_path / "bert")
    options: dict[str, Any] = {"offload": True, "work": tmp_path / "work", "sequences": 2, "tokens": 12}
    with stopping_at(1):
        flat(measure, folder, **options)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # larger files cannot be written, as on a full disk
    try:
        with pytest.raises(ResultError, match="Free some space"):
            flat(measure, folder, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed = flat(measure, folder, **options)
    assert resumed.extra["offload"]["resumed_at"] == 1
    assert same_bits(resumed, measure(folder, rankscope.Inputs(sequences=2, tokens=12)))
