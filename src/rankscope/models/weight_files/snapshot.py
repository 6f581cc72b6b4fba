"""A model of the hub as a local folder, in the cache of huggingface_hub, where other tools find it too.

The files are downloaded by :mod:`rankscope.models.weight_files.http` with its checks and limits, and hashed on the way:
a file gets its name in the cache only if it has the hash that the hub states. Then it is a folder like any other.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from rankscope.errors import LoadError
from rankscope.models.loading.shard_files import BESIDE, INDEX, TOKENIZER_FILES, named_in_index
from rankscope.models.weight_files.files import Traffic, bytes_at
from rankscope.models.weight_files.http import HubFolder, refuse_other_content
from rankscope.models.weight_files.remote_folder import largest_of

_PIECE = 2**24
_AT_ONCE = 8
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARD_OF_PICKLE = re.compile(r"pytorch_model-\d+-of-\d+\.bin")
_BRANCH = re.compile(r"(?!.*\.\.)[\w][\w./-]*")


def hub_snapshot(name: str, revision: str | None, *, online: bool, weights: bool, allow_pickle: bool = False) -> Path:
    """The folder of a model of the hub, after downloading what it lacks.

    Args:
        name: its id.
        revision: branch, tag or commit; None for the default branch.
        online: ask the hub; if False, only the cache is used.
        weights: also the weights; otherwise configuration and tokenizer only.
        allow_pickle: also ``pytorch_model.bin`` if there are no safetensors.

    Raises:
        LoadError: the hub or the cache does not have it, or it cannot be downloaded.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if not online:
        return _kept(cache, name, revision)
    folder = HubFolder(name, revision, f"hub:{name}", Traffic())
    commit = str(folder.revision)
    place = cache / "snapshots" / commit
    try:
        _fetch(folder, ("config.json", *TOKENIZER_FILES, *BESIDE, *([INDEX] if weights else [])), cache)
        if weights:
            _fetch(folder, _weight_names(folder, place, allow_pickle), cache)
        branch = revision or "main"
        if _BRANCH.fullmatch(branch) and branch != commit:
            (cache / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
            (cache / "refs" / branch).write_text(commit, encoding="ascii")
    except OSError as error:
        raise LoadError(
            f"{name} could not be stored in {cache}: {error.strerror}. Make room, or set HF_HOME to another folder."
        ) from error
    if not place.is_dir():
        raise LoadError(f"{name} has no config.json, so it is not a model.")
    return place


def _kept(cache: Path, name: str, revision: str | None) -> Path:
    """The folder that an earlier download has left."""
    branch = revision or "main"
    try:
        commit = (cache / "refs" / branch).read_text(encoding="ascii").strip() if _BRANCH.fullmatch(branch) else branch
    except (OSError, UnicodeDecodeError):
        commit = branch
    folder = cache / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not folder.is_dir():
        raise LoadError(f"the hub is not reachable, or HF_HUB_OFFLINE is set, and {name} is not in {cache.parent}")
    return folder


def _weight_names(folder: HubFolder, place: Path, allow_pickle: bool) -> list[str]:
    index = place / INDEX
    if index.is_file():
        return named_in_index(index.read_bytes(), f"{folder.name}/{INDEX}")
    if folder.listed_file("model.safetensors") is not None or not allow_pickle:
        return ["model.safetensors"]
    return [*_PICKLES, *(name for name in folder.names if _SHARD_OF_PICKLE.fullmatch(name))]


def _fetch(folder: HubFolder, names: Sequence[str], cache: Path) -> None:
    """Download those of these files that the hub has and the cache does not have."""
    snapshot = cache / "snapshots" / str(folder.revision)
    _refuse_large(folder, names)
    missing = [name for name in names if folder.listed_file(name) is not None and not os.path.lexists(snapshot / name)]
    needed = sum(listed.size for name in missing if (listed := folder.listed_file(name)) is not None)
    if not missing:
        return
    for part in (snapshot, cache / "blobs"):
        part.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise LoadError(
            f"{folder.name} has {needed:,} bytes to download, and {cache} has room for {free:,}. Set HF_HOME to a "
            "larger disk, or read it without a download: --offload."
        )
    with (
        tqdm(total=needed, unit="B", unit_scale=True, desc=folder.name, disable=None, leave=False) as bar,
        folder.traffic.watched(bar.update),
        ThreadPoolExecutor(_AT_ONCE) as readers,
    ):
        list(readers.map(lambda name: _download(folder, name, cache), missing))


def _refuse_large(folder: HubFolder, names: Sequence[str]) -> None:
    """The limits of local files, before anything is downloaded."""
    for name in names:
        listed, largest = folder.listed_file(name), largest_of(name)
        if listed is not None and largest is not None and listed.size > largest:
            raise LoadError(
                f"{folder.name}/{name} has {listed.size:,} bytes; at most {largest:,} are read of such a file."
            )


def _download(folder: HubFolder, name: str, cache: Path) -> None:
    """Download one file under another name, and rename it once its hash is that of the listing."""
    listed, file = folder.listed_file(name), folder.file(name)
    if listed is None or file is None:
        raise LoadError(f"{folder.name} has no file {name!r}.")
    handle, unfinished = tempfile.mkstemp(dir=cache / "blobs", suffix=".incomplete")
    try:
        with os.fdopen(handle, "wb") as out:
            digest = hashlib.sha256() if listed.sha256 else hashlib.sha1(b"blob %d\0" % listed.size)
            for offset in range(0, listed.size, _PIECE):
                piece = bytes_at(file, offset, min(_PIECE, listed.size - offset))
                digest.update(piece)
                out.write(piece)
        refuse_other_content(f"{folder.name}/{name}", listed, digest.hexdigest())
        Path(unfinished).chmod(0o644)
        _link(Path(unfinished), cache / "blobs" / listed.blob, cache / "snapshots" / str(folder.revision) / name)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _link(content: Path, blob: Path, place: Path) -> None:
    os.replace(content, blob)
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except FileExistsError:  # another process has downloaded it at the same time
        return
    except OSError:  # a system without links
        os.replace(blob, place)
