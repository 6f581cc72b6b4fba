"""Every verb on a case: equal to the twin, or refused by name; nothing else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.runs.rows import only
from tests.flat_calls import flat
from tests.hostile.case import Case
from tests.hostile.twin import WHOLE, Cut, Twin

TOLERANCE = 1e-6
READABLE = 1e-9
"""Below this relative residual a twin in float64 has too few digits left to be compared."""

VARIANTS = {
    "pure": Cut(skip=0.0, mlp=False, norm=False),
    "+mlp": Cut(skip=0.0, norm=False),
}


class Outcome(NamedTuple):
    """``equal`` or ``refused``, and the worst relative difference or the words of the refusal."""

    kind: str
    detail: str


class Setting(NamedTuple):
    case: Case
    model: nn.Module
    given: Any

    def twin(self, cut: Cut) -> Twin:
        return self.case.twin(self.model, self.given, cut)

    def run(self) -> Tensor:
        return self.case.run(self.model, self.given)

    @property
    def inputs(self) -> rs.Inputs:
        """What the network runs on, with its axes if they are plain: to find them takes a third of the time."""
        is_plain = isinstance(self.given, Tensor) and self.given.ndim == 2 and not self.given.is_floating_point()
        return rs.Inputs(self.given, axes="batch tokens") if is_plain else rs.Inputs(self.given)

    @property
    def options(self) -> dict[str, Any]:
        blocks = {} if self.case.blocks is None else {"blocks": self.case.blocks}
        return {**blocks, **self.case.options}


def outcome(case: Case, verb: str) -> Outcome:
    """Run one verb on one network and judge it.

    Raises:
        AssertionError: a silent difference, a refusal that names nothing, or a network that is not left as it was.
    """
    setting = Setting(case, case.model(), case.given())
    with left_alone(setting):
        try:
            return Outcome("equal", VERBS[verb](setting))
        except rs.RankscopeError as error:
            return refused(error, setting.model)


def refused(error: rs.RankscopeError, model: nn.Module) -> Outcome:
    message = str(error)
    assert names_a_part(message, model), f"a refusal that names no part of the model: {message}"
    return Outcome("refused", f"{type(error).__name__}: {message}")


@contextmanager
def left_alone(setting: Setting) -> Iterator[None]:
    """Weights, buffers, hooks, attributes, modes and output of the network are the same before and after."""
    before, output = fingerprint(setting.model), setting.run()
    yield
    after = fingerprint(setting.model)
    assert after.keys() == before.keys(), f"attributes changed: {after.keys() ^ before.keys()}"
    changed = [name for name, value in before.items() if not same(value, after[name])]
    assert not changed, f"the model was changed: {changed}"
    assert torch.equal(setting.run(), output), "the model gives another output than before"


def fingerprint(model: nn.Module) -> dict[str, object]:
    facts: dict[str, object] = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        facts[f"{name} hooks"] = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]
        facts[f"{name} attributes"] = sorted(vars(module))
        facts[f"{name} training"] = module.training
        facts[f"{name} class"] = type(module)
    for name, parameter in model.named_parameters():
        facts[f"{name} object"] = (id(parameter), parameter.requires_grad, parameter.grad is None)
    return facts


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def names_a_part(message: str, model: nn.Module) -> bool:
    """Whether a message names a block, a module, its class, or an argument of the model."""
    if re.search(r"\bblocks? \d", message):
        return True
    names = {name for name, _ in model.named_modules() if name}
    names |= {type(module).__name__ for module in model.modules()}
    names |= set(inspect.signature(model.forward).parameters)
    patterns = {re.sub(r"\d+", "*", name) for name in names if "." in name}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?![\w])", message) for name in names | patterns)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> float:
    assert ours.shape == theirs.shape, f"shape {tuple(ours.shape)}, by hand {tuple(theirs.shape)}"
    error = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
    assert error <= tolerance, f"differs from the twin by {error:.3g}"
    return error


def assert_residuals(ours: dict[tuple[int, int], float], theirs: Twin, case: Case) -> float:
    """Relative residuals by (layer, sequence) against the twin's hidden states."""
    by_hand = {
        (layer, sequence): value
        for layer, row in enumerate(theirs.relative_residuals())
        for sequence, value in enumerate(row)
    }
    assert ours.keys() == by_hand.keys(), f"blocks and sequences {sorted(ours)}, by hand {sorted(by_hand)}"
    worst = 0.0
    for place, value in by_hand.items():
        if not theirs.states[place[0]][place[1]].any():
            assert math.isnan(ours[place]), f"(block, sequence) {place}: {ours[place]:.9g} of a state that is zero"
            continue
        error = abs(ours[place] - value) - case.roundings
        allowed = TOLERANCE * max(value, READABLE / TOLERANCE)
        # Written so that NaN fails.
        assert error <= allowed, f"(block, sequence) {place}: {ours[place]:.9g}, by hand {value:.9g}"
        worst = max(worst, error / max(value, READABLE))
    return worst


