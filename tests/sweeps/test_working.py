"""One task: rows with their coordinates, equal to those of the verb itself; failures with their reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rankscope as rs
from rankscope.runs.querying import COORDINATES
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.sweeps import working
from rankscope.sweeps.plan import plan_of
from rankscope.sweeps.tasks import Task, tasks_of
from rankscope.sweeps.working import do
from rankscope.verbs._spec import VERBS

SMALL = {"sequences": 2, "tokens": 12}


def one_task(**given: Any) -> Task:
    return next(tasks_of(plan_of({"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": SMALL, **given})))


def values(table: Any) -> list[tuple[Any, ...]]:
    names = ("metric", "site", "layer", "head", "sequence", "value", "status")
    columns = (table[name].to_pylist() for name in names)
    return [tuple(map(repr, row)) for row in zip(*columns, strict=True)]  # NaN equals itself


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("measure", {"metrics": ["relative_residual", "stable_rank"]}),
        ("ablate", {"variants": ["pure", "full"]}),
        ("exact", {}),
        ("bound", {"theorems": ["dong_2021_multi_head"], "lanczos": 5}),
        ("decompose", {"marginals": ["heads"]}),
        ("remedy", {"remedies": ["stronger_skip"], "gradients": False, "repeats": 0}),
        ("predict", {"most_blocks": 3}),
    ],
)
def test_rows_are_those_of_the_verb(verb: str, options: dict[str, Any]) -> None:
    outcome = do(one_task(verbs=[{verb: options}], seeds=[3]))
    if verb == "predict":
        run = rs.predict("init:tiny-bert", seeds=1, seed=3, tokens=12, **options)
    else:
        run = getattr(rs, verb)("init:tiny-bert", seed=3, **SMALL, **options)
    assert outcome.table is not None, outcome.facts
    assert values(outcome.table) == values(run.table)
    assert outcome.facts["verdict"] == run.verdict
    known = {*FIXED_COLUMNS, *COORDINATES, *VERBS[verb].columns}
    assert set(outcome.table.column_names) <= known, "query must know every column"
    assert set(outcome.table["seed"].to_pylist()) == {3}
    assert set(outcome.table["task"].to_pylist()) == {outcome.task.key}


def test_surgery_is_around_the_verb() -> None:
    outcome = do(one_task(variants=[{"name": "cut", "skip": 0, "mlp": "drop", "norm": "identity"}]))
    pure = do(one_task(variants=["pure"]))
    assert outcome.table is not None
    assert pure.table is not None
    assert values(outcome.table) == values(pure.table)
    with rs.operate(loaded := rs.load("init:tiny-bert").model, skip=0.0, mlp="drop", norm="identity"):
        run = rs.measure(loaded, list_of_ids(), batch=4)
    assert set(outcome.table["variant"].to_pylist()) == {"cut"}
    assert outcome.facts["provenance"]["operations"] == run.provenance.to_json()["operations"]


def list_of_ids() -> Any:
    import torch

    return torch.ones(1, 8, dtype=torch.long)


def test_texts_and_files_reach_the_model(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("one two three four five six seven eight nine ten eleven twelve thirteen " * 3)
    outcome = do(one_task(inputs={**SMALL, "text": str(text)}))
    run = rs.measure("init:tiny-bert", text, **SMALL)
    assert outcome.table is not None
    assert values(outcome.table) == values(run.table)
    outcome = do(one_task(inputs={**SMALL, "texts": ["a b c d", "e f g h"]}))
    assert outcome.facts["provenance"]["sequences"] == 2


def test_a_failure_is_an_outcome_with_its_reason() -> None:
    outcome = do(one_task(verbs=[{"measure": {"metrics": ["stable_rnk"]}}]))
    assert outcome.table is None
    assert "stable_rank" in outcome.facts["reason"]
    assert outcome.facts["type"] == "UnknownNameError"
    assert outcome.facts["trace"] == "", "an explained error needs no trace"


def test_a_defect_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: Task) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(working, "_run", broken)
    outcome = do(one_task())
    assert outcome.facts["reason"] == "by nothing"
    assert "in broken" in outcome.facts["trace"]


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError()])
def test_what_may_heal_is_raised(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(task: Task) -> None:
        raise error

    monkeypatch.setattr(working, "_run", broken)
    with pytest.raises(type(error)):
        do(one_task())


def test_other_weights_on_the_worker_are_refused(tmp_path: Path) -> None:
    rs.load("init:tiny-bert").model.save_pretrained(tmp_path / "m")
    task = one_task(models=[str(tmp_path / "m")])
    assert do(task).table is not None
    (tmp_path / "m" / "vocab.txt").write_text("new")
    outcome = do(task)
    assert outcome.table is None
    assert "other files here" in outcome.facts["reason"]
