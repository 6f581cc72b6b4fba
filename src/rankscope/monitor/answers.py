"""Whether a model answers better than with one answer for all inputs, from what autograd saved for the loss.

A loss that is stuck at the logarithm of the number of classes, or at the variance of the targets, is that of a model
whose answers do not depend on its inputs. The operation that computed the loss has saved the answers and the targets,
so that both are known without a pass of the model, whatever code computed it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.linalg.precision import widest
from rankscope.monitor.readings import ENOUGH
from rankscope.verdicts.states import LEAST_INPUTS

CLASSES, TRUTH, SHARES, NUMBERS = "classes", "yes or no", "yes or no, as shares", "numbers"
CRITERIA = {
    "NllLossBackward0": CLASSES,
    "NllLoss2DBackward0": CLASSES,
    "BinaryCrossEntropyWithLogitsBackward0": TRUTH,
    "BinaryCrossEntropyBackward0": SHARES,
    "MseLossBackward0": NUMBERS,
    "SmoothL1LossBackward0": NUMBERS,
    "HuberLossBackward0": NUMBERS,
}
"""Operations of a loss as autograd calls them, and what their targets are. A robust loss is judged by squares, too."""
NEAR = 256
"""Operations next to the loss among which these are looked for; a model that returns its loss has many more."""
EVERY = 4
"""Calls of ``keep`` of which one is kept, after the first ones."""
ROWS = 64
"""Answers that are compared."""
ENTRIES = 2**20
"""Numbers that are kept of one batch at most: of a large vocabulary, fewer answers."""
WINDOW = 16
"""Readings whose losses are added up; half of them have to be there."""
USE, SURE_USE = 0.01, 0.03
"""Share of the loss of one answer for all by which the answers have to be better over the window, or over a quarter of
it, to count as depending on the inputs."""
FALLS = 0.01
"""Share by which the loss of 32 steps has to fall to count as falling."""

Samples = dict[tuple[Any, ...], tuple[Tensor, ...]]
"""Answers and targets of a batch, by the place of the operation, its kind, their shape and device, and whether they
were broadcast against each other."""


class Answers:
    """Compares the answers to some training batches with their mean, given for all inputs instead."""

    def __init__(self) -> None:
        self._calls = 0
        self._kept: dict[tuple[Any, ...], deque[tuple[Tensor, ...]]] = {}
        self._losses: deque[float] = deque(maxlen=32)
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._since, self._level, self._rate = 0, math.nan, math.nan
        self._is_new = False
        self._labels: Tensor | None = None
        self._taken = (0, -1)

    def hear(self, loss: float) -> None:
        """The loss of a step."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def keep(self, loss: Tensor) -> None:
        """Keep some answers and their targets, given the loss before ``backward``; on their device, without waiting."""
        self.add(self.sample(loss))

    def sample(self, loss: Tensor) -> Samples:
        """What :meth:`keep` would keep; for a loss of which only ``backward`` shows whether it is that of the model."""
        self._calls += 1
        if torch.compiler.is_compiling() or (self._calls > ENOUGH and self._calls % EVERY):
            return {}
        found = {}
        for place, node in enumerate(criteria(loss)):
            kept = _sampled(node)
            if kept is not None and CRITERIA[node.name()] == CLASSES:
                self._labels = node._saved_target.detach()
            if kept is not None:
                shape, device = kept[0].shape[1:], kept[0].device
                found[place, CRITERIA[node.name()], shape, device, _is_crossed(node)] = kept
        return found

    def add(self, samples: Samples) -> None:
        """Keep what was sampled."""
        for key, kept in samples.items():
            others = {old for old in self._kept if old[0] == key[0] and old != key}
            self._is_new = self._is_new or bool(others)
            self._kept = {old: value for old, value in self._kept.items() if old not in others}
            own = self._kept.setdefault(key, deque())
            own.append(kept)
            while len(own) > 1 and sum(len(one[0]) for one in own) - len(own[0][0]) >= ROWS:
                own.popleft()

    def take_labels(self, step: int) -> Tensor | None:
        """The classes of a batch since the last call; None if none is known, or if steps have several losses.

        A loss for real inputs and one for generated ones have one class each.
        """
        labels, self._labels = self._labels, None
        (calls, before), self._taken = self._taken, (self._calls, step)
        return labels if self._calls - calls == step - before else None

    def is_new(self) -> bool:
        """Whether the loss has become another one since the last call, and does not compare with those before."""
        found, self._is_new = self._is_new, False
        return found

    def facts(self, step: int, rate: float) -> dict[str, float]:
        """At a reading, by name; nothing if no such loss was seen.

        - ``answers_alike``: steps for which the answers were no better than one answer for all, and the loss did not
          fall. They are not counted while the learning rate rises.
        - ``answers_loss``: the loss of the answers over the last readings; for numbers, the mean square of the errors.
        - ``mean_answer_loss``: the same if the mean of the answers were given for all inputs.
        - ``answers_crossed``: 1 if answers and targets were broadcast against each other, as (N, 1) and (N).
        """
        if not self._kept:
            return {}
        losses = [_losses(key[1], kept) for key, kept in self._kept.items()]
        known = [one for one in losses if one is not None]
        if known:
            own, mean = map(math.fsum, zip(*known, strict=True))
            self._window.append((own, mean))
        level = sum(self._losses) / len(self._losses) if self._losses else math.nan
        rises, self._rate = rate > self._rate, rate
        falls = not level > self._level - FALLS * abs(self._level)
        if len(self._window) < ENOUGH or self._uses() or rises or falls:
            self._since, self._level = step, level
        found = {
            "answers_alike": float(step - self._since),
            "answers_crossed": float(any(key[-1] for key in self._kept)),
        }
        if len(self._window) >= ENOUGH:
            means = (math.fsum(values) / len(self._window) for values in zip(*self._window, strict=True))
            found |= dict(zip(("answers_loss", "mean_answer_loss"), means, strict=True))
        return found

    def _uses(self) -> bool:
        """Whether the answers are better than their mean."""
        for number, least in ((len(self._window), USE), (WINDOW // 4, SURE_USE)):
            own, mean = map(math.fsum, zip(*list(self._window)[-number:], strict=True))
            if not own > (1.0 - least) * mean:
                return True
        return False


def criteria(loss: Tensor) -> Iterator[Any]:
    """The operations of :data:`CRITERIA` next to a loss, the nearest first; at most four.

    Example:
        >>> x = torch.zeros(3, 2, requires_grad=True)
        >>> [node.name() for node in criteria(2 * F.cross_entropy(x, torch.tensor([0, 1, 1])))]
        ['NllLossBackward0']
    """
    waiting, seen, count = deque([loss.grad_fn]), {loss.grad_fn}, 0
    for _ in range(NEAR):
        node = waiting.popleft() if waiting else None
        if node is None or count == 4:
            return
        if node.name() in CRITERIA:
            count += 1
            yield node
            continue
        following = dict.fromkeys(one for one, _ in node.next_functions if one is not None and one not in seen)
        seen.update(following)
        waiting.extend(following)


def labels_of(loss: Tensor, output: Tensor) -> Tensor | None:
    """The classes that a loss compares with the first sequences of a batch, shaped as these without their last axis.

    Only if the loss is a cross-entropy of these very numbers: its logarithms of shares are bit for bit theirs.
    """
    shares = F.log_softmax(output.flatten(0, -2), -1)
    for node in criteria(loss):
        known = CRITERIA[node.name()] == CLASSES and not _is_hooked(node)
        logs = node._saved_self.detach() if known else shares.new_empty(0)
        if logs.ndim == 2 and torch.equal(logs[: len(shares)], shares):
            labels: Tensor = node._saved_target.detach()[: len(shares)].view(output.shape[:-1]).clone()
            return labels
    return None


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """The loss of :func:`labels_of`."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def _is_hooked(node: Any) -> bool:
    """Whether hooks (a checkpoint, an offload) saved what the operation needs: to look at it would compute it."""
    raw = [getattr(node, f"_raw_saved_{name}", None) for name in ("self", "target")]
    return any(getattr(one, "unpack_hook", raw) is not None for one in raw)  # an older torch does not tell


def _sampled(node: Any) -> tuple[Tensor, ...] | None:
    """Some answers and their targets, one per row, and for classes which targets count; None if they are not there.

    What hooks saved (a checkpoint, an offload) is left alone: to look at it would compute it, and a checkpoint allows
    that only once.
    """
    if _is_hooked(node):
        return None
    answers, targets = node._saved_self.detach(), node._saved_target.detach()
    if type(answers) is not Tensor or type(targets) is not Tensor or not answers.numel():
        return None
    if CRITERIA[node.name()] != CLASSES:
        if answers.shape != targets.shape:
            return None
        wide = [one.reshape(len(one), -1) if one.ndim else one.reshape(1, 1) for one in (answers, targets)]
        answers, targets = (one[:, :: -(-one.shape[1] * ROWS // ENTRIES)] for one in wide)
        chosen = torch.arange(len(answers), device=answers.device)[:: -(-len(answers) // ROWS)]
        return answers[chosen], targets[chosen]
    answers = answers.movedim(1, -1).flatten(0, -2) if answers.ndim > 1 else answers[None]
    targets = targets.reshape(-1)
    ignored = node._saved_ignore_index  # -100 is given without its sign
    counts = targets != (ignored - 2**64 if ignored >= 2**63 else ignored)
    # Those that count first, from all over the batch: multiples of the golden ratio are spread evenly.
    spread = torch.arange(len(targets), device=targets.device, dtype=torch.float32) * 0.6180339887 % 1.0
    number = min(len(targets), max(LEAST_INPUTS, min(ROWS, ENTRIES // answers.shape[1])))
    chosen = (counts.float() + spread).topk(number).indices
    return answers[chosen], targets[chosen], counts[chosen]


def _is_crossed(node: Any) -> bool:
    """Whether answers and targets were each repeated along an axis of the other one before they were compared."""
    if CRITERIA[node.name()] != NUMBERS:
        return False
    pairs = list(zip(*(one.stride() for one in (node._saved_self, node._saved_target)), strict=True))
    repeated = [pair for pair, size in zip(pairs, node._saved_self.shape, strict=True) if size > 1]
    return any(own == 0 < target for own, target in repeated) and any(target == 0 < own for own, target in repeated)


def _losses(kind: str, kept: deque[tuple[Tensor, ...]]) -> tuple[float, float] | None:
    """The loss of the answers, and of their mean for all; None if too few, or equal targets."""
    answers, targets, *counts = (torch.cat(parts) for parts in zip(*kept, strict=True))
    if counts:
        answers, targets = answers[counts[0]], targets[counts[0]]
    answers = answers.to(widest(answers.device))
    if len(answers) < LEAST_INPUTS or bool((targets == targets[:1]).all()):
        return None
    if kind == CLASSES:
        mean = torch.logsumexp(answers, 0, keepdim=True) - math.log(len(answers))
        own, one = (F.nll_loss(given, targets) for given in (answers, mean.expand_as(answers)))
    elif kind in (TRUTH, SHARES):
        targets = targets.to(answers.dtype)
        shares, of = (
            (answers.sigmoid(), F.binary_cross_entropy_with_logits)
            if kind == TRUTH
            else (answers, F.binary_cross_entropy)
        )
        mean = shares.mean(0, keepdim=True).expand_as(shares)
        own, one = of(answers, targets), F.binary_cross_entropy(mean, targets)
    else:
        own, one = ((given - targets).square().mean() for given in (answers, answers.mean(0, keepdim=True)))
    found = float(own), float(one)
    return found if all(map(math.isfinite, found)) and found[1] > 0.0 else None
