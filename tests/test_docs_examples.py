"""Every page runs as printed and prints what it shows: its ``python`` blocks and its ``rankscope`` commands, in order.

``tests/printed.py`` runs and compares. Commands that are not run are checked against the commands that exist.
"""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import rankscope
from rankscope.cli.app import command_line
from tests.models.connections import refusing_connections
from tests.printed import agree, blocks, check, shortened
from tests.test_house import NOT_INSTALLED

ROOT = Path(__file__).resolve().parents[1]
HOWTO = sorted(path.stem for path in (ROOT / "docs/howto").glob("*.md"))
IN_A_FRESH_PYTHON = ["docs/adding.md"]
"""Pages that register something."""
BY_ANOTHER_TEST = ["README.md", "docs/howto/monitor.md", "docs/howto/trainers.md"]
"""The first below, the others in tests/monitor/test_page.py."""
WRITTEN = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
                                if not {"_build", "notebooks"} & set(path.parts))]  # fmt: skip
PAGES = [page for page in WRITTEN if page not in (*IN_A_FRESH_PYTHON, *BY_ANOTHER_TEST)
         and re.search(r"^```(python|console)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)]  # fmt: skip
LONG = ("docs/index.md", "docs/howto/report.md")
"""Pages that take ten seconds or more and show commands that other pages run too."""
EXPLAINED_ELSEWHERE = {
    "ls": "docs/reference/metrics.md",
    "env": "docs/howto/doctor.md",
    "query": "docs/howto/sweep.md",
    "selftest": "docs/howto/doctor.md",
}
NAVIGATED = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
             if not {"_build", "data"} & set(path.parts) and path != ROOT / "docs/index.md"]  # fmt: skip


def bodies(page: str, language: str) -> list[str]:
    """Text of each fenced block of that language."""
    return [block.body for block in blocks((ROOT / page).read_text(encoding="utf-8"), language)]


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each ``rankscope ...`` line in a console block."""
    lines = ((page, line) for page in WRITTEN for body in bodies(page, "console") for line in body.splitlines())
    return [(page, line[2:].split()) for page, line in lines if line.startswith("$ rankscope ")]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow) if p in LONG else p for p in PAGES])
def test_code_runs_and_prints_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bodies(page, "python") or "howto/" not in page, f"{page} has no python block"
    check(ROOT / page, tmp_path, monkeypatch)


def test_the_readme_prints_what_it_shows_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    with refusing_connections(tried):
        check(ROOT / "README.md", tmp_path, monkeypatch)
    assert tried == []
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_readme_names_every_command_and_script_of_a_paper() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    table = text.partition("## Commands")[2]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))) == set(commands)
    scripts = {path.name for pattern in ("dong*.py", "wu*.py") for path in (ROOT / "reproductions").glob(pattern)}
    assert set(re.findall(r"reproductions/(\w+\.py)", text)) == scripts


@pytest.mark.parametrize(
    ("shown", "now", "same"),
    [
        ("residual  0.857", "residual 0.858", True),
        ("residual 0.857", "residual 0.859", False),
        ("residual 0.857", "rank 0.857", False),
        ("3 blocks", "4 blocks", False),
        ("86% of 3.67e-04", "87% of 3.68e-04", True),
        ("1.4e-07, float floor (4.77e-07)", "3.2e-07, float floor (4.77e-07)", True),
        ("1.4e-06", "3.2e-06", False),
        ("4.46e-03* at the float floor", "1.20e-03* at the float floor", True),
        ("trend ▁▄█", "trend ▁▅█", True),
        ("[... 9 lines ...]", "[... 8 lines ...]", False),
    ],
)
def test_outputs_agree_up_to_the_last_printed_digit(shown: str, now: str, same: bool) -> None:
    assert agree(shown, now) is same
    assert agree(shown, now, varies=True) is ("rank" not in now)


def test_long_outputs_are_cut_in_the_middle_and_sentences_wrapped() -> None:
    told = shortened("\n".join(f"  line {number}" for number in range(60)))
    assert told.startswith("line 0\nline 1\n")
    assert "line 27\n[... 22 lines ...]\nline 50\n" in told
    assert max(map(len, shortened("word " * 60).splitlines())) <= 80


@pytest.mark.parametrize("page", IN_A_FRESH_PYTHON)
def test_python_blocks_run_in_a_fresh_python(page: str, tmp_path: Path) -> None:
    # The page writes a verb as a folder of two files; here both are one program.
    made = "import sys\nsys.modules['rankscope.verbs.loudness'] = sys.modules['__main__']\n"
    program = made + "\n".join(bodies(page, "python"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_and_verb_has_a_how_to() -> None:
    commands = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    assert {name for name in commands if name not in {*HOWTO, *EXPLAINED_ELSEWHERE}} == set()
    for name, page in EXPLAINED_ELSEWHERE.items():
        assert f"rankscope {name}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_sidebar_has_five_groups_and_every_page_once() -> None:
    """At most 25 entries on the first level, and no page that cannot be reached; pages and words have a limit."""
    listed: dict[str, list[str]] = {}
    for source in (ROOT / "docs").rglob("*.md"):
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", source.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            entries = [line.rpartition("<")[2].rstrip(">") for line in body.splitlines() if not line.startswith(":")]
            pages = [str((source.parent / name).resolve().relative_to(ROOT / "docs")) for name in entries if name]
            listed.setdefault(str(source.relative_to(ROOT / "docs")), []).extend(pages)
    everywhere = [f"{name}.md" for pages in listed.values() for name in pages]
    assert sorted(everywhere) == sorted(page.removeprefix("docs/") for page in NAVIGATED)
    assert len(listed["index.md"]) <= 25
    assert (ROOT / "docs/index.md").read_text("utf-8").count(":caption:") == 5
    texts = [(ROOT / page).read_text("utf-8").split() for page in NAVIGATED]
    assert len(texts) <= 45
    assert sum(map(len, texts)) <= 55_000


@pytest.mark.parametrize("name", HOWTO)
def test_a_how_to_is_short_and_begins_with_code_and_what_it_prints(name: str) -> None:
    text = (ROOT / f"docs/howto/{name}.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    body = re.sub(r"^# .*\n|^```\{index\}(?s:.*?)^```$|^<details>(?s:.*?)</details>$", "", text, flags=re.MULTILINE)
    assert re.match(r"```(python|console)", body.strip())


def test_the_landing_page_shows_the_answer_of_the_doctor_page() -> None:
    """In each of its three ways; the last one shows the finding alone."""
    printed = " ".join(bodies("docs/howto/doctor.md", "output")[0].partition("\n\nClassifier:")[0].split())
    first, second, third, *_ = (" ".join(body.split()) for body in bodies("docs/index.md", "output"))
    assert first == second == printed
    assert third == f"The model has a fault, step 0: {printed.partition(' Change:')[0]}"


def test_addresses_and_citation_are_those_of_the_metadata() -> None:
    """``project.urls`` is where an address is changed: others must begin with the repository or the documentation."""
    metadata = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    urls = dict(re.findall(r'^(\w+) = "(.*)"$', metadata, flags=re.MULTILINE))
    readme, questions = ((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/faq.md"))
    for url in re.findall(r"https://[^\s)>\"]*rankscope[^\s)>\"}]*", readme + questions):
        badges = ("https://img.shields.io", "https://readthedocs.org")
        known = (urls["Repository"], urls["Documentation"], *badges)
        assert url.startswith(known), f"{url} is not below an address of pyproject.toml"
    (cited,) = re.findall(r"```bibtex\n.*?```", questions, flags=re.DOTALL)
    assert re.findall(r"title  = \{(.*)\}", cited)[0] in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_json_blocks_are_json(page: str) -> None:
    for body in bodies(page, "json"):
        json.loads(body)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["rankscope", *(m.name for m in pkgutil.walk_packages(rankscope.__path__, "rankscope."))]
)
def test_docstring_examples_are_true(name: str) -> None:
    if name == "rankscope.__main__":
        pytest.skip("importing it runs the command line")
    if name in NOT_INSTALLED:
        pytest.importorskip(NOT_INSTALLED[name])
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    for example in examples:
        failures: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=failures.append)
        assert not failures, "".join(failures)


def test_console_commands_exist() -> None:
    known = typer.main.get_command(command_line()).commands  # type: ignore[attr-defined]
    assert commands(), "no rankscope command was found in the pages: the scan is broken"
    for page, words in commands():
        assert words[1] in known, f"{page} names `{' '.join(words)}`"
        command = known[words[1]]
        below = getattr(command, "commands", {})
        # A group that is given no command of its own runs one of them.
        parts = [command, *([below[words[2]]] if words[2:] and words[2] in below else below.values())]
        options = {name for part in parts for parameter in part.params for name in parameter.opts}
        unknown = [word for word in words if word.startswith("--") and word not in options]
        assert not unknown, f"{page}: `{' '.join(words)}` uses options that do not exist: {unknown}"
