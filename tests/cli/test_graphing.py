"""``rankscope graph``."""

from __future__ import annotations

import json
from pathlib import Path

KEYS = {"centres", "radius", "diameter", "strongly_connected", "quasi_strongly_connected", "lambda_2", "spectral_gap"}


def test_the_command_compares_masks(cli, tmp_path: Path) -> None:
    one = json.loads(cli("graph", "causal", "--tokens", "64", "--json").out)
    assert set(one) >= KEYS | {"transient", "layers_to_1e-3"}
    assert one["centres"] == {"count": 1, "first": [0]}
    figure = tmp_path / "masks.png"
    outcome = cli("graph", "causal", "window(4)", "complete", "--tokens", "64", "--json", "--figure", str(figure))
    assert [entry["mask"] for entry in json.loads(outcome.out)["masks"]] == ["causal", "window(4)", "complete"]
    assert figure.stat().st_size > 10_000
    assert "causal: Tokens agree" in cli("graph", "causal", "--tokens", "64").out
    brief = cli("graph", "causal", "complete", "--tokens", "64", "--quiet").out.splitlines()
    assert [line.partition(":")[0] for line in brief] == ["causal", "complete"]
    assert cli("graph", "nonsense", "--tokens", "64").code == 2
