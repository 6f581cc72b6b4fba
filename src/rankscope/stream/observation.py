"""Collects evidence about the axes of the stream: what block calls take and return, and how that changes.

``BlockWatch`` observes every block call of a pass: its tensors, the axes along which its norms and maps act, its
attention, and what goes around it. ``FirstCalls`` keeps what the first block takes and returns in a pass on other
inputs. ``evidence`` draws the conclusions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rankscope.errors import LayoutError, SiteError
from rankscope.linalg.rounding import differs
from rankscope.models.inputs import Batch
from rankscope.models.loading.devices import seed_generators
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import hidden, needs_all_ranks
from rankscope.pass_graph.identity import ByTensor
from rankscope.stream.frames import by_place, first_tensor, slots_in, stream_in, stream_out, tensors_in
from rankscope.stream.operators import ADDS, MULTI_HEAD, QUERIES, SDPA, SOFTMAXES, is_flex

T = Tensor
_LAST_AXIS_NORMS = frozenset({F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm})
_SECOND_AXIS_NORMS = frozenset(
    {F.group_norm, torch.group_norm, F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}
)
_PRODUCTS = frozenset({F.linear, torch.matmul, T.matmul, T.__matmul__, torch.nn.functional.bilinear})
_CONVOLUTIONS = frozenset({F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d})
_TURNS = frozenset(
    {
        T.permute, T.transpose, T.swapaxes, T.swapdims, T.movedim, T.moveaxis, T.t,
        torch.permute, torch.transpose, torch.swapaxes, torch.movedim, torch.moveaxis,
    }
)  # fmt: skip
_SHORT = 8
_ROUNDINGS = 64


class Mark(NamedTuple):
    """Marks a tensor outside of blocks as made from the input of a call (``in``), or from a slot of its output."""

    side: Literal["in", "out"]
    stack: str | None
    number: int
    slot: str = ""


Marks = frozenset[Mark]


@dataclass
class ObservedCall:
    """One observed block call.

    Attributes:
        entry: the input, read from the declared slot.
        left: the output, likewise; None if there is no such slot.
        carries: marks of earlier calls that the input still has, from paths around the blocks.
        takes: slots of the previous call that are among the arguments of this one, shaped like the stream.
        beside: the other slots of the previous call that are, and their shapes.
        places: arguments of this call that are what the previous one returned in the declared slot.
        follows: whether ``entry`` is that.
        given: shape of the branch it takes, if it only writes to streams; what it returns then also stands for
            its input.
    """

    name: str
    entry: Tensor
    carries: Marks
    takes: tuple[str, ...]
    beside: Mapping[str, torch.Size]
    places: frozenset[int | str]
    follows: bool
    left: Tensor | None = None
    given: torch.Size | None = None


@dataclass
class SeenStack:
    """What the observing pass found out about one stack."""

    calls: list[ObservedCall] = field(default_factory=list)
    by_norms: set[int] = field(default_factory=set)
    by_maps: set[int] = field(default_factory=set)
    attention: set[tuple[int, int, int]] = field(default_factory=set)
    added_behind: set[Marks] = field(default_factory=set)

    def renamed(self, names: Mapping[str | None, str | None]) -> SeenStack:
        """The same, with other names of the stacks that marks come from."""

        def with_names(marks: Marks) -> Marks:
            return frozenset(mark._replace(stack=names[mark.stack]) for mark in marks)

        calls = [replace(call, carries=with_names(call.carries)) for call in self.calls]
        return replace(self, calls=calls, added_behind=set(map(with_names, self.added_behind)))

    def channels(self, stream: Stream) -> int | None:
        """The channel axis; norms take precedence, because a linear map may also mix tokens, and streams."""
        mixed: set[int] = set()
        if stream.has_streams:
            with suppress(SiteError):  # other axes than were declared, which is refused later
                mixed.add(stream.axis_of("streams", self.calls[0].entry.dim()))
        votes = self.by_norms or self.by_maps - mixed
        return next(iter(votes)) if len(votes) == 1 else None


class WatchedBlocks(NamedTuple):
    """The modules that are the blocks of one stack, and how they hold the stream."""

    name: str | None
    stream: Stream
    modules: tuple[str, ...]


class BlockWatch(TorchFunctionMode):
    """Follows marks from block to block outside of blocks, and the axes of the stream inside them.

    Args:
        stacks: the blocks to observe.
        is_guess: whether it is not known yet that these are the blocks.

    Attributes:
        seen: what was observed, by stack.
    """

    def __init__(self, stacks: Sequence[WatchedBlocks], *, is_guess: bool = False) -> None:
        super().__init__()
        self.seen = {stack.name: SeenStack() for stack in stacks}
        self._stacks = stacks
        self._is_guess = is_guess
        self._is_void = False
        self._open: list[tuple[WatchedBlocks, ObservedCall]] = []
        self._marks = ByTensor[Marks]()
        self._axes = ByTensor[tuple[int, ...]]()
        self._slots: dict[str | None, dict[str, weakref.ref[Tensor]]] = {}
        self._left: dict[str | None, weakref.ref[Tensor]] = {}
        self._made_from = ByTensor[list[weakref.ref[Tensor]]]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in QUERIES:
            return out
        with hidden():
            inputs = tensors_in((args, kwargs or {}), depth=3)
            if self._open:
                self._inside(func, args, kwargs or {}, inputs, out)
            else:
                self._outside(func, inputs, tensors_in(out) or inputs[:1])
        return out

    def _outside(self, func: Callable[..., Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        # What is made from a tensor is written down before it is known whether the tensor enters a block: a model may
        # scale the stream for its own skip first. The marks of ``_mark_all_made_from`` then reach it.
        for tensor in inputs:
            made = self._made_from.get(tensor) or []
            self._made_from[tensor] = [*made, *map(weakref.ref, outputs)]
        known = [self._marks_of(tensor) for tensor in inputs]
        union = Marks().union(*known)
        if not union:
            return
        if func in ADDS:
            for seen_stack in self.seen.values():
                seen_stack.added_behind.add(union)
        for tensor in outputs:
            self._marks[tensor] = union

    def _mark_all_made_from(self, tensor: Tensor, mark: Mark) -> None:
        """Mark a tensor, and everything made from it before the block runs (``0.5 * x + block(x)``)."""
        waiting = [tensor]
        while waiting:
            current = waiting.pop()
            if mark not in self._marks_of(current):
                marks = frozenset({mark}) if current is tensor else self._marks_of(current) | {mark}
                self._marks[current] = marks
                made = self._made_from.get(current) or []
                waiting += [child for reference in made if (child := reference()) is not None]

    def _marks_of(self, tensor: Tensor) -> Marks:
        return self._marks.get(tensor) or frozenset()

    def _inside(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor], out: Any
    ) -> None:
        stack, call = self._open[-1]
        seen = self.seen[stack.name]
        is_attention_call = func is SDPA or func == MULTI_HEAD or func in SOFTMAXES or is_flex(func)
        # A later stage with other tokens, one window each, says nothing about the tokens of the first.
        if is_attention_call and call.entry.shape == seen.calls[0].entry.shape:
            self._note_attention(func, inputs, out, seen)
        # ``axes`` says, for each axis of a tensor, which axis of the stream it is; permutations change their order.
        turned = next(((tensor, axes) for tensor in inputs if (axes := self._axes.get(tensor)) is not None), None)
        if turned is None:
            return
        tensor, axes = turned
        if func in _LAST_AXIS_NORMS:
            seen.by_norms.add(axes[-1])
        elif func in _SECOND_AXIS_NORMS:
            seen.by_norms.add(axes[1])
        elif func in _CONVOLUTIONS and tensor is inputs[0]:
            seen.by_maps.add(axes[1])
            return
        elif func in _PRODUCTS or func == MULTI_HEAD or func is SDPA:
            if tensor is inputs[0]:
                seen.by_maps.add(axes[-1])
            return
        if not isinstance(out, Tensor) or out is tensor:
            return
        if func in _TURNS:
            # Apply the same call to an empty tensor whose axes have distinct sizes, to see where each axis ends up.
            small = torch.empty(tuple(range(2, 2 + tensor.dim())))
            shape = func(small, *args[1:], **kwargs).shape
            self._axes[out] = tuple(axes[size - 2] for size in shape)
        elif out.shape == tensor.shape:
            self._axes[out] = axes

    @staticmethod
    def _note_attention(func: Callable[..., Any], inputs: list[Tensor], out: Any, seen: SeenStack) -> None:
        if (func is SDPA or is_flex(func)) and inputs[0].dim() == 4:
            seen.attention.add((inputs[0].shape[0], inputs[0].shape[-2], inputs[1].shape[-2]))
        elif func == MULTI_HEAD:
            # It takes (tokens, batch, dim), whatever the module around it was given.
            if inputs[0].dim() == 3:
                seen.attention.add((inputs[0].shape[1], inputs[0].shape[0], inputs[1].shape[0]))
        elif func is not SDPA and isinstance(out, Tensor) and out.dim() == 4:
            seen.attention.add((out.shape[0], out.shape[-2], out.shape[-1]))

    @contextmanager
    def on(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Observe the calls of the blocks, which are among these modules."""
        with ExitStack() as hooks:
            for stack in self._stacks:
                for name in stack.modules:
                    enter, leave = self._enter(stack, name), self._leave(stack)
                    hooks.callback(modules[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
                    hooks.callback(modules[name].register_forward_hook(leave).remove)
            hooks.enter_context(self)
            yield

    @property
    def first_blocks(self) -> list[str]:
        """The first module of each stack that was called."""
        return [seen_stack.calls[0].name for seen_stack in self.seen.values() if seen_stack.calls]

    def of(self, view: ModelView) -> dict[str | None, SeenStack] | None:
        """What was observed of the blocks of each stack of a view; None if others were observed, or more of them."""
        ran = {name: seen_stack for name, seen_stack in self.seen.items() if seen_stack.calls}
        names: dict[str | None, str | None] = {}
        for stack in view.stacks:
            calls = [call.module_name for call in stack.calls]
            own = next(
                (name for name, seen_stack in ran.items() if [call.name for call in seen_stack.calls] == calls), None
            )
            if own is None or own in names or replace(stack.stream, axes=None) != Stream():
                return None
            names[own] = stack.name
        if self._is_void or names.keys() != ran.keys():
            return None
        return {new: ran[old].renamed(names) for old, new in names.items()}

    def _enter(self, stack: WatchedBlocks, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A pre-hook that records the input of a block."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with hidden():
                first, taken = first_tensor(args, kwargs), stream_in(stack.stream, args, kwargs)
                if first is None or taken is None:
                    return
                if torch._C._functorch.is_functorch_wrapped_tensor(first):
                    self._is_void = True
                    if self._is_guess:
                        return
                    raise LayoutError(
                        f"{name} runs inside torch.func (vmap, grad): what it takes is one part of a tensor whose "
                        "further axes are hidden. Call it on whole batches."
                    )
                seen_stack = self.seen[stack.name]
                slots = {slot: ref() for slot, ref in self._slots.get(stack.name, {}).items()}
                given = tensors_in((args, kwargs), depth=3)
                passed = {slot: value.shape for slot, tensor in slots.items() for value in given if value is tensor}
                takes = tuple(slot for slot, shape in passed.items() if shape == first.shape)
                beside = {slot: shape for slot, shape in passed.items() if shape != first.shape}
                left = self._left[stack.name]() if stack.name in self._left else None
                given_at = by_place(args, kwargs).items()
                places = frozenset(place for place, value in given_at if left is not None and value is left)
                marks = self._marks_of(first)
                call = ObservedCall(name, taken.clone(), marks, takes, beside, places, follows=taken is left)
                self._mark_all_made_from(first, Mark("in", stack.name, len(seen_stack.calls)))
                seen_stack.calls.append(call)
                self._open.append((stack, call))
                # Axes are numbered by the input of the block that runs; those of an earlier block mean nothing here.
                self._axes.clear()
                self._axes[first] = tuple(range(first.dim()))

        return hook

    def _leave(self, stack: WatchedBlocks) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """A hook that records the output of a block."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            with hidden():
                if not self._open:
                    return
                _, call = self._open.pop()
                left = stream_out(stack.stream, output)
                call.left = None if left is None else left.clone()
                if stack.stream.takes == "branch" and call.left is not None:
                    call.given, call.entry = call.entry.shape, call.left
                number = len(self.seen[stack.name].calls) - 1
                slots = slots_in(output)
                first = next(iter(slots.values()), None)
                named = {slot if position else "0": tensor for position, (slot, tensor) in enumerate(slots.items())}
                self._slots[stack.name] = {slot: weakref.ref(tensor) for slot, tensor in named.items()}
                if left is not None:
                    self._left[stack.name] = weakref.ref(left)
                # The outputs that could be the stream: the first one, under the name "0", and those of its shape.
                for slot, tensor in named.items():
                    if tensor.shape == call.entry.shape or tensor is first:
                        self._marks[tensor] = frozenset({Mark("out", stack.name, number, slot)})

        return hook


def observed_blocks(view: ModelView, batch: Batch) -> dict[str | None, SeenStack]:
    """What one pass shows of the blocks of each stack."""
    watch = BlockWatch(
        [
            WatchedBlocks(stack.name, stack.stream, tuple(dict.fromkeys(call.module_name for call in stack.calls)))
            for stack in view.stacks
        ]
    )
    with watch.on(view.modules()):
        _run(view, batch)
    return watch.seen


def watch_lists(modules: Mapping[str, nn.Module]) -> BlockWatch:
    """A watch on the modules in lists, which are most likely the blocks; not on those inside of others."""
    lists: dict[str, list[str]] = {}
    for name, module in modules.items():
        *outer, last = name.split(".")
        if last.isdigit() and not any(word.isdigit() for word in outer) and any(True for _ in module.children()):
            lists.setdefault(".".join([*outer, "*"]), []).append(name)
    return BlockWatch([WatchedBlocks(key, Stream(), tuple(names)) for key, names in lists.items()], is_guess=True)


def _run(view: ModelView, batch: Batch) -> Any:
    """What the model returns in one pass, with the same random numbers each time: some use them in evaluation too."""
    with torch.random.fork_rng(devices=[]):
        seed_generators(0)
        return batch.run(view.model)


def check_fed(view: ModelView, batch: Batch, stack: Stack, seen: SeenStack) -> None:
    """Raise if a block takes nothing of what the block before it in the order of calls returned.

    Usually marks show that it does. Where they do not, what the earlier block returned is changed, to see whether the
    later one then takes something else.

    Raises:
        LayoutError: the calls are not the blocks of one stream: the model runs its input in parts, or two stacks.
    """
    calls = seen.calls
    for number, (before, after) in enumerate(pairwise(calls)):
        marked = any(mark[:3] == ("out", stack.name, number) for mark in after.carries)
        if marked or after.follows or after.places or after.takes or _is_fed(view, batch, stack, number, after):
            continue
        earlier = [call.name for call in calls[: number + 1]]
        what = f"{after.name} (call {number + 1} of a block) takes nothing of what {before.name} returned before it"
        if after.name in earlier:
            raise LayoutError(
                f"{what}, and has run before: the model runs its blocks more than once, on parts of the tokens "
                f"(chunks, one token at a time with a cache) or on several inputs. These {len(calls)} calls are not "
                f"{len(calls)} blocks of one stream. Run each block once, on whole sequences and without a cache: "
                "wrap the model in a module whose forward does."
            )
        stem, alike = _until_they_differ(before.name, after.name)
        raise LayoutError(
            f"{what}: they belong to two residual streams.",
            [({"blocks": pattern}, f"Name the blocks of one: blocks={pattern!r}.") for pattern in (stem, alike)],
            "Name the blocks of one of them, e.g. blocks='encoder.layers.*'.",
        )


def _until_they_differ(one: str, other: str) -> tuple[str, str]:
    """Patterns for the blocks beside each of two: ``towers.0.layers.*`` and ``towers.1.layers.*``."""
    parts = one.split("."), other.split(".")
    start = next((place for place, (a, b) in enumerate(zip(*parts, strict=False)) if a != b), 0)
    patterns = [
        ".".join([*words[: start + 1], *("*" if word.isdigit() else word for word in words[start + 1 :])])
        for words in parts
    ]
    return patterns[0], patterns[1]


def _is_fed(view: ModelView, batch: Batch, stack: Stack, number: int, after: ObservedCall) -> bool:
    """Whether a call takes something else if what the call before it returned is changed."""
    begun, ended = 0, 0
    taken: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal begun
        value = stream_in(stack.stream, args, kwargs)
        if value is not None:
            begun += 1
            if begun == number + 2:
                taken.append(value.clone())

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal ended
        ended += 1
        if ended != number + 1:
            return None
        return pytree.tree_map_only(Tensor, lambda x: x.flip(-1) * 2 + 1 if x.is_floating_point() else x, output)

    modules = view.modules()
    with ExitStack() as hooks:
        for name in dict.fromkeys(call.module_name for call in stack.calls):
            hooks.callback(modules[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(modules[name].register_forward_hook(leave).remove)
        _run(view, batch)
    return not taken or taken[0].shape != after.entry.shape or not torch.equal(taken[0], after.entry)


def check_carries_all(view: ModelView, batch: Batch, stack: Stack) -> None:
    """Raise if blocks without skips are not what the input passes through on its way to the output.

    What every block returns is held fixed and the input is replaced. If the output changes, the input gets around the
    blocks: they are the parts of a branch, or there are others beside them. Only inputs that reach the blocks are
    replaced: a model that returns its loss also takes targets, and these never do.

    Raises:
        LayoutError: it does.
    """
    stream = stack.stream
    if any(plan.skips for plan in stack.plans) or stream.skips == "around" or not stream.has_plain_blocks:
        return
    kept: list[Any] = []
    outputs: list[list[Tensor]] = []
    for given in (batch, with_another_sequence(batch, 0, _reaching(view, batch))):
        returned = iter(list(kept))

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any, *, held: Iterator[Any] = returned) -> Any:
            kept.append(output)
            before = next(held, None)
            if before is not None and _shapes(before) != _shapes(output):
                raise _parts_of_a_branch(stack)  # experts, which take other tokens of another input
            return before

        with ExitStack() as hooks:
            for name in dict.fromkeys(call.module_name for own in view.stacks for call in own.calls):
                hooks.callback(view.modules()[name].register_forward_hook(leave).remove)
            outputs.append(tensors_in(_run(view, given), depth=3))
    one, other = outputs
    if len(one) == len(other) and all(a.shape == b.shape and _agree(a, b) for a, b in zip(one, other, strict=True)):
        return
    raise _parts_of_a_branch(stack)


def _shapes(returned: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(returned, depth=3)]


def _parts_of_a_branch(stack: Stack) -> LayoutError:
    names = list(dict.fromkeys(call.module_name for call in stack.calls))
    return LayoutError(
        f"{names[0]} to {names[-1]} add nothing to what they take, and the input also reaches the output around them: "
        "with all that they return held fixed and another input, the output would change. They are parts of a branch, "
        "or other blocks run beside them. Name all modules that are blocks, e.g. blocks='layers.*'."
    )


def _reaching(view: ModelView, batch: Batch) -> frozenset[str]:
    """Names of the inputs on which what a block takes depends; all of them if only one can be replaced."""
    names = frozenset(batch.inputs)
    others = {name: with_another_sequence(batch, 0, frozenset({name})) for name in names}
    replaced = {name for name, one in others.items() if one.inputs[name] is not batch.inputs[name]}
    if len(replaced) < 2:
        return names
    plain = _taken(view, batch)
    same = {name for name in replaced if all(map(_agree, plain, _taken(view, others[name])))}
    return names - same if same < replaced else names


def _taken(view: ModelView, batch: Batch) -> list[Tensor]:
    """What the first call of each block takes."""
    tensors_by_name: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name in dict.fromkeys(call.module_name for own in view.stacks for call in own.calls):

            def enter(module: nn.Module, args: tuple[Any, ...], kwargs: Any, *, name: str = name) -> None:
                tensors_by_name.setdefault(name, [one.clone() for one in tensors_in((args, kwargs), depth=3)])

            hooks.callback(view.modules()[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
        _run(view, batch)
    return [tensor for taken in tensors_by_name.values() for tensor in taken]


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if not one.is_floating_point():
        return True  # chosen ids say no more than the numbers they are chosen by
    return not bool(differs(one, other, _ROUNDINGS).any())


class _AllEntered(Exception):  # noqa: N818  (no error: the way out of a forward pass whose rest is not needed)
    """The first block of every stack has run."""


Ends = tuple[Tensor, Tensor | None]
"""What a block takes as the stream, and what it returns."""


class FirstCalls:
    """Keeps what the first block of each stack takes and returns in a pass.

    Args:
        blocks: for each stack its name, its stream and its first block.
        ends_early: whether the pass ends after them.

    Attributes:
        found: by stack.
    """

    def __init__(self, blocks: Sequence[tuple[str | None, Stream, nn.Module]], *, ends_early: bool = False) -> None:
        self.found: dict[str | None, Ends] = {}
        self._blocks = blocks
        self._ends_early = ends_early
        self._entries: dict[str | None, Tensor] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Keep them in the pass that runs inside this block."""
        with ExitStack() as hooks:
            for name, stream, module in self._blocks:
                hooks.callback(module.register_forward_pre_hook(self._enter(name, stream), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leave(name, stream)).remove)
            with suppress(_AllEntered):
                yield

    def _enter(self, name: str | None, stream: Stream) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken = stream_in(stream, args, kwargs)
            if taken is not None:
                self._entries.setdefault(name, taken.clone())

        return hook

    def _leave(self, name: str | None, stream: Stream) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            left = stream_out(stream, output)
            if stream.takes == "branch" and left is not None:
                self._entries[name] = left.clone()
            if name in self._entries:
                self.found.setdefault(name, (self._entries[name], None if left is None else left.clone()))
            if self._ends_early and len(self.found) == len(self._blocks):
                raise _AllEntered

        return hook


def first_calls(view: ModelView, batch: Batch) -> dict[str | None, Ends]:
    """Input and output of the first block of each stack; the pass ends there."""
    modules = view.modules()
    blocks = [(stack.name, stack.stream, modules[stack.calls[0].module_name]) for stack in view.stacks]
    calls = FirstCalls(blocks, ends_early=not needs_all_ranks(view.model))
    with calls.on():
        _run(view, batch)
    return calls.found


def of_another_length(batch: Batch) -> Batch | None:
    """The same ids repeated, or the first half if there are many; None if the input is something else."""
    ids = token_ids(batch)
    lengths = {value.shape[1 - batch.axis] for value in ids}
    if len(lengths) != 1 or any(is_data(name, value) for name, value in named_inputs(batch)):
        return None
    axis, length = 1 - batch.axis, lengths.pop()

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[axis] != length:
            return value
        return value.narrow(axis, 0, length // 2) if length > _SHORT else torch.cat([value, value], dim=axis)

    inputs = {name: cut(value) for name, value in batch.inputs.items()}
    return replace(batch, inputs=inputs, arguments=tuple(map(cut, batch.arguments)))


def named_inputs(batch: Batch) -> list[tuple[str, Any]]:
    """What the model is called with; positional arguments have no name."""
    return [*(("", value) for value in batch.arguments), *batch.inputs.items()]


def is_data(name: str, value: object) -> bool:
    """Whether an input is an image, audio or embedded tokens."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and "mask" not in name


def token_ids(batch: Batch) -> list[Tensor]:
    """The token ids among the inputs."""
    named = {name: value for name, value in batch.inputs.items() if name.endswith("input_ids")}
    values = named.values() if named else [v for n, v in batch.inputs.items() if "mask" not in n and "type" not in n]
    return [value for value in (*batch.arguments, *values) if _is_ids(value)]


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def with_another_sequence(batch: Batch, row: int, names: Collection[str] | None = None) -> Batch:
    """The same batch with other tokens in one sequence, or another image or sound.

    Ids are moved along by one place, so that there are as many of each as before: a model may count some of them.
    Given names, only inputs of these names are changed, and arguments without a name.
    """
    ids = {id(value) for value in token_ids(batch)}

    def changed(name: str, value: Tensor, axis: int) -> Tensor:
        are_ids = id(value) in ids
        if names is not None and name in batch.inputs and name not in names:
            return value
        if value.dim() < 2 or not (are_ids or is_data(name, value)):
            return value
        value = value.clone()
        own = value.select(axis, row)
        if not are_ids:
            drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(own)
            own.copy_(0.5 * own + drawn * own.std().clamp_min(1e-3))
        elif bool((own == own[0]).all()):
            others = value[value != own[0]]
            own.fill_(int(others[0]) if len(others) else int(own[0]) - 1 if own[0] > 0 else 1)
        else:
            own.copy_(own.roll(1))
        return value

    return batch.mapped(changed)


def with_another_token(batch: Batch, row: int, counts: Tensor | None) -> Batch:
    """The same batch with one token of one sequence replaced, or one number of its image or audio.

    ``counts`` marks the tokens of that sequence that count; one of them is replaced.
    """
    ids = {id(value) for value in token_ids(batch)}

    def changed(name: str, value: Tensor, axis: int) -> Tensor:
        if value.dim() < 2:
            return value
        if id(value) in ids:
            return _another_id(value, row, axis, counts)
        if not is_data(name, value):
            return value
        value = value.clone()
        place = tuple(row if at == axis else size // 2 for at, size in enumerate(value.shape))
        value[place] += 1 + value[place].abs()
        return value

    return batch.mapped(changed)


def _another_id(ids: Tensor, row: int, axis: int, counts: Tensor | None) -> Tensor:
    """Replace one id near the middle by another id of the sequence, which the model is known to accept."""
    ids = ids.clone()
    own = ids.select(axis, row)
    middle = changed_place(len(own), counts)
    other = [number for number in own[1:-1].tolist() if number != int(own[middle])]
    own[middle] = other[0] if other else (own[middle] - 1 if own[middle] > 0 else own[middle] + 1)
    return ids


def changed_place(tokens: int, counts: Tensor | None = None) -> int:
    """Position of the token that is changed: the middle one, or the middle one of those that count."""
    kept = [] if counts is None else counts[:tokens].nonzero()[:, 0].tolist()
    return kept[len(kept) // 2] if kept else tokens // 2
