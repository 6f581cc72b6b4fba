"""Ranges over HTTP: the right bits or an error that says what to do, whatever the network does."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from rankscope.errors import InputError, LoadError
from rankscope.models.weight_files import http, tensors
from rankscope.models.weight_files.folders import LocalFolder, ModelFolder, model_folder, stored_tensors
from rankscope.models.weight_files.tensors import planned_reads
from tests import network_faults
from tests.hub_server import COMMIT, Fault, Served, serving
from tests.network_faults import FATAL, PASSING

TIMEOUT = 0.5
LONGEST_RUN = 20.0
"""Far above what any of these runs takes, far below what a test run would wait."""


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
    monkeypatch.setattr(http, "sleep", lambda seconds: None)
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


def test_a_folder_without_a_listing_has_an_index(hub: Served, tmp_path: Path) -> None:
    names = stored_tensors(LocalFolder(hub.folder))
    index = {name: Path(entry.file.name).name for name, entry in names.items()}
    (tmp_path / "config.json").write_text("{}")
    for path in hub.folder.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    import json

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    hub.folder = tmp_path
    place = model_folder(f"{hub.address}/plain/")
    assert same(everything(place), everything(LocalFolder(tmp_path)))
    assert (place.origin, place.revision) == ("url", None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.__name__)
def test_what_passes_is_survived(hub: Served, fault: Fault) -> None:
    place = model_folder("hub:tiny")
    stored_tensors(place)  # so that the fault meets a read of tensors
    hub.faults = [None, None, fault, fault]
    assert same(everything(place), everything(LocalFolder(hub.folder)))
    assert not hub.faults
    assert place.traffic is not None
    if fault is not network_faults.answers_less:  # an answer, not a failure
        assert place.traffic.retries >= 2


@pytest.mark.parametrize("fault", FATAL, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("place", ["hub:tiny", "plain"])
def test_what_does_not_pass_is_said(hub: Served, fault: Fault, place: str) -> None:
    stored = stored_tensors(model_folder("hub:tiny"))["0.1"]
    if place == "plain":
        stored = tensors.read_header(
            http.UrlFolder(f"{hub.address}/plain", http.Traffic()).file("model-0.safetensors")
        )["0.1"]  # type: ignore[arg-type]
    hub.faults = [fault]
    both = torch.empty(2, *stored.shape)

    def read_twice() -> None:  # a change is seen on the hub with the next request, redirected with another hash
        stored.read_into(both[0])
        stored.read_into(both[1])

    with pytest.raises(LoadError, match=FATAL[fault]):
        read_twice()


def test_a_request_continues_where_it_stopped(hub: Served) -> None:
    entry = max(stored_tensors(model_folder("hub:tiny")).values(), key=lambda one: one.nbytes)
    hub.ranges.clear()
    hub.faults = [network_faults.ends_early]
    place = torch.empty(entry.shape, dtype=entry.dtype)
    planned_reads([(entry, place)])[0]()
    (_, first, count), (_, again, rest) = hub.ranges
    assert first < again, "from the beginning would be twice the bytes"
    assert again + rest == first + count


def test_a_server_that_always_fails_is_given_up(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PATIENCE", 600.0)
    stored = stored_tensors(model_folder("hub:tiny"))["0.1"]
    hub.faults = [network_faults.unavailable] * 100
    with pytest.raises(LoadError, match=r"8 attempts failed, the last with 503 Service Unavailable.*--work"):
        stored.read_into(torch.empty(stored.shape))
    assert len(hub.faults) == 92


def test_pauses_are_those_that_the_server_asks_for(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(http, "PATIENCE", 600.0)
    monkeypatch.setattr(http, "sleep", waited.append)
    stored = stored_tensors(model_folder("hub:tiny"))["0.1"]

    def limited(handler: object, *words: object) -> bool:
        handler.refuse(429, Ratelimit='"resolvers";r=0;t=55')  # type: ignore[attr-defined]
        return True

    def dated(handler: object, *words: object) -> bool:
        from email.utils import formatdate

        handler.refuse(503, Retry_After=formatdate(time.time() + 30, usegmt=True))  # type: ignore[attr-defined]
        return True

    hub.faults = [limited, dated, network_faults.unavailable]
    stored.read_into(torch.empty(stored.shape))
    assert waited[0] == 55
    assert 27 < waited[1] <= 30
    assert 1 <= waited[2] <= 2, "the third failure, without advice: 2 s at most"


@pytest.mark.parametrize(
    ("token", "given", "message"),
    [
        ("right", None, "401 Unauthorized.*hf auth login"),
        ("right", "wrong", "403 Forbidden.*accept the terms"),
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
        ("hub:other", "404 Not Found.*Check the name"),
        ("hub:tiny@absent", "404 Not Found.*revision"),
        ("hub:a b", "names no model of the hub"),
        ("hub:../tiny", "names no model of the hub"),
    ],
)
def test_a_name_that_is_not_there(hub: Served, spec: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        model_folder(spec)


def test_a_hub_that_is_overloaded_is_asked_again(hub: Served) -> None:
    hub.status = 429
    with pytest.raises(LoadError, match="4 attempts failed, the last with 429 Too Many Requests"):
        model_folder("hub:tiny")


def test_offline_is_said(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE is set"):
        model_folder("hub:tiny")


def test_nobody_listens(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LoadError, match=r"4 attempts failed.*Check the connection"):
        model_folder("hub:tiny")


@pytest.mark.parametrize("url", ["https://user:secret@host/m", "https://host/m?X-Amz-Signature=abc", "http://h/m#part"])
def test_an_address_with_a_secret_is_not_recorded(url: str) -> None:
    with pytest.raises(LoadError) as error:
        model_folder(url)
    assert "secret" not in str(error.value)
    assert "abc" not in str(error.value)


def test_a_budget_is_not_exceeded(hub: Served) -> None:
    whole = sum(path.stat().st_size for path in hub.folder.glob("*.safetensors"))
    with pytest.raises(InputError, match="byte_budget=5,000"):
        everything(model_folder("hub:tiny", byte_budget=5000))
    assert hub.sent <= 5000
    assert len(everything(model_folder("hub:tiny", byte_budget=whole + 2000))) == 8


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
    with pytest.raises(LoadError, match=r"hub cannot be reached or does not have it.*owner/other is not in"):
        load("owner/other")


@pytest.mark.slow
def test_two_hundred_runs_under_faults(hub: Served) -> None:
    """Each run meets one to three faults at random requests: right bits if all pass, else the error of the first."""
    drawn = random.Random(24)
    expected = everything(LocalFolder(hub.folder))
    ended = {"right": 0, "refused": 0}
    for number in range(200):
        hub.etag, hub.hashes = "one", {}
        kinds = [drawn.choice(PASSING if drawn.random() < 0.7 else tuple(FATAL)) for _ in range(drawn.randint(1, 3))]
        hub.faults = []
        for fault in kinds:
            hub.faults += [None] * drawn.randint(0, 3) + [fault]
        began = time.monotonic()
        fatal = [FATAL[fault] for fault in kinds if fault in FATAL]
        said = ""
        try:
            found = everything(model_folder("hub:tiny" if number % 2 else "hub:tiny@v1"))
        except LoadError as error:
            said = str(error)
        assert any(message in said for message in fatal) if fatal else said == "", (number, kinds, said)
        assert said or same(found, expected), (number, kinds)
        ended["refused" if said else "right"] += 1
        assert time.monotonic() - began < LONGEST_RUN, (number, kinds)
    assert min(ended.values()) > 40, ended
