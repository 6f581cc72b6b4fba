"""Renders a picture as HTML. Everything but our own numbers is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape

import numpy as np

from rankscope.ext.playground.curves import SHORT, curve
from rankscope.ext.playground.picture import Frame, Picture, TokenCourse, Treated
from rankscope.ext.playground.scales import exponent
from rankscope.ext.theory.predict.judge import read_logs
from rankscope.verdicts.sentences import in_words

WIDE, NARROW = (540, 440), (340, 330)
HEADLINES = {
    3: "Doubly exponential collapse: each block cubes the differences.",
    1: "Exponential collapse: each block multiplies the differences by a factor below 1.",
    0: "No collapse: small differences do not shrink from block to block.",
}
IMPORTS = """from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.simulating import simulate"""
SLOWING = "Slower than exponential: the stream grows, so each pre-norm block changes it less than the one before."


def rendered(picture: Picture) -> str:
    """The answer, the sphere and the curve."""
    given = _treated(picture)
    shown = picture.frames if given is None else given.frames
    frames = json.dumps({"frames": [_packed(frame) for frame in shown]}, separators=(",", ":"))
    return (
        f'<div class="play" data-order="{picture.order}" data-frames="{escape(frames, quote=True)}">'
        f'{_answer(picture)}<div class="panels">{_sphere(picture)}{_curve(picture)}</div>{_numbers(picture)}</div>'
    )


def refusal(sentence: str) -> str:
    """HTML to show if the choices are refused."""
    words = escape(sentence)
    return f'<div class="play" data-order=""><section class="answer refused" role="alert">{words}</section></div>'


def _packed(frame: Frame) -> dict[str, object]:
    """Coordinates as integers in thousandths, token by token."""
    return {
        "s": [round(1000 * value) for point in frame.sphere for value in point],
        "l": [round(1000 * value) for point in frame.lens for value in point],
        "a": power(frame.log10_angle),
        "m": power(-frame.log10_angle),
    }


def power(log10: float) -> str:
    """A number given by its log10, as safe HTML.

    Example:
        >>> power(-1.0), power(-24.5), power(-math.inf)
        ('0.1', '10<sup>−24.5</sup>', '0')
    """
    if log10 == -math.inf:
        return "0"
    if not math.isfinite(log10):
        return "unknown"
    if not -3 <= log10 < 4:
        return f"10<sup>{exponent(log10)}</sup>"
    return f"{10**log10:.2g}" if log10 < 1 else f"{10**log10:,.0f}"


def _answer(picture: Picture) -> str:
    badge = "no collapse" if picture.order == 0 else f"order {picture.order}"
    state = {3: "bad", 1: "care", 0: "good"}[picture.order]
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(picture))
    headline = SLOWING if picture.order == 1 and _slows(picture) else HEADLINES[picture.order]
    return (
        f'<section class="answer {state}" aria-live="polite"><p class="headline"><span class="badge">{badge}</span> '
        f"{headline}</p><p>{escape(picture.reason)}</p><dl>{items}</dl></section>"
    )


def _slows(picture: Picture) -> bool:
    chosen = picture.choices
    return chosen.norm != "none" and chosen.norm_place == "pre" and chosen.skip_gain >= 1


def _facts(picture: Picture) -> Iterator[tuple[str, str]]:
    course = picture.course.log10_relative
    yield f"tokens differ after block {picture.choices.depth - 1} by", f"{power(course[-1])} of themselves"
    yield "state, as measure names it", escape(in_words(read_logs(np.array(course[1:])[:, None])))
    order = picture.course.order[-1]
    lost = "tokens are equal" if course[-1] == -math.inf else "too small a residual to measure it"
    yield "order measured at the last block", f"{order:.3f}" if math.isfinite(order) else lost
    if picture.order != 3 and math.isfinite(picture.factor):
        yield "factor per block, late", f"{picture.factor:.3g}"
    for name, sight in picture.sights.items():
        yield f"{SHORT[name]} goes blind", "never" if sight.block is None else f"at block {sight.block}"
    given = picture.treated
    if given is not None:
        words = "not possible here" if given.course is None else f"{power(given.course.log10_relative[-1])}"
        yield f"under {escape(given.name)}", words


def _treated(picture: Picture) -> Treated | None:
    """The network under the chosen remedy, if there is one and it could be computed."""
    given = picture.treated
    return given if given is not None and given.course is not None else None


def _sphere(picture: Picture) -> str:
    depth, given = picture.choices.depth, _treated(picture)
    under = "" if given is None else f", under {escape(given.name)}"
    return (
        '<figure class="card ball"><div class="views">'
        '<svg class="sphere" viewBox="-112 -112 224 224" role="img" aria-label="Tokens on a sphere"></svg>'
        '<div class="loupe"><svg class="lens" viewBox="-56 -56 112 112" role="img" '
        'aria-label="The same tokens, magnified"></svg>× <output class="zoom"></output></div></div>'
        '<div class="player"><button type="button" class="run">Play</button>'
        f'<input type="range" class="layer" min="0" max="{depth}" step="1" value="0" aria-label="block">'
        '<output class="where">first tokens</output></div>'
        f"<figcaption>{picture.choices.tokens} tokens as directions{under}. The pole is their mean; the angle from it "
        'is the true one in all dimensions, now at most <output class="angle"></output> radian. The lens looks down on '
        "the pole and magnifies until the tokens fill it, however little they differ.</figcaption></figure>"
    )


def _curve(picture: Picture) -> str:
    given, treated = picture.treated, _treated(picture)
    keys = [("exact", "exact arithmetic"), ("law", "the law, one block ahead")]
    keys += [(f"read-{short}", f"what {short} reads") for short in SHORT.values()]
    if treated is not None:
        keys.append(("treated", f"exact, under {escape(treated.name)}"))
    legend = "".join(f'<li><span class="key {name}"></span>{text}</li>' for name, text in keys)
    refused = ""
    if given is not None and treated is None:
        refused = f'<p class="refused">{escape(given.name)}: {escape(given.refused)}</p>'
    title = "How far tokens differ: log<sub>10</sub> of the relative residual"
    return (
        f'<figure class="card chart"><h3>{title}</h3><ul class="legend">{legend}</ul>'
        f"{curve(picture, *WIDE, 'wide')}{curve(picture, *NARROW, 'narrow')}{refused}</figure>"
    )


def _numbers(picture: Picture) -> str:
    heads = ["block", "exact", "law", "order", *(SHORT[name] for name in picture.sights)]
    given = None if picture.treated is None else picture.treated.course
    heads += [] if given is None else ["treated", "its order"]
    rows = "".join(_row(picture, given, block) for block in range(picture.choices.depth + 1))
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    code = f"{IMPORTS}\n\nsimulate({picture.choices.call()})"
    return (
        '<details class="card"><summary>The numbers, and how to reproduce them</summary>'
        "<p>log<sub>10</sub> of the relative residual after each block.</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="The numbers"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f'<pre tabindex="0">{escape(code)}</pre></details>'
    )


def _row(picture: Picture, given: TokenCourse | None, block: int) -> str:
    cells = [_cell(picture.course.log10_relative[block])]
    cells.append(_cell(picture.law.log10_relative[block - 1]) if block else "")
    cells.append(_cell(picture.course.order[block - 1]) if block else "")
    cells += [_cell(sight.log10_relative[block]) for sight in picture.sights.values()]
    if given is not None:
        cells += [_cell(given.log10_relative[block]), _cell(given.order[block - 1]) if block else ""]
    name = str(block - 1) if block else "in"
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _cell(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.4e}"
    return "−∞" if value == -math.inf else ""
