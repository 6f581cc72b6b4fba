"""Why a run went bad: what experiments showed, what was recorded, and what was seen, in order. Does not import torch.

    watch.why()                       # of a run that is watched
    why(read_record("runs/plain"))    # of its record, as `rankscope doctor runs/plain` prints

A cause is shown (an experiment), or recorded (an event or a fact); what is only seen, as a curve is, is never one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rankscope._printing import brief
from rankscope.monitor.readings import FAULTS, Alarm, Reading
from rankscope.monitor.record import Record

SYMPTOMS = (
    "loss_rises", "not_finite", "not_finite_gradients", "vanishing_qk_gradients", "constant_answer", "token_collapse",
    "input_collapse",
)  # fmt: skip
"""Facts and states that follow from what happened before them, if that is known."""
WITHIN = 64
"""Steps before a run went bad in which an event may have caused it."""
EARLY = 16
"""Steps after which the motion of weights counts: with Adam and small initial weights, the first steps are large."""
FAST, FAST_EARLY = 0.015, 0.05
"""Change of the weights per step, relative to their norm, in two readings, or in three that may be among the first
steps, with which a learning rate that was set or raised is the cause. In training that works it is about 0.001."""
RAISED = 4.0
"""Factor by which a rate is raised at once, to be more than a warm-up, and the cause with a third of that motion."""
_OWN = ("gradients", "weights", "loss", "data")
_FIRST = ("data", "weights", "structure", "objective", "optimizer", "gradients", "rate")


@dataclass(frozen=True)
class Clue:
    """One thing that is known about a run.

    Attributes:
        how: ``"shown"`` by an experiment, ``"recorded"`` as an event or a fact, or ``"seen"`` in a curve.
        step: of the training.
        component: what it is about, as that of an :class:`~rankscope.monitor.readings.Alarm`.
        words: what.
        name: of the event or the alarm.
    """

    how: Literal["shown", "recorded", "seen"]
    step: int
    component: str
    words: str
    name: str = ""


@dataclass(frozen=True)
class Why:
    """What is known about a run that went bad.

    Attributes:
        since: the step at which it did; None if no alarm was raised.
        cause: what leads; None if nothing was shown or recorded that does. Without an alarm, what was shown or else the
            first event that nobody declared.
        lines: everything, in order.
        readings: how many there were.
    """

    since: int | None
    cause: Clue | None
    lines: tuple[Clue, ...]
    readings: int

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        count = f"{self.readings} reading{'s' if self.readings != 1 else ''}"
        if not self.readings and not self.lines:
            head = "Nothing was read."
        elif self.since is None:
            words = "" if self.cause is None else self.cause.words.split("\n")[0].rstrip(".")
            no_alarm = "No other alarm" if self.cause is not None and self.cause.name == FAULTS else "No alarm"
            head = f"{no_alarm} ({count}); {self.cause.how}: {words}." if self.cause else f"No fault seen ({count})."
            events = sum(line.name != "learning_rate" for line in self.lines)
            if self.cause is None and events:
                head = f"{head} {events} event{'s' if events > 1 else ''} that may be planned:"
        elif self.cause is None:
            head = f"Went bad at step {self.since}; nothing was shown or recorded that explains it ({count})."
        else:
            words = self.cause.words.split("\n")[0].rstrip(".")
            head = f"Went bad at step {self.since}, {self.cause.how}: {words}."
        rows = (f"  {line.how:<9}step {line.step}: {_unnumbered(line)}" for line in self.lines)
        return "\n".join([head, *rows])


def _unnumbered(line: Clue) -> str:
    return line.words.removeprefix(f"Step {line.step}: ").replace("\n", "\n" + 11 * " ")


def why(record: Record) -> Why:
    """Why a recorded run went bad."""
    motions = [(reading.step, fastest(reading)) for reading in record.readings]
    raised = [alarm for alarm in record.alarms if alarm.state == "raised"]
    return explained(raised, record.notes, motions, len(record.readings))


def fastest(reading: Reading) -> float:
    """Largest motion of the weights of a block per step; NaN if it is not known."""
    found = [row.mean for row in reading.table if row.metric == "weight_motion" and math.isfinite(row.mean)]
    return max(found, default=math.nan)


def explained(
    raised: Sequence[Alarm],
    notes: Iterable[Alarm],
    motions: Sequence[tuple[int, float]],
    readings: int,
    found: Sequence[Clue] = (),
) -> Why:
    """Put the evidence in order, and find what leads.

    An event that nobody declared, in the last steps before the run went bad, leads; then a fault that was shown, facts
    in their order, and a learning rate with which weights moved fast.

    Args:
        raised: alarms.
        notes: events, and what else was written down.
        motions: step and motion of the weights, of each reading.
        readings: how many there were.
        found: what experiments show now.
    """
    events = [one for one in notes if one.name != FAULTS and one.component != "none"]
    shown = [*(Clue("shown", one.step, one.component, one.sentence, one.name) for one in raised if one.name == FAULTS)]
    shown += [line for line in found if all(line.words not in one.words for one in shown)]
    facts = [one for one in raised if one.name != FAULTS]
    since = min((int(one.evidence.get("since", one.step)) for one in facts), default=None)
    own = [one for one in facts if one.component != "unknown" and not one.sentence.count(" Follows ")]
    rate, seen = _rate(events, motions)
    if rate is not None and rate.step == 0 and any(one.name in SYMPTOMS and one.component in _OWN for one in own):
        rate = None  # where the first bad number is says more than a rate that was the same from the start
    cause = None
    if since is not None:
        # That the batch was the same all along is noted late, and nothing changed at that step.
        changed = [one for one in events if one.name != "same_batch" and _is_sudden(one)]
        sudden = [one for one in changed if since - WITHIN <= one.step <= since]
        # A loss that jumps in the middle of a run does not follow from what was so at its first step; and of what is
        # shown now, nobody knows whether it was so before.
        is_late = since > 0 and all(one.name == "loss_rises" for one in facts)
        candidates = [
            *sorted((_recorded(one) for one in sudden), key=_order),
            *(line for line in shown if line.step <= since and not is_late),
            *(_recorded(one) for one in own if one.name not in SYMPTOMS),
            *(rate,),
            *(_recorded(one) for one in own if one.name in SYMPTOMS and one.name != "loss_rises"),
            *(line for line in shown if line.step > since and not is_late),
        ]
        known = [one for one in candidates if one is not None]
        cause = next(iter(known), None)
    else:
        # Asked without an alarm: what was shown, or else what nobody declared, as it is.
        sudden = [one for one in events if _is_sudden(one)]
        cause = min((*shown, *map(_recorded, sudden)), key=_order, default=None)
    lines = [*shown, *(_recorded(one) for one in (*events, *facts)), *seen]
    return Why(since, cause, tuple(sorted(lines, key=_order)), readings)


def _is_sudden(event: Alarm) -> bool:
    """Whether nobody declared it, and it is more than the rate with which an optimizer begins."""
    begins = event.name == "learning_rate" and not math.isfinite(event.evidence.get("before", math.nan))
    return not begins and not event.evidence.get("declared")


def _recorded(one: Alarm) -> Clue:
    return Clue("recorded", one.step, one.component, one.sentence, one.name)


def _order(line: Clue) -> tuple[int, int]:
    return line.step, _FIRST.index(line.component) if line.component in _FIRST else len(_FIRST)


def _rate(events: Sequence[Alarm], motions: Sequence[tuple[int, float]]) -> tuple[Clue | None, list[Clue]]:
    """The learning rate that was set or raised before weights began to move fast, and what was seen of that."""
    known = [(step, motion) for step, motion in motions if math.isfinite(motion)]
    if not known:
        return None, []
    raises = [one for one in events if one.name == "learning_rate" and not _fell(one.evidence)]
    for one in raises:
        before = one.evidence.get("before", math.nan)
        after = [(step, motion) for step, motion in known if step > one.step]
        if one.step >= EARLY and one.evidence["now"] >= RAISED * before > 0.0 and after:
            step, most = max(after[:8], key=lambda entry: entry[1])
            if most >= FAST / 3:
                return _recorded(one), [_fast(step, most)]
    late = [(step, motion) for step, motion in known if motion >= FAST and step >= known[0][0] + EARLY]
    early = [(step, motion) for step, motion in known if motion >= FAST_EARLY]
    fast = early if len(early) >= 3 else late if len(late) >= 2 else []
    if not fast:
        return None, []
    leads = [one for one in raises if one.step <= fast[0][0]]
    seen = _fast(fast[0][0], max(motion for _, motion in fast))
    return (_recorded(leads[-1]) if leads else None), [seen]


def _fell(evidence: Mapping[str, float]) -> bool:
    return evidence["now"] < evidence.get("before", math.nan)


def _fast(step: int, motion: float) -> Clue:
    return Clue("seen", step, "rate", f"weights move by up to {motion:.2g} of their norm per step, from here on")


def follows(cause: Clue | None) -> str:
    """What an alarm says about a cause that is older than itself."""
    if cause is None:
        return ""
    if cause.name == FAULTS:
        return "Same cause as step 0: see the fault that was shown at the first step."
    return f"Follows {cause.name.replace('_', ' ')}, step {cause.step}: {_unnumbered(cause)}"
