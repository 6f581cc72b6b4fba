"""What training says about remedies: the shipped file follows from the record, and counts as it is defined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.failing_runs import leaderboard
from benchmarks.failing_runs.leaderboard import (
    AS_IS,
    DESIGNS,
    SOUND,
    Design,
    evidence,
    frames,
    outcomes,
    table,
    train_missing,
)

from rankscope.errors import UnsupportedOperationError
from rankscope.remedies import REMEDIES, arrangement_of, evidence_for
from rankscope.surgery.session import structure_of
from tests.own_models import GPT, ids

TOLD = json.loads(leaderboard.RECORD.read_text())


def test_what_ships_follows_from_the_record() -> None:
    again = "run: python -m benchmarks.failing_runs.leaderboard write"
    assert json.loads(leaderboard.EVIDENCE.read_text()) == evidence(TOLD), again
    assert leaderboard.RECORD.with_suffix(".inc").read_text() == table(TOLD), again
    assert leaderboard.RECORD.with_name("leaderboard_designs.inc").read_text() == frames(TOLD), again


def test_at_least_five_designs_ten_remedies_three_seeds() -> None:
    found = outcomes(TOLD)
    whole = [design for design in DESIGNS if len(found.get((design.name, AS_IS), [])) == 3]
    assert len(whole) >= 5
    for design in whole:
        tried = {name for name in REMEDIES if len(found.get((design.name, name), [])) == 3}
        assert len(tried | TOLD["refused"].get(design.name, {}).keys()) >= 10
        assert not any(one["rescued"] for one in found[design.name, AS_IS])


def run(remedy: str, loss: float | None, *collapsed: str, seed: int = 0, finite: bool = True) -> dict[str, Any]:
    return {
        "design": "no skips",
        "remedy": remedy,
        "seed": seed,
        "loss": loss,
        "finite": finite,
        "collapsed": collapsed,
    }


def test_rescued_means_half_of_the_gap_its_own_alarms_over_and_finite_weights() -> None:
    tried = [
        run("pre_norm", 2.4),
        run("deepnorm", 2.6),
        run("neutreno", 2.1, "token_collapse"),
        run("residual_scale", 2.1, "entropy_collapse"),  # not an alarm of the design as it is
        run("qk_norm", 2.1, finite=False),
        run("skipinit", None, finite=False),
    ]
    frame = [run(AS_IS, 3.0, "token_collapse"), run(SOUND, 2.0)]
    sound = [run(AS_IS, 2.09, seed=1), run(SOUND, 2.0, seed=1), run("deepnorm", 2.0, seed=1)]  # does not fail
    told = {"date": "", "runs": [*frame, *tried, *sound], "refused": {}}
    (design,) = evidence(told)["designs"]
    assert design["alarms"] == ["token_collapse"]
    assert design["remedies"] == {
        "deepnorm": [0, 1], "neutreno": [0, 1], "pre_norm": [1, 1], "qk_norm": [0, 1], "residual_scale": [1, 1],
        "skipinit": [0, 1],
    }  # fmt: skip


def test_a_record_is_continued_and_refusals_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(design: Design, remedy: str, seed: int) -> dict[str, Any]:
        if remedy == "layered":
            raise UnsupportedOperationError("layered needs pre-norm: ...")
        trained.append(remedy)
        return {**run(remedy, 2.0), "design": design.name, "seed": seed}

    monkeypatch.setattr(leaderboard, "train", train)
    for _ in range(2):
        train_missing(tmp_path / "record.json", DESIGNS[:1], [0], ["layered", "skipinit"])
        assert trained == [AS_IS, SOUND, "skipinit"]
    assert json.loads((tmp_path / "record.json").read_text())["refused"] == {
        DESIGNS[0].name: {"layered": "layered needs pre-norm: ..."}
    }


@pytest.mark.slow
def test_a_run_of_the_record_is_the_run_of_today() -> None:
    design = next(one for one in DESIGNS if one.name == "queries and keys grow")
    (stored,) = [
        one for one in TOLD["runs"] if (one["design"], one["remedy"], one["seed"]) == (design.name, "qk_norm", 0)
    ]
    found = leaderboard.train(design, "qk_norm", 0)
    assert found["loss"] == pytest.approx(stored["loss"], rel=1e-2)
    assert found["collapsed"] == stored["collapsed"]


def test_evidence_is_of_networks_arranged_alike_that_end_in_the_alarm() -> None:
    found = evidence_for("post-norm", ["token_collapse"])
    designs = [one for one in evidence(TOLD)["designs"] if one["arrangement"] == "post-norm"]
    chosen = [one for one in designs if "token_collapse" in one["alarms"]]
    assert found["skipinit"].designs == tuple(one["name"] for one in chosen)
    assert found["skipinit"].trained == sum(one["remedies"]["skipinit"][1] for one in chosen)
    assert f"of {found['skipinit'].trained} trainings of small post-norm networks" in found["skipinit"].words
    assert evidence_for("post-norm", ["still_weights"]) == evidence_for(None, ["token_collapse"]) == {}


@pytest.mark.parametrize("place", ["pre", "post"])
def test_the_arrangement_of_a_model(place: str) -> None:
    assert arrangement_of(structure_of(GPT(place), ids(1, 5), None)) == f"{place}-norm"
