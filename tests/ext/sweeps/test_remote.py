"""A sweep over a base model and a fine-tuned copy on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import rankscope as rs
from rankscope.errors import InputError
from tests.ext.offload.folders import saved
from tests.hub_server import Served, serving
from tests.models.weight_files.test_http import connect

INPUTS = {"sequences": 2, "tokens": 12}
MEASURE = {"offload": True, "metrics": ["relative_residual"], "sites": ["block.out"]}
PLAN: dict[str, Any] = {"models": ["hub:base/tiny", "hub:copy/tiny"], "verbs": [{"measure": MEASURE}], "inputs": INPUTS}


def tuned(base: Path, folder: Path) -> Path:
    """A copy whose last block has other weights; the first files are those of the base."""
    folder.mkdir()
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors" and any(name.startswith("layers.2.") for name in load_file(path)):
            changed = {n: t * 1.5 if n.startswith("layers.2.") else t for n, t in load_file(path).items()}
            save_file(changed, folder / path.name, {"format": "pt"})
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    base = saved("init:tiny-llama", tmp_path / "base")
    with serving(Served(base, others={"base": base, "copy": tuned(base, tmp_path / "copy")})) as served:
        connect(monkeypatch, served)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60.0)
        yield served


def test_the_rows_of_each_model(hub: Served, tmp_path: Path) -> None:
    assert rs.sweep(PLAN, tmp_path / "sweep", serial=True).complete
    columns = ("site", "layer", "sequence", "value")
    found = rs.query(tmp_path / "sweep", f"select model, {', '.join(columns)} from rows").to_pylist()
    for name in ("base", "copy"):
        here = rs.measure(
            tmp_path / name, rs.Inputs(**INPUTS), metrics=MEASURE["metrics"], sites=MEASURE["sites"]
        ).table
        wanted = sorted(zip(*(here[column].to_pylist() for column in columns), strict=True))
        assert wanted == sorted(
            tuple(row[column] for column in columns) for row in found if row["model"] == f"hub:{name}/tiny"
        )


def test_variants_of_a_model_that_is_never_whole_are_refused() -> None:
    with pytest.raises(InputError, match="offload reads one block at a time"):
        rs.sweep({**PLAN, "variants": ["full", "pure"]}, "never", serial=True)
