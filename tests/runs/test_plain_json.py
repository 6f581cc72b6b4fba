"""JSON of a stranger."""

from __future__ import annotations

import pytest

from rankscope.runs.plain_json import parse_json


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'["\\ud800"]', "half a character"),
        (b'{"\\udfff": 1}', "half a character"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "decode"),
        (b"{", "Expecting"),
        (b"9" * 5000, "digits"),
    ],
)
def test_what_no_file_of_ours_holds_is_a_value_error(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(content)


@pytest.mark.parametrize("content", [b'"\\ud83d\\ude00"', '"\U0001f600"', b"null", b'{"a": 1e300}'])
def test_whole_characters_and_numbers_are_read(content: bytes | str) -> None:
    assert parse_json(content) in ("\U0001f600", None, {"a": 1e300})
