"""From a plan to tasks: how many, which, and keys that change with what decides the rows and with nothing else."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rankscope.errors import InputError, LoadError, UnknownNameError
from rankscope.ext.sweeps import tasks as tasks_module
from rankscope.ext.sweeps.plan import plan_of
from rankscope.ext.sweeps.tasks import Task, differs, identity_of, tasks_of


def tasks(**given: Any) -> list[Task]:
    return list(tasks_of(plan_of({"models": ["init:tiny-bert"], "verbs": ["measure"], **given})))


def model_folder(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text('{"model_type": "bert"}')
    (home / "model.safetensors").write_bytes(b"weights")
    return home


def test_the_product_is_complete_and_only_what_makes_sense() -> None:
    found = tasks(
        models=["init:tiny-bert", {"model": "init:tiny-gpt2", "seeds": [7], "verbs": ["exact", "predict"]}],
        verbs=["measure", "ablate", "exact", "bound", "predict"],
        variants=["full", "pure", {"name": "cut", "skip": 0}],
        seeds=[0, 1],
    )
    bert = [task.facts["verb"] for task in found if task.facts["model"] == "init:tiny-bert"]
    assert Counter(bert) == {"measure": 6, "exact": 6, "bound": 6, "ablate": 2, "predict": 2}
    other = [(task.facts["verb"], task.facts["variant"], task.facts["seed"]) for task in found if "gpt2" in task.spec]
    assert other == [("exact", "full", 7), ("exact", "pure", 7), ("exact", "cut", 7), ("predict", None, 7)]
    assert len({task.key for task in found}) == len(found)


def test_checkpoints_come_in_order_and_a_prediction_once(tmp_path: Path) -> None:
    places = [str(model_folder(tmp_path / f"checkpoint-{step}")) for step in (0, 50, 100)]
    found = tasks(models=[{"name": "run", "checkpoints": places}], verbs=["measure", "predict"])
    assert [(task.facts["verb"], task.facts["step"]) for task in found] == [
        ("measure", 0), ("predict", 0), ("measure", 50), ("measure", 100),
    ]  # fmt: skip


def test_the_key_is_the_same_twice_and_survives_json() -> None:
    one, again = tasks()[0], tasks()[0]
    assert one.key == again.key
    assert Task(json.loads(json.dumps(one.facts)), one.spec).key == one.key


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": [1]},
        {"dtype": "float64"},
        {"inputs": {"tokens": 63}},
        {"inputs": {"texts": ["a"]}},
        {"verbs": [{"measure": {"null": True}}]},
        {"variants": ["pure"]},
        {"models": ["init:tiny-roberta"]},
        {"models": [{"model": "init:tiny-bert", "model_class": "BertForMaskedLM"}]},
        {"models": [{"model": "init:tiny-bert", "blocks": "layer.*"}]},
    ],
)
def test_whatever_decides_the_rows_changes_the_key(change: dict[str, Any]) -> None:
    assert tasks(**change)[0].key != tasks()[0].key


@pytest.mark.parametrize("change", [{"retries": 9}, {"cpus": 2}, {"memory": "9 GiB"}, {"seeds": [0, 1]}])
def test_how_it_is_run_does_not(change: dict[str, Any]) -> None:
    assert tasks(**change)[0].key == tasks()[0].key


def test_another_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tasks()[0].key
    monkeypatch.setattr(tasks_module, "__version__", "99.0")
    assert tasks()[0].key != before


def test_other_weights_are_another_key(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model")
    before = tasks(models=[str(place)])[0].key
    assert tasks(models=[str(place)])[0].key == before
    (place / "model.safetensors").write_bytes(b"other weights")
    changed = tasks(models=[str(place)])[0].key
    assert changed != before
    os.utime(place / "model.safetensors", ns=(1, 1))
    assert tasks(models=[str(place)])[0].key != changed


def test_the_text_itself_is_in_the_key(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one text")
    before = tasks(inputs={"text": str(path)})[0]
    path.write_text("another")
    assert tasks(inputs={"text": str(path)})[0].key != before.key
    assert before.text == str(path)


def test_workers_elsewhere_may_have_other_times_but_not_other_sizes(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model")
    asked = identity_of(str(place))
    os.utime(place / "model.safetensors", ns=(1, 1))
    assert identity_of(str(place)) != asked
    assert not differs(asked, identity_of(str(place)))
    (place / "model.safetensors").write_bytes(b"other weights")
    assert differs(asked, identity_of(str(place)))


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"models": ["init:tiny-brt"]}, UnknownNameError, "tiny-bert"),
        ({"models": ["./nowhere"]}, LoadError, "no file or folder"),
        ({"variants": ["puer"]}, UnknownNameError, "pure"),
        ({"variants": [{"name": "a", "mask": "causl"}]}, Exception, "causal"),
        ({"variants": [{"name": "a", "temperature": 0}]}, InputError, "variant 'a'"),
        ({"inputs": {"text": "nowhere.txt"}}, InputError, "nowhere.txt"),
    ],
)
def test_mistakes_are_found_before_anything_runs(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        tasks(**given)


def test_paths_are_absolute_for_workers_and_as_written_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    found = tasks(models=["here"])[0]
    assert found.spec == str(tmp_path / "here")
    assert found.facts["spec"] == "here"
    (tmp_path / "tiny-bert").mkdir()
    assert tasks()[0].spec == "init:tiny-bert"
