"""Where a result comes from: enough to make it again, and nothing about the person who made it."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rankscope._errors import ResultError
from rankscope.results._frozen import freeze, thaw

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
GIT_SECONDS = 5.0


@dataclass(frozen=True)
class Provenance:
    """Facts about one run. Paths below the home directory are written with ``~``; no host or user name is kept.

    Args:
        model: the spec as the user gave it, or the class name of a module already in memory.
        origin: how the spec was read, e.g. ``"hub"``, ``"folder"``, ``"init"``, ``"memory"``.
        revision: commit of the hub repository, where there is one.
        config_hash: hash of the model's configuration.
        seed: seed of a random initialisation and of random inputs.
        parameters: number of parameters.
        weights_dtype: dtype the weights are held in.
        arithmetic_dtype: dtype the forward pass computes in.
        attention: attention implementation that ran.
        token_policy: which tokens count.
        sequences: number of sequences measured.
        lengths: tokens counted in each sequence.
        operations: plain descriptions of the surgery the model ran under, in order.
        layout: where the residual stream was declared to be; None where it was found.
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

    def __post_init__(self) -> None:
        for name in ("versions", "git", "lengths", "command", "operations"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        object.__setattr__(self, "model", without_home(self.model))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Provenance.from_json, (self.to_json(),))

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {item.name: thaw(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, facts: object) -> Provenance:
        """Read what :meth:`to_json` wrote; anything else is a :class:`ResultError`."""
        if not isinstance(facts, Mapping):
            raise ResultError(f"Provenance must be a JSON object, got {type(facts).__name__}.")
        known = {item.name for item in dataclasses.fields(cls)}
        if set(facts) != known:
            odd = sorted(str(name) for name in set(facts) ^ known)
            raise ResultError(f"Provenance does not have the fields of schema {SCHEMA}: {', '.join(odd)} differ.")
        for name in known:
            if not _fits(name, facts[name]):
                raise ResultError(
                    f"Provenance: {name!r} cannot be {facts[name]!r:.80}; it was not written by rankscope."
                )
        return cls(**{name: facts[name] for name in known})


_WORDS = ("model", "origin", "revision", "config_hash", "weights_dtype", "arithmetic_dtype", "attention",
          "token_policy", "python", "platform", "created")  # fmt: skip
_REQUIRED = ("model", "python", "platform", "created", "versions", "schema", "lengths", "operations", "command")


def _fits(name: str, value: object) -> bool:
    """Whether a field of a file may hold this."""
    if value is None:
        return name not in _REQUIRED
    if name in _WORDS:
        return isinstance(value, str)
    if name in ("seed", "parameters", "sequences", "schema"):
        return _is_whole(value)
    if name == "wall_seconds":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "lengths":
        return isinstance(value, Sequence) and all(map(_is_whole, value))
    if name == "command":
        return isinstance(value, Sequence) and all(isinstance(word, str) for word in value)
    if name == "operations":
        return isinstance(value, Sequence) and all(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def installed_versions(libraries: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Versions of those of ``libraries`` that are installed, without importing any."""
    found = {name: _version(name) for name in libraries}
    return {name: version for name, version in found.items() if version is not None}


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
    """The command line of this process, its program by name only."""
    program, *rest = sys.argv or [""]
    return (Path(program).name, *(without_home(word) for word in rest))


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit of the checkout that ``folder`` lies in and whether tracked files differ from it; None outside one."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path | None, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
