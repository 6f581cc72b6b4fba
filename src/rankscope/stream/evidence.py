"""Checks the axes of the stream against evidence from the input, the attention and the blocks' own maps.

A tensor of shape ``(2, 64, 16)`` can be 64 tokens or 64 channels, and a metric along the wrong axis looks like
any other number. Evidence comes from observing the blocks, and from passes in which one token, or one sequence, is
replaced. An assumed order of axes is rejected if something contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankscope.errors import InputError, LayoutError, SiteError
from rankscope.linalg.precision import as_float64
from rankscope.models.inputs import Batch
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import is_distributed, without_fastpath
from rankscope.stream.observation import (
    BlockWatch,
    Ends,
    Mark,
    ObservedCall,
    SeenStack,
    changed_place,
    check_carries_all,
    check_fed,
    first_calls,
    is_data,
    named_inputs,
    observed_blocks,
    of_another_length,
    token_ids,
    with_another_sequence,
    with_another_token,
)
from rankscope.stream.own_tokens import check_own_tokens

_FOUND = ("batch tokens dim", "tokens batch dim")
_DECLARED = (
    "batch dim tokens",
    "batch tokens streams dim",
    "batch streams tokens dim",
    "streams batch tokens dim",
    "(batch tokens) dim",
    "(tokens batch) dim",
    "(batch tokens) tokens dim",
    "(tokens batch) tokens dim",
    "(batch streams) tokens dim",
    "(streams batch) tokens dim",
    "dim batch tokens",
)
_STREAMS_SEEN = "what a token reaches"
_ROUNDINGS = 256
_REORDERED = 16
"""Number of roundings of the largest entry by which sums may differ if formed in another order, as experts do."""


@dataclass
class _Facts:
    """What is known about the first tensor of one stack.

    Attributes:
        shape: shape of the tensor that entered the first block.
        rows: number of sequences in the probe.
        row: the sequence in which one token was changed.
        lengths: how many tokens the input ids have, if there are ids.
        only_ids: whether the input consists of ids only.
        changed: where the tensor differs after the change; None if nowhere.
        changed_behind: the same for the output of the first block.
        replaced: where the tensor differs after all tokens of sequence 0 were replaced; None if nowhere.
        replaced_behind: the same for the output of the first block.
        channels: the axis along which norms, linear maps and convolutions of the blocks act, if they agree.
        attention: batch, queries and keys of each observed attention.
        given: shape of what the first module takes, if it takes a branch and not the stream.
    """

    shape: torch.Size
    rows: int
    row: int
    lengths: frozenset[int]
    only_ids: bool
    changed: Tensor | None
    changed_behind: Tensor | None
    replaced: Tensor | None
    replaced_behind: Tensor | None
    channels: int | None
    attention: Sequence[tuple[int, int, int]]
    given: torch.Size | None = None


@dataclass(frozen=True)
class Known:
    """What earlier passes on the same inputs showed.

    Attributes:
        watch: a pass on the inputs as they are.
        token: what the first block of each list of modules took and returned, by its name, with the middle token of the
            last sequence replaced; None if there was no such pass.
        sequence: the same with all tokens of the first sequence replaced.
    """

    watch: BlockWatch
    token: Mapping[str | None, Ends] | None = None
    sequence: Mapping[str | None, Ends] | None = None


def agreed(
    view: ModelView,
    batch: Batch,
    rows: int,
    *,
    keep: Tensor | None = None,
    measures: bool = True,
    known: Known | None = None,
) -> ModelView:
    """The view with streams that agree with a forward pass, and the evidence for them.

    Args:
        view: the structure found, and the stream, declared or guessed.
        batch: the probe.
        rows: number of sequences in it.
        keep: which tokens of the last sequence are to be measured; None for all, of every sequence.
        measures: whether tokens will be measured at all.
        known: what was observed before.

    Raises:
        InputError: some tokens are not to be measured, and it is unknown which tokens of the stream these are.
        LayoutError: the stream contradicts the assumed layout; the message says what to declare.
    """
    with without_fastpath():
        seen = known.watch.of(view) if known is not None else None
        if seen is None:
            known, seen = None, observed_blocks(view, batch)
        placed = tuple(_with_argument(stack, seen[stack.name]) for stack in view.stacks)
        if placed != view.stacks:
            view = replace(view, stacks=placed)
            known, seen = None, observed_blocks(view, batch)
        after = _first_calls(view, None if known is None or not _is_middle(batch, keep) else known.token)
        if after is None:
            after = first_calls(view, with_another_token(batch, rows - 1, keep))
        other = _first_calls(view, None if known is None else known.sequence)
        if other is None:
            other = first_calls(view, with_another_sequence(batch, 0))
    stacks = []
    for stack in view.stacks:
        evidence = seen[stack.name]
        _check_flow(stack, evidence)
        if stack.stream.has_plain_blocks:
            _check_slots(view, batch, stack, evidence)
        check_fed(view, batch, stack, evidence)
        check_carries_all(view, batch, stack)
        before, (entry, left) = evidence.calls[0], after.get(stack.name, (None, None))
        replaced, replaced_behind = other.get(stack.name, (None, None))
        facts = _Facts(
            before.entry.shape,
            rows,
            rows - 1,
            frozenset(value.shape[1 - batch.axis] for value in token_ids(batch)),
            not any(is_data(name, value) for name, value in named_inputs(batch)),
            _change(before.entry, entry),
            _change(before.left, left),
            _change(before.entry, replaced),
            _change(before.left, replaced_behind),
            evidence.channels(stack.stream),
            sorted(evidence.attention),
            before.given,
        )
        stacks.append(_settled(stack, facts, evidence))
        if keep is not None:
            _check_places(stacks[-1], facts, keep)
        if measures:
            _check_length(view, batch, stacks[-1], facts, keep)
    return replace(view, stacks=tuple(stacks))


def _is_middle(batch: Batch, keep: Tensor | None) -> bool:
    """Whether the token that is to be replaced is the middle one of each sequence."""
    lengths = {value.shape[1 - batch.axis] for value in token_ids(batch)}
    return all(changed_place(length, keep) == changed_place(length) for length in lengths)


def _first_calls(view: ModelView, known: Mapping[str | None, Ends] | None) -> dict[str | None, Ends] | None:
    """What is known of the first block of each stack; None if not of all."""
    blocks = {stack.name: stack.calls[0].module_name for stack in view.stacks}
    if known is None or not all(block in known for block in blocks.values()):
        return None
    return {name: known[block] for name, block in blocks.items()}


def shows_streams(stack: Stack) -> bool:
    """Whether the evidence for a stack is enough to read several streams per token that nobody declared."""
    return _STREAMS_SEEN in stack.agrees_with


def _settled(stack: Stack, facts: _Facts, seen: SeenStack) -> Stack:
    """The stack with an order of axes that no evidence contradicts."""
    # Of the two orders that need no declaration, try the other one before refusing.
    against = _against(stack.stream, facts) or _too_few(stack, facts)
    if against and stack.stream.axes in _FOUND and not stack.is_declared:
        other = replace(stack.stream, axes=_FOUND[1 - _FOUND.index(stack.stream.axes)])
        if not _against(other, facts):
            stack, against = replace(stack, stream=other), []
    if against:
        raise _refusal(stack, facts, against)
    for call in seen.calls:
        for tensor in (call.entry, call.left):
            is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
            if is_wrapper and not is_distributed(tensor):
                raise LayoutError(
                    f"{call.name} takes or returns a {type(tensor).__name__}, a tensor of a class of its own, whose "
                    "entries only its own functions know. Give the model plain tensors, or weights that make them."
                )
            if tensor is not None and _batch_of(stack.stream, tensor.shape, facts.rows) != facts.rows:
                raise LayoutError(
                    f"{call.name} takes a tensor of shape {tuple(call.entry.shape)} and returns one of shape "
                    f"{tuple(tensor.shape)}, which is not {facts.rows} sequences, as the input has, when read as "
                    f"'{stack.stream}' like the first block's.",
                    otherwise=_HOW_TO_DECLARE,
                )
    return replace(
        stack,
        agrees_with=_for(stack.stream, facts),
        reads_earlier=_reading_earlier(stack, seen),
        second_streams=_second_streams(stack.stream, seen),
        reach=_reach(stack.stream, facts),
    )


def _reach(stream: Stream, facts: _Facts) -> Literal["later", "earlier", "both", "none"] | None:
    """To which tokens the first block passes on a change of one token; None if more than one token was changed."""
    behind = facts.changed_behind
    if facts.changed is None or behind is None or behind.shape != facts.changed.shape:
        return None
    before, after = (
        stream.canonical(changed, facts.rows)[facts.row].any(dim=-1) for changed in (facts.changed, behind)
    )
    if int(before.sum()) != 1:
        return None
    place = int(before.int().argmax())
    earlier, later = bool(after[:place].any()), bool(after[place + 1 :].any())
    return ("both" if earlier else "later") if later else ("earlier" if earlier else "none")


def _reading_earlier(stack: Stack, seen: SeenStack) -> tuple[int, ...]:
    """Blocks whose input is made from the outputs of several earlier calls, as with attention over depth."""
    if len(seen.calls) != len(stack.calls):
        return ()
    sources = [
        {mark.number for mark in call.carries if mark.side == "out" and mark.stack == stack.name} for call in seen.calls
    ]
    return tuple(known.first_layer for known, numbers in zip(stack.calls, sources, strict=True) if len(numbers) > 1)


def _too_few(stack: Stack, facts: _Facts) -> list[str]:
    """Evidence from a stream with fewer tokens than input ids: pooled, or only some tokens go through the blocks."""
    tokens = stack.stream.sizes(facts.shape, facts.rows)[1]
    declared = stack.is_declared or stack.stream.argument is not None
    if declared or not facts.only_ids or not facts.lengths or tokens >= min(facts.lengths):
        return []
    return [
        f"the input has {min(facts.lengths)} tokens, and only {tokens} go through the blocks; if they are all there "
        "are, as where tokens are pooled first, declare the axes as they are"
    ]


def _check_places(stack: Stack, facts: _Facts, keep: Tensor) -> None:
    """Raise if a token of the input is at another position in the stream, or in another stream."""
    stream = replace(stack.stream, streams="join")
    if facts.only_ids and len(facts.lengths) > 1:
        raise InputError(
            f"The inputs have ids of several lengths ({', '.join(map(str, sorted(facts.lengths)))}), and which tokens "
            f"are padding is known of one of them, so that it is not known for {stack.calls[0].module_name}. Pass ids "
            "of one length, or none that are padding."
        )
    if not facts.only_ids or not facts.lengths or facts.changed is None:
        return
    words, sizes = stream.unfolded(facts.shape, facts.rows)
    place = changed_place(min(facts.lengths), keep)
    reached = stream.canonical(facts.changed, facts.rows)[facts.row].any(dim=-1)
    if len(reached) > 1 and bool(reached.all()):
        raise InputError(
            f"Token {place} of the input reaches every token of what {stack.calls[0].module_name} takes, as where "
            "latents read the input, so that padding of the input says nothing about them. Pass sequences of one "
            "length, without padding and with tokens_policy='content', or padding='none'."
        )
    if _is_local(words, sizes, facts) and not bool(reached[place]):
        raise InputError(
            f"Token {place} of the input is token {int(reached.int().argmax())} of what {stack.calls[0].module_name} "
            "takes, so that which of its tokens are padding is not known. Pass sequences of one length, without "
            "padding and with tokens_policy='content'."
        )


def _check_length(view: ModelView, batch: Batch, stack: Stack, facts: _Facts, keep: Tensor | None) -> None:
    """Check the tokens that the model adds, if it is seen where those of the input are."""
    if not facts.only_ids or len(facts.lengths) != 1 or facts.changed is None or stack.stream.axes not in _FOUND:
        return
    reached = stack.stream.canonical(facts.changed, facts.rows)[facts.row].any(dim=-1)
    (length,) = facts.lengths
    first = int(reached.int().argmax()) - changed_place(length, keep)
    if int(reached.sum()) == 1 and 0 <= first <= len(reached) - length:
        check_own_tokens(view, batch, stack, length, len(reached), first, some_count=keep is not None)


def _batch_of(stream: Stream, shape: torch.Size, rows: int) -> int:
    try:
        return stream.sizes(shape, rows)[0]
    except SiteError:
        return -1


def _against(stream: Stream, facts: _Facts) -> list[str]:
    """Sentences that describe what contradicts this order of axes; empty if nothing does."""
    stream = replace(stream, streams="join")
    try:
        words, sizes = stream.unfolded(facts.shape, facts.rows)
    except SiteError as error:
        return [str(error)]
    batch, tokens, dim = stream.sizes(facts.shape, facts.rows)
    if batch != facts.rows:
        return [f"that is {batch} sequences, and the input holds {facts.rows}"]
    objections = []
    own_axis = stream.axis_of("dim", len(facts.shape))
    if facts.channels is not None and facts.channels != own_axis:
        objections.append(f"the norms and linear maps of its blocks act along axis {facts.channels}, not {own_axis}")
    # A length is evidence only if it equals another axis: models may add or pool tokens, which is not a contradiction.
    apart = [size for word, size in zip(words, sizes, strict=True) if word == "tokens"]
    others = [*(apart if len(apart) > 1 else []), *([dim] if facts.channels is None else [])]
    streams = [size for word, size in zip(words, sizes, strict=True) if word == "streams"]
    objections += [
        f"the input has {length} tokens, and that is {tokens}"
        for length in facts.lengths
        if tokens not in facts.lengths and length in (*others, *streams)
    ]
    # Not among streams: what mixes them may be a softmax as well.
    objections += [
        f"its attention has {queries} queries in each of {facts.rows} sequences, and that is {tokens} tokens"
        for rows, queries, keys in facts.attention
        if rows == facts.rows and queries == keys and queries != tokens and queries in others
    ]
    if facts.changed is not None:
        objections += _against_change(words, facts.changed.reshape(sizes), facts.row)
        objections += _against_mixing(stream, facts)
    if stream.has_streams and not objections:
        objections += _against_streams(stream, facts)
    if facts.replaced is not None and not objections:
        rows = _reached(facts.replaced.reshape(sizes), words.index("batch"))
        if bool(rows[1:].any()):
            objections.append(f"a change of the tokens of one sequence reached {int(rows.sum())} of {facts.rows}")
    if facts.changed is None and batch == tokens and batch > 1:
        objections.append(f"there are as many sequences as tokens ({batch}), and nothing distinguishes them")
    if not objections and tokens == dim and facts.channels is None and not _is_local(words, sizes, facts):
        objections.append(
            f"there are as many tokens as channels ({tokens}), and nothing distinguishes them; use inputs of another "
            "length"
        )
    return objections


def _against_change(words: Sequence[str], changed: Tensor, row: int) -> list[str]:
    """Evidence against these axes from a change of one token of one sequence."""
    reached = {axis: _reached(changed, axis) for axis in range(changed.dim())}
    rows = reached[words.index("batch")]
    if [i for i, hit in enumerate(rows.tolist()) if hit] != [row]:
        return [f"a change of one token of sequence {row} reached {int(rows.sum())} sequences"]
    # A changed token changes few places along a token axis, and most channels.
    local = [axis for axis, word in enumerate(words) if word == "tokens" and _is_part(reached[axis])]
    whole = [axis for axis, word in enumerate(words) if word == "tokens" and len(reached[axis]) > 1]
    whole = [axis for axis in whole if bool(reached[axis].all())]
    dims = reached[words.index("dim")]
    if whole and local:
        return [
            f"a change of one token reached all {len(reached[whole[0]])} places along one axis of tokens, as it does "
            "where a token has several streams"
        ]
    streams = reached[words.index("streams")] if "streams" in words else None
    if whole and streams is not None and _is_part(streams):
        return [
            f"a change of one token reached all {len(reached[whole[0]])} tokens, and only {int(streams.sum())} of its "
            f"{len(streams)} streams"
        ]
    if whole and _is_part(dims):
        return [f"a change of one token reached all tokens, and only {int(dims.sum())} of {len(dims)} channels"]
    return []


def _against_mixing(stream: Stream, facts: _Facts) -> list[str]:
    """Evidence against the batch axis from a block that carries a change from one sequence to another.

    Ignored if attention was observed within each sequence: experts with a limited capacity also mix sequences.
    """
    tokens = stream.sizes(facts.shape, facts.rows)[1]
    if any(shape[:2] == (facts.rows, tokens) for shape in facts.attention) and facts.rows != tokens:
        return []
    for changed in (facts.changed_behind, facts.replaced_behind):
        if changed is None or _batch_of(stream, changed.shape, facts.rows) != facts.rows:
            continue
        words, sizes = stream.unfolded(changed.shape, facts.rows)
        rows = _reached(changed.reshape(sizes), words.index("batch"))
        if int(rows.sum()) > 1:
            return [f"the first block carries a change of one sequence to {int(rows.sum())} of {facts.rows}"]
    return []


def _against_streams(stream: Stream, facts: _Facts) -> list[str]:
    """Evidence against an axis of streams: a changed token reaches some of its streams or channels only.

    What enters the first block decides, because attention carries a change to every window of an image.
    """
    for changed in (facts.changed, facts.changed_behind):
        if changed is not None and _batch_of(stream, changed.shape, facts.rows) == facts.rows:
            words, sizes = stream.unfolded(changed.shape, facts.rows)
            reached, dims = (_reached(changed.reshape(sizes), words.index(word)) for word in ("streams", "dim"))
            if not bool(reached.all()):
                return [f"a change of one token reached {int(reached.sum())} of its {len(reached)} streams"]
            if _is_part(dims):
                return [
                    f"a change of one token reached all its streams, and only {int(dims.sum())} of {len(dims)} channels"
                ]
            return []
    return []


def _reached(changed: Tensor, axis: int) -> Tensor:
    others = [other for other in range(changed.dim()) if other != axis]
    return changed.any(dim=others) if others else changed


def _is_part(reached: Tensor) -> bool:
    return 0 < int(reached.sum()) <= len(reached) // 2


def _is_local(words: Sequence[str], sizes: Sequence[int], facts: _Facts) -> bool:
    """Whether the change reached few tokens and most of the channels."""
    if facts.changed is None:
        return False
    changed = facts.changed.reshape(tuple(sizes))
    local = [_is_part(_reached(changed, axis)) for axis, word in enumerate(words) if word == "tokens"]
    return any(local) and not _is_part(_reached(changed, list(words).index("dim")))


def _for(stream: Stream, facts: _Facts) -> tuple[str, ...]:
    """What confirms this order of axes, in words."""
    stream = replace(stream, streams="join")
    words, sizes = stream.unfolded(facts.shape, facts.rows)
    _, tokens, _ = stream.sizes(facts.shape, facts.rows)
    reasons = []
    if tokens in facts.lengths or _is_local(words, sizes, facts):
        reasons.append("the input")
    if any((rows, queries) == (facts.rows, tokens) or rows * queries == facts.rows * tokens
           for rows, queries, _ in facts.attention):  # fmt: skip
        reasons.append("the attention")
    if facts.channels is not None:
        reasons.append("the blocks' own maps")
    if stream.has_streams and _streams_are_seen(stream, words, sizes, facts):
        reasons.append(_STREAMS_SEEN)
    return tuple(reasons)


def _streams_are_seen(stream: Stream, words: Sequence[str], sizes: Sequence[int], facts: _Facts) -> bool:
    """Whether a changed token reaches all its streams and few other tokens, and branches read one stream per token.

    Members of an ensemble are also reached by a change of one token, but each has its own attention. A module that only
    writes to streams shows both in its shapes: it takes one stream per token and returns several.
    """
    if facts.changed is None:
        return False
    reached = _reached(facts.changed.reshape(tuple(sizes)), list(words).index("streams"))
    if len(reached) < 2 or not bool(reached.all()):
        return False
    batch, tokens, _ = stream.sizes(facts.shape, facts.rows)
    if stream.takes == "branch":
        return facts.given is not None and tuple(facts.given) == _one_stream_of(stream, facts)
    inside = {shape[:2] for shape in facts.attention}
    alone = (batch, tokens) in inside and (batch * len(reached), tokens) not in inside
    return alone and _is_local(words, sizes, facts)


def _one_stream_of(stream: Stream, facts: _Facts) -> tuple[int, ...]:
    """Shape of a tensor that lies like the streams and has one per token."""
    words, sizes = stream.unfolded(facts.shape, facts.rows)
    return tuple(size for word, size in zip(words, sizes, strict=True) if word != "streams")


def _refusal(stack: Stack, facts: _Facts, against: Sequence[str]) -> LayoutError:
    first = stack.calls[0].module_name or "the model itself"
    readings = [replace(stack.stream, axes=axes, streams="join") for axes in (*_FOUND, *_DECLARED)]
    sizes = ""
    try:
        sizes = " x ".join(map(str, stack.stream.sizes(facts.shape, facts.rows)))
        sizes = f", that is {sizes}"
    except SiteError:
        pass
    return LayoutError(
        f"Block 0 ({first}) takes a tensor of shape {tuple(facts.shape)} for {facts.rows} sequences. Read as "
        f"'{stack.stream}'{sizes} (sequences, tokens, channels), this cannot be the residual stream: "
        f"{'; '.join(entry.rstrip('.') for entry in against)}.",
        [_hint(better) for better in _unlike([better for better in readings if not _against(better, facts)], facts)],
        _HOW_TO_DECLARE,
    )


def _unlike(readings: Sequence[Stream], facts: _Facts) -> list[Stream]:
    """The first of those that read the tensor alike: an axis of one token, or of one stream, makes no difference."""
    by_reading: dict[tuple[object, ...], Stream] = {}
    places = torch.arange(facts.shape.numel()).reshape(facts.shape)
    for one in readings:
        read = one.canonical(places, facts.rows)
        by_reading.setdefault((tuple(read.shape), read.contiguous().numpy().tobytes()), one)
    return list(by_reading.values())


_HOW_TO_DECLARE = (
    "Declare where the stream is, with one word per axis out of batch, tokens, dim and streams: "
    "stream=rankscope.Stream('batch dim tokens'), or --layout 'batch dim tokens'; or name other blocks with "
    "blocks='layers.*'."
)


def _declared(stack: Stack) -> Stream:
    """The stream without the order of axes, if nobody declared it."""
    return stack.stream if stack.is_declared else replace(stack.stream, axes=None)


def _hint(better: Stream, lead: str = "What was seen agrees with") -> tuple[dict[str, object], str]:
    return {"stream": better}, f"{lead} stream=rankscope.{better!r}, on the command line --layout {str(better)!r}."


def _check_flow(stack: Stack, seen: SeenStack) -> None:
    """Raise if the output of the blocks is not the stream, or not all of it.

    Raises:
        LayoutError: the stream goes around the blocks, or is in another slot than the one that is read.
    """
    calls, stream, pairs = seen.calls, stack.stream, _pairs(seen)
    around = bool(pairs) and all(Mark("in", stack.name, number) in after.carries for number, _, after in pairs)
    # Blocks without skips, and a stream that bypasses some of them: the skip is outside and spans several blocks.
    bare = not any(plan.skips for plan in stack.plans)
    around |= bare and any(mark[:2] == ("in", stack.name) for _, _, after in pairs for mark in after.carries)
    meet = {Mark("in", stack.name, 0), Mark("out", stack.name, 0, "0")}
    alone = not pairs and any(meet <= marks for marks in seen.added_behind)
    if (around or alone) and stream.skips == "inside" and stream.slot == 0:
        raise LayoutError(
            f"The input of {calls[0].name} also bypasses it and is combined with its output outside, in the model's "
            "own loop: its output is a branch, not the residual stream.",
            [_hint(replace(_declared(stack), skips="around"), "The loop adds the two (x = x + block(x)): declare")],
            "It is not their plain sum, which no declaration describes: write the skip into the block.",
        )
    if stream.skips == "around":
        wrong = next((after.name for _, before, after in pairs if not _is_sum(before, after)), None)
        if wrong is not None:
            raise LayoutError(
                f"stream=Stream(skips='around') says that what {wrong} takes is the sum of what the block before it "
                "took and returned, and it is not. Leave skips out, or write the skip into the block's module."
            )


def _with_argument(stack: Stack, seen: SeenStack) -> Stack:
    """The stack with the argument in which its blocks take the declared slot of what the block before returned.

    Raises:
        LayoutError: they take it in another argument than the declared one, or nothing of its shape.
    """
    stream, pairs = stack.stream, _pairs(seen)
    is_default = stream.slot == 0 and stream.argument is None
    if is_default or stream.slot == "sum" or stream.skips == "around" or stream.takes == "branch":
        return stack
    if pairs and all(after.follows for _, _, after in pairs):
        return stack
    places = frozenset[int | str]().union(*(after.places for _, _, after in pairs))
    shared = places.intersection(*(after.places for _, _, after in pairs))
    if stream.argument is None and shared:
        return replace(stack, stream=replace(stream, argument=min(shared, key=str)))
    wrong = next((call for call in seen.calls if call.left is None or call.left.shape != call.entry.shape), None)
    if wrong is not None or places:
        name = (wrong or seen.calls[0]).name
        raise LayoutError(
            f"A stream declared as '{stream}': what {name} takes as the stream is not what a block "
            f"returns in slot {stream.slot}"
            + (f"; that goes to the argument {min(places, key=str)!r}. " if places else ". ")
            + "Declare the slot of the output and the argument of the input, as in "
            "stream=rankscope.Stream(slot=1, argument='encoder_hidden_states')."
        )
    return stack


def _second_streams(stream: Stream, seen: SeenStack) -> tuple[tuple[int | str, int], ...]:
    """Slots that every block hands on to the next besides the stream, shaped like it up to the number of tokens."""
    pairs = _pairs(seen)
    if not pairs or not stream.has_plain_blocks:
        return ()
    shape = list(seen.calls[0].entry.shape)
    axis = stream.axis_of("tokens", len(shape))
    others: list[tuple[int | str, int]] = []
    for slot, other in pairs[0][2].beside.items():
        is_like = len(other) == len(shape) and [*other[:axis], shape[axis], *other[axis + 1 :]] == shape
        if is_like and all(slot in after.beside for _, _, after in pairs):
            others.append((int(slot) if slot.isdigit() else slot, other[axis]))
    return tuple(others)


def _check_slots(view: ModelView, batch: Batch, stack: Stack, seen: SeenStack) -> None:
    """Raise if blocks pass on further tensors shaped like the stream; checked at two lengths, if the input has one.

    Raises:
        LayoutError: the stream is in another slot than the one that is read, or in several.
    """
    why, other = _other_slots(stack, seen), of_another_length(batch)
    if why is None:
        return
    # Global tokens (PEGASUS-X) that happen to be as many as the tokens are not a second stream.
    if other is not None and _other_slots(stack, observed_blocks(view, other)[stack.name]) is None:
        return
    taken, message, reads_first = why
    if not taken:
        raise LayoutError(message)
    summed = replace(_declared(stack), slot="sum")
    alone = replace(_declared(stack), slot=int(taken) if taken.isdigit() else taken)
    both = _hint(summed, "If it is their sum, as in blocks that pass on (hidden, residual), declare")
    raise LayoutError(
        message,
        [*([both] if reads_first else []), _hint(alone, f"If it is slot {taken} alone, declare")],
        "Declare which of the tensors that a block returns is the stream: stream=rankscope.Stream(slot=1).",
    )


def _pairs(seen: SeenStack) -> list[tuple[int, ObservedCall, ObservedCall]]:
    """Pairs of consecutive calls."""
    return list(zip(range(len(seen.calls)), seen.calls, seen.calls[1:], strict=False))


def _other_slots(stack: Stack, seen: SeenStack) -> tuple[str, str, bool] | None:
    """The slot that blocks pass on besides the first tensor of their output, in words, and whether they pass on both.

    None if they pass on nothing else; an empty slot if they pass on several.
    """
    for number, before, after in _pairs(seen):
        carried = {mark.slot for mark in after.carries if mark == Mark("out", stack.name, number, mark.slot)}
        taken = sorted({*carried, *after.takes} - {"0"})
        if not taken or not carried:
            continue
        if len(taken) > 1:
            spread = (
                f"{before.name} returns {len(taken) + 1} tensors of one shape, and {after.name} takes them all: the "
                "residual stream is spread over them, as in a list with one tensor per token. Pass one tensor from "
                "block to block (torch.stack); or, if one of them is the stream, declare which one: "
                "stream=rankscope.Stream(slot=1)."
            )
            return "", spread, True
        reads_first = "0" in {*carried, *after.takes}
        words = (
            f"{before.name} returns several tensors of one shape, and {after.name} reads the first and slot "
            f"{taken[0]}: the residual stream is not the first alone."
            if reads_first
            else f"{after.name} continues with slot {taken[0]} of the output of {before.name}, not with the first "
            "tensor in it."
        )
        return taken[0], words, reads_first
    return None


def _is_sum(before: ObservedCall, after: ObservedCall) -> bool:
    """Whether the input of the next block is the sum of the input and the output of this one."""
    if before.left is None or before.left.shape != before.entry.shape or after.entry.shape != before.entry.shape:
        return False
    entry, left, following = as_float64(before.entry), as_float64(before.left), as_float64(after.entry)
    gap = (entry + left - following).abs().max()
    size = following.abs().max() + entry.abs().max()
    return bool(gap <= _ROUNDINGS * torch.finfo(after.entry.dtype).eps * size)


def _change(before: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Where a tensor differs by more than rounding; None if nowhere, or if the tensors are not comparable."""
    if before is None or after is None or after.shape != before.shape:
        return None
    changed = (before - after).abs() > _REORDERED * torch.finfo(before.dtype).eps * before.abs().max()
    return changed if bool(changed.any()) else None
