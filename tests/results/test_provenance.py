"""Provenance says enough, and nothing about the person."""

from __future__ import annotations

import dataclasses
import getpass
import json
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope._errors import ResultError
from rankscope.results.provenance import Provenance, current_command, git_state, installed_versions, without_home


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


def test_only_what_is_installed_is_listed() -> None:
    assert set(installed_versions(["numpy", "no-such-package-here"])) == {"numpy"}


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


def test_command_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [""])
    assert current_command() == ("",)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run(["git", "add", "file"], cwd=tmp_path, check=True)
    subprocess.run([*run, "commit", "-q", "--no-verify", "-m", "one"], cwd=tmp_path, check=True)
    clean = git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("two")
    changed = git_state(tmp_path)
    assert changed == {"commit": clean["commit"], "dirty": True}


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("facts", [[], "text", {"model": "m"}, {**Provenance(model="m").to_json(), "odd": 1}])
def test_other_json_is_refused(facts: object) -> None:
    with pytest.raises(ResultError):
        Provenance.from_json(facts)


def test_a_model_that_is_not_a_name_is_refused() -> None:
    with pytest.raises(ResultError, match="model"):
        Provenance.from_json({**Provenance(model="m").to_json(), "model": 3})
