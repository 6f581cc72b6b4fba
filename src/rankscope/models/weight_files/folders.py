"""The files of a model, wherever they are: a local folder, the hub, an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rankscope._types import path_of
from rankscope.errors import LoadError
from rankscope.models.loading.config import config_from_json
from rankscope.models.loading.shard_files import indexed_files, safetensors_in
from rankscope.models.weight_files.files import (
    LocalFile,
    Traffic,
    WeightFile,
    hub_id,
    is_hub_id,
    is_remote,
    refuse_web_server,
)
from rankscope.models.weight_files.remote import CONNECTIONS, HubFolder, RemoteFolder, StoreFolder
from rankscope.models.weight_files.tensors import StoredTensor, stored_in

__all__ = ["CONNECTIONS", "LocalFolder", "ModelFolder", "config_in", "model_folder", "stored_tensors"]


def model_folder(spec: str | Path) -> ModelFolder:
    """The files of a model; of a remote one, only the list of files is read.

    Args:
        spec: a local folder, ``hub:NAME``, ``hub:NAME@REVISION``, a hub id, or the address of a folder (``s3://``,
            ``gs://``).

    Raises:
        LoadError: there is no such place, or it cannot be read.
    """
    text, traffic = str(spec), Traffic()
    if text.startswith("hub:"):
        return HubFolder(*hub_id(text), text, traffic)
    refuse_web_server(text)
    if is_remote(spec):
        return StoreFolder(text, traffic)
    place = path_of(spec, "model", "a local folder, hub:NAME, or an address (s3://, gs://)")
    if not place.exists() and isinstance(spec, str) and is_hub_id(text):
        return HubFolder(text, None, text, traffic)
    return LocalFolder(place)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine."""

    path: Path
    origin: Literal["folder"] = "folder"
    revision: None = None
    traffic: None = None

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    def weight_files(self) -> list[WeightFile]:
        """Those that the index names, or all."""
        return [LocalFile(path) for path in indexed_files(self.path) or safetensors_in(self.path)]

    @contextmanager
    def copied(self, names: Sequence[str]) -> Iterator[Path]:
        """The folder itself; nothing is copied."""
        yield self.path


ModelFolder = LocalFolder | RemoteFolder
"""The files of one model: which there are, where they come from, and copies of the small ones."""


def config_in(folder: ModelFolder) -> Any:
    """The configuration of a model, built from data only; of a remote model, one small file is read.

    Raises:
        LoadError: there is none, or it is not valid.
    """
    with folder.copied(("config.json",)) as place:
        return config_from_json(place / "config.json", None)


def stored_tensors(folder: ModelFolder) -> dict[str, StoredTensor]:
    """All tensors of a model by name, from the headers of its files.

    Raises:
        LoadError: there are no safetensors, or a file is not valid.
    """
    files = folder.weight_files()
    if not files:
        raise LoadError(
            f"{folder.name!r} has no *.safetensors, which are read one tensor at a time. Pass a folder with a "
            "config.json and *.safetensors, hub:NAME, or an address (s3://, gs://); save your own model "
            "with save_pretrained."
        )
    if folder.traffic is None:
        return stored_in(files)
    with ThreadPoolExecutor(CONNECTIONS) as readers:
        return stored_in(files, readers)
