"""Which weights a spec means, without reading them: names, sizes and times of files, or a hash of the configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rankscope._errors import InputError, LoadError

WEIGHTS = ("*.safetensors", "*.gguf", "*.safetensors.index.json", "pytorch_model*.bin")
OTHERS = ("config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json",
          "tokenizer_config.json")  # fmt: skip
LARGEST_TEXT = 64 * 2**20


def identity_of(spec: str, revision: str | None = None) -> dict[str, Any]:
    """What tells one set of weights from another, in plain JSON types.

    A preset is known by the hash of its configuration, a file by name, size and time of change, a hub name by itself
    and its revision: give a commit where the branch may move.

    Example:
        >>> identity_of("init:tiny-bert")["kind"]
        'preset'

    Raises:
        LoadError: a local path that holds no model.
    """
    if spec.startswith("init:"):
        return _of_initialisation(spec.removeprefix("init:"))
    path = Path(spec).expanduser()
    if path.is_dir():
        return {"kind": "folder", "files": _files(path)}
    if path.is_file():
        return {"kind": "file", "files": [_facts(path)]}
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise LoadError(f"There is no file or folder {spec!r}. Paths in a plan are seen from where it is started.")
    return {"kind": "hub", "name": spec, "revision": revision}


def differs(asked: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether a worker sees other weights than the plan was made for; times may differ between machines."""

    def without_times(one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "files": [entry[:2] for entry in one.get("files", ())]}

    return without_times(asked) != without_times(here)


def text_of(path: str) -> str:
    """The text of a file that models are to read.

    Raises:
        InputError: when it is absent, too large, or no text.
    """
    try:
        if Path(path).expanduser().stat().st_size > LARGEST_TEXT:
            raise InputError(f"The text {path} has more than {LARGEST_TEXT} bytes. Cut it: a sweep reads a few pages.")
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"The text {path} of the plan cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The text {path} of the plan is not UTF-8 (byte {error.start}).") from error


def hash_of(value: object) -> str:
    """SHA-256 of the sorted JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _of_initialisation(name: str) -> dict[str, Any]:
    from rankscope.models.presets import PRESETS, preset

    path = Path(name).expanduser()
    if name not in PRESETS and path.exists():
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise LoadError(f"{path} holds no config.json to initialise.")
        return {"kind": "config", "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    entry = preset(name)
    facts = [entry.model_type, json.loads(json.dumps(dict(entry.config), default=str)), entry.model_class]
    return {"kind": "preset", "name": name, "sha256": hash_of(facts)}


def _files(folder: Path) -> list[list[Any]]:
    found = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    found += [folder / name for name in OTHERS if (folder / name).is_file()]
    if not any(path.name == "config.json" or path.suffix == ".gguf" for path in found):
        raise LoadError(f"{folder} holds no config.json and no .gguf file, so it is not a model folder.")
    return [_facts(path) for path in found]


def _facts(path: Path) -> list[Any]:
    found = path.stat()
    return [path.name, found.st_size, found.st_mtime_ns]
