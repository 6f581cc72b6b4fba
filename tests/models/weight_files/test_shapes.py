"""Sizes of a checkpoint from its headers."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankscope as rs
from rankscope.models.loading import load
from rankscope.models.weight_files.shapes import shapes_of
from tests.ext.offload.folders import saved
from tests.hub_server import COMMIT, Served, serving
from tests.models.weight_files.test_http import connect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("init:tiny-llama", tmp_path_factory.mktemp("shapes") / "llama")


def test_sizes_are_those_of_the_model(folder: Path) -> None:
    model = load(folder).model
    found = shapes_of(folder)
    block = list(model.layers[0].parameters())
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.formats == {"F32": found.parameters}
    assert found.nbytes == 4 * found.parameters
    assert (found.blocks, found.largest_block) == (3, 4 * sum(p.numel() for p in block))
    assert found.bytes_read is None
    assert "3 blocks" in str(found)


def test_only_headers_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.models.weight_files.tensors._FIRST_BYTES", 8)
    with serving(Served(folder)) as served:
        connect(monkeypatch, served)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 10)
        found = shapes_of("hub:tiny")
        starts = {path.name: path.read_bytes()[:8] for path in folder.glob("*.safetensors")}
        headers = {name: 8 + int.from_bytes(start, "little") for name, start in starts.items()}
        assert found.revision == COMMIT
        index = (folder / "model.safetensors.index.json").stat().st_size
        assert found.bytes_read == served.sent == sum(headers.values()) + index
        assert all(first + count <= headers.get(name, index) for name, first, count in served.ranges)


def test_a_prediction_reads_the_configuration_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Served(folder)) as served:
        connect(monkeypatch, served)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 10)
        run = rs.predict("hub:tiny", seed=0)
        assert {name for name, _, _ in served.ranges} == {"config.json"}
        assert any(COMMIT in note for note in run.notes)