def residuals(run: rs.Run, metric: str, **wanted: str) -> dict[tuple[int, int], float]:
    """By (layer, sequence); several stacks count as one, in the order in which they ran."""
    rows = [
        row
        for row in only(run.table, metric=metric, site="block.out").to_pylist()
        if all(row[column] == value for column, value in wanted.items())
    ]
    first, depth = {}, 0
    for stack in dict.fromkeys(row["stack"] for row in rows):
        first[stack] = depth
        depth += 1 + max(row["layer"] for row in rows if row["stack"] == stack)
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        place = first[row["stack"]] + row["layer"], row["sequence"]
        assert place not in found, f"two rows for one block and sequence: {place}"
        found[place] = row["value"] if metric == "relative_residual" else 10 ** row["value"]
    return found


def doctor(setting: Setting) -> str:
    """Passes only if ``measure`` is right; what fails says where."""
    report = flat(rs.doctor, setting.model, setting.given, **setting.options)
    if not report.trusted or not report.stacks:
        failed = "; ".join(check.detail for check in report.checks if check.status in ("fail", "refused"))
        raise rs.RankscopeError(f"{failed} ({type(setting.model).__name__})" if not report.stacks else failed)
    depth = sum(stack.depth for stack in report.stacks)
    assert depth == len(setting.twin(WHOLE).states), f"{depth} blocks, by hand {len(setting.twin(WHOLE).states)}"
    try:
        return measure(setting)
    except rs.RankscopeError as error:
        raise AssertionError(f"doctor passes what measure refuses: {error}") from error


def measure(setting: Setting, **declared: Any) -> str:
    run = flat(
        rs.measure,
        setting.model,
        setting.given,
        metrics=["relative_residual"],
        sites=["block.out"],
        **setting.options,
        **declared,
    )
    theirs = setting.twin(WHOLE)
    if declared and theirs.told is not None:
        theirs = theirs._replace(counts=theirs.told)
    return f"{assert_residuals(residuals(run, 'relative_residual'), theirs, setting.case):.1e}"


def measure_declared(setting: Setting) -> str:
    declared = {name: value() if callable(value) else value for name, value in (setting.case.declared or {}).items()}
    return measure(setting, **declared)


def measure_cut(setting: Setting) -> str:
    with rs.operate(setting.model, rs.Surgery(skip=0.0, **setting.options), inputs=setting.given):
        run = flat(
            rs.measure,
            setting.model,
            setting.given,
            metrics=["relative_residual"],
            sites=["block.out"],
            **setting.options,
        )
    theirs = setting.twin(Cut(skip=0.0))
    return f"{assert_residuals(residuals(run, 'relative_residual'), theirs, setting.case):.1e}"


EDITS: dict[str, tuple[Cut, dict[str, Any]]] = {
    "skip0": (Cut(skip=0.0), {"skip": 0.0}),
    "skip05": (Cut(skip=0.5), {"skip": 0.5}),
    "one_block": (Cut(skip=0.0, layers=frozenset({1})), {"skip": 0.0, "layers": [1]}),
    "mlp": (Cut(mlp=False), {"mlp": "drop"}),
    "norm": (Cut(norm=False), {"norm": "identity"}),
    "uniform": (Cut(uniform=True), {"attention": "uniform"}),
}


