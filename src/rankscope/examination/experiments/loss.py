"""Experiments on the loss alone: the output is held, and what it is compared with is changed.

One label is changed, and where the gradient of the output moves is what the label is compared with. This hears labels
inside ``loss(output, batch)`` too. Right and wrong answers are put in the place of the output, and the output is
optimised without the model. None of this runs the model again, except for what says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from rankscope.examination.experiments.dependencies import token_map
from rankscope.examination.experiments.scan import Scan
from rankscope.examination.outcomes import NO, NOT_READ, Outcome, experiment
from rankscope.examination.passes import Examination, in_training
from rankscope.examination.tensors import apart, are_probabilities, filled_ends, spread_out
from rankscope.models.loading.devices import seed_generators

ROOM = 1 << 27
"""Entries of an output up to which it is held: several gradients of that size are in memory at once."""
STEPS = 150
"""Steps of Adam that optimise outputs; both of two outputs that are compared take them."""
OUT_OF_REACH = 0.3
"""Share of the first loss that is left, after the outputs were optimised, if targets are out of their reach."""
_MOVED = 0.1
"""Share of the largest change of a gradient from which on a place counts."""
AGREE = 0.95
"""Share of the labels that must be the token of the input at a distance, beyond those that are so by chance."""
PARALLEL = 0.9999
"""Cosine from which on two gradients are taken to be of one loss; with label smoothing it is below."""
BY_CHANCE = 1e-3
"""Probability below which labels that are all alike are no accident of the batch."""


class Held:
    """The loss as a function of what the model returns and of what that is compared with.

    Args:
        x: the examination; outputs that are alike are made to differ.

    Attributes:
        leaves: everything that the model returned, flattened.
        main: the place of its main output among them.
    """

    def __init__(self, x: Examination) -> None:
        if x.loss is None or x.result is None or x.result.numel() > ROOM:
            raise ValueError("there is no loss, or no output, or it is too large to be changed many times")
        self._x = x
        self.leaves, self._spec = pytree.tree_flatten(x.returned)
        mains = [
            at
            for at, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and leaf.shape == x.result.shape and torch.equal(leaf, x.result)
        ]
        if not mains:
            raise ValueError("what the model returned cannot be taken apart")
        self.main = mains[0]
        self.leaves[self.main] = spread_out(x.result)

    @property
    def output(self) -> Tensor:
        """The main output, made to differ."""
        leaf: Tensor = self.leaves[self.main]
        return leaf

    def loss(self, output: Tensor, compared: Any = None) -> Tensor:
        """The loss with another main output, or compared with something else, with equal random numbers each time."""
        leaves = [output if at == self.main else leaf for at, leaf in enumerate(self.leaves)]
        with torch.random.fork_rng(devices=[]):
            seed_generators(0)
            return self._x.loss_of(pytree.tree_unflatten(leaves, self._spec), compared)

    @property
    def reads_others(self) -> bool:
        """Whether the loss also depends on something else that the model returned."""
        free = list(self.leaves)
        for at, leaf in enumerate(free):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                free[at] = leaf.detach().clone().requires_grad_()
        others = [
            leaf for leaf in (*free[: self.main], *free[self.main + 1 :]) if getattr(leaf, "requires_grad", False)
        ]
        if not others:
            return False
        with torch.enable_grad():
            total = self._x.loss_of(pytree.tree_unflatten(free, self._spec))
        return any(one is not None for one in torch.autograd.grad(total, others, allow_unused=True))

    def value(self, output: Tensor, compared: Any = None) -> float:
        """The same as a number."""
        with torch.no_grad():
            return float(self.loss(output, compared))

    def gradient(self, compared: Any = None, output: Tensor | None = None) -> Tensor:
        """The gradient of the loss in the main output."""
        free = (self.output if output is None else output).detach().clone().requires_grad_()
        with torch.enable_grad():
            found = torch.autograd.grad(self.loss(free, compared), free, allow_unused=True)[0]
        return torch.zeros_like(free) if found is None else found

    def optimised(self, start: Tensor, shown: Callable[[Tensor], Tensor] = lambda free: free) -> Tensor:
        """The output after some steps of Adam under the loss, without the model; ``shown`` bounds it."""
        free = start.detach().clone().requires_grad_()
        size = max(float(start.double().square().mean().sqrt()), 1.0)
        optimizer = torch.optim.Adam([free], 0.05 * size)
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.enable_grad():
                torch.autograd.backward(self.loss(shown(free)))
            optimizer.step()
        return shown(free).detach()


def held(x: Examination) -> Held:
    """The loss of an examination, made once."""
    return x.once(Held)


def classes_axis(out: Tensor, labels: Tensor) -> int | None:
    """The axis of an output that counts classes, if labels are classes of it: the last one, or the second."""
    if labels.is_floating_point() or labels.dtype is torch.bool or not labels.numel() or out.ndim != labels.ndim + 1:
        return None
    for axis in (out.ndim - 1, 1):
        if out.shape[:axis] + out.shape[axis + 1 :] == labels.shape and 0 <= int(labels.max()) < out.shape[axis]:
            return axis if out.shape[axis] > 1 else None
    return None


def _targets(x: Examination) -> list[tuple[Tensor, Callable[[Tensor], Any]]]:
    """The tensors that the loss is given beside the output, each with how to give another one in its place."""
    leaves, spec = pytree.tree_flatten(x.compared)

    def other(at: int) -> Callable[[Tensor], Any]:
        return lambda new: pytree.tree_unflatten([new if n == at else leaf for n, leaf in enumerate(leaves)], spec)

    return [
        (leaf, other(at))
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == x.sequences
    ]


def _by_place(moved: Tensor, target: Tensor) -> Tensor | None:
    """The size of a change of the gradient for each place that the labels have: sequences, or sequences and tokens."""
    moved = moved.abs()
    if target.ndim == 1:
        return moved.reshape(len(moved), -1).amax(1) if len(moved) == len(target) else None
    if moved.ndim == 2 and moved.shape[0] == target.numel() != moved.shape[1]:  # the model flattens its outputs
        return moved.amax(-1).view(target.shape)
    if moved.ndim != 3 or len(moved) != len(target):
        return None
    last = (moved.shape[0], moved.shape[2]) == tuple(target.shape) and moved.shape[1] != target.shape[1]
    return moved.amax(1) if last else moved.amax(-1)


@experiment
def alignment(x: Examination) -> Outcome:
    """Whether a label is compared with the output at one place, and where; the control is two equal calls."""
    known = held(x)
    before = known.gradient()
    unstable = not torch.equal(before, known.gradient()) or not bool(torch.isfinite(before).all())
    for target, given in _targets(x):
        if target.is_floating_point() or target.dtype is torch.bool or target.ndim not in (1, 2) or len(target) < 3:
            continue
        here = (len(target) // 2, *(size // 2 for size in target.shape[1:]))
        wanted = [int(one) for one in torch.unique(target) if int(one) >= 0 and int(one) != int(target[here])]
        if not wanted or int(target[here]) < 0:
            continue
        other = target.clone()
        other[here] = wanted[0]
        after = known.gradient(given(other))
        # A mean over what counts, or over weights of classes, scales the gradients of all others by one number.
        usual = before.abs() > 1e-3 * before.abs().max()
        scale = (after[usual] / before[usual]).median() if bool(usual.any()) else 1.0
        places = _by_place(after - scale * before, target)
        if places is None or not bool(places.any()):
            continue
        found = [tuple(int(one) for one in place) for place in (places > _MOVED * places.max()).nonzero()]
        return Outcome(len(found) == 1, unstable, {"here": here, "places": found, "target": target, "given": given})
    return NOT_READ


@experiment
def compared_token(x: Examination) -> Outcome:
    """Which token of the input the output at a token is compared with, as a distance; the control is chance.

    The labels equal the ids of the input at some distance, and a label is compared with an output at some distance. The
    sum of both is 1 if each token predicts the next.
    """
    found = x.outcome("alignment")
    if not found.shown or found["target"].ndim != 2 or found["places"][0][0] != found["here"][0]:
        return NOT_READ
    target, to_output = found["target"], found["here"][1] - found["places"][0][1]
    for value in x.mains:
        ids = value.transpose(0, x.batch.axis)
        if value.is_floating_point() or ids.shape != target.shape:
            continue
        for away in range(-2, 3):
            wanted = target[:, max(-away, 0) : target.shape[1] - max(away, 0)]
            read = ids[:, max(away, 0) : ids.shape[1] + min(away, 0)]
            counted = wanted >= 0  # negative labels are not counted by any loss of torch
            if int(counted.sum()) < 4:
                continue
            share = float((wanted == read)[counted].double().mean())
            chance = sum(
                float((read[counted] == one).double().mean() * (wanted[counted] == one).double().mean())
                for one in set(wanted[counted].tolist())
            )
            if share - chance > AGREE * (1.0 - chance):
                return Outcome(True, chance > AGREE, {"distance": to_output + away, "share": share, "ids": value})
    return NOT_READ


def _by_token(x: Examination, distances: Callable[[int], bool]) -> tuple[Tensor, int]:
    """How much the output changes at each token if the one in the middle is replaced, and which that is.

    Raises:
        LookupError: this was not read, or outputs are not compared with tokens at such a distance.
    """
    compared, known = x.outcome("compared_token"), x.once(token_map)
    before, after, moved = known.output("plain"), known.output("middle"), known.moved("middle")
    wanted = compared.shown and distances(compared["distance"])
    if not wanted or before is None or after is None or moved is None or not known.has_tokens:
        raise LookupError("outputs are not compared with such tokens")
    return (after.double() - before.double()).abs().flatten(1).mean(1) * moved, known.middle


@experiment
def copies_input(x: Examination) -> Outcome:
    """Whether each output is compared with the token it stands at; the control is an output that cannot just copy it.

    Outputs that read their input through a bottleneck, as autoencoders do, depend on all tokens alike.
    """
    change, middle = _by_token(x, lambda distance: distance == 0)
    others = torch.cat([change[:middle], change[middle + 1 :]])
    return Outcome(True, not float(change[middle]) > 2 * float(others.mean()), x.outcome("compared_token").numbers)


@experiment
def skips_a_token(x: Examination) -> Outcome:
    """Whether each output is compared with another token than the next; the control is a model that is not causal."""
    change, middle = _by_token(x, lambda distance: distance not in (0, 1))
    sees_later = bool(change[:middle].any()) or not bool(change[middle + 1 :].any())
    return Outcome(True, sees_later, x.outcome("compared_token").numbers)


@experiment
def other_places(x: Examination) -> Outcome:
    """Whether a label is compared with the output of another sequence alone; the control is two equal calls."""
    found = x.outcome("alignment")
    if found.seen is None:
        return NOT_READ
    places, here = found["places"], found["here"]
    return Outcome(len(places) == 1 and places[0][0] != here[0], found.control, {"places": places, "here": here})


@experiment
def labels_unread(x: Examination) -> Outcome:
    """Whether the gradient is the same for any labels.

    The control is a gradient that is zero or random, or a loss that compares sequences with each other, which needs no
    labels.
    """
    known = held(x)
    before = known.gradient()
    if x.labels is None and x.targets is None:
        return NOT_READ
    drawn = torch.Generator().manual_seed(0)
    now = known.value(known.output)
    several = False
    for target, given in _targets(x):
        first = target[:1].expand_as(target)
        if torch.equal(first, target):
            continue
        # Half of them alike, because classes that are all different may be pairs of a contrastive loss in any order.
        alike = target.clone()
        alike[::2] = first[::2]
        mixed = target[torch.randperm(len(target), generator=drawn).to(target.device)]
        for other in (target.roll(1, 0), target.flip(0), mixed, alike):
            several = several or not torch.equal(other, target)
            # The gradient of an absolute error is a sign, which stays; its value does not.
            moved = not torch.equal(known.gradient(given(other)), before)
            if moved or known.value(known.output, given(other)) != now:
                return NO
    if not several:
        return NOT_READ
    swapped = known.output.clone()
    swapped[0] = known.output[1]
    compares = not torch.allclose(known.gradient(output=swapped)[2:], before[2:])
    unusable = compares or not bool(before.any()) or not torch.equal(before, known.gradient())
    return Outcome(True, unusable or not math.isfinite(now), {"loss": now})


@experiment
def wrong_is_better(x: Examination) -> Outcome:
    """Whether wrong answers have a smaller loss than right ones; the control are labels that move other outputs too."""
    if x.labels is None or x.result is None:
        return NOT_READ
    known, labels = held(x), x.labels
    axis = classes_axis(known.output, labels)
    if axis is None or not x.outcome("alignment").shown:
        return NOT_READ
    count, probabilities = known.output.shape[axis], are_probabilities(x.result, axis)

    def answer(classes: Tensor) -> Tensor:
        one_hot = F.one_hot(classes.clamp_min(0), count).movedim(-1, axis).to(known.output)
        return one_hot * 0.96 + 0.02 / count if probabilities else 8 * one_hot

    right, wrong = known.value(answer(labels)), known.value(answer((labels + 1) % count))
    places, here = x.outcome("alignment")["places"], x.outcome("alignment")["here"]
    finite = math.isfinite(right) and math.isfinite(wrong)
    return Outcome(finite and wrong < right - 0.1 * abs(right), places != [here], {"right": right, "wrong": wrong})


@experiment
def padding_counts(x: Examination) -> Outcome:
    """Whether the loss counts padding; the control is an id that is a label of other tokens too.

    Padding is what fills the ends of most sequences, in the inputs and in the labels.
    """
    found = x.outcome("alignment")
    if not found.shown or found["target"].ndim != 2:
        return NOT_READ
    target = found["target"]
    ids = [value.transpose(0, x.batch.axis) for value in x.mains if not value.is_floating_point() and value.ndim == 2]
    fills = [fill for one in ids if one.shape == target.shape and (fill := filled_ends(one)) is not None]
    wanted = filled_ends(target)
    gradient = _by_place(held(x).gradient(), target)
    if not fills or wanted is None or gradient is None or gradient.shape != target.shape:
        return NOT_READ
    padded, counted = fills[0] & wanted, gradient > 0
    value = int(target[padded][0])
    share = float((padded & counted).sum()) / max(int(counted.sum()), 1)
    elsewhere = float((target[~wanted] == value).double().mean())
    return Outcome(share > 0.2, elsewhere > 0.05, {"share": share, "value": value})


_BOUNDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "SigmoidBackward0": ("sigmoid", torch.sigmoid),
    "TanhBackward0": ("tanh", torch.tanh),
    "ReluBackward0": ("relu", F.softplus),
    "SoftplusBackward0": ("softplus", F.softplus),
    "SoftmaxBackward0": ("softmax", lambda free: free.softmax(-1)),
}


@experiment
def bounded_output(x: Examination) -> Outcome:
    """Whether the last operation keeps outputs from where the loss is small; the control is the same start without it.

    Asked only of models that end in a bounded function, which the pass for the gradients tells.
    """
    known = held(x)
    last = x.once(in_training).last_functions
    if last[known.main] not in _BOUNDS or (x.labels is None and x.targets is None):
        return NOT_READ
    name, bound = _BOUNDS[last[known.main]]
    start = torch.zeros_like(known.output) + 0.1 * torch.randn(
        known.output.shape, generator=torch.Generator().manual_seed(0)
    ).to(known.output)
    first = known.value(bound(start))
    least, free = known.value(known.optimised(start, bound)), known.value(known.optimised(start))
    finite = all(map(math.isfinite, (first, least, free)))
    return Outcome(
        finite and least > OUT_OF_REACH * first > 0,
        not free < 0.1 * least,
        {"name": name, "least": least, "free": free},
    )


@experiment
def broadcast(x: Examination) -> Outcome:
    """Whether outputs and labels of different shapes are all compared with each other.

    The control: with the shape of the labels, a label moves other outputs than its own as well.
    """
    if x.labels is None or x.result is None or not x.labels.is_floating_point() or len(x.labels) < 3:
        return NOT_READ
    known, labels = held(x), x.labels
    if labels.numel() != known.output.numel() or labels.shape == known.output.shape:
        return NOT_READ
    other = labels.clone()
    other[1] += 1.0

    def others_moved(output: Tensor) -> bool:
        moved = (known.gradient(other, output) - known.gradient(labels, output)).flatten().abs()
        return bool((moved.view(len(labels), -1).amax(1)[2:] > _MOVED * moved.max()).all()) and bool(moved.any())

    return Outcome(
        others_moved(known.output),
        others_moved(known.output.reshape(labels.shape)),
        {
            "output": tuple(known.output.shape),
            "labels": tuple(labels.shape),
            "before": known.value(known.output),
            "after": known.value(known.output.reshape(labels.shape)),
        },
    )


@experiment
def labels_alike(x: Examination) -> Outcome:
    """Whether all labels are one class; the control is whether that is likely by chance, in a small batch."""
    labels = x.labels
    if labels is None or labels.ndim != 1 or classes_axis(held(x).output, labels) is None:
        return NOT_READ
    classes = held(x).output.shape[-1]
    by_chance = float(classes) ** (1 - len(labels)) > BY_CHANCE
    alike = bool((labels == labels[0]).all())
    return Outcome(alike, by_chance, {"count": len(labels), "label": int(labels[0]), "classes": classes})


@experiment
def one_answer_is_best(x: Examination) -> Outcome:
    """Whether one constant output for all inputs has the smallest loss; the control are labels that are all equal.

    The output is optimised under the loss, without the model. A loss that separates inputs is far above its best value
    where all outputs are equal.
    """
    known = held(x)
    free = known.output.float()
    axis = None if x.result is None else x.sequence_axis(x.result)
    if x.result is None or axis is None or x.sequences < 4 or known.reads_others:
        return NOT_READ  # other outputs would change with this one
    if x.labels is not None and x.labels.is_floating_point() and x.outcome("labels_unread").seen is False:
        return NO  # numbers to be met keep outputs apart
    size = float(x.result.double().square().mean().sqrt())
    slope = known.gradient().double()
    over_classes = float(slope.sum(-1).norm()) <= 1e-3 * float(slope.norm())
    scored = x.labels is not None and not x.labels.is_floating_point() and not _compares(known, axis)
    if scored or over_classes or not size > 0:
        return NO  # outputs that are alike answer labels that are
    drawn = torch.randn(x.result.shape, generator=torch.Generator().manual_seed(0)).to(x.result.device)
    start = x.result.detach().float() + size * drawn
    begin = known.value(start)
    end_at = known.optimised(start)
    end = known.value(end_at)
    constant = end_at.mean(axis, keepdim=True).expand_as(free)
    if constant.ndim > 2:  # all tokens or views of an input alike, too
        one = constant.flatten(1, -2).mean(1)
        constant = one.reshape(len(one), *[1] * (constant.ndim - 2), -1).expand_as(free)
    at_constant = known.value(constant.clone())
    finite = math.isfinite(begin) and begin > 0
    met = finite and at_constant <= end + 0.01 * abs(begin - end) and end <= 0.2 * begin
    alike = x.labels is not None and bool((x.labels == x.labels[:1]).all())
    return Outcome(met, alike, {"begin": begin, "constant": at_constant, "apart": apart(start, axis)})


def _compares(known: Held, axis: int) -> bool:
    """Whether a loss compares sequences with each other: the gradient of the others changes with the first one."""
    other = known.output.clone()
    other.select(axis, 0).copy_(known.output.select(axis, 1))
    before, after = (known.gradient(output=one).narrow(axis, 1, one.shape[axis] - 1) for one in (known.output, other))
    return not torch.allclose(before, after)


@experiment
def softmax_across(x: Examination) -> Outcome:
    """Whether the loss is a cross-entropy whose softmax runs over sequences or tokens.

    The control: with a softmax over the classes the gradient is that of the loss too, or as in CLIP each output is a
    score of a pair.
    """
    labels, known = x.labels, held(x)
    out = known.output
    if labels is None or labels.is_floating_point() or labels.dtype is torch.bool or labels.shape != out.shape[:-1]:
        return NOT_READ
    if out.shape[-1] < 2 or not 0 <= int(labels.max()) < out.shape[-1]:
        return NOT_READ
    calls = Scan(None)
    with calls:
        own = known.gradient()

    def is_over(states: Tensor, chosen: Tensor, gradient: Tensor, axis: int) -> bool:
        """Whether the gradient is that of a cross-entropy along this axis, up to a factor."""
        free = states.detach().double().requires_grad_()
        with torch.enable_grad():
            picked = free.log_softmax(axis).gather(-1, chosen.clamp_min(0)[..., None])[..., 0]
            wanted = torch.autograd.grad(-picked[chosen >= 0].sum(), free)[0]
        return float(F.cosine_similarity(gradient.double().flatten(), wanted.flatten(), dim=0)) > PARALLEL

    wrong = [at for at in range(-out.ndim, -1) if out.shape[at] > 1 and is_over(out, labels, own, at)]
    if not wrong and not is_over(out.flatten(0, -2), labels.flatten(), own.flatten(0, -2), 0):
        return NO
    pairs = out.shape[-1] in out.shape[:-1] and len(set(labels.flatten().tolist())) == labels.numel()
    raised = out.clone()
    raised[(0,) * (out.ndim - 1)] += 3.0
    change = abs(known.value(raised) - known.value(out))  # nothing, under a softmax over the classes
    places = {one.place for one in calls.calls if one.shape[-1] == out.shape[-1] and one.axis < len(one.shape) - 1}
    over_batch = out.ndim == 2 or (bool(wrong) and out.ndim + wrong[0] == x.sequence_axis(out))
    numbers = {"change": change, "place": places.pop() if len(places) == 1 else None, "over batch": over_batch}
    return Outcome(True, pairs or change < 1e-4 or is_over(out, labels, own, -1), numbers)
