"""Every ``python`` block of the README and of the docs runs as printed: one namespace per page, in order.

Blocks in ``console``, ``text`` and ``json`` are not run; console lines are checked against the commands that exist.
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

import rankscope

ROOT = Path(__file__).resolve().parents[1]
HOWTO = sorted(path.stem for path in (ROOT / "docs/howto").glob("*.md"))
IN_A_FRESH_PYTHON = ["docs/adding.md"]
"""Pages that register something."""
BY_ANOTHER_TEST = ["docs/howto/monitor.md"]  # tests/monitor/test_page.py
WRITTEN = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
                                if not {"_build", "notebooks"} & set(path.parts))]  # fmt: skip
PAGES = [page for page in WRITTEN if page not in (*IN_A_FRESH_PYTHON, *BY_ANOTHER_TEST)
         and ("howto/" in page or "\n```python\n" in (ROOT / page).read_text(encoding="utf-8"))]  # fmt: skip
"""Pages with code, and every how-to, which must have some."""
EXPLAINED_ELSEWHERE = {
    "card": "docs/howto/report.md",
    "ls": "docs/reference/registries.md",
    "env": "docs/howto/doctor.md",
    "query": "docs/howto/sweep.md",
    "selftest": "docs/howto/doctor.md",
}
NAVIGATED = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
             if not {"_build", "data"} & set(path.parts) and path != ROOT / "docs/index.md"]  # fmt: skip
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.md"))
FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Line number and text of each fenced block of that language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(text[: m.start("body")].count("\n"), m["body"]) for m in FENCE.finditer(text) if m["language"] == language]


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each ``rankscope ...`` line in a console block."""
    lines = ((page, line) for page in WRITTEN for _, body in blocks(page, "console") for line in body.splitlines())
    return [(page, line[2:].split()) for page, line in lines if line.startswith("$ rankscope ")]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page, "python")
    assert found, f"{page} has no python block"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, body in found:
        # Blank lines first, so that a traceback shows the line of the page.
        exec(compile("\n" * line + body, str(ROOT / page), "exec"), namespace)


@pytest.mark.parametrize("page", IN_A_FRESH_PYTHON)
def test_python_blocks_run_in_a_fresh_python(page: str, tmp_path: Path) -> None:
    program = "\n".join(body for _, body in blocks(page, "python"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_and_verb_has_a_how_to() -> None:
    import typer.main

    from rankscope.cli.app import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name for name in commands if name not in {*HOWTO, *EXPLAINED_ELSEWHERE}} == set()
    for name, page in EXPLAINED_ELSEWHERE.items():
        assert f"rankscope {name}" in (ROOT / page).read_text(encoding="utf-8")


def test_the_sidebar_has_short_sections_and_every_page_once() -> None:
    """Sections of at most twelve entries, `monitor` among the first ten, and no page that cannot be reached."""
    listed: dict[str, list[str]] = {}
    for source in (ROOT / "docs").rglob("*.md"):
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", source.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            entries = [line.rpartition("<")[2].rstrip(">") for line in body.splitlines() if not line.startswith(":")]
            pages = [str((source.parent / name).relative_to(ROOT / "docs")) for name in entries if name]
            listed.setdefault(str(source.relative_to(ROOT / "docs")), []).extend(pages)
            assert len(pages) <= 12 or source.parent.name in {"decisions", "gallery"}
    everywhere = [f"{name}.md" for pages in listed.values() for name in pages]
    assert sorted(everywhere) == sorted(page.removeprefix("docs/") for page in NAVIGATED)
    assert "howto/monitor" in listed["index.md"][:10]


def test_addresses_and_citation_are_those_of_the_metadata() -> None:
    """``project.urls`` is where an address is changed: others must begin with the repository or the documentation."""
    metadata = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    urls = dict(re.findall(r'^(\w+) = "(.*)"$', metadata, flags=re.MULTILINE))
    readme, questions = ((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/faq.md"))
    for url in re.findall(r"https://[^\s)>\"]*rankscope[^\s)>\"}]*", readme + questions):
        badges = ("https://pypi.org", "https://img.shields.io", "https://readthedocs.org")
        known = (urls["Repository"], urls["Documentation"], *badges)
        assert url.startswith(known), f"{url} is not below an address of pyproject.toml"
    assert all(f"({url})" in readme for url in urls.values() if url != urls["Repository"])
    (cited,) = re.findall(r"```bibtex\n.*?```", readme, flags=re.DOTALL)
    assert cited in questions
    assert re.findall(r"title  = \{(.*)\}", cited)[0] in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_code_and_end_without_output_of_their_own(path: Path) -> None:
    """They are executed when the documentation is built; here only that there is something to execute."""
    text = path.read_text(encoding="utf-8")
    cells = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert cells
    for cell in cells:
        compile(cell, str(path), "exec")


def test_the_three_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_look", "own_architecture", "training_run"]


@pytest.mark.parametrize("page", PAGES)
def test_json_blocks_are_json(page: str) -> None:
    for _, body in blocks(page, "json"):
        json.loads(body)


@pytest.mark.parametrize(
    "name", ["rankscope", *(m.name for m in pkgutil.walk_packages(rankscope.__path__, "rankscope."))]
)
def test_docstring_examples_are_true(name: str) -> None:
    if name == "rankscope.__main__":
        pytest.skip("importing it runs the command line")
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    for example in examples:
        failures: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=failures.append)
        assert not failures, "".join(failures)


def test_console_commands_exist() -> None:
    import typer.main

    from rankscope.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
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
