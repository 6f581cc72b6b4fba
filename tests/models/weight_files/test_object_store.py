"""Object stores through fsspec, here its store in memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save

from rankscope.errors import LoadError
from rankscope.models.weight_files import remote
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

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str) -> list[bytes]:
        if self.errors:
            raise self.errors.pop(0)
        return list(self._own.cat_ranges(paths, starts, ends, on_error=on_error))


WEIGHTS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    own = fsspec.filesystem("memory")
    own.pipe_file("/bucket/model/model.safetensors", save(WEIGHTS))
    own.pipe_file("/bucket/model/config.json", b"{}")
    found = Store()
    monkeypatch.setattr(remote, "_store", lambda scheme: found)
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


def test_errors_say_what_to_do(store: Store) -> None:
    entry = stored_tensors(model_folder("s3://bucket/model"))["a"]
    store.errors = [OSError("reset")]
    with pytest.raises(LoadError, match=r"OSError: reset.*repeat the command"):
        entry.read_into(torch.empty(3, 4))
    store.errors = [PermissionError("denied")]
    with pytest.raises(LoadError, match="check the permissions"):
        entry.read_into(torch.empty(3, 4))
    with pytest.raises(LoadError, match=r"could not be read.*Check the name"):
        model_folder("s3://bucket/absent")


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(LoadError, match="pip install gcsfs"):
        model_folder("gs://bucket/model")
