"""Every verb on the simulated device gives the values of the processor, as the table in the docs says.

The ordinary suite runs one preset. The whole table takes minutes; ``./dev slow tests/device`` runs it, and
``RANKSCOPE_WRITE_TABLE=1`` writes it anew.
"""

from __future__ import annotations

import json
import os
from datetime import date

import pytest
import torch

from tests.device.simulated import SimulatedDevice
from tests.device.verbs_on_device import FEATURES, FOUND, PRESETS, TABLE, VERBS, committed, compared, rendered

ON_THE_PROCESSOR = ("exact", "decompose", "bound")
"""Without float64 these run on the processor, so the ordinary suite runs them with it."""
QUICK = [(verb, "float32") for verb in ("measure", "paths", *ON_THE_PROCESSOR)]
QUICK += [(verb, "float32, no float64") for verb in VERBS if verb not in ON_THE_PROCESSOR]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("verb", "feature"), QUICK)
def test_verb(device: SimulatedDevice, verb: str, feature: str) -> None:
    assert compared(device, verb, "tiny-llama", feature) == committed()[verb][feature]["tiny-llama"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_table(device: SimulatedDevice) -> None:
    found: dict[str, dict[str, dict[str, str]]] = {verb: {feature: {} for feature in FEATURES} for verb in VERBS}
    for preset in PRESETS:
        for verb in VERBS:
            for feature in FEATURES:
                found[verb][feature][preset] = compared(device, verb, preset, feature)
    if os.environ.get("RANKSCOPE_WRITE_TABLE"):
        facts = {"date": date.today().isoformat(), "torch": torch.__version__, "results": found}
        FOUND.write_text(json.dumps(facts, indent=1) + "\n")
        TABLE.write_text(rendered(found))
    assert found == committed()


def test_no_entry_of_the_table_is_a_difference() -> None:
    for verb, by_feature in committed().items():
        for feature, by_preset in by_feature.items():
            assert set(by_preset.values()) <= {"equal", "close", "refused"}, (verb, feature, by_preset)
            assert set(by_preset) == set(PRESETS)
    assert rendered(committed()) == TABLE.read_text()
