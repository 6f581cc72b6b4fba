"""Models that are not on this machine: the values of the local run, and no more bytes than necessary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import rankscope as rs
from tests.ext.offload.folders import same_bits, saved
from tests.hub_server import COMMIT, Served, serving
from tests.network_faults import drops_half_way, unavailable

SHAPE = {"sequences": 2, "tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("init:tiny-llama", tmp_path_factory.mktemp("remote") / "llama")


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(Served(folder)) as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        yield served


def test_measure_reads_block_by_block_and_gives_the_same_bits(hub: Served) -> None:
    hub.latency = 0.01
    local = rs.measure(hub.folder, rs.Inputs(**SHAPE))
    hub.faults = [None, None, None, drops_half_way, unavailable]
    run = rs.measure(rs.Model("hub:owner/tiny@v1", offload=True), rs.Inputs(**SHAPE))
    assert same_bits(run, local)
    assert (run.provenance.origin, run.provenance.revision) == ("hub", COMMIT)
    assert not hub.faults
    facts = run.extra["offload"]
    assert facts["blocks_read"] == 3
    assert facts["bytes_read"] <= hub.sent  # what was under way when a connection broke is sent again


def test_a_bare_hub_name(hub: Served) -> None:
    local = rs.measure(hub.folder, rs.Inputs(**SHAPE))
    assert same_bits(rs.measure(rs.Model("owner/tiny", offload=True), rs.Inputs(**SHAPE)), local)


def test_nothing_is_left_on_disk(hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    run = rs.measure(rs.Model("hub:tiny", offload=True), rs.Inputs(**SHAPE))
    assert run.extra["offload"]["bytes_read"] == hub.sent
    assert list(tmp_path.iterdir()) == []
