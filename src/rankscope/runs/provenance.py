"""Where a result comes from: enough to reproduce it, and nothing about the person who ran it."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rankscope._files import read_regular
from rankscope._printing import brief
from rankscope.errors import ResultError
from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.changes import changes_in_words

SCHEMA = 1
LIBRARIES = (
    "rankscope",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "accelerate",
    "x-transformers",
    "gguf",
)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"refs/[\w./+@-]{1,200}")
_LARGEST_GIT_FILE = 4 * 2**20


@dataclass(frozen=True)
class Provenance:
    """Facts about one run. Paths below the home directory are written with ``~``; no host or user name is kept.

    Args:
        model: the spec as the user gave it, or the class name of a module already in memory.
        origin: how the spec was read, e.g. ``"hub"``, ``"folder"``, ``"init"``, ``"memory"``.
        revision: commit of the hub repository, if there is one.
        config_hash: hash of the model's configuration.
        seed: seed of a random initialisation and of random inputs.
        parameters: number of parameters.
        weights_dtype: dtype the weights are held in.
        arithmetic_dtype: dtype the forward pass computes in.
        device: device the model ran on; None in runs of earlier versions.
        attention: attention implementation that ran.
        token_policy: which tokens count.
        sequences: number of sequences measured.
        lengths: tokens counted in each sequence.
        operations: plain descriptions of the surgery the model ran under, in order.
        layout: where the user declared the residual stream to be; None if it was discovered.
        inputs: description of the inputs; None in runs of earlier versions.
        inputs_hash: SHA-256 of the token ids, or of the input tensors if the model takes no token ids.
        spectra: ``"exact"`` or ``"estimated"``, if ranks of tokens were measured.
        structure: what was claimed about the structure of the model, and the experiment that each claim rests on.
    """

    model: str
    origin: str | None = None
    revision: str | None = None
    config_hash: str | None = None
    seed: int | None = None
    parameters: int | None = None
    weights_dtype: str | None = None
    arithmetic_dtype: str | None = None
    attention: str | None = None
    token_policy: str | None = None
    sequences: int | None = None
    lengths: tuple[int, ...] = ()
    operations: tuple[Mapping[str, Any], ...] = ()
    layout: str | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}".strip())
    command: tuple[str, ...] = field(default_factory=lambda: current_command())
    git: Mapping[str, Any] | None = field(default_factory=lambda: git_state())
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA
    wall_seconds: float | None = None
    inputs: str | None = None
    inputs_hash: str | None = None
    device: str | None = None
    spectra: str | None = None
    structure: tuple[Mapping[str, Any], ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("versions", "git", "lengths", "command", "operations", "structure"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        object.__setattr__(self, "model", without_home(self.model))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Provenance.from_json, (self.to_json(),))

    @property
    def subject(self) -> str:
        """What was measured, as a title: the model, without the folders above it, and what was changed in it."""
        name = self.model
        if self.origin == "folder":
            name = re.split(r"[/\\]", name.rstrip("/\\"))[-1] or name
        return f"{name} {self.changes}".rstrip()

    @property
    def changes(self) -> str:
        """The surgery in words, e.g. ``without skip connections``; empty if there was none."""
        return changes_in_words(self.operations)

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {item.name: thaw(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, facts: object) -> Provenance:
        """Read what :meth:`to_json` wrote; anything else is a :class:`ResultError`."""
        if not isinstance(facts, Mapping):
            raise ResultError(f"Provenance must be a JSON object, got {type(facts).__name__}.")
        known = {item.name for item in dataclasses.fields(cls)}
        facts = {**dict.fromkeys(_LATER), "structure": (), **facts}
        if set(facts) != known:
            odd = sorted(str(name) for name in set(facts) ^ known)
            raise ResultError(f"Provenance does not have the fields of schema {SCHEMA}: {', '.join(odd)} differ.")
        for name in known:
            if not _fits(name, facts[name]):
                raise ResultError(
                    f"Provenance: {name!r} cannot be {facts[name]!r:.80}; it was not written by rankscope."
                )
        return cls(**{name: facts[name] for name in known})


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("seed", "parameters", "sequences", "schema"), int),
    **dict.fromkeys(("lengths", "command", "operations", "structure"), Sequence),
    **dict.fromkeys(("versions", "git"), Mapping),
    "wall_seconds": (int, float),
}
"""What a value read from a file must be; every other field is text."""
_ENTRIES: Mapping[str, type] = {"lengths": int, "command": str, "operations": Mapping, "structure": Mapping}
_REQUIRED = ("model", "python", "platform", "created", "versions", "schema", *_ENTRIES)
_LATER = ("layout", "inputs", "inputs_hash", "device", "spectra")
"""Fields that runs of earlier versions do not have."""


def _fits(name: str, value: object) -> bool:
    """Whether a value read from a file is valid for a field."""
    if value is None:
        return name not in _REQUIRED
    if isinstance(value, bool) or not isinstance(value, _KINDS.get(name, str)):
        return False
    entries = value if name in _ENTRIES and isinstance(value, Sequence) else ()
    # Text is a sequence too.
    is_text = isinstance(value, str) and name in _KINDS
    return not is_text and all(isinstance(one, _ENTRIES[name]) and not isinstance(one, bool) for one in entries)


def installed_versions(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Versions of the installed ones among ``libraries``, without importing them."""
    versions = {name: _version(name) for name in libraries}
    return {name: version for name, version in versions.items() if version is not None}


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def without_home(text: str, home: str | None = None) -> str:
    """``text`` with the home directory replaced by ``~`` wherever a path starts with it.

    Example:
        >>> without_home("--out=/users/ada/runs", home="/users/ada")
        '--out=~/runs'
    """
    folder = (os.path.expanduser("~") if home is None else home).rstrip("/\\")  # stays "~" for a user without one
    if len(folder) < 2:
        return text
    return re.sub(re.escape(folder) + r"(?=$|[/\\:;,\s'\"])", "~", text)


