"""A plan is typed: what it takes, what it refuses, and the nearest word it knows."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.errors import InputError
from rankscope.ext.sweeps.plan import Checkpoint, plan_of


def plan(**given: Any) -> dict[str, Any]:
    return {"models": ["init:tiny-bert"], "verbs": ["measure"], **given}


def test_short_and_long_forms_mean_the_same() -> None:
    short = plan_of(plan(verbs=["measure", {"exact": {"stability": True}}, {"bound": None}], variants=["full"]))
    long = plan_of(
        plan(
            models=[{"model": "init:tiny-bert"}],
            verbs=[{"verb": "measure"}, {"verb": "exact", "stability": True}, {"verb": "bound"}],
            variants=[{"name": "full"}],
        )
    )
    assert short == long


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"modls": []}, "modls is not a key of a plan (did you mean 'models'?)"),
        ({"verbs": ["mesure"]}, "no verb 'mesure' for a sweep (did you mean 'measure'?)"),
        (
            {"verbs": [{"measure": {"metric": ["mu"]}}]},
            "verbs.0.metric is not a key of a plan (did you mean 'metrics",
        ),
        ({"verbs": [{"exact": {"xyz": 1}}]}, "known here: offload, plain, stability"),
        ({"variants": [{"name": "a", "skipp": 0}]}, "did you mean 'skip'?"),
        ({"variants": [{"name": "a", "mlp": "dropp"}]}, "'keep' or 'drop'"),
        ({"models": [{"model": "a", "inputs": {"token": 3}}]}, "models.0.inputs.token"),
        ({"models": []}, "models"),
        ({"models": ["a", "a"]}, "a is written twice"),
        ({"models": [{"name": "a"}]}, "give a model"),
        ({"models": [{"checkpoints": ["x-1"]}]}, "needs a name"),
        ({"models": [{"model": "a", "checkpoints": ["x-1"]}]}, "exclude each other"),
        ({"models": [{"model": "a", "revisions": ["x"], "checkpoints": [{"revision": "y"}]}]}, "exclude each other"),
        ({"models": [{"model": "a", "model_class": "os.system"}]}, "model_class"),
        ({"inputs": {"text": "a", "random_tokens": True}}, "exclude each other"),
        ({"inputs": {"tokens": 0}}, "inputs.tokens"),
        ({"memory": "lots"}, "memory='lots' is not a size"),
        ({"memory": True}, "memory=True is not a size"),
        ({"retries": -1}, "retries"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["x"]}, "seeds.0"),
        ({"trust_remote_code": True}, "trust_remote_code is not a key"),
    ],
)
def test_mistakes_are_named_with_their_place(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(plan(**given))
    assert says in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "size"), [("4 GiB", 2**32), ("1.5GiB", 3 * 2**29), ("500 MB", 5 * 10**8), (7, 7), (None, None)]
)
def test_sizes(given: object, size: int | None) -> None:
    assert plan_of(plan(memory=given)).memory == size


@pytest.mark.parametrize(
    ("given", "label", "number"),
    [
        ("runs/a/checkpoint-500", "checkpoint-500", 500),
        ({"path": "runs/final", "step": 9}, "final", 9),
        ({"path": "runs/final"}, "final", None),
        ({"revision": "step1000-tokens2B"}, "step1000-tokens2B", 2),
        ({"revision": "step1000", "step": 5}, "step1000", 5),
    ],
)
def test_checkpoints_know_their_step(given: object, label: str, number: int | None) -> None:
    found = Checkpoint.model_validate(given)
    assert (found.label, found.number) == (label, number)
