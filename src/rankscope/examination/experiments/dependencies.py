"""What depends on what: one pass in which each sequence is the same one, with something replaced in it.

The pass answers several questions at once, because each row of its batch asks one::

    row        what is replaced in it              if the output changes ...
    plain      nothing
    again      nothing                             ... something is random, or depends on the place in the batch
    middle     the token in the middle             ... at earlier tokens: there is no causal mask
    order      nothing, tokens in another order    ... beyond that order: positions are seen
    padded     another sequence, with padding
    padding    that one, other padding             ... at other tokens: padding is attended to

The control of every answer is ``again``: what differs between two equal rows is noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from rankscope.examination.outcomes import NO, NOT_READ, Outcome, experiment
from rankscope.examination.passes import SEGMENTS, Examination, ModuleCall
from rankscope.examination.tensors import change_between, changed_entries, filled_ends
from rankscope.models.inputs import Batch
from rankscope.models.inputs.axes import other_entries
from rankscope.models.inputs.record import is_mask_like

FEWEST = 6
"""Tokens below which a causal mask, a window and a coincidence look alike."""
UNDECIDED = 0.2
"""Share of the tokens that must have another label than an equal token of their sequence; a model without positions
can then be right on less than 90% of them."""
MOST = 0.6
"""Share of one id from which on a text says little; the space of a text by characters is a fifth of it."""


@dataclass
class TokenMap:
    """The pass with all rows.

    Attributes:
        x: an examination of the batch of these rows.
        rows: place in the batch, by what was replaced.
        middle: number of the token in the middle.
        order: of the tokens in the row of that name.
    """

    x: Examination
    rows: dict[str, int]
    middle: int
    order: Tensor

    def output(self, name: str) -> Tensor | None:
        """The main output of one row, with tokens first if it has them; None if it does not count sequences."""
        out = self.x.result
        axis = None if out is None else self.x.sequence_axis(out)
        if out is None or axis is None or name not in self.rows:
            return None
        tokens = self.x.token_axis(out)
        row = out.select(axis, self.rows[name])
        return row if tokens is None else row.movedim(tokens - (axis < tokens), 0)

    @property
    def has_tokens(self) -> bool:
        """Whether the main output has an axis of tokens."""
        return self.x.result is not None and self.x.token_axis(self.x.result) is not None

    def moved(self, name: str, control: str = "plain") -> Tensor | None:
        """Which tokens of the output differ between two rows, or whether it does at all; None if it was not read."""
        before, after = self.output(control), self.output(name)
        gap = None if before is None or after is None else changed_entries(before, after)
        if gap is None:
            return None
        return gap.flatten(1).any(1) if self.has_tokens else gap.any()

    @property
    def is_noisy(self) -> bool | None:
        """Whether two equal rows differ; None if that was not read."""
        moved = self.moved("again")
        return None if moved is None else bool(moved.any())


def real_tokens(x: Examination) -> Tensor | None:
    """Which tokens are no padding, as far as that is known."""
    fills = next((one for value in x.texts if (one := filled_ends(value)) is not None), None)
    return x.batch.keep if x.batch.keep is not None else None if fills is None else ~fills


def plain_of(x: Examination) -> int:
    """Which sequence is the plain one: that with the fewest padded tokens."""
    real = real_tokens(x)
    return 0 if real is None else int(real.sum(1).argmax())


def replaced(batch: Batch, row: int | None = None) -> tuple[Batch, list[Tensor]]:
    """The batch with other ids, vectors and images everywhere, or in one sequence, and these tensors."""
    made: list[Tensor] = []

    def other(name: str, value: Tensor, axis: int) -> Tensor:
        if is_mask_like(name) or value.dtype is torch.bool or value.ndim < 2:
            return value
        new = other_entries(value, torch.ones(value.shape[:2], dtype=torch.bool, device=value.device))
        if row is not None:
            where = torch.arange(value.shape[axis], device=value.device) == row
            new = torch.where(where.view(-1, *[1] * (value.ndim - 1 - axis)), new, value)
        made.append(new)
        return new

    return batch.mapped(other), made


def token_map(x: Examination) -> TokenMap:
    """Run the pass; see the table at the top of this module."""
    kept, real = x.batch.keep, real_tokens(x)
    plain = plain_of(x)
    content = torch.ones(x.tokens or 1, dtype=torch.bool) if real is None else real[plain].cpu()
    places = content.nonzero()[:, 0]
    middle = int(places[len(places) // 2]) if len(places) else 0
    order = torch.randperm(x.tokens or 1, generator=torch.Generator().manual_seed(0))
    found = padding_mask(x)
    sources = {"plain": plain, "middle": plain, "order": plain}
    if found is not None:
        sources |= dict.fromkeys(("padded", "padding"), plain_padded(found))
    sources["again"] = plain
    count = max(len(sources), x.sequences)
    rows = {name: place for place, name in enumerate(sources)}
    chosen = [*sources.values(), *[plain] * (count - len(sources))]
    # Segments of tokens stay as they are; of a source and a target, the one is followed that the loss compares.
    several = [one for one in x.mains if one.is_floating_point() or len(torch.unique(one)) > SEGMENTS] or [*x.mains]
    compared = x.outcome("compared_token").numbers.get("ids")
    following = [one for one in x.mains if one is compared] or several

    def edited(name: str, value: Tensor, axis: int) -> Tensor:
        new = value.index_select(axis, torch.tensor(chosen, device=value.device)).movedim(axis, 0)
        if not any(value is one for one in x.mains) or new.shape[1] != x.tokens:
            return new.movedim(0, axis)
        # Other ids are those that occur in the batch, because they have an embedding.
        other = other_entries(new, torch.ones(new.shape[:2], dtype=torch.bool, device=new.device))
        new[rows["order"]] = new[rows["order"]][order.to(new.device)]
        if any(value is one for one in following):
            new[rows["middle"], middle] = other[rows["middle"], middle]
        if found is not None and any(value is one for one in several):
            where = found.hidden[sources["padded"]].to(new.device)
            new[rows["padding"], where] = other[rows["padding"], where]
        return new.movedim(0, axis)

    batch = x.batch.mapped(edited, sequences=count, keep=None if kept is None else kept[chosen])
    x.forward_passes += 1
    inner = replace(x, batch=batch, view=None, optimizer=None)
    assert inner.base
    return TokenMap(inner, rows, middle, order)


def next_tokens_of(x: Examination) -> Tensor | None:
    """The ids of which each output is compared with the next one; None if the loss compares something else."""
    compared = x.outcome("compared_token")
    return compared["ids"] if compared.shown and compared["distance"] == 1 else None


@dataclass(frozen=True)
class PaddingMask:
    """The argument that marks padding, and where the tokens are that it marks."""

    name: str
    value: Tensor
    hidden: Tensor
    turned: bool


def padding_mask(x: Examination) -> PaddingMask | None:
    """The only mask of tokens whose one value fills the ends of sequences, and never their first token."""
    masks = {
        name: value
        for name, value in x.batch.inputs.items()
        if isinstance(value, Tensor) and is_mask_like(name) and value.ndim == 2 and len(torch.unique(value)) == 2
    }
    if len(masks) != 1:
        return None
    ((name, mask),) = masks.items()
    turned = mask.shape != (x.sequences, x.tokens)
    rows = mask.T if turned else mask
    if rows.shape != (x.sequences, x.tokens):
        return None
    for value in torch.unique(rows).tolist():
        side: Tensor = rows == value
        if torch.equal(side.int().cummax(1).values == 1, side) and not bool(side[:, 0].any()) and bool(side.any()):
            return PaddingMask(name, mask, side, turned)
    return None


@experiment
def sequences_touch(x: Examination) -> Outcome:
    """Whether another second sequence changes the output of the others.

    The control is an output that has to: a similarity between all sequences, which loses a row and a column with one of
    them, or shares of one list, of which all others change alike.
    """
    out = x.result
    axis = None if out is None else x.sequence_axis(out)
    if out is None or axis is None or x.sequences < 3 or x.noise:
        return NOT_READ
    known = x.once(token_map)
    row = out.select(axis, plain_of(x))
    here = known.output("plain")
    tokens = x.token_axis(out)
    row = row if tokens is None else row.movedim(tokens - (axis < tokens), 0)
    gap = None if here is None else changed_entries(row, here)
    if gap is not None and not bool(gap.any()):
        return NO
    calls = x.calls(replaced(x.batch, 1)[0])
    other = calls[-1].output
    if other is None or other.shape != out.shape:
        return NOT_READ
    keep = torch.tensor([at for at in range(x.sequences) if at != 1], device=out.device)
    one, two = (states.index_select(axis, keep) for states in (out, other))
    gap = changed_entries(one, two)
    if gap is None or not bool(gap.any()):
        return NO
    fewer = x.output(x.batch.taken(0, x.sequences - 1))
    similarity = fewer is not None and sum(a != b for a, b in zip(fewer.shape, out.shape, strict=False)) > 1
    listed = x.labels is not None and x.labels.is_floating_point() and x.labels.shape == out.shape
    alike = listed and any(
        torch.allclose(gap, gap.narrow(axis, 0, 1), rtol=1e-4)
        for gap in (two.double() - one.double(), two.double() / one.double())
    )
    leak = next((call for call, after in zip(x.base, calls, strict=False) if _leaks(x, call, after, keep)), None)
    numbers = {"size": change_between(one, two), "where": "" if leak is None else leak.name or "", "keep": keep}
    return Outcome(True, similarity or alike, numbers | {"axis": axis})


def _leaks(x: Examination, before: ModuleCall, after: ModuleCall, keep: Tensor) -> bool:
    if before.module is not after.module or before.output is None or after.output is None:
        return False
    axis = x.sequence_axis(before.output)
    if axis is None or before.output.shape != after.output.shape:
        return False
    gap = changed_entries(*(one.index_select(axis, keep) for one in (before.output, after.output)))
    return gap is not None and bool(gap.any())


@experiment
def place_counts(x: Examination) -> Outcome:
    """Whether a sequence has another output in another place of a batch of nothing else; the control is noise."""
    if x.sequences < 2 or x.result is None or x.sequence_axis(x.result) is None:
        return NOT_READ
    if x.once(token_map).is_noisy is False:
        return NO

    def first(name: str, value: Tensor, axis: int) -> Tensor:
        return value.narrow(axis, 0, 1).repeat_interleave(x.sequences, axis)

    equal, axis = x.output(x.batch.mapped(first)), x.sequence_axis(x.result)
    if equal is None or axis is None:
        return NOT_READ
    rows = equal.movedim(axis, 0)
    gap = changed_entries(rows[:1].expand_as(rows), rows)
    return NOT_READ if gap is None else Outcome(bool(gap.any()), x.noise > 0, {"rows": rows})


@experiment
def reaches_earlier(x: Examination) -> Outcome:
    """Whether another token in the middle changes the output at earlier tokens; the control are two equal rows."""
    if x.tokens is None or x.tokens < FEWEST:
        return NOT_READ
    known = x.once(token_map)
    moved = known.moved("middle") if known.has_tokens else None
    if moved is None:
        return NOT_READ
    middle = known.middle
    before, after = moved[:middle], moved[middle + 1 :]
    numbers = {"middle": middle, "earlier": int(before.sum()), "later": int(after.sum()), "all later": len(after)}
    leak = next((call.name for call in known.x.base if call.name and _sees_later(known, call)), "")
    # Each block reaches one token further, so a mask that is off by one reaches as many earlier tokens as blocks.
    near = 0 < numbers["earlier"] < middle and bool(before[-numbers["earlier"] :].all())
    return Outcome(bool(numbers["earlier"]), known.is_noisy, numbers | {"near": near, "where": leak})


def _sees_later(known: TokenMap, call: ModuleCall) -> bool:
    """Whether what a module returns at earlier tokens differs between the rows, and what it takes does not."""
    earlier = slice(known.middle)
    return [_differ(known, states, "plain", "middle", earlier) for states in (call.given, call.output)] == [False, True]


def _differ(known: TokenMap, states: Tensor | None, one: str, other: str, tokens: slice | Tensor) -> bool | None:
    """Whether some states differ between two rows at these tokens; None if they do not count tokens."""
    axis = None if states is None else known.x.token_axis(states)
    if states is None or axis is None:
        return None
    gap = changed_entries(*(states.select(1 - axis, known.rows[name])[tokens] for name in (one, other)))
    return gap is not None and bool(gap.any())


@experiment
def padding_seen(x: Examination) -> Outcome:
    """Whether other values at padded tokens change the output at other tokens.

    The control are two equal rows; and where an output is one for all tokens, no module returns anything else at the
    other tokens: a model may look for its last token among the ids themselves, as that of GPT-2 for classes does.
    """
    found = padding_mask(x)
    if found is None:
        return NOT_READ
    known = x.once(token_map)
    seen = known.moved("padding", "padded")
    if seen is None:
        return NOT_READ
    hidden = found.hidden[plain_padded(found)].to(seen.device)
    if known.has_tokens:
        seen = seen[~hidden]
    before, after = known.output("padded"), known.output("padding")
    assert before is not None
    assert after is not None
    if known.has_tokens:
        before, after = before[~hidden], after[~hidden]
    spreads = known.has_tokens or any(
        _differ(known, call.output, "padded", "padding", ~hidden) for call in known.x.base
    )
    control = known.is_noisy or (bool(seen.any()) and not spreads)
    return Outcome(bool(seen.any()), control, {"mask": found, "size": change_between(before, after)})


def plain_padded(found: PaddingMask) -> int:
    """The sequence with the most padding."""
    return int(found.hidden.sum(1).argmax())


@experiment
def order_unseen(x: Examination) -> Outcome:
    """Whether tokens in another order have the same outputs in that order; the control are two equal rows.

    Asked only if equal tokens of a sequence have labels that differ, so that the order must be seen.
    """
    found = x.outcome("alignment")
    if found.seen is None or found["target"].ndim != 2 or not x.tokens or x.batch.keep is not None:
        return NOT_READ
    if x.outcome("tokens_alike").seen:
        return NOT_READ  # a head of zeros says nothing of the order
    labels = found["target"]
    if len(x.texts) != 1 or x.texts[0].shape != labels.shape:
        return NOT_READ
    equal = x.texts[0][:, :, None] == x.texts[0][:, None]
    counted = (labels >= 0)[:, :, None] & (labels >= 0)[:, None]
    differ = equal & counted & (labels[:, :, None] != labels[:, None])
    share = float(differ.any(-1).double().mean())
    if share < UNDECIDED:
        return NO
    known = x.once(token_map)
    before, after = known.output("plain"), known.output("order")
    if before is None or after is None or not known.has_tokens:
        return NOT_READ
    gap = changed_entries(before[known.order.to(before.device)], after)
    return NOT_READ if gap is None else Outcome(not bool(gap.any()), known.is_noisy, {"share": share})


@experiment
def tokens_alike(x: Examination) -> Outcome:
    """Whether all tokens of a sequence have one output, although their labels differ; the control is a head of zero."""
    out, found = x.result, x.outcome("alignment")
    axis = None if out is None else x.token_axis(out)
    if out is None or axis is None or found.seen is None or found["target"].ndim != 2:
        return NOT_READ
    labels = found["target"]
    if bool((labels == labels[:, :1]).all()):
        return NO

    def apart(states: Tensor) -> bool:
        rows = states.movedim(axis, 0)
        gap = changed_entries(rows[:1].expand_as(rows), rows)
        return gap is None or bool(gap.any())

    if apart(out):
        return NO
    drawn = x.once(with_zeros_drawn)
    return Outcome(True, drawn is not None and apart(drawn), {"tokens": out.shape[axis]})


LOST = 1e-3
"""Spread of the outputs, relative to that of the inputs, below which the input counts as lost."""


def raw_apart(x: Examination) -> float:
    """How much the inputs themselves differ; 1 for ids that differ."""
    distances = []
    for value in x.mains:
        if value.is_floating_point():
            one = x.inputs_apart(value)
            distances += [] if one is None else [one]
        else:
            rows = value.movedim(x.batch.axis, 0)
            distances.append(1.0 if any(not torch.equal(rows[0], row) for row in rows[1:]) else 0.0)
    return max(distances, default=0.0)


def with_zeros_drawn(x: Examination) -> Tensor | None:
    """The output with weights drawn that begin at zero, get a gradient, and so move with the first step."""
    zero = {name: one.detach() for name, one in x.model.named_parameters() if not bool(one.detach().any())}
    zero = {name: one for name, one in zero.items() if (g := x.gradients.get(name)) is not None and bool(g.any())}
    drawn = torch.Generator().manual_seed(0)
    replaced = {name: (0.02 * torch.randn(one.shape, generator=drawn)).to(one) for name, one in zero.items()}
    return x.output(replaced=replaced) if replaced else None


def begins_at_zero(x: Examination) -> bool:
    """Whether outputs are alike because of weights that begin at zero."""
    output = x.once(with_zeros_drawn)
    return output is not None and (x.inputs_apart(output) or 0.0) > LOST * raw_apart(x)


@experiment
def norm_over_tokens(x: Examination) -> Outcome:
    """Whether a module without attention has mean 0 and variance 1 along the tokens, and lets them see each other.

    The control is the same module with the same values again.
    """
    found: list[str] = []
    noisy = False
    for call in x.base:
        if call.given is None or call.output is None or not call.is_leaf or call.given.shape != call.output.shape:
            continue
        axis = x.token_axis(call.output) if call.is_alone else None
        if axis is None or call.output.ndim != 3 or not _is_normed(call.output, call.given, axis):
            continue
        moved = call.given.clone()
        moved.select(axis, 0).add_(torch.randn_like(moved.select(axis, 0)))
        after, again = (_called(call.module, value) for value in (moved, call.given))
        gap, control = (changed_entries(call.output, one) for one in (after, again))
        if gap is not None and control is not None and bool(gap.movedim(axis, 0)[1:].any()):
            noisy = noisy or bool(control.any())
            found.append(call.name or type(call.module).__name__)
    return Outcome(True, noisy, {"names": list(dict.fromkeys(found))}) if found else NO


def _called(module: nn.Module, value: Tensor) -> Tensor:
    from rankscope.stream.viewing import undisturbed

    with undisturbed(module):
        out: Tensor = module(value)
    return out


def _is_normed(out: Tensor, given: Tensor, axis: int) -> bool:
    """Whether the output, before its gain and shift by channel, has equal mean and variance along the tokens."""
    mean, deviation = out.double().mean(axis), out.double().std(axis, unbiased=False)
    was = given.double().std(axis, unbiased=False)
    same = float((mean - mean.mean(0)).abs().max()) < 1e-4 and float((deviation - deviation.mean(0)).abs().max()) < 1e-2
    return same and float((was - was.mean(0)).abs().max()) > 1e-2


@experiment
def one_id(x: Examination) -> Outcome:
    """Whether most tokens that count are one id, in all inputs of ids; the control is a vocabulary of few ids."""
    for shape in {value.shape for value in x.texts if value.numel() >= 16}:
        tokens = torch.stack([value for value in x.texts if value.shape == shape], dim=-1)
        fills = [one for value in x.texts if value.shape == shape and (one := filled_ends(value)) is not None]
        if fills:  # what fills the ends is padding
            tokens = tokens[~fills[0]]
        elif x.batch.keep is not None and x.batch.keep.shape == tokens.shape[:-1]:
            tokens = tokens[x.batch.keep.to(tokens.device)]
        common, counts = torch.unique(tokens.flatten(0, -2), dim=0, return_counts=True)
        share = float(counts.max()) / int(counts.sum())
        if share >= MOST:
            return Outcome(True, int(common.max()) <= 1, {"share": share, "id": int(common[counts.argmax(), 0])})
    return NO


@experiment
def maps_follow(x: Examination) -> Outcome:
    """Whether one linear map reads exactly what another returned; the control is a narrow middle, which is a rank."""
    leaves = [call for call in x.base if call.is_leaf and call.output is not None and call.name and not call.is_idle]
    found = []
    for one, other in pairwise(leaves):
        if not (isinstance(one.module, nn.Linear) and isinstance(other.module, nn.Linear)):
            continue
        if one.output is None or other.given is None or not torch.equal(one.output, other.given):
            continue
        if bool((one.output == one.output.flatten()[0]).all()):
            continue  # one number everywhere is equal whatever comes in between
        narrow = one.module.out_features <= max(one.module.in_features, other.module.out_features)
        found.append((one.name, other.name, one.module.out_features, narrow))
    wide = [pair for pair in found if not pair[3]]
    return Outcome(bool(found), not wide, {"pairs": wide})


def turned_first(x: Examination, keep: Tensor, axis: int) -> float | None:
    """How much the other sequences change if every module that takes tokens first takes sequences first."""
    first = [module for module in x.model.modules() if getattr(module, "batch_first", None) is False]
    if not first:
        return None
    try:
        for module in first:
            module.batch_first = True  # type: ignore[assignment]
        one, other = x.output(), x.output(replaced(x.batch, 1)[0])
    except (RuntimeError, ValueError, AssertionError):
        return None  # a mask or a state that only fits the other order
    finally:
        for module in first:
            module.batch_first = False  # type: ignore[assignment]
    if one is None or other is None or one.shape != other.shape:
        return None
    return change_between(one.index_select(axis, keep), other.index_select(axis, keep))
