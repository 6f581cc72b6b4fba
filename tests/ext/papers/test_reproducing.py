"""Every reproduction at small size: it runs, draws, describes itself, and can be drawn again from what it saved."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope.errors import InputError, RankscopeError, UnknownNameError
from rankscope.ext.papers._curves import line, published, published_line
from rankscope.ext.papers._spec import METHOD, REPRODUCTIONS
from rankscope.ext.papers.reproducing import reproduce, text_of, write_reproduction
from rankscope.runs.run import Run

NAMES = (
    "dong2021-circle",
    "dong2021-fig2",
    "dong2021-path-census",
    "dong2021-paths-hull",
    "dong2021-paths-memory",
    "dong2021-paths-sort",
    "long-paths",
    "mechanisms",
    "training-fights-collapse",
    "width-depth",
    "wu2024-fig2",
)


SLOW = (
    "dong2021-fig2",
    "dong2021-paths-hull",
    "dong2021-paths-memory",
    "dong2021-paths-sort",
    "long-paths",
    "mechanisms",
    "training-fights-collapse",
    "width-depth",
    "wu2024-fig2",
)
"""Relatives of others, and those whose results have tests of their own."""
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)


class _Runs(dict[str, Run]):
    def __missing__(self, name: str) -> Run:
        self[name] = reproduce(name, small=True, seeds=1)
        return self[name]


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return _Runs()


def test_every_reproduction_is_tested_here() -> None:
    assert tuple(REPRODUCTIONS) == NAMES


@pytest.mark.slow
@EACH
def test_it_writes_data_figures_and_text(runs: dict[str, Run], name: str, tmp_path: Path) -> None:
    written = write_reproduction(runs[name], tmp_path)
    suffixes = {path.suffix for path in written}
    assert suffixes == {".json", ".parquet", ".png", ".svg", ".md"}
    assert all(path.stat().st_size > 0 for path in written)
    for path in written:
        if path.suffix == ".svg":
            ET.parse(path)
    again = Run.load(tmp_path)
    assert again.table.equals(runs[name].table)
    assert text_of(again) == text_of(runs[name]) == (tmp_path / "text.md").read_text(encoding="utf-8")


@EACH
def test_the_text_opens_with_figure_and_answer_and_ends_with_its_method(runs: dict[str, Run], name: str) -> None:
    text, entry = text_of(runs[name]), REPRODUCTIONS[name]
    title, figure, answer, paper, *_ = text.split("\n\n")
    assert (title, answer) == (f"# {entry.title}", runs[name].verdict)
    assert figure == f"![{entry.figure}](figure.png)"
    for cite in entry.cites:
        author, year = re.findall(r"[a-z]+|\d+", cite.key)[:2]
        assert author.capitalize() in paper
        assert year in paper
        assert cite.key not in text, "a reader of the text does not know BibTeX keys"
    assert text.count(f"\n{METHOD}\n") == 1
    assert not re.search(r"\bnan\b|undefined", text)


def test_dong_small_collapses_without_skips_and_not_with_them(runs: dict[str, Run]) -> None:
    table = runs["dong2021-fig2"].table
    for model, text in (("BERT", "words"), ("ALBERT", "pieces"), ("XLNet", "pieces")):
        where = {"model": model, "reading": "authors", "text": text}
        assert line(table, "relative_composite_residual", **where, curve="SAN").mean[-1] < 1e-3
        assert line(table, "relative_composite_residual", **where, curve="SAN+skip").mean[-1] > 0.3


def test_wu_small_layer_norm_under_the_complete_mask_is_rounding_in_both_formats(runs: dict[str, Run]) -> None:
    table = runs["wu2024-fig2"].table
    for dtype in (np.float32, np.float64):
        where = {"part": "figure", "variant": "SAN+LN", "mask": "complete", "dtype": np.dtype(dtype).name}
        # Float64 sees the fall go on where float32 has long stopped.
        assert line(table, "mu_over_norm", **where).mean[-1] < 4 * np.finfo(dtype).eps


def test_unknown_names_and_weights_are_answered() -> None:
    with pytest.raises(UnknownNameError, match="dong2021-fig2"):
        reproduce("dong2021-fig3")
    with pytest.raises(InputError, match="reads no weights named bert"):
        reproduce("dong2021-path-census", checkpoints={"bert": "somewhere"})


def test_published_curves_are_whole() -> None:
    facts = published("dong2021_fig2")
    assert len(facts["curves"]) == 24
    for entry in facts["curves"]:
        found = published_line(facts, model=entry["model"], weights=entry["weights"], curve=entry["curve"])
        assert found.values.size == 13
        assert np.nanmax(found.values) < 2
    assert published_line(facts, model="BERT", weights="init", curve="SAN").is_rounding(3)
    assert not published_line(facts, model="BERT", weights="init", curve="SAN").is_rounding(2)


@pytest.mark.slow
def test_a_reproduction_tells_how_long_it_took_unless_parts_were_kept(tmp_path: Path) -> None:
    assert (reproduce("dong2021-path-census", small=True).provenance.wall_seconds or 0) > 0
    assert reproduce("dong2021-circle", small=True, keep=tmp_path).provenance.wall_seconds is None


def test_the_networks_of_a_figure_are_measured_with_an_own_model() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    inputs = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    run = rs.reproduce("dong2021-fig2", model, inputs)
    same = rs.ablate(model, inputs, variants=["pure", "+mlp", "+skip", "full"], metrics=["relative_residual"])
    assert run.table.equals(same.table)
    assert {row["variant"] for row in run.table.to_pylist()} == {"pure", "+mlp", "+skip", "full"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: rs.reproduce(model), "then your model: rankscope.reproduce('dong2021-fig2', model, inputs)"),
        (lambda model: rs.reproduce("mechanisms", model), "takes no model; dong2021-fig2 does"),
        (lambda model: rs.reproduce("dong2021-fig2", inputs=torch.ones(1, 2, 16)), "Pass your model too"),
        (lambda model: rs.reproduce("dong2021-fig2", modle=model), "Did you mean 'model'"),
    ],
)
def test_wrong_ways_to_pass_an_own_model(call: Callable[[nn.Module], object], words: str) -> None:
    with pytest.raises(RankscopeError, match=re.escape(words)):
        call(nn.Linear(2, 2))
