"""What training says about remedies, as it is shipped."""

from __future__ import annotations

import pytest

from rankscope.remedies import REMEDIES, arrangement_of, evidence_for
from rankscope.remedies._evidence import trained_designs
from rankscope.surgery.session import structure_of
from tests.own_models import GPT, ids


def test_at_least_five_designs_with_three_seeds_each() -> None:
    designs = trained_designs()
    assert len(designs) >= 5
    assert all(set(one["remedies"]) <= set(REMEDIES) for one in designs)
    assert all(0 <= rescued <= trained == 3 for one in designs for rescued, trained in one["remedies"].values())


def test_evidence_is_of_networks_arranged_alike_that_end_in_the_alarm() -> None:
    found = evidence_for("post-norm", ["token_collapse"])
    designs = [one for one in trained_designs() if one["arrangement"] == "post-norm"]
    chosen = [one for one in designs if "token_collapse" in one["alarms"]]
    assert found["skipinit"].designs == tuple(one["name"] for one in chosen)
    assert found["skipinit"].trained == sum(one["remedies"]["skipinit"][1] for one in chosen)
    assert f"of {found['skipinit'].trained} trainings of small post-norm networks" in found["skipinit"].words
    assert evidence_for("post-norm", ["still_weights"]) == evidence_for(None, ["token_collapse"]) == {}


@pytest.mark.parametrize("place", ["pre", "post"])
def test_the_arrangement_of_a_model(place: str) -> None:
    assert arrangement_of(structure_of(GPT(place), ids(1, 5), None)) == f"{place}-norm"
