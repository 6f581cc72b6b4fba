"""Ranges over HTTP: the right bits or an error that says what to do, whatever the network does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from rankscope.errors import LoadError
from rankscope.models.weight_files import tensors
from rankscope.models.weight_files.folders import LocalFolder, ModelFolder, model_folder, stored_tensors
from rankscope.models.weight_files.tensors import planned_reads, read_header
from tests import network_faults
from tests.hub_server import COMMIT, Fault, Handler, Served, serving
from tests.network_faults import FATAL, PASSING

TIMEOUT = 0.5


def connect(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """Make ``served`` the hub of this process."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", served.address)
    template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of tensors that follow each other; no model, because nothing here runs one."""
    place = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        drawn = {f"{number}.{k}": torch.randn(40, 7 + k, generator=generator) for k in range(4)}
        save_file(drawn, place / f"model-{number}.safetensors")
    (place / "config.json").write_text("{}")
    return place


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A hub with short timeouts, reads of 2 KiB and no pauses."""
    monkeypatch.setattr(tensors, "_LONGEST_READ", 1 << 11)
    monkeypatch.setattr(tensors, "_FIRST_BYTES", 1 << 9)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    with serving(Served(folder)) as served:
        connect(monkeypatch, served)
        yield served


def everything(place: ModelFolder) -> dict[str, torch.Tensor]:
    """All tensors of a model, read one range after the other."""
    stored = stored_tensors(place)
    found = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in stored.items()}
    for read in planned_reads((stored[name], found[name]) for name in stored):
        read()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_hub_gives_the_bits_of_the_folder_at_a_commit(hub: Served) -> None:
    place = model_folder("hub:owner/tiny")
    assert (place.origin, place.revision) == ("hub", COMMIT)
    assert same(everything(place), everything(LocalFolder(hub.folder)))
    assert place.traffic is not None
    assert place.traffic.received == hub.sent, "every byte is counted"
    assert place.traffic.requests == len(hub.ranges)


def test_no_byte_of_a_tensor_is_read_twice(hub: Served) -> None:
    place = model_folder("hub:tiny")
    stored = stored_tensors(place)
    hub.ranges.clear()
    found = [(entry, torch.empty(entry.shape, dtype=entry.dtype)) for entry in stored.values()]
    for read in planned_reads(found):
        read()
    assert sum(count for _, _, count in hub.ranges) == sum(entry.nbytes for entry in stored.values())


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.__name__)
def test_what_passes_is_survived(hub: Served, fault: Fault) -> None:
    place = model_folder("hub:tiny")
    hub.faults = [None, None, fault, fault]
    assert same(everything(place), everything(LocalFolder(hub.folder)))
    assert not hub.faults


@pytest.mark.parametrize("fault", FATAL, ids=lambda fault: fault.__name__)
def test_what_does_not_pass_is_said(hub: Served, fault: Fault) -> None:
    file = model_folder("hub:tiny").file("model-0.safetensors")  # type: ignore[union-attr]
    stored = read_header(file)["0.1"]
    hub.faults = [fault]
    with pytest.raises(LoadError, match=FATAL[fault]):
        stored.read_into(torch.empty(stored.shape))


def test_a_server_that_always_fails_is_given_up(hub: Served) -> None:
    stored = stored_tensors(model_folder("hub:tiny"))["0.1"]
    hub.faults = [network_faults.unavailable] * 100
    with pytest.raises(LoadError, match=r"could not be read.*503 Service Unavailable.*repeat the command later"):
        stored.read_into(torch.empty(stored.shape))
    assert len(hub.faults) == 96, "asked once, and three times again"


@pytest.mark.parametrize(
    ("token", "given", "message"),
    [
        ("right", None, "401.*hf auth login"),
        ("right", "wrong", "403.*accept the terms"),
    ],
)
def test_who_may_not_read_hears_what_to_do(
    hub: Served, token: str, given: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = token
    if given is not None:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        monkeypatch.setenv("HF_TOKEN", given)
    with pytest.raises(LoadError, match=message):
        model_folder("hub:tiny")


def test_the_token_is_sent_to_the_hub_and_not_where_it_redirects(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "right"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "right")
    assert len(everything(model_folder("hub:tiny"))) == 8  # the server refuses a token on its other host


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hub:other", "404.*Check the name"),
        ("hub:tiny@absent", "404.*revision"),
        ("hub:a b", "names no model of the hub"),
        ("hub:../tiny", "names no model of the hub"),
    ],
)
def test_a_name_that_is_not_there(hub: Served, spec: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        model_folder(spec)


def test_offline_is_said(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE is set"):
        model_folder("hub:tiny")


def test_nobody_listens(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LoadError, match=r"could not be read.*the connection"):
        model_folder("hub:tiny")


@pytest.mark.parametrize("url", ["https://user:secret@host/m", "https://host/m?X-Amz-Signature=abc", "http://h/m#part"])
def test_a_web_server_is_refused_without_its_address(url: str) -> None:
    with pytest.raises(LoadError, match="Web servers are not read from") as error:
        model_folder(url)
    assert "secret" not in str(error.value)
    assert "abc" not in str(error.value)


def test_an_index_cannot_lead_elsewhere(hub: Served, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    hub.folder = tmp_path
    with pytest.raises(LoadError, match="not a file of its own folder"):
        stored_tensors(model_folder("hub:tiny"))


def test_a_hub_id_is_downloaded_once_and_read_as_a_folder(
    hub: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankscope.models.loading import load

    hub.folder = tmp_path / "model"
    load("init:tiny-bert").model.save_pretrained(hub.folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    expected = everything(LocalFolder(hub.folder))
    first = load("owner/tiny")
    assert (first.origin, first.revision) == ("hub", COMMIT)
    assert all(torch.equal(value, expected[name]) for name, value in first.model.named_parameters())
    hub.ranges.clear()
    load("owner/tiny")
    assert not hub.ranges, "all files were in the cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load("owner/tiny").revision == COMMIT
    with pytest.raises(LoadError, match=r"hub cannot be reached or does not have it.*the cache has no owner/other"):
        load("owner/other")


MALFORMED = {
    "no files": {"siblings": None, "sha": None},
    "a commit that climbs": {"sha": "../../../etc"},
    "a size below zero": {"siblings": [{"rfilename": "config.json", "size": -1}]},
    "a size without end": {"siblings": [{"rfilename": "config.json", "size": 10**60}]},
    "files that are words": {"siblings": ["config.json"]},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_listing_that_is_none_ends_in_a_sentence(
    hub: Served, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import json

    from rankscope.models.loading import load

    def listing(handler: Handler, words: list[str]) -> None:
        body = json.dumps({"id": "tiny", "sha": COMMIT, "siblings": [], **MALFORMED[case]}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    monkeypatch.setattr(Handler, "listing", listing)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError):
        model_folder("hub:tiny")
    with pytest.raises(LoadError):
        load("owner/tiny")
