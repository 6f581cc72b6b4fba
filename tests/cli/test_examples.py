"""The examples of every help text run as printed, and every verb keeps the promises about its output."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from rankscope.cli.app import app
from rankscope.cli.examples import examples

ROOT = Path(__file__).parents[2]
EXAMPLES = examples()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ESCAPE = "\x1b["


def options_of(command: str) -> set[str]:
    found = COMMANDS[command].commands["run"] if command == "sweep" else COMMANDS[command]
    return {name for parameter in found.params for name in parameter.opts}


def run_examples(cli, command: str) -> list:
    """Outcomes of the lines in order, the last of which is the command's own."""
    return [cli(*shlex.split(line)) for line in EXAMPLES[command]]


def test_every_command_has_examples_and_nothing_else_does() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert all(any(line.split()[0] == name for line in lines) for name, lines in EXAMPLES.items())


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_the_examples_unbroken(cli, command: str) -> None:
    shown = [line.strip() for line in cli(command, "--help").out.splitlines()]
    assert all(f"rankscope {line}" in shown for line in EXAMPLES[command])


ON_PAGES = ("ablate", "exact", "measure", "predict", "query", "sweep")
"""Commands that the pages of the documentation run too (``tests/test_docs_examples.py``)."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow) if name in ON_PAGES else name for name in EXAMPLES]
)
def test_examples_run_as_printed(cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for outcome in run_examples(cli, command):
        assert outcome.code == 0, outcome.err
        assert ESCAPE not in outcome.out + outcome.err  # a pipe gets no colour
        assert "Traceback" not in outcome.err


QUIET = {
    "measure": "measure init:tiny-bert --sequences 1 --tokens 8 --metrics relative_residual",
    "ablate": "ablate init:tiny-bert --sequences 1 --tokens 8 --variants pure,full",
    "decompose": "decompose init:tiny-bert --sequences 1 --tokens 8",
    "exact": "exact init:tiny-bert --skip 0 --sequences 1 --tokens 8",
    "bound": "bound init:tiny-bert --theorems dong_2021_multi_head --sequences 1 --tokens 8",
    "graph": "graph causal --tokens 8",
    "remedy": "remedy init:tiny-bert --remedies stronger_skip --sequences 1 --tokens 8",
    "predict": "predict tiny-bert --tokens 8 --seeds 1 --most-blocks 3",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", QUIET)
def test_quiet_is_one_line(cli, command: str) -> None:
    outcome = cli(*shlex.split(QUIET[command]), "--quiet")
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    assert outcome.out.strip()
    assert outcome.err == ""


def test_every_verb_that_can_be_long_can_be_quiet() -> None:
    talkative = set(COMMANDS) - {"ls", "env"}
    assert {name for name in talkative if "--quiet" not in options_of(name)} == set()
    assert set(QUIET) | {"doctor", "selftest", "report", "compare", "sweep", "query"} == talkative


def test_quiet_doctor_and_selftest_say_nothing_when_all_is_well(cli) -> None:
    assert cli("doctor", "init:tiny-bert", "--quiet").out == ""
    assert cli("selftest", "--quiet").out == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal(variables: dict[str, str], coloured: bool) -> None:
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", **variables}
    words = [sys.executable, "-m", "rankscope", "measure", "init:tiny-brt"]
    done = subprocess.run(words, stdout=slave, stderr=slave, env=environment, cwd=ROOT, check=False)
    os.close(slave)
    text = os.read(master, 100_000).decode()
    os.close(master)
    assert done.returncode == 2
    assert "tiny-bert" in text
    assert ("\x1b[31m" in text) is coloured


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{shlex.quote(sys.executable)} -m rankscope ls presets | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_imports_nothing_heavy(shell: str) -> None:
    code = (
        "import os, sys\nfrom rankscope.cli.app import main\n"
        f"os.environ.update(_RANKSCOPE_COMPLETE='complete_{shell}', COMP_WORDS='rankscope meas',\n"
        " COMP_CWORD='1', _TYPER_COMPLETE_ARGS='rankscope meas',\n"
        " _TYPER_COMPLETE_FISH_ACTION='get-args')\n"
        "try:\n    main([])\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "measure" in done.stdout
    assert done.stdout.rstrip().endswith("HEAVY []")
