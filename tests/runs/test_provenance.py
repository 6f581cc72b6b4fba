"""Provenance says enough, and nothing about the person."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.errors import ResultError
from rankscope.runs.provenance import Provenance, git_state, without_home


def test_json_round_trip() -> None:
    facts = Provenance(model="m", seed=3, lengths=(4, 5), parameters=10, wall_seconds=0.5)
    text = json.dumps(facts.to_json(), allow_nan=False)
    assert Provenance.from_json(json.loads(text)) == facts
    assert pickle.loads(pickle.dumps(facts)) == facts


def test_it_cannot_be_changed() -> None:
    facts = Provenance(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.model = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        facts.versions["torch"] = "9"  # type: ignore[index]


def test_no_host_and_no_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "ada"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "argv", [str(home / "bin/rankscope"), "measure", f"--out={home}/runs", str(home)])
    facts = Provenance(model=f"{home}/models/mine")
    text = json.dumps(facts.to_json())
    assert facts.command == ("rankscope", "measure", "--out=~/runs", "~")
    assert facts.model == "~/models/mine"
    assert str(home) not in text
    assert platform.node() not in text or len(platform.node()) < 4
    assert f'"{getpass.getuser()}"' not in text


def test_home_is_replaced_only_as_a_whole_folder() -> None:
    assert without_home("/users/ada/x:/users/adam/y", home="/users/ada") == "~/x:/users/adam/y"
    assert without_home("/etc/x", home="/") == "/etc/x"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_state_is_what_git_says(tmp_path: Path) -> None:
    """A branch, a branch among packed references, a detached head, a worktree; each read without git."""
    here = tmp_path / "here"
    here.mkdir()

    def git(*words: str, at: Path = here) -> str:
        settings = ("user.name=a", "user.email=a@example.org", "commit.gpgsign=false", "init.defaultBranch=feature/one")
        options = [word for setting in settings for word in ("-c", setting)]
        command = ["git", *options, *words]
        return subprocess.run(command, cwd=at, check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(here) is None
    git("init", "-q", ".")
    assert git_state(here) is None, "no commit yet"
    git("commit", "-q", "--allow-empty", "--no-verify", "-m", "one")
    (here / "inside").mkdir()
    commit = git("rev-parse", "HEAD")
    for place in (here, here / "inside"):
        assert git_state(place) == {"commit": commit, "dirty": None}
    git("worktree", "add", "-q", str(tmp_path / "beside"))
    assert git_state(tmp_path / "beside") == {"commit": commit, "dirty": None}
    git("pack-refs", "--all")
    git("commit", "-q", "--allow-empty", "--no-verify", "-m", "two", at=tmp_path / "beside")
    assert git_state(here) == {"commit": commit, "dirty": None}
    newer = git("rev-parse", "HEAD", at=tmp_path / "beside")
    assert newer != commit
    assert git_state(tmp_path / "beside") == {"commit": newer, "dirty": None}
    git("checkout", "-q", "--detach")
    assert git_state(here) == {"commit": commit, "dirty": None}


def test_item_12_the_git_program_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("a" * 40 + "\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {"commit": "a" * 40, "dirty": None}


ODD_HEADS = {
    "words": b"swordfish",
    "a path that climbs": b"ref: refs/../../secret",
    "a path from the root": b"ref: /etc/passwd",
    "bytes": bytes(range(256)),
    "nothing": b"",
    "long": b"ref: refs/" + b"a" * 10_000,
    "zero": b"ref: refs/a\0b",
}


@pytest.mark.parametrize("case", ODD_HEADS)
def test_item_12_an_odd_repository_is_none(case: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("b" * 40)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_bytes(ODD_HEADS[case])
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs", "commondir"])
def test_item_12_a_pipe_in_a_repository_is_not_waited_for(name: str, tmp_path: Path) -> None:
    home = tmp_path / ".git"
    (home / "refs" / "heads").mkdir(parents=True)
    if name != "HEAD":
        (home / "HEAD").write_text("ref: refs/heads/main")
    os.mkfifo(home / name)
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("words", ["gitdir: .git", "gitdir: /dev/zero", "gitdir: \0", "x" * 5000, ""])
def test_item_12_a_file_in_place_of_a_repository(words: str, tmp_path: Path) -> None:
    (tmp_path / ".git").write_text(words)
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("facts", [[], "text", {"model": "m"}, {**Provenance(model="m").to_json(), "odd": 1}])
def test_other_json_is_refused(facts: object) -> None:
    with pytest.raises(ResultError):
        Provenance.from_json(facts)
