"""Every verb on a generated network: right, refused with a reason, silently wrong, or a raw exception."""

from __future__ import annotations

import ast
import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.models.view import ModelView
from rankscope.stream import viewing
from rankscope.surgery import session
from tests.hostile.generated.networks import Network

TOLERANCE = 1e-6
READABLE = 1e-9
"""Below this relative residual a twin in float64 has too few digits left to be compared."""

HINT = re.compile(
    r"""\b(stream|blocks)=(?:rankscope\.|rs\.)?(?:Stream\(([^()]*(?:\([^()]*\)[^()]*)*)\)|("[^"]*"|'[^']*'|\[[^\]]*\]))"""
)


class Outcome(NamedTuple):
    """``right``, ``refused``, ``wrong``, ``raw`` or ``noise``; the reason of a refusal, or what is wrong."""

    kind: str
    detail: str
    message: str = ""


class Declared(NamedTuple):
    """What a user says about a network."""

    stream: rs.Stream | None = None
    blocks: str | list[str] | None = None


class WrongError(AssertionError):
    """A number that is not the twin's, and nothing said so."""


def judge(seed: int, *, declared: bool = True) -> dict[str, Outcome]:
    """All verbs on the network of a seed; with ``declared`` also the hints of refusals as printed, and declarations."""
    with structure_found_once():
        return _judge(Network(seed), declared)


@contextmanager
def structure_found_once() -> Iterator[None]:
    """Let the verbs share what was found about a network, or why nothing was: nine tenths of their time goes there."""
    known: dict[object, ModelView | Exception] = {}

    def shared(model: nn.Module, batch: Any, **words: Any) -> ModelView:
        key = (id(model), *(str(words.get(name)) for name in ("blocks", "stream")))
        if key not in known:
            try:
                known[key] = found(model, batch, **words)
            except Exception as error:  # noqa: BLE001 (raised again, for the next verb too)
                known[key] = error
        value = known[key]
        if isinstance(value, Exception):
            raise value
        return value

    found = viewing.view_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "view_of", shared)
        patch.setattr(session, "view_of", shared)
        yield


def _judge(network: Network, with_declarations: bool) -> dict[str, Outcome]:
    with torch.no_grad():
        before = network(network.given)
    if not before.isfinite().all():
        return {"measure": Outcome("noise", "the network's own numbers overflow")}
    # Twins before any verb: inside a with block of operate() their modules would be changed too.
    for skip, mlp, nudge in itertools.product((1.0, 0.0), (True, False), (0.0, 1e-13)):
        network.twin(skip, mlp, nudge)
    assert_close(before, network.twin()[0], 1e-9)
    found = {"measure": attempt(measure, network, Declared())}
    found |= operate(network, Declared())
    found["exact"] = attempt(exact, network, Declared())
    if with_declarations:
        found |= _declared(network, {verb: hint(outcome.message) for verb, outcome in found.items()})
    with torch.no_grad():
        if not torch.equal(network(network.given), before):
            found["left alone"] = Outcome("wrong", "the network gives another output than before")
    return found


