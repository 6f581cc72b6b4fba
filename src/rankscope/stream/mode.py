"""Follows the residual stream through every block of a running model.

A ``TorchFunctionMode`` sees each torch call; hooks on the blocks mark where a stream begins and ends. Subclasses decide
what happens at an add, an attention call or a norm: the tracer observes, surgery rewrites.

Gradient checkpointing runs blocks again in the backward pass. The input identifies which call of a block is being
repeated: checkpointing passes the block the tensor it had in the forward pass, or a detached one with the same storage.
Only weak references are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from rankscope.errors import SiteError
from rankscope.models.inputs import sequences_in_pass
from rankscope.models.view import BlockCall, Label, ModelView, Stack
from rankscope.models.wrapping import without_fastpath
from rankscope.stream.attention_calls import from_sdpa, inside_multi_head, is_attention_shaped, is_over_keys
from rankscope.stream.frames import (
    SkipSum,
    StreamFrame,
    first_tensor,
    output_tensor,
    stream_in,
    stream_out,
    with_output_tensor,
)
from rankscope.stream.operators import (
    IN_PLACE_SUMS,
    JOINS,
    MULTI_HEAD,
    NORMS,
    QUERIES,
    SDPA,
    SOFTMAXES,
    awake,
    is_asleep,
    is_flex,
    is_norm,
)
from rankscope.stream.sites import SiteRef, SiteSelection

AttentionKind = Literal["attention", "cross_attention"]


SavingHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Any]]


def saving_hooks() -> SavingHooks | None:
    """What packs and unpacks tensors that are saved for the backward pass now: a checkpoint, for example."""
    found: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


class ActiveBlock(StreamFrame):
    """Follows the stream through one call and checks it against what the probe saw.

    ``taken`` is the tensor that the model's own loop adds to the output of the call, if the skips go around the blocks.
    The loop keeps a reference to it anyway, so keeping one here costs no memory. ``entered`` is a copy of the stream,
    ``batch tokens dim``, as it entered the current block, kept only if a mode needs it when the block ends. ``saving``
    is the checkpoint around the call, if there is one.
    """

    def __init__(self, entry: Tensor, stack: Stack, number: int, taken: Tensor | None = None) -> None:
        super().__init__(entry, stack.sums)
        self.taken = taken if stack.stream.skips == "around" else None
        self.stack = stack
        self.number = number
        self.call: BlockCall = stack.calls[number]
        self.block = 0
        self.last_sum: Tensor | None = None
        self.entered: Tensor | None = None
        self.sum: SkipSum | None = None
        self.label: Label | None = None
        blocks = self.call.blocks
        self._adds = [(i, label) for i, plan in enumerate(blocks) for label in plan.adds]
        self._joins = [join for plan in blocks for join in plan.joins]
        self._attention = [(i, kind) for i, plan in enumerate(blocks) for kind in plan.attention]
        self._adds_seen = 0
        self._attention_seen = 0
        self._softmaxes_seen = 0
        self._norms_seen = Counter[str]()
        self.saving = saving_hooks()
        self._met: list[tuple[object, bool]] = []
        self._expected: list[tuple[object, bool]] | None = None
        self._sequences = sequences_in_pass()
        self._check_batch()

    @property
    def layer(self) -> int:
        """Number of the block that is running."""
        return self.call.first_layer + self.block

    def ref(self, site: str) -> SiteRef:
        """A site of the block that is running."""
        return SiteRef(self.stack.name, self.layer, site)

    def next_add(self) -> tuple[int, Label | None]:
        """Block (counted inside this call) and label of the add that is happening."""
        if self._adds_seen == len(self._adds):
            raise SiteError(self._surprise("more adds onto the stream than when the model was probed"))
        self._adds_seen += 1
        return self._adds[self._adds_seen - 1]

    @property
    def joins(self) -> bool:
        """Whether the current add adds a parallel branch to the sum of the previous one."""
        return self._joins[self._adds_seen - 1]

    @property
    def is_joined(self) -> bool:
        """Whether the next add adds a parallel branch to the sum of this one."""
        return self._adds_seen < len(self._adds) and self._joins[self._adds_seen]

    @property
    def adds_are_over(self) -> bool:
        """Whether every add of the block that is running has happened."""
        return all(block != self.block for block, _ in self._adds[self._adds_seen :])

    @property
    def is_at_final_norm(self) -> bool:
        """Whether a norm that runs now is the final norm of the stack, and not one of a block."""
        return self.call.final_norm_inside and self._adds_seen == len(self._adds)

    @property
    def has_attention(self) -> bool:
        """Whether the probe saw attention in this call."""
        return bool(self._attention)

    @property
    def awaited_attention(self) -> AttentionKind | None:
        """The kind of the next attention call; None if all have happened."""
        return self._attention[self._attention_seen][1] if self._attention_seen < len(self._attention) else None

    def next_attention(self) -> SiteRef:
        """The site of the attention call that is happening."""
        if self._attention_seen == len(self._attention):
            raise SiteError(self._surprise("more attention calls than when the model was probed"))
        self._attention_seen += 1
        block, kind = self._attention[self._attention_seen - 1]
        return SiteRef(self.stack.name, self.call.first_layer + block, f"{kind}.probs")

    def again(self) -> ActiveBlock:
        """This call from here on, for a part of it that runs once more; it has to meet the stream where it does now."""
        other = copy(self)
        other._aliases, other._normed = self._aliases.copied(), self._normed.copied()
        other._norms_seen, other._met = self._norms_seen.copy(), [*self._met]
        other._expected = self._met if self._expected is None else self._expected
        return other

    def meet(self, what: object, is_stream: bool) -> bool:
        """Note whether an operation takes the stream; what runs again is checked against what ran before."""
        self._met.append((what, is_stream))
        if self._expected is not None and self._expected[len(self._met) - 1 : len(self._met)] != self._met[-1:]:
            raise SiteError(
                f"In block {self.layer} ({self.call.module_name}) gradient checkpointing runs a part again, and not as "
                "in the forward pass: its input is another tensor, or it takes another path. Checkpoint whole blocks."
            )
        return is_stream

    def next_norm(self, module: str) -> tuple[str, int]:
        """The norm call that is happening, as :class:`BranchParts` names it; no module for a function."""
        self._norms_seen[module] += 1
        return module, self._norms_seen[module] - 1

    def is_attention(self, scores: Tensor) -> bool:
        """Whether the softmax over the last axis of these scores, which is happening, is attention.

        One more than the probe saw counts if it looks like attention, and is then refused.
        """
        known, number = self.call.softmaxes, self._softmaxes_seen
        self._softmaxes_seen += 1
        is_meant = known[number] if number < len(known) else scores.dim() == 4
        return is_meant and is_attention_shaped(scores, *self.batch_and_tokens())

    def check_complete(self, *, attention: bool) -> None:
        """Raise unless everything the probe saw has happened."""
        if self._adds_seen != len(self._adds):
            raise SiteError(self._surprise(f"{self._adds_seen} of {len(self._adds)} adds onto the stream"))
        if attention and self._attention_seen != len(self._attention):
            raise SiteError(self._surprise(f"{self._attention_seen} of {len(self._attention)} attention calls"))

    def canonical(self, tensor: Tensor) -> Tensor:
        """The tensor as ``batch tokens dim``, regardless of the order or flattening the block works in."""
        return self.stack.stream.canonical(self._shaped(tensor), self._sequences)

    def apart(self, tensor: Tensor) -> Tensor:
        """The streams of each token, as ``batch tokens streams dim``."""
        return self.stack.stream.apart(self._shaped(tensor), self._sequences)

    def _shaped(self, tensor: Tensor) -> Tensor:
        shape = self.entry_shape
        flattened = tensor.dim() != len(shape) or self.is_stream(tensor)
        return tensor.reshape(shape) if flattened and tensor.numel() == shape.numel() else tensor

    def per_token(self, rows: Tensor) -> Tensor:
        """Numbers per token, in the order of the tokens of this call, as ``batch tokens width``."""
        if self.stack.stream.has_streams:
            # A branch reads one stream per token, as batch tokens dim in every known model.
            return rows.reshape(*self.batch_and_tokens(), -1)
        return self.stack.stream.canonical(rows.reshape(*self.entry_shape[:-1], -1), self._sequences)

    def native(self, x: Tensor, like: Tensor) -> Tensor:
        """A stream ``batch tokens dim`` in the order and flattening of ``like``, a tensor of this call."""
        return self.stack.stream.native(x, self.entry_shape, self._sequences).reshape(like.shape)

    def batch_and_tokens(self) -> tuple[int, int]:
        """Number of sequences and tokens in the stream."""
        return self.stack.stream.sizes(self.entry_shape, self._sequences)[:2]

    def _check_batch(self) -> None:
        """Raise if the stream does not contain the sequences of the current batch."""
        if self.stack.stream.takes == "branch":
            return
        if self._sequences is None and self.stack.stream.folds_batch:
            raise SiteError(
                f"Block {self.layer} ({self.call.module_name}) takes a stream '{self.stack.stream}': its sequences "
                "share an axis, and how many there are is known only in passes that rankscope runs. Give the surgery "
                "to a verb, e.g. rankscope.measure(model, inputs, surgery), instead of running the model in operate()."
            )
        batch, tokens = self.batch_and_tokens()
        if self._sequences is not None and batch != self._sequences:
            raise SiteError(
                f"Block {self.layer} ({self.call.module_name}) took a tensor of shape {tuple(self.entry_shape)}, read "
                f"as '{self.stack.stream}': {batch} sequences of {tokens} tokens, but the inputs hold "
                f"{self._sequences} sequences. Declare the order of its axes, e.g. "
                "stream=rankscope.Stream('batch dim tokens'), or --layout 'batch dim tokens'."
            )

    def _surprise(self, what: str) -> str:
        return (
            f"In block {self.layer} ({self.call.module_name}) the tracer saw {what}. "
            "The model takes another path on this input than on the probe: measure it with inputs of the same kind."
        )


def in_backward() -> bool:
    """Whether autograd is currently running."""
    return torch._C._current_graph_task_id() != -1


class CallMemory:
    """Remembers which call took which tensor, as long as that tensor is alive."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, StorageWeakRef], int] = {}
        self._latest: dict[str | None, int] = {}

    def begin_pass(self) -> None:
        """Forget tensors that no longer exist."""
        self._numbers = {key: number for key, number in self._numbers.items() if not key[1].expired()}  # type: ignore[no-untyped-call]
        self._latest.clear()

    def remember(self, stack: Stack, number: int, entry: Tensor) -> None:
        """Record that this tensor is the input of this call."""
        self._numbers[stack.name, _storage(entry)] = number

    def remember_output(self, stack: Stack, number: int, out: Tensor) -> None:
        """Record the output of a repeated call: if several blocks are repeated together, it is the next one's input."""
        self.remember(stack, number + 1, out)

    def number(self, stack: Stack, module_name: str, entry: Tensor) -> int:
        """The call that is being repeated. If its input is no longer known (offloaded), assume reverse order."""
        # A shared module (ALBERT) has several calls; the backward pass repeats them from the last to the first.
        numbers = [i for i, call in enumerate(stack.calls) if call.module_name == module_name]
        known = self._numbers.get((stack.name, _storage(entry)))
        if known not in numbers:
            latest = self._latest.get(stack.name, len(stack.calls))
            known = ([number for number in numbers if number < latest] or numbers)[-1]
        self._latest[stack.name] = known
        return known


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


