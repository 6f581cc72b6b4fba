"""Every architecture there is a preset for: the same bits as in memory, or a refusal that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope import Inputs, Model
from rankscope.errors import LoadError, RankscopeError, UnsupportedConfigError
from rankscope.models.presets import PRESETS
from rankscope.verbs.measure.run import measure
from tests.ext.offload.folders import same_bits, saved

SHAPE = {"sequences": 3, "tokens": 12, "batch": 2}
HALF_WAY = {"tiny-swinv2": "skipped", "tiny-t5": "several stacks"}


@pytest.mark.parametrize("name", sorted(HALF_WAY))
def test_refusals_name_the_reason(tmp_path: Path, name: str) -> None:
    folder = saved(f"init:{name}", tmp_path / "model")
    with pytest.raises((UnsupportedConfigError, LoadError), match=HALF_WAY[name]):
        measure(Model(folder, offload=True), Inputs(**SHAPE))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in PRESETS if name.startswith("tiny-")))
def test_equal_or_refused(tmp_path: Path, name: str) -> None:
    folder = saved(f"init:{name}", tmp_path / "model")
    try:
        whole = measure(folder, Inputs(**SHAPE))
    except (RankscopeError, ValueError) as error:
        pytest.skip(f"the saved folder cannot be measured in memory either: {error}"[:100])
    try:
        streamed = measure(Model(folder, offload=True), Inputs(**SHAPE))
    except (UnsupportedConfigError, LoadError):
        return
    assert same_bits(whole, streamed)
