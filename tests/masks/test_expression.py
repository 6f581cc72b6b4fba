"""Expressions: what is read, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import InputError, RankscopeError, UnknownNameError
from rankscope.masks import MASKS, parse_mask
from rankscope.masks._mask import Both, Complement, Either

CAUSAL, NEAR, FIRST = MASKS["causal"](), MASKS["window"](2), MASKS["sink"](1)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", CAUSAL),
        ("causal()", CAUSAL),
        ("  window ( 2 ) ", NEAR),
        ("window(width=2)", NEAR),
        ("causal & window(2) | sink(1)", Either((Both((CAUSAL, NEAR)), FIRST))),
        ("sink(1) | causal & window(2)", Either((FIRST, Both((CAUSAL, NEAR))))),
        ("causal & (window(2) | sink(1))", Both((CAUSAL, Either((NEAR, FIRST))))),
        ("~causal & window(2)", Both((Complement(CAUSAL), NEAR))),
        ("~(causal | sink(1))", Complement(Either((CAUSAL, FIRST)))),
        ("~~causal", CAUSAL),
        ("random_sparse(1, seed=2)", MASKS["random_sparse"](degree=1, seed=2)),
        ("adjacency('10/11')", MASKS["adjacency"]("10/11")),
        ('adjacency("10\\u002f11")', MASKS["adjacency"]("10/11")),
    ],
)
def test_read(text: str, mask: object) -> None:
    assert parse_mask(text) == mask


def test_written_with_as_few_parentheses_as_needed() -> None:
    for text in ("causal & window(2) | sink(1)", "causal & (window(2) | sink(1))", "~(causal & window(2))", "~causal"):
        assert str(parse_mask(f"({text})")) == text
    assert str(parse_mask("causal | (sink(1) | window(2))")) == "causal | sink(1) | window(2)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "__import__('os').system('true')",
        "causal.__class__",
        "causal.dense(3)",
        "().__class__.__bases__[0]",
        "[causal]",
        "{causal}",
        "lambda: causal",
        "causal if causal else causal",
        "causal; causal",
        "causal\ncausal",
        "f'{causal}'",
        "window(1+1)",
        "window(2**64)",
        "window(0x10)",
        "0in",
        "window(1e3)",
        "window(1.5)",
        "window(True)",
        "window(None)",
        "window(window(1))",
        "window(width=)",
        "window(1, width=1)",
        "window(width=1, width=1)",
        "random_sparse(degree=1, 2)",
        "window()",
        "window(1, 2)",
        "window('1')",
        "window(-1)",
        "sink(0)",
        "adjacency(1)",
        "adjacency('\\')",
        'adjacency("\\x")',
        'adjacency("unclosed)',
        "window(1",
        "(causal",
        "causal)",
        "causal |",
        "| causal",
        "causal || window(1)",
        "causal ~ window(1)",
        "~",
        "window(" + "9" * 5000 + ")",
        "window(99999999999999999999)",
        "window(2147483648)",
        "(" * 300 + "causal" + ")" * 300,
        "causal | " * 5000 + "causal",
        "window(١)",
        "caus\u0430l",
        "causal\x00",
    ],
)
def test_refused(text: str) -> None:
    begin = time.process_time()
    with pytest.raises((InputError, UnknownNameError)):
        parse_mask(text)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("text", [None, 3, b"causal", ["causal"]])
def test_only_text_is_an_expression(text: Any) -> None:
    with pytest.raises(InputError, match="is a string"):
        parse_mask(text)


@pytest.mark.parametrize(
    ("text", "near"), [("causl", "'causal'"), ("__import__", "Known"), ("window(wdth=1)", "'width'")]
)
def test_unknown_names_are_answered_with_near_ones(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        parse_mask(text)


def test_the_place_is_shown() -> None:
    with pytest.raises(InputError, match="at character 10: invalid syntax") as caught:
        parse_mask("causal | | sink(1)")
    assert "rankscope ls masks" in str(caught.value)


@given(st.text(alphabet="causlwindow(),=|&~ 0123'\"\\_.-", max_size=40))
def test_any_text_is_a_mask_or_an_error_of_ours(text: str) -> None:
    try:
        mask = parse_mask(text)
    except RankscopeError:
        return
    assert parse_mask(str(mask)) == mask


def test_five_hundred_signs_are_read_and_no_more() -> None:
    assert parse_mask("~" * 500 + "causal") == CAUSAL
    assert parse_mask("|".join(["causal"] * 501)) == Either((CAUSAL,) * 501)
    with pytest.raises(InputError, match="at most 500 operators"):
        parse_mask("~" * 501 + "causal")
    assert parse_mask("&".join(["((causal))"] * 60)) == Both((CAUSAL,) * 60)


def test_twenty_thousand_characters_are_read_and_no_more() -> None:
    assert parse_mask("causal".ljust(20_000)) == CAUSAL
    with pytest.raises(InputError, match="at most 20,000 characters, this one 20,001"):
        parse_mask("causal".ljust(20_001))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window('1')", r"window: width \(.*\) is a whole number, not '1'"),
        ("adjacency(1)", r"adjacency: source \(.*\) is a string, not 1"),
        ("window(2147483648)", r"window\(width=2147483648\): width goes from 0 to 2147483647"),
        ("sink(0)", r"sink\(count=0\): count goes from 1 to"),
        ("window(1, 2)", "takes 1 parameters, got 2"),
        ("window()", r"needs width, e\.g\. window\("),
        ("window(1, width=1)", "width is given twice"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_said(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_mask(text)
    assert parse_mask("window(2147483647)") == MASKS["window"](2147483647)
