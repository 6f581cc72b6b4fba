"""The report as a file: self-contained, escaped, small, made without torch."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rankscope
from rankscope.errors import InputError, ResultError
from tests.reporting.runs import EDGES, LONG_TOKEN, OVERRIDE, SCRIPT, VERBS, run_of

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("src", "href", "action", "data", "poster", "srcset")
TITLES = {
    "measure": ["Layer by layer", "Who collapses, who repairs", "Head by head", "How alike the tokens are"],
    "encoder-decoder": ["Layer by layer", "Head by head"],
    "ablate": ["Which component does it"],
    "exact": ["How fast, really"],
    "decompose": ["Which paths carry the signal"],
    "bound": ["What the theorems say"],
    "predict": ["What was computed"],
    "remedy": ["What was computed"],
}


class Page(HTMLParser):
    """What a browser would find: elements, attributes, text outside scripts, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
            self._inside = ""
        elif self._inside != "style":
            self.words.append(data)

    @property
    def charts(self) -> list[dict[str, object]]:
        return json.loads(self.scripts[0])


def page_of(run: object, folder: Path) -> tuple[Page, str]:
    text = rankscope.report(run, folder / "report.html").read_text(encoding="utf-8")
    return Page(text), text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_sections(verb: str, tmp_path: Path) -> None:
    page, _ = page_of(run_of(verb), tmp_path)
    said = [word.strip() for word in page.words]
    assert [title for title in TITLES[verb] if title not in said] == []
    assert page.charts
    assert "undefined metric" not in said


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*VERBS, *EDGES])
def test_nothing_is_fetched_and_all_is_small(name: str, tmp_path: Path) -> None:
    page, text = page_of(run_of(name) if name in VERBS else EDGES[name](), tmp_path)
    linked = [value for _, found in page.tags for key, value in found.items() if key in LINKS]
    assert [link for link in linked if not str(link).startswith("#")] == []
    assert "@import" not in text
    assert "url(" not in text
    assert len(text.encode()) < 6_000_000


def test_the_policy_allows_the_one_script_there_is(tmp_path: Path) -> None:
    page, _ = page_of(EDGES["hostile"](), tmp_path)
    policy = next(found["content"] for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    data, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    assert json.loads(data)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page, text = page_of(EDGES["hostile"](), tmp_path)
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script", "script"]
    assert "alert" not in page.scripts[1]
    assert SCRIPT not in text
    assert "\u202e" not in text, "an override would turn the words behind it around"
    assert "\\u202egnp.exe" in "".join(page.words)
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    headings = [found for tag, found in page.tags if tag == "title"]
    assert len(headings) == 1, "</title> in a name must not end the title"


def test_long_tokens_are_cut_where_they_would_flood(tmp_path: Path) -> None:
    page, text = page_of(EDGES["hostile"](), tmp_path)
    assert LONG_TOKEN not in text
    assert OVERRIDE not in text
    matrix = next(chart for chart in page.charts if chart["kind"] == "matrix")
    assert max(len(label) for view in matrix["views"] for label in view["labels"]) <= 24


def test_report_needs_no_torch(tmp_path: Path) -> None:
    run_of("measure").save(tmp_path / "run")
    words = ["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html"), "-q"]
    code = (
        "import sys\nfrom rankscope.cli.app import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as left:\n    assert not left.code\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
    assert (tmp_path / "r.html").stat().st_size > 10_000


def test_runs_together_and_from_folders(tmp_path: Path) -> None:
    names = ("measure", "exact")
    for name in names:
        run_of(name).save(tmp_path / name)
    page, text = page_of([tmp_path / "measure", tmp_path / "exact", EDGES["1 layer"]()], tmp_path)
    assert "In short" in page.words
    assert "Side by side" in page.words
    assert text.count('class="chapter') == 3


def test_without_runs_or_a_place_to_write(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one run"):
        rankscope.report([], tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="cannot be written"):
        rankscope.report(EDGES["empty"](), tmp_path / "file" / "r.html")


def test_what_was_not_measured_is_said_with_the_command(tmp_path: Path) -> None:
    page, _ = page_of(EDGES["1 layer"](), tmp_path)
    assert "Not in this run" in page.words
    assert any("rankscope measure init:tiny-bert --similarity" in word for word in page.words)
