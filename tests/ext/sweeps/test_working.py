"""One task: rows with their coordinates, equal to those of the verb itself; failures with their reason."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rankscope as rs
from rankscope.ext.sweeps import working
from rankscope.ext.sweeps.plan import plan_of
from rankscope.ext.sweeps.results import Chunk, Results
from rankscope.ext.sweeps.tasks import COORDINATES, RECORD, Task, tasks_of
from rankscope.ext.sweeps.working import Limits, rows_of, run_chunk
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.verbs._spec import VERBS

SMALL = {"sequences": 2, "tokens": 12}


class Outcome(NamedTuple):
    task: Task
    table: Any
    facts: dict[str, Any]


def do(task: Task, models: dict[Any, Any] | None = None, **limits: Any) -> Outcome:
    """What is stored of a task, as a chunk of its own."""
    results = Results.at(tempfile.mkdtemp())
    results.place.make("rows", "failures")
    chunk = Chunk((task,))
    work = None if models is None else lambda one, _: working.do(one, models)
    counts = run_chunk(chunk, results, Limits(**{"retries": 0, **limits}), work=work)
    if counts["failed"]:
        return Outcome(task, None, results.table(f"failures/{chunk.name}.parquet").to_pylist()[0])
    table = results.table(f"rows/{chunk.name}.parquet")
    return Outcome(task, table, json.loads(table[RECORD][0].as_py()))


def one_task(**given: Any) -> Task:
    return next(tasks_of(plan_of({"models": ["init:tiny-bert"], "verbs": ["measure"], "inputs": SMALL, **given})))


def values(table: Any) -> list[tuple[Any, ...]]:
    names = ("metric", "site", "layer", "head", "sequence", "value", "status")
    columns = (table[name].to_pylist() for name in names)
    return [tuple(map(repr, row)) for row in zip(*columns, strict=True)]  # NaN equals itself


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("measure", {"metrics": ["relative_residual", "stable_rank"]}),
        ("ablate", {"variants": ["pure", "full"]}),
        ("exact", {}),
        ("bound", {"theorems": ["dong_2021_multi_head"]}),
        ("decompose", {"marginals": ["heads"]}),
        ("remedy", {"remedies": ["stronger_skip"], "gradients": False}),
        ("predict", {"most_blocks": 3}),
    ],
)
def test_rows_are_those_of_the_verb(verb: str, options: dict[str, Any]) -> None:
    outcome = do(one_task(verbs=[{verb: options}], seeds=[3]))
    if verb == "predict":
        run = rs.predict("init:tiny-bert", seeds=1, seed=3, tokens=12, **options)
    else:
        run = getattr(rs, verb)(rs.Model("init:tiny-bert", seed=3), rs.Inputs(**SMALL), **options)
    assert outcome.table is not None, outcome.facts
    assert values(outcome.table) == values(run.table)
    assert outcome.facts["verdict"] == run.verdict
    known = {*FIXED_COLUMNS, *COORDINATES, *VERBS[verb].columns, RECORD}
    stored = outcome.table
    assert set(stored.column_names) <= known, "query must know every column"
    assert set(stored["seed"].to_pylist()) == {3}
    assert set(stored["task"].to_pylist()) == {outcome.task.key}
    assert stored[RECORD].null_count == stored.num_rows - 1
    assert stored[RECORD][0].as_py() is not None


def test_surgery_is_around_the_verb() -> None:
    outcome = do(one_task(variants=[{"name": "cut", "skip": 0, "mlp": "drop", "norm": "identity"}]))
    pure = do(one_task(variants=["pure"]))
    assert values(outcome.table) == values(pure.table)
    with rs.operate(loaded := rs.load("init:tiny-bert").model, rs.Surgery(skip=0.0, mlp="drop", norm="identity")):
        run = rs.measure(loaded, rs.Inputs(list_of_ids(), batch=4))
    assert set(outcome.table["variant"].to_pylist()) == {"cut"}
    assert outcome.facts["provenance"]["operations"] == run.provenance.to_json()["operations"]


def list_of_ids() -> Any:

    return torch.ones(1, 8, dtype=torch.long)


def test_texts_and_files_reach_the_model(tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("one two three four five six seven eight nine ten eleven twelve thirteen " * 3)
    outcome = do(one_task(inputs={**SMALL, "text": str(text)}))
    run = rs.measure("init:tiny-bert", rs.Inputs(text, **SMALL))
    assert values(outcome.table) == values(run.table)
    task = one_task(inputs={**SMALL, "text": str(text)})
    text.write_text("another text")
    assert "another text here" in do(task).facts["reason"]
    outcome = do(one_task(inputs={**SMALL, "texts": ["a b c d", "e f g h"]}))
    assert outcome.facts["provenance"]["sequences"] == 2


def test_a_failure_is_an_outcome_with_its_reason() -> None:
    outcome = do(one_task(verbs=[{"measure": {"metrics": ["stable_rnk"]}}]))
    assert outcome.table is None
    assert "stable_rank" in outcome.facts["reason"]
    assert outcome.facts["type"] == "UnknownNameError"
    assert outcome.facts["trace"] == "", "an explained error needs no trace"


def test_a_defect_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: Task, models: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(working, "_run", broken)
    outcome = do(one_task())
    assert outcome.facts["reason"] == "by nothing"
    assert "in broken" in outcome.facts["trace"]


@pytest.mark.parametrize("error", [OSError("the disk was away"), MemoryError("too large")])
def test_what_may_heal_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tries: list[int] = []
    run = working._run

    def failing(task: Task, models: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise error
        return run(task, models)

    monkeypatch.setattr(working, "_run", failing)
    assert do(one_task(), retries=2).table is not None
    tries.clear()
    assert do(one_task(), retries=1).facts["reason"] == str(error)
    assert len(tries) == 2


def test_a_task_that_never_ends_fails_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(task: Task, models: Any) -> None:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(working, "_run", endless)
    outcome = do(one_task(), timeout=0.2, retries=3)
    assert outcome.facts["reason"] == "It took longer than 0.2 s, the timeout of the plan."
    monkeypatch.undo()
    assert do(one_task(), timeout=100).table is not None


def test_neighbours_share_a_model_that_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope.models import loading

    loads: list[str] = []
    load = loading.load
    monkeypatch.setattr(loading, "load", lambda spec, **how: loads.append(spec) or load(spec, **how))
    described = {"models": ["init:tiny-bert", "init:tiny-gpt2"], "verbs": ["measure"], "inputs": SMALL}
    plan = plan_of({**described, "variants": ["full", "pure"], "seeds": [0, 1]})
    last = plan_of({**described, "models": ["init:tiny-gpt2"], "verbs": ["exact"], "seeds": [1]})
    models: dict[Any, Any] = {}
    together = [do(task, models) for task in (*tasks_of(plan), *tasks_of(last))]
    assert len(loads) == 4, "two models from two seeds each"
    for outcome in together:
        assert outcome.table is not None, outcome.facts
        alone = do(outcome.task)
        assert values(outcome.table) == values(alone.table), "what ran before on the same model left nothing behind"


def test_a_task_without_rows_is_stored_as_done() -> None:
    task = one_task()
    stored = rows_of(task, rs.measure("init:tiny-bert", rs.Inputs(**SMALL)).table.slice(0, 0), {})
    assert stored.num_rows == 1
    assert stored["task"].to_pylist() == [task.key]
    assert stored["metric"].to_pylist() == [None]


def test_other_weights_on_the_worker_are_refused(tmp_path: Path) -> None:
    rs.load("init:tiny-bert").model.save_pretrained(tmp_path / "m")
    task = one_task(models=[str(tmp_path / "m")])
    assert do(task).table is not None
    (tmp_path / "m" / "vocab.txt").write_text("new")
    outcome = do(task)
    assert outcome.table is None
    assert "other files here" in outcome.facts["reason"]