def _declared(network: Network, hints: dict[str, Declared]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    if any(hints["measure"]):
        found["measure, as its hint says"] = attempt(measure, network, hints["measure"])
    declared = hints["skip0"] if any(hints["skip0"]) else hints["mlp"]
    if any(declared):
        found |= {f"{verb}, as its hint says": outcome for verb, outcome in operate(network, declared).items()}
    for name, stream in declarations(network).items():
        if Declared(stream) != hints["measure"]:
            found[f"measure, {name}"] = attempt(measure, network, Declared(stream))
    return found


def declarations(network: Network) -> dict[str, rs.Stream]:
    """The true layout if it has to be declared, and, for one network in six, a false one."""
    true = network.layout.declared
    found = {}
    if true not in (None, "batch tokens dim", "tokens batch dim"):
        found["declared"] = rs.Stream(true)
    if network.seed % 6 == 0:
        flat = {"(batch tokens) dim": "(tokens batch) dim", "(tokens batch) dim": "(batch tokens) dim"}
        false = flat.get(true or "", "batch dim tokens" if true != "batch dim tokens" else "batch tokens dim")
        found["declared falsely"] = rs.Stream(false)
    return found


def operate(network: Network, declared: Declared) -> dict[str, Outcome]:
    """Skips removed and MLPs dropped; the structure is found once for both, as for nested ``with`` blocks."""
    found: dict[str, Outcome] = {}

    def both(network: Network, declared: Declared) -> None:
        with rs.operate(rs.Model(network, blocks=declared.blocks, stream=declared.stream), inputs=network.given):
            found["skip0"] = attempt(operating(without_skips, 0.0, True), network, Declared())
            found["mlp"] = attempt(operating(without_mlps, 1.0, False), network, Declared())

    whole = attempt(both, network, declared)
    return found if len(found) == 2 else {"skip0": whole, "mlp": whole}


def attempt(run: Callable[[Network, Declared], None], network: Network, declared: Declared) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(network, declared)
    except rs.RankscopeError as error:
        return Outcome("refused", reason(error, network), str(error))
    except WrongError as error:
        return Outcome("wrong", str(error))
    except NoiseError as error:
        return Outcome("noise", str(error))
    except Exception as error:  # noqa: BLE001 (a raw exception is a finding like any other)
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        return Outcome("raw", f"{words} ({place.name})")
    finally:
        network.forget()
    return Outcome("right", "")


def reason(error: Exception, network: Network) -> str:
    """Class and first clause, without the names and numbers of this network."""
    words = " ".join(str(error).split())
    words = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", words)
    for name in sorted((name for name, _ in network.named_modules() if name), key=len, reverse=True):
        words = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", "…", words)
        words = re.sub(rf"(?<![\w.]){re.escape(re.sub(r'[0-9]+', '*', name))}(?![\w*])", "…", words)
    words = re.sub(r"\d+(\.\d+)?", "N", words)
    first = re.split(r"(?<=\w)[.;:] ", words)[0]
    return f"{type(error).__name__}: {first[:140]}"


def hint(message: str) -> Declared:
    """The declaration that a refusal suggests: the one that was tried on the model, or else the first of each kind."""
    found = Declared()
    tried = message.partition("What was seen agrees with ")[2]
    for name, stream, text in HINT.findall(tried or message):
        if name == "stream" and found.stream is None:
            found = found._replace(stream=_stream(stream) if stream else rs.Stream.parse(ast.literal_eval(text)))
        elif name == "blocks" and text and found.blocks is None:
            found = found._replace(blocks=ast.literal_eval(text))
    listed = re.search(r"Lists of modules in it: '([^']*)'", message)
    return found._replace(blocks=listed[1]) if listed else found


def _stream(arguments: str) -> rs.Stream | None:
    try:
        call = ast.parse(f"Stream({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        words = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        return rs.Stream(*(ast.literal_eval(argument) for argument in call.args), **words)
    except (SyntaxError, ValueError):
        return None


class NoiseError(Exception):
    """The twin itself moves as much when its input moves by a few roundings."""


def measure(network: Network, declared: Declared) -> None:
    run = rs.measure(
        rs.Model(network, blocks=declared.blocks, stream=declared.stream),
        network.given,
        metrics=["relative_residual"],
        sites=["block.out"],
    )
    _compare(run, "relative_residual", network, 1.0, True)


def exact(network: Network, declared: Declared) -> None:
    run = rs.exact(network, rs.Inputs(network.given, sequences=1), rs.Surgery(skip=0.0, mlp="drop"), plain=False)
    _compare(run, "log10_relative_residual", network, 0.0, False)


def without_skips(network: Network) -> AbstractContextManager[Any]:
    return rs.operate(network, rs.Surgery(skip=0.0))


def without_mlps(network: Network) -> AbstractContextManager[Any]:
    return rs.operate(network, rs.Surgery(mlp="drop"))


def operating(
    cut: Callable[[Network], AbstractContextManager[Any]], gain: float, keep: bool
) -> Callable[[Network, Declared], None]:
    def verb(network: Network, declared: Declared) -> None:
        with torch.no_grad(), cut(network):
            ours = network(network.given)
        theirs, whole = network.twin(gain, keep)[0], network.twin()[0]
        if _differ(ours, theirs) > TOLERANCE:
            if _differ(network.twin(gain, keep, 1e-13)[0], theirs) > TOLERANCE / 10:
                raise NoiseError("the network without its parts magnifies roundings")
            what = "the whole network" if _differ(ours, whole) < TOLERANCE else "neither the twin nor the whole"
            raise WrongError(f"differs by {_differ(ours, theirs):.2g}: {what}")
        if _differ(theirs, whole) == 0.0:
            raise WrongError("there was nothing to change, and nothing was said")

    return verb


def _compare(run: rs.Run, metric: str, network: Network, skip: float, mlp: bool) -> None:
    """Relative residuals by block and sequence against the twin's, whichever stack comes first."""
    ours = residuals(run, metric)
    states = network.twin(skip, mlp)[1]
    orders = [states] if len(states) == 1 else [states, states[::-1]]
    nudged = [network.twin(skip, mlp, 1e-13)[1]]
    nudged += [order[::-1] for order in nudged] if len(states) > 1 else []
    wrong = []
    for order, moved in zip(orders, nudged, strict=True):
        rows = 1 if metric.startswith("log10") else None
        theirs, theirs_moved = by_place(order, rows), by_place(moved, rows)
        wrong.append(_worst(ours, theirs, theirs_moved))
    if all(wrong):
        if all(words == "noise" for words in wrong):
            raise NoiseError("the twin's own residuals move with roundings")
        raise WrongError(wrong[0])


def _worst(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float], moved: dict[Any, float]) -> str:
    """What is wrong, in words; empty if nothing is."""
    if ours.keys() != theirs.keys():
        return f"{_size(ours)}, by hand {_size(theirs)}"
    noisy = False
    for place, value in theirs.items():
        both_gone = value <= READABLE and ours[place] <= 10 * READABLE
        # Written so that NaN is wrong.
        if not both_gone and not abs(ours[place] - value) <= TOLERANCE * value:
            if abs(moved[place] - value) > TOLERANCE * value / 10:
                noisy = True
                continue
            return f"(block, sequence) {place}: {ours[place]:.6g}, by hand {value:.6g}"
    return "noise" if noisy else ""


def _size(places: dict[tuple[int, int], float]) -> str:
    blocks, sequences = (1 + max((place[axis] for place in places), default=-1) for axis in (0, 1))
    return f"{blocks} blocks x {sequences} sequences"


def by_place(stacks: list[list[Tensor]], rows: int | None) -> dict[tuple[int, int], float]:
    flat = [state for stack in stacks for state in stack]
    return {
        (layer, number): float((x - x.mean(0)).norm() / x.norm())
        for layer, state in enumerate(flat)
        for number, x in enumerate(state[:rows])
    }


def residuals(run: rs.Run, metric: str) -> dict[tuple[int, int], float]:
    """By (layer, sequence); several stacks count as one, in the order in which they ran."""
    rows = [row for row in run.table.to_pylist() if row["metric"] == metric and row["site"] == "block.out"]
    rows = [row for row in rows if metric == "relative_residual" or row["arithmetic"] == "exact"]
    first: dict[str, int] = {}
    depth = 0
    for stack in dict.fromkeys(row["stack"] for row in rows):
        first[stack] = depth
        depth += 1 + max(row["layer"] for row in rows if row["stack"] == stack)
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        place = first[row["stack"]] + row["layer"], row["sequence"]
        if place in found:
            raise WrongError(f"two rows for one block and sequence: {place}")
        found[place] = row["value"] if metric == "relative_residual" else 10 ** row["value"]
    return found


def _differ(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if difference == difference else float("inf")


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert _differ(ours, theirs) <= tolerance, f"the twin is not the network: {_differ(ours, theirs):.2g}"
