"""Object stores through fsspec, here its store in memory."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from rankscope.errors import LoadError
from rankscope.ext.offload import object_store
from rankscope.models.weight_files import http
from rankscope.models.weight_files.folders import model_folder, stored_tensors


class Store:
    """fsspec's store in memory, with a version of each object and errors on request."""

    def __init__(self) -> None:
        self._own = fsspec.filesystem("memory")
        self.version = "1"
        self.errors: list[Exception] = []

    def ls(self, path: str, detail: bool, refresh: bool) -> list[dict[str, Any]]:
        return [{**entry, "ETag": self.version} for entry in self._own.ls(f"/{path}", detail=detail)]

    def info(self, path: str, refresh: bool) -> dict[str, Any]:
        return {**self._own.info(path), "ETag": self.version}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return bytes(self._own.cat_file(path, start=start, end=end))


WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    own = fsspec.filesystem("memory")
    own.pipe_file("/bucket/model/model.safetensors", save(WEIGHTS))
    own.pipe_file("/bucket/model/config.json", b"{}")
    found = Store()
    monkeypatch.setattr(object_store, "_store", lambda scheme: found)
    monkeypatch.setattr(http, "sleep", lambda seconds: None)
    yield found
    own.rm("/bucket", recursive=True)


def test_the_bits_are_those_of_the_object(store: Store) -> None:
    folder = model_folder("s3://bucket/model/")
    assert (folder.origin, folder.revision) == ("url", None)
    for name, entry in stored_tensors(folder).items():
        place = torch.empty(entry.shape, dtype=entry.dtype)
        entry.read_into(place)
        assert torch.equal(place, WEIGHTS[name])
    with folder.copied(("config.json", "tokenizer.json")) as place:
        assert [path.name for path in place.iterdir()] == ["config.json"]


def test_an_object_that_changes_is_refused(store: Store) -> None:
    entry = stored_tensors(model_folder("gs://bucket/model"))["a"]
    store.version = "2"
    with pytest.raises(LoadError, match="changed while it was being read"):
        entry.read_into(torch.empty(3, 4))


def test_errors_pass_or_say_what_to_do(store: Store) -> None:
    folder = model_folder("s3://bucket/model")
    entry = stored_tensors(folder)["a"]
    store.errors = [OSError("reset"), TimeoutError("late")]
    entry.read_into(torch.empty(3, 4))
    assert folder.traffic is not None
    assert folder.traffic.retries == 2
    store.errors = [OSError("reset")] * 9
    with pytest.raises(LoadError, match="attempts failed, the last with OSError: reset"):
        entry.read_into(torch.empty(3, 4))
    store.errors = [PermissionError("denied")]
    with pytest.raises(LoadError, match="Check your credentials"):
        entry.read_into(torch.empty(3, 4))
    with pytest.raises(LoadError, match="does not exist"):
        model_folder("s3://bucket/absent")


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(LoadError, match="pip install gcsfs"):
        model_folder("gs://bucket/model")


def test_a_store_that_does_not_answer_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = stored_tensors(model_folder("s3://bucket/model"))["a"]
    over = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(http, "PATIENCE", 0.3)
    monkeypatch.setattr(store, "cat_file", lambda path, start, end: over.wait(60))
    began = time.monotonic()
    with pytest.raises(LoadError, match="attempts failed, the last with TimeoutError: no answer in"):
        entry.read_into(torch.empty(3, 4))
    assert time.monotonic() - began < 20
    over.set()