def operating(edit: str) -> Callable[[Setting], str]:
    """The output under ``operate`` against the hand-cut output; a cut that changes nothing has to be refused."""
    cut, words = EDITS[edit]

    def verb(setting: Setting) -> str:
        theirs, whole = setting.twin(cut).output, setting.twin(WHOLE).output
        with rs.operate(setting.model, rs.Surgery(**words, **setting.options), inputs=setting.given):
            ours = setting.run()
        return judge_edit(ours, theirs, whole, setting.case)

    return verb


def judge_edit(ours: Tensor, theirs: Tensor, whole: Tensor, case: Case) -> str:
    error = assert_close(ours, theirs, TOLERANCE + case.roundings)
    changed = float((theirs - whole).abs().max() / whole.abs().max())
    assert changed > 1e-4, "there was nothing to change, and nothing was said"
    return f"{error:.1e}"


def edit_outcomes(case: Case) -> dict[str, Outcome]:
    """All edits of one network, one after the other: its structure is found once, which costs more than the edits.

    Raises:
        AssertionError: as for :func:`outcome`, or the network is not itself between two edits.
    """
    setting = Setting(case, case.model(), case.given())
    outcomes: dict[str, Outcome] = {}
    with left_alone(setting):
        whole = setting.twin(WHOLE).output
        by_hand = {edit: setting.twin(cut).output for edit, (cut, _) in EDITS.items()}
        try:
            with rs.operate(setting.model, rs.Surgery(**setting.options), inputs=setting.inputs):
                bare = setting.run()  # not by the fused kernels of torch, which an operation turns off
                for edit, (_, words) in EDITS.items():
                    outcomes[edit] = _one_edit(setting, words, by_hand[edit], whole)
                    assert torch.equal(setting.run(), bare), f"{edit}: not undone"
        except rs.RankscopeError as error:
            return dict.fromkeys(EDITS, refused(error, setting.model))
    return outcomes


def _one_edit(setting: Setting, words: dict[str, Any], theirs: Tensor, whole: Tensor) -> Outcome:
    try:
        with rs.operate(setting.model, rs.Surgery(**words, **setting.options)):
            ours = setting.run()
    except rs.RankscopeError as error:
        return refused(error, setting.model)
    return Outcome("equal", judge_edit(ours, theirs, whole, setting.case))


def exact(cut: Cut, **words: Any) -> Callable[[Setting], str]:
    def verb(setting: Setting) -> str:
        run = flat(rs.exact, setting.model, setting.given, plain=False, sequences=1, **words, **setting.options)
        ours = residuals(run, "log10_relative_residual", arithmetic="exact")
        first = setting.twin(cut).first()
        return f"{assert_residuals(ours, first, setting.case):.1e}"

    return verb


def ablate(setting: Setting) -> str:
    """Each variant equal, or left out by name in the notes; all of them left out is a refusal."""
    run = flat(
        rs.ablate,
        setting.model,
        setting.given,
        variants=list(VARIANTS),
        metrics=["relative_residual"],
        **setting.options,
    )
    worst, refused = 0.0, []
    for name, cut in VARIANTS.items():
        ours = residuals(run, "relative_residual", variant=name)
        if not ours:
            refused += [note for note in run.notes if note.startswith(f"{name} under")]
            assert refused, f"{name} is missing without a note"
            continue
        try:
            worst = max(worst, assert_residuals(ours, setting.twin(cut), setting.case))
        except AssertionError as error:
            raise AssertionError(f"variant {name}: {error}") from error
    if refused:
        raise rs.RankscopeError(" ".join(refused))
    return f"{worst:.1e}"


def always_refused(verb: str) -> Callable[[Setting], str]:
    """A verb that needs the weights of single heads, which a hand-written network does not declare."""

    def run(setting: Setting) -> str:
        getattr(rs, verb)(setting.model, setting.given, **setting.options)
        pytest.fail(f"{verb} answered for a network whose heads it cannot know")

    return run


VERBS: dict[str, Callable[[Setting], str]] = {
    "doctor": doctor,
    "measure": measure,
    "measure_cut": measure_cut,
    **{edit: operating(edit) for edit in EDITS},
    "exact_whole": exact(WHOLE),
    "exact": exact(Cut(skip=0.0), skip=0.0),
    "ablate": ablate,
    "decompose": always_refused("decompose"),
    "bound": always_refused("bound"),
}
