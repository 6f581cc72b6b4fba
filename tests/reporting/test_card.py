"""The block for a model card: read back by the Hub's own reader, harmless with hostile names."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import huggingface_hub
import pytest
import yaml

import rankscope as rs
from rankscope.errors import ResultError


@pytest.fixture(scope="module")
def run() -> rs.Run:
    return rs.measure("init:tiny-bert", rs.Inputs(sequences=2, tokens=16))


def test_hub_reads_the_results(run: rs.Run) -> None:
    facts = yaml.safe_load(rs.card(run).yaml)
    name, results = huggingface_hub.repocard_data.model_index_to_eval_results(facts["model-index"])
    assert name == "init:tiny-bert"
    last = run.curve("relative_residual", "block.out").mean[-1]
    (residual,) = [result for result in results if result.metric_type == "relative_residual"]
    assert residual.metric_value == float(f"{last:.6g}")


def test_picture_has_a_cell_per_block_and_metric(run: rs.Run) -> None:
    made = rs.card(run)
    svg = ET.fromstring(made.svg)
    shaded = [node for node in svg.iter("{http://www.w3.org/2000/svg}rect") if len(node)]
    blocks = len(run.curve("relative_residual", "block.out").layers)
    rows = [line for line in made.markdown.splitlines() if line.startswith("| ")]
    assert len(shaded) == blocks * (len(rows) - 1)


def test_a_saved_run_gives_the_same_card(run: rs.Run, tmp_path) -> None:
    run.save(tmp_path / "run")
    assert rs.card(tmp_path / "run") == rs.card(run)
    home = rs.card(run).save(tmp_path / "card")
    assert sorted(item.name for item in home.iterdir()) == ["card.md", "model-index.yaml", "strip.svg"]


def test_hostile_names_stay_text(run: rs.Run) -> None:
    name = "</svg><script>alert(1)</script> | [x](javascript:y) `a`\n# b"
    hostile = dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, model=name))
    made = rs.card(hostile)
    ET.fromstring(made.svg)
    assert "<script>" not in made.svg
    assert "<script>" not in made.markdown.replace("\\<script\\>", "")
    assert made.markdown.splitlines()[0].endswith("\\# b")
    assert yaml.safe_load(made.yaml)["model-index"][0]["name"].startswith("</svg>")


def test_a_run_without_blocks_is_refused() -> None:
    run = rs.measure("init:tiny-bert", rs.Inputs(sequences=2, tokens=8))
    with pytest.raises(ResultError, match="by block"):
        rs.card(dataclasses.replace(run, table=run.table.slice(0, 0)))
