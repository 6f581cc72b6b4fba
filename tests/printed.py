"""What the code of the pages prints, kept in the pages below the code and compared with what it prints now.

A page is run from top to bottom in one namespace and one empty folder: its ``python`` blocks, and the lines
``$ rankscope ...`` of its ``console`` blocks. What a block prints is in an ``output`` block below it.
``RANKSCOPE_WRITE_OUTPUTS=1`` (``./dev outputs``) writes it anew.

Words after the language of a block say how it is treated:

- ``console norun``: not run, because it needs what a test does not have (a server, a GPU, hours). Shows no output.
- ``output varies``: what is printed contains timings, dates or versions; numbers may differ.
- ``python silent``: what it prints comes from other libraries and is not shown.
- ``console fails``: the exit code of the last command is 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankscope.errors import LoadError
from rankscope.models.pretrained import pretrained_folder

WRITE = "RANKSCOPE_WRITE_OUTPUTS"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COLUMNS = 80
"""Width of a terminal in which commands run, and at which long sentences are wrapped; it fits a page."""
FIRST, LAST = 28, 10
"""Lines kept of an output that is longer than both together."""
FENCE = re.compile(r"^```(?P<language>\w+)(?P<words>(?: \w+)*)\n(?P<body>.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BELOW = re.compile(r"\s*^```output(?P<words>[ \w]*)\n.*?^```$", flags=re.MULTILINE | re.DOTALL)
VERSION = re.compile(r"\b\d[\w.+-]*")
NUMBER = re.compile(r"(?:\d+\.\d+|\.\d+|\d+)(?:e[+-]?\d+)?")
ROUNDING = 4.77e-07
"""The float floor of float32, for outputs that state none."""
LABEL = re.compile(r" *(Change|Hint|Shown by): +")
"""What follows is wrapped below its beginning."""
FLOOR = re.compile(r"(?:float floor \(?|differences below )([\d.]+e-\d+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text, and where it is in the page."""

    language: str
    words: tuple[str, ...]
    body: str
    start: int
    end: int
    line: int


