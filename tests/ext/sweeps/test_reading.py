"""A plan file is plain data or it is refused, with the line."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import InputError
from rankscope.ext.sweeps.plan import LARGEST_PLAN, read_plan_data

LEVELS = zip("abcdefg", "bcdefgh", strict=True)
BOMB = "a: &a [x, x]\n" + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in LEVELS)


def file_with(text: str | bytes, folder: Path) -> Path:
    path = folder / "plan.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_plain_data_is_read(tmp_path: Path) -> None:
    path = file_with("models: [init:tiny-bert, {model: b, seeds: [1]}]\nverbs:\n  - measure\n", tmp_path)
    assert read_plan_data(path) == {"models": ["init:tiny-bert", {"model": "b", "seeds": [1]}], "verbs": ["measure"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, 'anchors and aliases (& and *) are not read; write it out in "<unicode string>", line 1'),
        ("models: !!python/object/apply:os.system ['true']\n", "could not determine a constructor for the tag"),
        ("models: !custom x\n", "could not determine a constructor for the tag"),
        ("models: [a]\nverbs: [measure]\nmodels: [b]\n", "'models' is written twice in \"<unicode string>\", line 3"),
        ("models: [{model: a, model: b}]\n", "'model' is written twice"),
        ("a: b\n---\nc: d\n", "expected a single document"),
        ("[" * 5000 + "]" * 5000, "is not a YAML file that can be read"),
        ("models: [a\n", "is not a YAML file"),
        ("- a\n", "a list; a plan is a mapping"),
        ("", "nothing; a plan is a mapping"),
        (b"\xff\xfe\x00", "not"),
        ("#" * (LARGEST_PLAN + 1), "1,048,576 bytes"),
        ("a: \x00\n", "is not a YAML file"),
    ],
)
def test_anything_else_is_refused_with_its_place(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        read_plan_data(file_with(text, tmp_path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_plan_data(tmp_path / "none.yaml")


@given(st.text(alphabet="ab:-&*!|>[]{}'\"#,\n ?%@`\t", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(InputError):
        assert isinstance(read_plan_data(file_with(text, Path(folder))), dict)