def current_command() -> tuple[str, ...]:
    """The command line of this process, with the program reduced to its file name."""
    program, *rest = sys.argv or [""]
    return (Path(program).name, *(without_home(word) for word in rest))


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout that contains ``folder``, read from its files; None if there is none or it is malformed.

    The ``git`` program is not run: it obeys the settings of the current repository, and one of them names a command
    to execute. Whether tracked files differ from the commit is therefore unknown, and ``dirty`` is None.
    """
    start = Path.cwd() if folder is None else Path(folder).resolve()
    for place in (start, *start.parents):
        if (place / ".git").exists():
            commit = _commit_in(place / ".git")
            return None if commit is None else {"commit": commit, "dirty": None}
    return None


def _commit_in(home: Path) -> str | None:
    """The commit that HEAD names; None for anything that git itself would not write."""
    if home.is_file():  # a worktree or a submodule: one line with the path of the directory that has HEAD
        home = home.parent / _git_file(home).removeprefix("gitdir: ").strip()
    head = _git_file(home / "HEAD").strip()
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else None
    name = head.removeprefix("ref: ")
    if not _REF.fullmatch(name) or ".." in name:
        return None
    shared = _git_file(home / "commondir").strip()
    for store in (home, home / shared) if shared else (home,):
        named = _git_file(store / name).strip()
        if _COMMIT.fullmatch(named):
            return named
        for line in _git_file(store / "packed-refs").splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name and _COMMIT.fullmatch(commit):
                return commit
    return None


def _git_file(path: Path) -> str:
    """The text of a regular file of at most 4 MiB, else empty: reading a pipe might never end."""
    try:
        return read_regular(path, _LARGEST_GIT_FILE).decode("utf-8", errors="replace")
    except (OSError, ValueError):  # no permission, or not a valid file name
        return ""
