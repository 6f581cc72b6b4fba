"""Promises of the whole command line: quick help, exit codes, one line per error, the recorded commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from rankscope.cli.app import main
from rankscope.errors import LoadError

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/commands.json").read_text(encoding="utf-8"))
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "matplotlib", "pandas")


def failing(*_: object, **__: object) -> None:
    raise LoadError("The spec 'x' leads\nto no model. Give a folder.")


@pytest.mark.parametrize("words", [["--help"], ["measure", "--help"], ["--version"], ["ls", "--help"], ["ls", "sites"]])
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    avoided = ("torch", "transformers") if words == ["ls", "sites"] else HEAVY
    code = (
        "import sys\nfrom rankscope.cli.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as left:\n    assert not left.code\n"
        f"print('HEAVY', [name for name in {avoided!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.rstrip().endswith("HEAVY []")


def test_python_dash_m() -> None:
    words = [sys.executable, "-m", "rankscope", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == f"rankscope {rankscope.__version__}"


@pytest.mark.parametrize("command", GOLDEN)
def test_commands_and_options_are_as_recorded(cli, command: str) -> None:
    outcome = cli(*command.split(), "--help")
    if "--help-all" in outcome.out:
        helps = {"--help", "--help-all", "--explain"}  # each prints and exits
        shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", outcome.out, flags=re.MULTILINE)
        assert len([name for name in shown if name not in helps]) == 10
        outcome = cli(*command.split(), "--help-all")
    assert outcome.code == 0
    options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", outcome.out.split("Examples:")[0])))
    assert options == GOLDEN[command]["options"]
    assert GOLDEN[command]["says"] in " ".join(outcome.out.split())


def test_every_command_is_recorded(cli) -> None:
    listed = re.findall(r"^\s{2}([a-z]+)\s{2,}\S", cli("--help").out, flags=re.MULTILINE)
    assert sorted(listed) == sorted(name for name in GOLDEN if name and " " not in name)


def test_an_error_is_one_line_on_stderr(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(rankscope), "measure", failing)
    outcome = cli("measure", "x", "--json")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err == "error: The spec 'x' leads to no model. Give a folder.\n"


@pytest.mark.parametrize("words", [["--debug", "measure", "x"], ["measure", "x", "--debug"]])
def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setitem(vars(rankscope), "measure", failing)
    with pytest.raises(LoadError):
        main(words)


@pytest.mark.parametrize(("value", "raises"), [("1", True), ("0", False), ("", False)])
def test_debug_by_environment(cli, monkeypatch: pytest.MonkeyPatch, value: str, raises: bool) -> None:
    monkeypatch.setitem(vars(rankscope), "measure", failing)
    monkeypatch.setenv("RANKSCOPE_DEBUG", value)
    if raises:
        with pytest.raises(LoadError):
            main(["measure", "x"])
    else:
        assert cli("measure", "x").code == 2


def test_an_interrupt_that_breaks_a_context_manager_is_an_interrupt(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_way(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    monkeypatch.setitem(vars(rankscope), "measure", half_way)
    outcome = cli("measure", "x")
    assert (outcome.code, outcome.err) == (130, "Interrupted. Nothing was saved.\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("a"), RuntimeError("b")])
def test_a_defect_shows_its_traceback_and_is_not_a_failed_check(
    cli, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setitem(vars(rankscope), "measure", broken)
    outcome = cli("measure", "x")
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback")
    assert outcome.err.endswith(f"{type(error).__name__}: {error}\n")
    with pytest.raises(type(error)):
        main(["--debug", "measure", "x"])


def test_what_the_users_code_prints_is_not_in_the_json(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import torch\nprint('epoch 0')\n\ndef build():\n    print('built')\n    return torch.nn.Linear(3, 3)\n"
    (tmp_path / "mine.py").write_text(f"{code}\ndef batch():\n    return torch.zeros(2, 5, 3)\n")
    outcome = cli("doctor", "mine.py:build", "--inputs", "mine.py:batch", "--json")
    assert json.loads(outcome.out)["kind"] == "doctor"
    assert "epoch 0\nbuilt\n" in outcome.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["measre", "x"], "measre"),
        (["measure"], "SPEC"),
        (["measure", "x", "--sequences", "0"], "sequences"),
        (["measure", "x", "--tokens-policy", "all"], "no-first"),
        (["measure", "x", "--text", "no-such-file.txt"], "no-such-file.txt"),
        (["ls", "metric"], "metrics"),
    ],
)
def test_wrong_use_exits_with_two(cli, words: list[str], says: str) -> None:
    outcome = cli(*words)
    assert outcome.code == 2
    assert outcome.out == ""
    assert says in outcome.err
    assert "Traceback" not in outcome.err
