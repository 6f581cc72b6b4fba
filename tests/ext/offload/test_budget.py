"""Sizes in words, and what is given up first when memory is short."""

from __future__ import annotations

import pytest

from rankscope.errors import InputError
from rankscope.execution.budget import Need, in_words, keeps_streams_in_memory, parse_size

NEED = Need(process=100, block=50, widened=20, work=30, states=40)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("3GiB", 3 * 2**30),
        ("3gb", 3 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("2k", 2000),
        (" 7 ", 7),
        (7, 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes(words: str | int, size: int) -> None:
    assert parse_size(words) == size


@pytest.mark.parametrize("words", ["", "3 PiB", "-1GiB", "0", "many", "1e9", "3GiBs", "nan"])
def test_what_is_no_size_is_refused(words: str) -> None:
    with pytest.raises(InputError, match="is not a size"):
        parse_size(words)


@pytest.mark.parametrize(("memory", "in_memory"), [(None, True), (240, True), (239, False), (200, False)])
def test_streams_go_to_files_where_they_have_no_room(memory: int | None, in_memory: bool) -> None:
    assert keeps_streams_in_memory(NEED, memory) is in_memory


def test_one_block_too_much_is_refused_with_the_estimate() -> None:
    with pytest.raises(InputError, match=r"takes about 0\.0 MiB \(process .*, block .*, widened .*, work .*, states"):
        keeps_streams_in_memory(NEED, 199)
    assert in_words(3 * 2**30) == "3.00 GiB"
