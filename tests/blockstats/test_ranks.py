"""One process and several read the same ratios, and training keeps its bits, however the model is spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.blockstats.nets import RATIOS, SEQUENCES, TOKENS, furthest
from tests.blockstats.rank_program import CELLS, PIPELINES, WORLD, backend_of, depth_of, window_of
from tests.forked import run_program

PROGRAM = "tests/blockstats/rank_program.py"
ORDINARY = {(kind, "not reentrant", "eager") for kind in WORLD} | {
    ("DDP", "reentrant", "eager"),
    ("FSDP2", "not reentrant", "blocks"),
}
ORDINARY -= {("FSDP2 x SP", "not reentrant", "eager")}
"""The twelve most important cells: every way to spread a model, with two blocks under each checkpoint."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ordinary = [
        "alone",
        "distributed tensors",
        "unnumbered",
        *(", ".join(names) for names in CELLS if names in ORDINARY),
    ]
    # Fifteen programs of up to four processes that import and compile: minutes, and more beside other work.
    return run_program(PROGRAM, tmp_path_factory.mktemp("blockstats"), patience=1500, scenarios=ordinary)


def said(runs: Path, name: str) -> list[dict[str, Any]]:
    """What each rank said; all of them ended well."""
    if not (runs / name).exists():
        run_program(PROGRAM, runs, scenarios=[name])
    codes = json.loads((runs / name / "ended.json").read_text())["codes"]
    assert codes == [0] * len(codes)
    return [json.loads((runs / name / f"{rank}.json").read_text()) for rank in range(len(codes))]


@pytest.mark.parametrize(
    ("kind", "kept", "way"),
    [pytest.param(*names, marks=[] if names in ORDINARY else pytest.mark.slow) for names in CELLS],
)
def test_ranks_read_what_one_process_does(runs: Path, kind: str, kept: str, way: str) -> None:
    depth, world = depth_of(kind), WORLD[kind]
    one = said(runs, "alone")[0][f"{depth} {window_of(kind)}"]
    ranks = said(runs, f"{kind}, {kept}, {way}")
    if (kind, kept, way) not in ORDINARY and any("torch cannot" in rank for rank in ranks):
        pytest.skip(f"the bare training fails: {[rank.get('torch cannot') for rank in ranks]}")
    # Ranks of tensor parallelism that hold the same tokens count each of them; parts of sequences count once.
    copies = {"TP": world, "FSDP2 x TP": 2}.get(kind, 1)
    for rank in ranks:
        assert rank.get("torch cannot") is None
        # Inductor computes the forward itself with other roundings, as for one process.
        assert furthest(rank["values"], one, depth) < (1e-5 if backend_of(kept, way) == "inductor" else 1e-7)
        assert {rank["values"][f"tokens/{i}"] for i in range(depth)} == {copies * SEQUENCES * TOKENS}
        assert rank["same losses"]
        assert rank["same parameters"]
    assert sum(rank["losses"] for rank in ranks) > 0


def test_streams_that_are_distributed_tensors(runs: Path) -> None:
    for rank in said(runs, "distributed tensors"):
        assert "give a window" in rank["parts 0"]
        assert "partial sum" in rank["sum 0"]
        assert "partial sum" in rank["sum 8"]
        whole, parts = rank["whole 8"], rank["parts 8"]
        assert {name: parts[f"{name}/0"] for name in RATIOS} == pytest.approx(
            {name: whole[f"{name}/0"] for name in RATIOS}, rel=1e-9, abs=1e-12
        )


def test_every_rank_hears_of_blocks_that_are_missing(runs: Path) -> None:
    for rank in said(runs, "unnumbered"):
        assert "after blocks [2, 3]" in rank["unnumbered"]
        assert "after blocks [2, 3]" in rank["idle"]


def test_the_cells_are_those_that_are_promised() -> None:
    assert len(ORDINARY) == 12
    assert set(PIPELINES) | {"DDP", "FSDP2", "TP", "SP", "FSDP2 x TP", "accumulation"} <= {cell[0] for cell in CELLS}
