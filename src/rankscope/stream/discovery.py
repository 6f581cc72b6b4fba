"""Finds the blocks of any model by their structure and the calls in a forward pass.

A transformer block is a child of a container (``ModuleList``, ``Sequential``, ...) to whose input both a
token-mixing branch and an MLP branch are added. Blocks are counted by call, so a module shared by all layers counts as
many times as it runs. If blocks are not separate modules, the smallest module that contains the whole stream is split
into blocks by the pattern of its adds.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from rankscope.errors import DiscoveryError, SiteError
from rankscope.models.stream import Stream
from rankscope.models.view import BlockCall, BlockPlan, ModelView, Stack, Sums
from rankscope.stream.carries import KnownCall, carries_of, long_skips_of
from rankscope.stream.long_skips import LongSkips
from rankscope.stream.operators import JOINS, is_norm
from rankscope.stream.passes import CallRecord, Pass, probe

STREAM_AXES = (
    "batch tokens streams dim",
    "batch streams tokens dim",
    "streams batch tokens dim",
    "(batch streams) tokens dim",
    "(streams batch) tokens dim",
)
"""How several streams per token can lie."""
_HINTS = 2
"""How many guesses are tried on a model in which no blocks were found."""
_MIXING = ("attention", "mixer", "both")
_STACK_WORDS = ("encoder", "decoder", "vision", "text", "audio")


def discover(
    model: nn.Module,
    run: Callable[[], object],
    *,
    batch: int,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
    begun: Pass | None = None,
) -> ModelView:
    """Find the residual stacks of ``model``.

    Args:
        model: any module.
        run: calls the model once on a small input.
        batch: number of sequences in that input.
        blocks: qualified names or glob patterns of the block modules (``"layers.*"``), if the user named them.
        stream: the layout of the residual stream, if the user declared it.
        begun: the first pass, if it has run before.

    Raises:
        DiscoveryError: nothing in the model looks like a block; the message lists containers to choose from.
    """
    chosen = plain = _stacks(model, run, batch, blocks, stream, "plain", begun=begun)
    if plain.stacks and not _uncut(plain.stacks):
        _refuse_missed(plain.stacks, plain.records, blocks)
        if blocks is None:
            _refuse_blocks_inside(plain.stacks, plain.records)
        return ModelView(model, plain.stacks)
    # Some skips are not plain sums: probe again with every recognised form of a sum, and keep what explains more.
    wider: tuple[Sums, ...] = ("any", "joined") if plain.joins else ("any",)
    for sums in wider:
        wide = _stacks(model, run, batch, blocks, stream, sums)
        if wide.stacks and wide.all_true and (not chosen.stacks or _uncut(wide.stacks) < _uncut(chosen.stacks)):
            chosen = wide
        if chosen.stacks and not _uncut(chosen.stacks):
            break
    if not chosen.stacks:
        raise _nothing_found(model, plain.seen, blocks)
    _refuse_missed(chosen.stacks, plain.records, blocks)
    if blocks is None:
        _refuse_lost_attention(chosen.stacks, chosen.records)
        _refuse_blocks_inside(chosen.stacks, chosen.records)
    if _uncut(chosen.stacks):
        # What is left over may be long skips, which can be told once it is known which modules are blocks.
        sums = chosen.stacks[0].sums
        long = _stacks(model, run, batch, blocks, stream, sums, long_skips=True, begun=chosen.seen)
        if long.all_true and _uncut(long.stacks) < _uncut(chosen.stacks):
            chosen = long
    return ModelView(model, chosen.stacks)


class _Found(NamedTuple):
    """What one reading of the sums shows.

    Attributes:
        stacks: the stacks; none if no module looks like a block.
        seen: the pass that showed it.
        all_true: whether all skips are genuine.
        joins: whether tensors are put side by side anywhere.
    """

    stacks: tuple[Stack, ...]
    seen: Pass
    all_true: bool
    joins: bool

    @property
    def records(self) -> list[CallRecord]:
        """Every module call."""
        return self.seen.records


def _refuse_missed(stacks: Sequence[Stack], records: list[CallRecord], blocks: str | Sequence[str] | None) -> None:
    """Refuse to read some of the blocks: one whose sums are not recognised is still a block if its class is theirs.

    Children of one list are found together; blocks that are attributes, or that are in two lists, are not.
    """
    missed = [] if blocks is not None else _missed(stacks, records)
    if missed:
        names = [call.module_name for stack in stacks for call in stack.calls]
        named = list(dict.fromkeys(record.name for record in records if record.name in {*names, *missed}))
        kind = type(next(record.module for record in records if record.name == missed[0])).__name__
        first = next(record.name for record in records if record.name in names)
        raise DiscoveryError(
            f"{', '.join(dict.fromkeys(missed))}: of the class {kind}, like {first}, and run on tensors of the "
            "same shape, but no attention and MLP branch was recognised in it, so that only some of the blocks would "
            "be read.",
            [({"blocks": named}, f"Name those that are blocks: blocks={named!r}.")],
            "Name those that are blocks, e.g. blocks='layers.*'.",
        )


def _missed(stacks: Sequence[Stack], records: list[CallRecord]) -> list[str]:
    """Names of modules that are no blocks of these stacks, and of the same class and shape as some that are."""
    names = {call.module_name for stack in stacks for call in stack.calls}
    of_names = [record for record in records if record.name in names]
    kinds = {(type(r.module), r.input_shape) for r in of_names if not isinstance(r.module, nn.Sequential)}
    around = {id(ancestor) for record in of_names for ancestor in _ancestors(record)}
    return [
        record.name
        for record in records
        if (type(record.module), record.input_shape) in kinds
        and record.name not in names
        and record.keeps_shape
        and id(record) not in around
        and not any(ancestor.name in names for ancestor in _ancestors(record))
    ]


def _refuse_lost_attention(stacks: Sequence[Stack], records: list[CallRecord]) -> None:
    """Refuse to read only some of the blocks that are in one module, because the stream of the others is not followed.

    What attention returns is then added to something that is not the stream: within what was taken for one block, or
    after the last sum. There, attention alone proves nothing, as it may pool tokens: something else carries the stream.
    """
    for stack in stacks:
        call = stack.calls[0]
        if len(stack.calls) > 1 or _uncut((stack,)) == 0:
            continue
        record = next(record for record in records if record.name == call.module_name)
        ran = [before for before, kind in record.attention if kind == "attention"]
        lost = [n for n in ran if n >= len(record.adds) or (stack.depth == 1 and record.adds[n] is None)]
        if len(ran) > 1 and lost:
            raise DiscoveryError(
                f"{record.name or 'the model itself'}: attention ran {len(ran)} times in it, and what {len(lost)} of "
                "them return is not added to the stream as far as it can be followed, so that only some of the "
                "blocks would be read.",
                [],
                "Give each block a module of its own, and name them, e.g. blocks='layers.*'.",
            )


def _refuse_blocks_inside(stacks: Sequence[Stack], records: list[CallRecord]) -> None:
    """Refuse to read a module as a block that has a list of blocks in its branch.

    The list has skips that are not those of the module itself, as where a whole stack has a skip around it.
    """
    names = {call.module_name for stack in stacks for call in stack.calls}
    inside: dict[tuple[int, str], list[CallRecord]] = {}
    around: dict[int, CallRecord] = {}
    for record in records:
        if record.is_numbered and record.mixes and record.labels:
            for outer in (ancestor for ancestor in _ancestors(record) if ancestor.name in names):
                around[id(outer)] = outer
                inside.setdefault((id(outer), _pattern(record)), []).append(record)
    for (number, pattern), blocks_inside in inside.items():
        outer = around[number]
        if len(blocks_inside) > 1 and sum(len(record.labels) for record in blocks_inside) > len(outer.labels):
            raise DiscoveryError(
                f"{outer.name or 'the model itself'} adds one branch to its input, and in that branch are "
                f"{len(blocks_inside)} modules with attention and skips of their own, {blocks_inside[0].name} to "
                f"{blocks_inside[-1].name}: which of them are the blocks cannot be told.",
                [({"blocks": pattern}, f"Name them: blocks={pattern!r}.")],
                "Name the blocks with blocks=, and give inputs of two tokens or more.",
            )


def with_streams(
    model: nn.Module,
    run: Callable[[], object],
    *,
    batch: int,
    blocks: str | Sequence[str] | None = None,
    begun: Pass | None = None,
) -> list[ModelView]:
    """Readings of the model in which a token has several residual streams, each with its own layout.

    They are candidates by shape alone; which of them holds has to be decided by evidence.
    """
    records = (begun or probe(model, run, batch)).records
    chosen = records if blocks is None else _named(records, blocks)
    passed_on = {record.input_shape for record in chosen if record.keeps_shape and record.fed_by}
    shapes = {record.name: record.input_shape for record in records}
    views = []
    for axes in STREAM_AXES:
        if not any(_one_stream_of(Stream(axes), shape, batch) for shape in passed_on):
            continue
        stacks, seen = _stacks(model, run, batch, blocks, Stream(axes), "plain")[:2]
        if blocks is None and _missed(stacks, seen.records):
            continue
        entries = [shapes[stack.calls[0].module_name] for stack in stacks]
        if entries and all(_one_stream_of(Stream(axes), shape, batch) for shape in entries):
            views.append(ModelView(model, tuple(replace(stack, is_declared=False) for stack in stacks)))
    return [*views, *_writing(model, records, chosen, batch)]


def _one_stream_of(stream: Stream, shape: torch.Size | None, batch: int) -> tuple[int, ...] | None:
    """The shape without the axis of streams; None if a tensor of this shape does not hold several."""
    try:
        words, sizes = stream.unfolded(shape or torch.Size(), batch)
    except SiteError:
        return None
    if sizes[words.index("batch")] != batch or sizes[words.index("streams")] < 2:
        return None
    return tuple(size for word, size in zip(words, sizes, strict=True) if word != "streams")


def _writing(model: nn.Module, records: list[CallRecord], chosen: list[CallRecord], batch: int) -> list[ModelView]:
    """Readings in which modules take a branch and return the streams it was written to.

    A block ends with the last such call before attention runs again; only that call is followed.
    """
    views = []
    for axes in STREAM_AXES:
        stream = Stream(axes, takes="branch")
        writers = [r for r in chosen if tuple(r.input_shape) == _one_stream_of(stream, r.output_shape, batch)]
        for pattern in dict.fromkeys(map(_pattern, writers)):
            calls = _last_of_each_block(records, [record for record in writers if _pattern(record) == pattern])
            if len(calls) > 1:
                blocks = tuple(BlockCall(r.name, layer, (BlockPlan((), ()),)) for layer, r in enumerate(calls))
                views.append(ModelView(model, (Stack(None, blocks, stream, None),)))
    return views


def _last_of_each_block(records: list[CallRecord], writers: list[CallRecord]) -> list[CallRecord]:
    """The writers after which attention runs next, and the last one; none if no attention is written."""
    numbers = {id(record): number for number, record in enumerate(records)}
    starts = [0, *(numbers[id(writer)] for writer in writers)]
    # Whether tokens are mixed between the writer before and this one.
    mixes = [any(r.mixes for r in records[a + 1 : b]) for a, b in pairwise(starts)]
    if not any(mixes):
        return []
    return [writer for number, writer in enumerate(writers) if number + 1 == len(writers) or mixes[number + 1]]


def _uncut(stacks: Sequence[Stack]) -> int:
    """How much carries a stream around blocks that surgery could not scale."""
    left = [carry for stack in stacks for carry in stack.carries if carry.calls_begun is None]
    return sum(1 + carry.last - carry.first for carry in left)


def _stacks(
    model: nn.Module,
    run: Callable[[], object],
    batch: int,
    blocks: str | Sequence[str] | None,
    stream: Stream | None,
    sums: Sums,
    *,
    long_skips: bool = False,
    begun: Pass | None = None,
) -> _Found:
    """What a few passes show if sums of these forms are recognised.

    With ``long_skips``, the model runs once more with its blocks known.
    """
    seen = begun or probe(model, run, batch, stream, sums, roles=True)
    records, graph = seen.records, seen.recorder.graph
    chosen = _named(records, blocks) if blocks is not None else _found(records)
    stacks: dict[str, list[CallRecord]] = {}
    for record in chosen:
        stacks.setdefault(_pattern(record), []).append(record)
    names = _stack_names(list(stacks))
    found = [_stack(names[key], calls, batch, stream) for key, calls in stacks.items()]
    # The graph knows module calls by their number in the pass; the replay needs to know which of them are blocks.
    numbers = {id(record): number for number, record in enumerate(records)}
    calls = {
        numbers[id(record)]: _known(position, call, record)
        for position, (stack, key) in enumerate(zip(found, stacks, strict=True))
        for call, record in zip(stack.calls, stacks[key], strict=True)
    }
    # Module calls are numbered from 0; negative numbers stand for the long skips of a stack, which belong to none.
    searches = {
        -1 - position: LongSkips({number: call for number, call in calls.items() if call.stack == position})
        for position in range(len(found) if long_skips else 0)
    }
    if searches:
        graph = probe(model, run, batch, stream, sums, searches).recorder.graph
    for key, search in searches.items():
        calls[key] = KnownCall(-1 - key, key, key, tuple((last, True) for _, last, _ in search.found))
    around = carries_of(graph, calls, len(found))
    long = [long_skips_of(graph, -1 - position, search.found) for position, search in enumerate(searches.values())]
    complete = tuple(
        replace(
            stack,
            sums=sums,
            carries=(*(long[position] if searches else ()), *around.carries[position]),
            own_norms=tuple(around.norms[position]),
            operators=tuple(graph.operators),
            idle=_idle(model, stack, seen.called),
        )
        for position, stack in enumerate(found)
    )
    is_lost = any(search.is_lost for search in searches.values()) or any(record.is_lost for record in chosen)
    return _Found(complete, seen, around.all_true and not is_lost, not graph.functions.isdisjoint(JOINS))


def _idle(model: nn.Module, stack: Stack, called: Container[str]) -> tuple[str, ...]:
    """The modules next to the blocks, in the same lists, that did not run."""
    lists = {_unnumbered(call.module_name) for call in stack.calls}
    return tuple(sorted(name for name, _ in model.named_modules() if _unnumbered(name) in lists and name not in called))


def _known(stack: int, call: BlockCall, record: CallRecord) -> KnownCall:
    adds = [
        (call.first_layer + number, label is not None and not joins)
        for number, plan in enumerate(call.blocks)
        for label, joins in zip(plan.adds, plan.joins, strict=True)
    ]
    last = call.first_layer + len(call.blocks) - 1
    return KnownCall(stack, call.first_layer, last, tuple(adds), frozenset(record.inside))


def _named(records: Iterable[CallRecord], blocks: str | Sequence[str]) -> list[CallRecord]:
    patterns = [blocks] if isinstance(blocks, str) else list(blocks)
    regexes = [re.compile(fnmatch.translate(pattern).replace(".*", r"[^.]*")) for pattern in patterns]
    return [record for record in records if any(regex.match(record.name) for regex in regexes)]


def _found(records: list[CallRecord]) -> list[CallRecord]:
    """Apply the rules of discovery, most specific first."""
    # 1. Children of a container to whose input token mixing and an MLP are both added.
    children = [record for record in records if record.is_numbered]
    blocks = _innermost([record for record in children if record.is_complete])
    if blocks:
        return _with_siblings(blocks, children)
    # 2. Any module of that kind: blocks that are not separate modules.
    holders = _innermost([record for record in records if record.is_complete])
    if holders:
        return holders
    # 3. Children of a container that mix tokens: with a skip, or without skips but feeding one another.
    mixing = [record for record in children if record.mixes and record.keeps_shape]
    for candidates in ([record for record in mixing if record.labels], _chained(mixing)):
        blocks = _innermost(candidates)
        if blocks:
            return _with_siblings(blocks, children)
    return []


def _chained(records: list[CallRecord]) -> list[CallRecord]:
    """Calls that pass their output to each other, as blocks without skips do and mere sub-layers do not."""
    links = [(record, giver) for record in records for giver in record.fed_by if _pattern(giver) == _pattern(record)]
    patterns = {_pattern(record) for record, _ in links}
    return [record for record in records if _pattern(record) in patterns]


def _innermost(candidates: list[CallRecord]) -> list[CallRecord]:
    """Candidates that contain no other candidate."""
    outer = {id(ancestor) for record in candidates for ancestor in _ancestors(record)}
    return [record for record in candidates if id(record) not in outer]


def _ancestors(record: CallRecord) -> Iterable[CallRecord]:
    parent = record.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def _with_siblings(found: list[CallRecord], children: list[CallRecord]) -> list[CallRecord]:
    """All children of the containers, in order of call: in a hybrid stack, some blocks lack attention or an MLP."""
    containers = {_pattern(record) for record in found}
    return [record for record in children if _pattern(record) in containers]


def _pattern(record: CallRecord) -> str:
    return _unnumbered(record.name)


def _unnumbered(name: str) -> str:
    """A name with its numbers replaced by ``*``: ``encoder.layer.*``."""
    return re.sub(r"\d+", "*", name)


def _stack_names(keys: list[str]) -> dict[str, str | None]:
    if len(keys) == 1:
        return {keys[0]: None}
    names: dict[str, str | None] = {}
    for key in keys:
        word = next((word for word in _STACK_WORDS if word in key), None)
        names[key] = word if word is not None and word not in names.values() else key
    return names


def _stack(name: str | None, records: list[CallRecord], batch: int, stream: Stream | None) -> Stack:
    calls, layer = [], 0
    for record in records:
        blocks = _cut_into_blocks(record)
        final_norm_inside = len(blocks) > 1 and record.ends_with_norm
        calls.append(BlockCall(record.name, layer, blocks, final_norm_inside, tuple(record.softmaxes)))
        layer += len(blocks)
    layout = (stream or Stream()).with_axes(_layout(records[0], batch))
    is_declared = stream is not None and stream.axes is not None
    return Stack(name, tuple(calls), layout, records[-1].final_norm, is_declared=is_declared)


def _layout(record: CallRecord, batch: int) -> str:
    shape = record.input_shape
    return "tokens batch dim" if len(shape) == 3 and shape[0] != batch and shape[1] == batch else "batch tokens dim"


def _cut_into_blocks(record: CallRecord) -> tuple[BlockPlan, ...]:
    """Split the adds of one call into blocks."""
    starts = _repeats(record) or _starts_of_blocks(record)
    plans = []
    is_stack = len(starts) > 1 and record.ends_with_norm
    has_norm = any(not is_stack or before < len(record.adds) for before in record.norms_at)
    for start, stop in pairwise([*starts, len(record.adds)]):
        last = start == starts[-1]
        attention = tuple(kind for before, kind in record.attention if start <= before and (before < stop or last))
        adds = tuple(record.adds[start:stop])
        joins, roles = tuple(record.joins[start:stop]), tuple(record.roles[start:stop])
        plans.append(
            BlockPlan(adds, attention, has_norm, record.parallel_mlp, joins, record.post_norm, roles, record.beside)
        )
    return tuple(plans)


def _starts_of_blocks(record: CallRecord) -> list[int]:
    """A new block begins when mixing follows mixing and then an MLP.

    An MLP that comes first belongs to the block, as in Conformers: mlp, attention, mixer, mlp.
    """
    starts = [0]
    has_mixed = is_whole = False
    # attention, mlp | attention, mlp | ...; a joining add belongs to the block whose branch it is parallel to.
    for position, label in enumerate(record.adds):
        mixes = label in _MIXING
        if mixes and not record.joins[position] and is_whole:
            starts.append(position)
            has_mixed = is_whole = False
        has_mixed |= mixes
        is_whole |= label == "both" or (has_mixed and label == "mlp")
    return starts


def _repeats(record: CallRecord) -> list[int]:
    """Where a sequence of adds that begins with an MLP repeats: mlp, attention, mlp | mlp, attention, mlp | ...

    The MLPs alone do not say which of them end a block and which begin one. Empty if nothing is repeated.
    """
    adds = list(zip(record.adds, record.joins, strict=True))
    if not adds or adds[0][0] != "mlp":
        return []
    for period in range(2, len(adds) // 2 + 1):
        if adds[:period] * (len(adds) // period) == adds and any(label in _MIXING for label, _ in adds[:period]):
            return list(range(0, len(adds), period))
    return []


def _hidden_modules(model: nn.Module) -> str | None:
    """The first attribute that holds modules in a plain list, tuple or dict, in words; None if there is none."""
    registered = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            entries = value.values() if isinstance(value, dict) else value
            hidden = [entry for entry in entries if isinstance(entry, nn.Module) and entry not in registered]
            if hidden:
                where = f"{name}.{attribute}" if name else attribute
                kind = type(hidden[0]).__name__
                return f"{where} is a plain {type(value).__name__} with {len(hidden)} modules ({kind})"
    return None


def _nothing_found(model: nn.Module, seen: Pass, blocks: str | Sequence[str] | None) -> DiscoveryError:
    records = seen.records
    called = sorted({_pattern(record) for record in records if record.is_numbered})
    without_stream = {_unnumbered(name): kind for name, kind in reversed(seen.without_stream.items())}
    if without_stream and not called:
        name, kind = without_stream.popitem()
        return DiscoveryError(
            f"No residual blocks were found in {type(model).__name__}: the modules {name!r} take {kind}, and a "
            "residual stream is a tensor of real numbers. Collect their outputs with hooks, turn complex ones into "
            "real ones (torch.view_as_real(x).flatten(-2)), and pass them to rankscope.judge."
        )
    if seen.in_torch_func:
        return DiscoveryError(
            f"No residual blocks were found in {type(model).__name__}: {seen.in_torch_func} runs inside torch.func "
            "(vmap, grad), where further axes of what it takes are hidden. Call it on whole batches."
        )
    listing = ", ".join(repr(name) for name in called[:8]) or "none that were called"
    idle = _lists_of_parts(model, records)
    if idle is not None and _hidden_modules(model) is None:
        return DiscoveryError(
            f"No residual blocks were found in {type(model).__name__}: the modules {idle!r} are never called "
            "themselves, only their parts are, so that they have no input and no output. Write what the model does "
            "with the parts of each into its forward, and call it."
        )
    if blocks is not None:
        return DiscoveryError(
            f"No module called in the forward pass of {type(model).__name__} matches blocks={blocks!r}. "
            f"Lists of modules in it: {listing}."
        )
    hidden = _hidden_modules(model)
    if hidden is not None:
        return DiscoveryError(
            f"No residual blocks were found in {type(model).__name__}: {hidden}, which torch does not see: the "
            "parameters of these modules are not among model.parameters(), so no optimizer trains them and they are "
            "neither moved nor saved. Wrap it: nn.ModuleList for a list, nn.ModuleDict for a dict."
        )
    return DiscoveryError(
        f"No residual blocks were found in {type(model).__name__}: no part of it adds an attention and an MLP branch "
        "to its own input.",
        [
            ({"blocks": named}, f"What was seen agrees with blocks={named!r}, if these modules are its blocks.")
            for named in _alike(records)
        ],
        f"Name the blocks yourself, e.g. blocks='layers.*'. Lists of modules in it: {listing}. "
        "If it is not a transformer, pass its hidden states to rankscope.judge."
        if called
        else "A block has to be a module that is called, and no modules in lists are: write each block as a module, in "
        "an nn.ModuleList, or pass the hidden states to rankscope.judge.",
    )


def _lists_of_parts(model: nn.Module, records: list[CallRecord]) -> str | None:
    """The pattern of the first list of modules that are not called themselves, while their parts are."""
    names = {record.name for record in records}
    lists: dict[str, list[str]] = {}
    for name, _ in model.named_modules():
        if name.rpartition(".")[2].isdigit():
            lists.setdefault(_unnumbered(name), []).append(name)
    for pattern, members in lists.items():
        inside = tuple(f"{member}." for member in members)
        if len(members) > 1 and names.isdisjoint(members) and any(name.startswith(inside) for name in names):
            return pattern
    return None


def _alike(records: list[CallRecord]) -> list[str | list[str]]:
    """Patterns of modules that may be blocks: numbered, of one class, and outside of each other.

    Lists of the same class that run on tensors of the same shape belong together.
    """
    numbered = [
        record
        for record in records
        if record.keeps_shape and _pattern(record) != record.name and not is_norm(record.module)
    ]
    inner = {id(record) for record in numbered if any(_pattern(one) != one.name for one in _ancestors(record))}
    kinds: dict[object, dict[str, set[str]]] = {}
    for record in numbered:
        if id(record) not in inner:
            kind = kinds.setdefault((type(record.module), record.input_shape), {})
            kind.setdefault(_pattern(record), set()).add(record.name)
    several = [patterns for patterns in kinds.values() if sum(map(len, patterns.values())) > 1]
    return [names[0] if len(names) == 1 else names for names in map(list, several)][:_HINTS]