Perform = Callable[..., Any]
_OBSERVING: ContextVar[bool] = ContextVar("_OBSERVING", default=False)


def unseen() -> AbstractContextManager[Any]:
    """Hide our own work inside a pass from every mode; dispatching to one costs as much as a small operation."""
    hidden: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return hidden


@contextmanager
def observing() -> Iterator[None]:
    """Mark what an observer computes from the stream as not part of the model, so that no mode follows it."""
    token = _OBSERVING.set(True)
    try:
        yield
    finally:
        _OBSERVING.reset(token)


@contextmanager
def reading_weights() -> Iterator[None]:
    """Read weights in the middle of a pass, which may run a layer: no mode follows it.

    Unlike under :func:`unseen`, quantised tensors keep the functions that they bring along.
    """
    with torch._C._EnableTorchFunction(), observing():
        yield


def is_observing() -> bool:
    """Whether what runs now is an observer's work, and not part of the model."""
    return _OBSERVING.get()


class StreamMode(TorchFunctionMode):
    """Base of everything that reads or changes the stream of a running model.

    Subclasses override the methods named ``on_...``.

    Args:
        view: the model and its structure.
    """

    def __init__(self, view: ModelView) -> None:
        super().__init__()
        self.view = view
        self._open: ActiveBlock | None = None
        self._in_pass = False
        self._calls_made: dict[str | None, int] = {}
        self._norm_depth = 0
        self._memory = CallMemory()
        self._pushed = ExitStack()

    def on_enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """A block call begins."""

    def on_next_block(self, call: ActiveBlock, stream: Tensor) -> None:
        """Inside one call, the next block begins."""

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
        """A branch is added to the stream, or put beside it; ``perform()`` is the model's own call."""
        result: Tensor = perform()
        return result

    def on_sum(self, call: ActiveBlock, label: Label, total: Tensor) -> Tensor:
        """A branch with this label has become part of the stream, which is now ``total``."""
        return total

    def on_fused(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """Fused attention; ``perform(*args, **kwargs)`` is the kernel."""
        return perform(*args, **kwargs)

    def on_softmax(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """The softmax over keys; ``perform(*args, **kwargs)`` is the model's own."""
        return perform(*args, **kwargs)

    def on_flex(self, ref: SiteRef, args: Sequence[Any], kwargs: Mapping[str, Any], perform: Perform) -> Any:
        """The operator of ``flex_attention``; ``perform(*args, **kwargs)`` is the model's own call."""
        return perform(*args, **kwargs)

    def on_norm(self, call: ActiveBlock, x: Tensor, out: Tensor) -> Tensor:
        """A norm of the stream returned ``out``."""
        return out

    def on_branch_norm(self, call: ActiveBlock, norm: tuple[str, int], x: Tensor, out: Tensor) -> Tensor:
        """A norm returned ``out`` for something that is not the stream itself; ``norm`` names it as `BranchParts`."""
        return out

    def on_leave(self, call: ActiveBlock, out: Tensor) -> None:
        """A block call ends."""

    def on_final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """The norm after the last block returned ``out``."""
        return out

    def reads_attention(self) -> bool:
        """Whether attention calls are currently needed."""
        return False

    def opens_outside_a_pass(self) -> bool:
        """Whether a block that runs again in the backward pass (gradient checkpointing) is also followed."""
        return False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Register the hooks and enable the mode; remove all of it on exit, even after an error."""
        modules = self.view.modules()
        with ExitStack() as stack:
            for handle in self._hooks(modules):
                stack.callback(handle.remove)
            stack.enter_context(without_fastpath())
            stack.enter_context(awake(self))
            stack.enter_context(self)
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self._open
        # Outside a block, or for our own work, do nothing: this runs for every torch call of the model.
        if call is None or func in QUERIES or is_observing():
            return func(*args, **kwargs)
        if func in call.sums:
            skip_sum = call.match(func, args, kwargs)
            if call.meet(func, skip_sum is not None):
                assert skip_sum is not None
                # For x += y the result must end up in the memory of x: other code may hold a reference to it.
                target = args[0] if func in IN_PLACE_SUMS else kwargs.get("out")
                out = self._add(call, skip_sum, lambda: func(*args, **kwargs))
                if func not in JOINS:
                    return self._summed(call, out, target)
                call.follow_joined(func, args, kwargs, out)
                return out
        # What attention returns is a branch, whatever it reads: there is no stream to follow through it.
        elif (func is SDPA or func == MULTI_HEAD or func in SOFTMAXES or is_flex(func)) and self.reads_attention():
            return self._attention(call, func, args, kwargs)
        out = func(*args, **kwargs)
        if func in NORMS and not self._norm_depth:  # inside a norm module, it is the module that counts
            out = self._normed_by(call, "", args[0] if args else kwargs["input"], out)
        call.pass_on(func, args, out)
        return self._summed(call, out) if call.makes_one_stream(func, args, kwargs, out) else out

    def _add(self, call: ActiveBlock, found: SkipSum, perform: Perform) -> Tensor:
        stream, branch = found.summands()
        block, label = call.next_add()
        # One module call may contain several blocks (a stack without block modules): this add starts the next one.
        if block != call.block:
            self.on_next_block(call, stream)
            call.block = block
            self.on_enter(call, stream)
        call.label, call.sum = label, found
        out = self.on_add(call, label, stream, branch, perform)
        call.sum = None  # it refers to the stream and the branch, and must not keep them alive
        return out

    def _summed(self, call: ActiveBlock, total: Tensor, target: Tensor | None = None) -> Tensor:
        """The stream after an add: after the add itself, or after the map that reads stream and branch side by side."""
        out = total if call.label is None else self.on_sum(call, call.label, total)
        if target is not None and out is not target:
            out = target.copy_(out)
        call.follow(out)
        if call.call.final_norm_inside:
            call.last_sum = out
        return out

    def _attention(
        self, call: ActiveBlock, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        call.meet(func, False)
        if func == MULTI_HEAD:
            # A single Python-level call: look inside it for the fused kernel or the softmax.
            return inside_multi_head(func, args, kwargs, self._fused, self._softmax_inside)
        if func is SDPA:
            return self._fused(func, args, kwargs)
        if is_flex(func):
            return self.on_flex(call.next_attention(), args, kwargs, func)
        if not call.has_attention:
            return func(*args, **kwargs)
        # Softmax is also used for gates and routers.
        if not is_over_keys(args, kwargs) or not call.is_attention(args[0]):
            return func(*args, **kwargs)
        batch = call.batch_and_tokens()[0]
        scores = args[0] if args[0].dim() == 4 else args[0].reshape(batch, -1, *args[0].shape[-2:])
        options = {name: value for name, value in kwargs.items() if name != "dim"} | {"dim": -1}
        out = self.on_softmax(call.next_attention(), (scores, *args[2:]), options, func)
        return out.reshape(args[0].shape)

    def _fused(self, perform: Perform, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self._open is not None
        if from_sdpa(args, kwargs) is None:
            return perform(*args, **kwargs)
        return self.on_fused(self._open.next_attention(), args, kwargs, perform)

    def _softmax_inside(self, perform: Perform, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self._open is not None
        return self.on_softmax(self._open.next_attention(), args, kwargs, perform)

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[torch.utils.hooks.RemovableHandle]:
        # Hooks on one module run in the order of registration. If the model is itself the only block, the pass still
        # begins before the block and ends after it. ``always_call``: blocks and passes also end if the model raises.
        yield self.view.model.register_forward_pre_hook(lambda *_: self._begin_pass())
        blocks = [modules[call.module_name] for stack in self.view.stacks for call in stack.calls]
        inside = {module for block in blocks for module in block.modules()}
        for name, module in modules.items():
            if module in inside and is_norm(module):
                yield module.register_forward_pre_hook(self._enter_norm)
                yield module.register_forward_hook(self._leave_norm(name), with_kwargs=True, always_call=True)
        for stack in self.view.stacks:
            for name in dict.fromkeys(call.module_name for call in stack.calls):
                module = modules[name]
                yield module.register_forward_pre_hook(self._enter(stack, name), with_kwargs=True)
                yield from self._inner_hooks(module)
                yield module.register_forward_hook(self._leave, always_call=True)
            for name in stack.idle:
                yield modules[name].register_forward_pre_hook(self._wakes(name))
            if stack.final_norm is not None:
                yield modules[stack.final_norm].register_forward_hook(self._final(stack))
        yield self.view.model.register_forward_hook(lambda *seen: self._end_pass(seen[-1]), always_call=True)

    def _inner_hooks(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        yield from ()

    def _begin_pass(self) -> None:
        """A forward pass of the model begins."""
        self._open, self._norm_depth = None, 0
        self._in_pass = not is_asleep()
        self._calls_made = {stack.name: 0 for stack in self.view.stacks}
        self._memory.begin_pass()

    def _enter(self, stack: Stack, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_asleep() or (not self._in_pass and not self.opens_outside_a_pass()):
                return
            entry = first_tensor(args, kwargs)
            number = None if entry is None else self._next_call(stack, name, entry)
            if number is None or entry is None:
                raise SiteError(
                    f"{name} ({type(module).__name__}) ran more often than when the model was probed. The model takes "
                    "another path on this input: measure it with inputs of the same kind."
                )
            with unseen():
                taken = stream_in(stack.stream, args, kwargs)
            assert taken is not None
            call = ActiveBlock(entry, stack, number, taken)
            # Opened after on_enter, so that what an observer computes there is not followed.
            self.on_enter(call, taken)
            self._open = call
            if not self._in_pass:
                self._be_on_the_stack()

        return hook

    def _wakes(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            if is_asleep():
                return
            raise SiteError(
                f"{name} ({type(module).__name__}) runs on this input, and did not when the model was probed: its "
                "depth depends on the input. Measure inputs of different depth one after the other."
            )

        return hook

    def _next_call(self, stack: Stack, name: str, entry: Tensor) -> int | None:
        """Number of the call that begins, in this pass, or of the one that is repeated in the backward pass."""
        if not self._in_pass:
            return self._memory.number(stack, name, entry)
        number = self._calls_made[stack.name]
        if number >= len(stack.calls) or stack.calls[number].module_name != name:
            return None
        self._calls_made[stack.name] = number + 1
        if self.opens_outside_a_pass():
            self._memory.remember(stack, number, entry)
        return number

    def _be_on_the_stack(self) -> None:
        """Re-enable the mode for a block: torch disables modes inside torch functions, such as ``loss.backward()``."""
        self._pushed.enter_context(self._re_enabled())

    def _re_enabled(self) -> AbstractContextManager[Any]:
        stack: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return nullcontext() if any(mode is self for mode in stack) else self

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Closed first, so that what subclasses compute in on_leave is not taken for a part of the block.
        call, self._open = self._open, None
        self._pushed.close()
        if call is None or output is None:
            return  # the block raised; checkpointing does so on purpose once it has all it needs
        out = output_tensor(output)
        if out is None:
            raise SiteError(
                f"{call.call.module_name} returned no tensor that could be the stream. Name the right blocks with "
                "blocks='layers.*'; `rankscope doctor` shows which were found."
            )
        call.check_complete(attention=self.reads_attention())
        if not self._in_pass:
            self._memory.remember_output(call.stack, call.number, out)
        with unseen():
            left = stream_out(call.stack.stream, output)
            if left is None:
                raise SiteError(
                    f"{call.call.module_name} returned a {type(output).__name__} without the tensors that "
                    f"stream=Stream(slot={call.stack.stream.slot!r}) asks for. Declare the slot in which the stream is."
                )
            left = left if call.taken is None else call.taken + left
        self.on_leave(call, left)

    def _enter_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._norm_depth += 1

    def _leave_norm(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._norm_depth -= 1
            call, out, x = self._open, output_tensor(output), first_tensor(args, kwargs)
            if call is None or out is None or x is None or self._norm_depth:
                return None
            new = self._normed_by(call, name, x, out)
            if call.is_stream(x):
                call.follow_normed(new)
            return with_output_tensor(output, new) if new is not out else None

        return hook

    def _normed_by(self, call: ActiveBlock, module: str, x: Tensor, out: Tensor) -> Tensor:
        """The output of a norm, or what stands in for it; no module for a function."""
        norm = call.next_norm(module)
        is_stream = call.meet(norm, call.is_stream(x))
        return self.on_norm(call, x, out) if is_stream else self.on_branch_norm(call, norm, x, out)

    def _final(self, stack: Stack) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            out = output_tensor(output)
            if self._calls_made.get(stack.name) != len(stack.calls) or out is None or not args:
                return None
            new = self.on_final(stack, args[0], out)
            return new if new is not out else None

        return hook

    def _end_pass(self, output: Any) -> None:
        """A forward pass of the model has ended; ``output`` is None if it raised."""
        was_asleep, self._in_pass = not self._in_pass, False
        if output is None or was_asleep:
            return
        for stack in self.view.stacks:
            made = self._calls_made[stack.name]
            if made != len(stack.calls):
                missing = ", ".join(call.module_name for call in stack.calls[made:][:4])
                raise SiteError(
                    f"Only {made} of {len(stack.calls)} block calls happened in this pass; not fired: {missing}. "
                    "Layers that are skipped at random (layer drop) must be switched off with model.eval()."
                )


class SiteMode(StreamMode):
    """Shows the residual stream, its branches and its sums at the selected sites.

    Args:
        view: the model and its structure.
        selection: the sites to show.
    """

    def __init__(self, view: ModelView, selection: SiteSelection) -> None:
        super().__init__(view)
        self._selection = selection

    def show(self, ref: SiteRef, x: Tensor) -> None:
        """Receive the stream at a site, as ``batch tokens dim``; at ``streams`` sites ``batch tokens streams dim``."""
        raise NotImplementedError

    def _show(self, call: ActiveBlock, site: str, x: Tensor) -> None:
        ref = call.ref(site)
        if ref in self._selection:
            self.show(ref, call.canonical(x))

    def _show_streams(self, call: ActiveBlock, site: str, x: Tensor) -> None:
        ref = call.ref(site)
        if call.stack.stream.has_streams and ref in self._selection:
            self.show(ref, call.apart(x))

    def on_enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """Show the stream as it enters a block."""
        if call.stack.stream.takes == "stream":
            self._show(call, "block.in", entry)
            self._show_streams(call, "streams.in", entry)

    def on_next_block(self, call: ActiveBlock, stream: Tensor) -> None:
        """Show the stream between two blocks of one call."""
        self._show(call, "block.out", stream)
        self._show_streams(call, "streams.out", stream)

    def on_add(
        self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform
    ) -> Tensor:
        """Show the branch."""
        if label is not None:
            self._show(call, f"{label}.out", branch)
        out: Tensor = perform()
        return out

    def on_sum(self, call: ActiveBlock, label: Label, total: Tensor) -> Tensor:
        """Show the sum."""
        self._show(call, f"{label}.sum", total)
        return total