def blocks(text: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page, of these languages or of all."""
    found = (
        Block(m["language"], tuple(m["words"].split()), m["body"], m.start(), m.end(), _line(m))
        for m in FENCE.finditer(text)
    )
    return [block for block in found if not languages or block.language in languages]


def _line(block: re.Match[str]) -> int:
    return block.string[: block.start("body")].count("\n")


def check(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run a page and compare what it prints with what it shows, or write it; the namespace that its code leaves."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    if MINILM in text:
        _place_minilm(folder)
    # The code of the page as a file, each line where the page has it: what reads source, and a traceback, find it.
    code = text.splitlines()
    inside = {
        line for block in blocks(text, "python") for line in range(block.line, block.line + block.body.count("\n"))
    }
    code = "\n".join(line if number in inside else "" for number, line in enumerate(code))
    (folder / "page.py").write_text(code, encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = _printed(text, page, namespace, monkeypatch)
    if os.environ.get(WRITE):
        page.write_text(printed, encoding="utf-8")
        return namespace
    shown, now = blocks(text, "output"), blocks(printed, "output")
    assert len(shown) == len(now), f"{page}: blocks of output are missing or too many. Write them with: ./dev outputs"
    for ours, theirs in zip(shown, now, strict=True):
        assert agree(ours.body, theirs.body, varies="varies" in ours.words), (
            f"{page}:{ours.line}: this is printed now; ./dev outputs writes it to the page.\n{theirs.body}"
        )
    return namespace


def agree(shown: str, now: str, *, varies: bool = False) -> bool:
    """Whether two outputs have the same words and, unless it ``varies``, the same numbers; spacing is free.

    A number may differ by one unit of its last printed digit, because processors round differently. Below the float
    floor that an output states, or ``ROUNDING`` without one, a number only has to be below it again.
    """
    shown, now = (re.sub(r"[▁-█]+", "▁", text) for text in (shown, now))  # of numbers that are compared
    if varies:
        shown, now = (re.sub(r"[-─━]{2,}", "--", VERSION.sub("0", text)) for text in (shown, now))
    if [part.split() for part in NUMBER.split(shown)] != [part.split() for part in NUMBER.split(now)]:
        return False
    floor = max((float(number) for number in FLOOR.findall(shown)), default=ROUNDING)
    pairs = zip(NUMBER.finditer(shown), NUMBER.finditer(now), strict=True)
    return varies or all(_same(a, b, floor) for a, b in pairs)


def _same(shown: re.Match[str], now: re.Match[str], floor: float) -> bool:
    a, b = float(shown[0]), float(now[0])
    starred = "at the float floor" in shown.string and shown.string[shown.end() :].startswith("*")
    unit = max(_unit(shown), _unit(now))
    return starred or max(a, b) < floor or abs(a - b) <= 1.01 * unit


def _unit(number: re.Match[str]) -> float:
    """One unit of the last printed digit; 0 for a whole number, which counts something, unless it is a percentage."""
    digits, _, power = number[0].partition("e")
    if "." not in digits and not power:
        return float(number.string[number.end() :].startswith("%"))
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def _printed(text: str, page: Path, namespace: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> str:
    """The page with what its blocks print now."""
    parts: list[str] = []
    done = 0
    for block in blocks(text, "python", "console"):
        if "norun" in block.words or (block.language == "console" and "$ rankscope " not in block.body):
            continue
        parts.append(text[done : block.end])
        below = BELOW.match(text, block.end)
        done = block.end if below is None else below.end()
        with _stdout() as out:
            if block.language == "console":
                _run_commands(block, page, monkeypatch)
            else:
                code = "\n" * block.line + block.body
                exec(compile(code, str(Path("page.py").resolve()), "exec", dont_inherit=True), namespace)
        if out.getvalue().strip() and "silent" not in block.words:
            parts.append(f"\n\n```output{below['words'] if below else ''}\n{shortened(out.getvalue())}```")
    return "".join([*parts, text[done:]])


def _run_commands(block: Block, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of a console block; commands of others are not run."""
    from rankscope.cli.app import main

    commands = block.body.splitlines()
    assert all(line.startswith("$ ") for line in commands), f"{page}:{block.line}: output belongs into a block below"
    for command in commands:
        words = shlex.split(command[2:], comments=True)
        if words[0] != "rankscope":
            continue
        monkeypatch.setattr("sys.argv", words)  # a run keeps the command it was made with
        with pytest.raises(SystemExit) as left:
            main(words[1:])
        expected = int("fails" in block.words and command == commands[-1])
        assert int(left.value.code or 0) == expected, f"{page}:{block.line}: `{command}` ended with {left.value.code}"


@contextlib.contextmanager
def _stdout() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield out


def shortened(text: str) -> str:
    """Sentences wrapped, trailing blanks removed, the middle of a long output replaced by how much it was."""
    lines = [line for given in text.strip("\n").splitlines() for line in _wrapped(given.rstrip())]
    lines = [line for place, line in enumerate(lines) if line or (place and lines[place - 1])]
    while lines and not lines[0].strip():
        lines.pop(0)
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    lines = [line[margin:] for line in lines]
    if len(lines) > FIRST + LAST + 5:
        lines[FIRST:-LAST] = [f"[... {len(lines) - FIRST - LAST} lines ...]"]
    return "".join(f"{line}\n" for line in lines)


def _wrapped(line: str) -> list[str]:
    """A sentence in several lines; a row of a table as it is, and a line without spaces cut."""
    label = LABEL.match(line)
    if len(line) <= COLUMNS or ("  " in line.strip() and label is None):
        return [line]
    if line.startswith(("{", "[")):
        return [f"{line[: COLUMNS - 28]} [... {len(line) - COLUMNS + 28} characters ...]"]
    margin = " " * label.end() if label else line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, COLUMNS, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _place_minilm(folder: Path) -> None:
    """The fetched weights where the hub's name finds them first; without them the page is skipped."""
    try:
        weights = pretrained_folder("minilm")
    except LoadError as error:
        pytest.skip(f"the page measures MiniLM: {error}")
    (folder / MINILM).parent.mkdir()
    (folder / MINILM).symlink_to(weights, target_is_directory=True)
