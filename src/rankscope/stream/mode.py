"""The one mode: follows the residual stream through every block of a running model, and asks a handler at each place.

A ``TorchFunctionMode`` sees each torch call; hooks on the blocks mark where a stream begins and ends. What is done at a
sum, a norm, an attention call or the end of a block is the business of a :class:`Handler`: the tracer shows what is
there, surgery changes it. So a model that is traced under surgery runs under two modes, and the later one sees what
the earlier one has changed. With ``x = x + attention(norm(x))`` as the only block, a handler is asked:

.. code-block:: text

    begin_pass                            the model is called
      enter(call, x)                      the block is called
        norm(call, ..., x, norm(x))       a norm
        attention(place)                  a softmax over keys, or a kernel that contains one
        add(call, "attention", x, branch) the sum, before it is computed
        added(call, "attention", total)   and after
      leave(call, ..., left)              the block returns
    final(stack, x, norm(x))              the norm after the last block
    end_pass                              the model returns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from rankscope.errors import SiteError
from rankscope.models.view import Label, ModelView, Stack
from rankscope.models.wrapping import without_fastpath
from rankscope.stream.attention_calls import (
    AttentionCall,
    from_flex,
    from_sdpa,
    from_softmax,
    inside_multi_head,
    is_over_keys,
    listening,
)
from rankscope.stream.block_call import ActiveBlock, CallMemory
from rankscope.stream.frames import SkipSum, first_tensor, output_tensor, stream_in, stream_out, with_output_tensor
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
from rankscope.stream.sites import SiteRef

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


Hooks = Iterator[torch.utils.hooks.RemovableHandle]


@dataclass(frozen=True)
class AttentionPlace:
    """An attention call that is about to run.

    Attributes:
        ref: the site of its probabilities.
        kind: a fused kernel, a softmax over keys, or the operator of ``flex_attention``.
        args: of the call; those of a softmax begin with scores ``batch heads query key``.
        kwargs: of the call.
        perform: the model's own call.
        block: the block that is running.
    """

    ref: SiteRef
    kind: Literal["fused", "softmax", "flex"]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    perform: Perform
    block: ActiveBlock

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream."""
        return self.block.batch_and_tokens()[1]

    def run(self) -> Any:
        """Run it as it is."""
        return self.perform(*self.args, **self.kwargs)

    def run_and_read(
        self, *, reads: bool = True, log_sums: Callable[[], Tensor | None] | None = None
    ) -> tuple[Any, AttentionCall | None]:
        """Run it as it is, and read what attends to what; None if its axes are others, or if it is not to be read.

        Args:
            reads: whether it is to be read.
            log_sums: what the kernel told about its sums of exponentials, once it has run.
        """
        with listening() as heard:
            out = self.run()
        if not reads:
            return out, None
        if self.kind == "softmax":
            return out, from_softmax(out, self.tokens, self.args[0])
        if self.kind == "flex":
            with observing():  # the operator needs function modes of its own, so that it cannot run unseen
                return out, from_flex(self.perform, self.args, self.kwargs)
        told = None if heard or log_sums is None else log_sums()
        return out, heard[-1] if heard else from_sdpa(self.args, self.kwargs, told)


class Handler:
    """What is done at each place of a pass. As it is, it leaves the model alone; a handler overrides what it needs.

    Attributes:
        mode: the mode that asks it.
        reads_attention: whether attention calls are needed at this moment.
        follows_repeats: whether a block that runs again in the backward pass (gradient checkpointing) is also followed.
    """

    mode: StreamMode
    follows_repeats = False

    @property
    def reads_attention(self) -> bool:
        """Whether attention calls are needed at this moment."""
        return False

    def hooks(self, modules: Mapping[str, nn.Module]) -> Hooks:
        """Hooks of its own, registered before those of the mode."""
        yield from ()

    def hooks_in(self, block: nn.Module) -> Hooks:
        """Hooks of its own in a block, registered after that which begins the block and before that which ends it."""
        yield from ()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A torch function is called, anywhere in the model."""
        return self.mode.run(func, args, kwargs)

    def begin_pass(self) -> None:
        """A forward pass of the model begins."""

    def end_pass(self, *, is_complete: bool) -> None:
        """A forward pass has ended; complete if it did not raise and all blocks ran."""

    def enter(self, call: ActiveBlock, entry: Tensor) -> None:
        """A block begins."""

    def next_block(self, call: ActiveBlock, stream: Tensor) -> None:
        """Inside one call, a block ends and the next one begins."""

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """A branch is added to the stream, or put beside it; ``perform()`` is the model's own call."""
        result: Tensor = perform()
        return result

    def added(self, call: ActiveBlock, label: Label | None, total: Tensor) -> None:
        """A branch has become part of the stream, which is now ``total``."""

    def attention(self, place: AttentionPlace) -> Any:
        """Attention happens."""
        return place.run()

    def norm(self, call: ActiveBlock, norm: tuple[str, int], x: Tensor, out: Tensor, *, of_stream: bool) -> Tensor:
        """A norm returned ``out`` for ``x``, the stream or something else; ``norm`` names it as `BranchParts` do."""
        return out

    def parallel_mlp(self, call: ActiveBlock, out: Tensor) -> Tensor:
        """The MLP that joins the attention branch before both are added returned ``out``."""
        return out

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """A block call ends; ``left`` is the stream in its output."""

    def final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """The norm after the last block returned ``out``."""
        return out


class StreamMode(TorchFunctionMode):
    """Follows the stream of a running model, and asks a handler at each place.

    Args:
        view: the model and its structure.
        handler: what is done.

    Attributes:
        open: the block call that is running.
        in_pass: whether a forward pass of the model is running.
        during_call: what ends with the block call that is running.
    """

    def __init__(self, view: ModelView, handler: Handler) -> None:
        super().__init__()
        self.view = view
        self.open: ActiveBlock | None = None
        self.in_pass = False
        self.during_call = ExitStack()
        self._handler = handler
        self._calls_made: dict[str | None, int] = {}
        self._norm_depth = 0
        self._memory = CallMemory()
        handler.mode = self

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
        # Most calls only ask for a shape; they, and our own work, concern no handler.
        if func in QUERIES or is_observing():
            return func(*args, **(kwargs or {}))
        return self._handler.call(func, args, kwargs or {})

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function, and follow the stream through it."""
        call = self.open
        if call is None:
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
        elif (
            func is SDPA or func == MULTI_HEAD or func in SOFTMAXES or is_flex(func)
        ) and self._handler.reads_attention:
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
            self._handler.next_block(call, stream)
            call.block = block
            self._handler.enter(call, stream)
        call.label, call.sum = label, found
        out = self._handler.add(call, label, stream, branch, perform)
        call.sum = None  # it refers to the stream and the branch, and must not keep them alive
        return out

    def _summed(self, call: ActiveBlock, total: Tensor, target: Tensor | None = None) -> Tensor:
        """The stream after an add: after the add itself, or after the map that reads stream and branch side by side."""
        out = total if target is None or total is target else target.copy_(total)
        call.follow(out)
        if call.call.final_norm_inside:
            call.last_sum = out
        self._handler.added(call, call.label, out)
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
            return self._attends(call, "flex", func, args, kwargs)
        if not call.has_attention:
            return func(*args, **kwargs)
        # Softmax is also used for gates and routers.
        if not is_over_keys(args, kwargs) or not call.is_attention(args[0]):
            return func(*args, **kwargs)
        batch = call.batch_and_tokens()[0]
        scores = args[0] if args[0].dim() == 4 else args[0].reshape(batch, -1, *args[0].shape[-2:])
        options = {name: value for name, value in kwargs.items() if name != "dim"} | {"dim": -1}
        out = self._attends(call, "softmax", func, (scores, *args[2:]), options)
        return out.reshape(args[0].shape)

    def _fused(self, perform: Perform, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self.open is not None
        if from_sdpa(args, kwargs) is None:
            return perform(*args, **kwargs)
        return self._attends(self.open, "fused", perform, args, kwargs)

    def _softmax_inside(self, perform: Perform, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        assert self.open is not None
        return self._attends(self.open, "softmax", perform, args, kwargs)

    def _attends(
        self,
        call: ActiveBlock,
        kind: Literal["fused", "softmax", "flex"],
        perform: Perform,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        return self._handler.attention(AttentionPlace(call.next_attention(), kind, args, kwargs, perform, call))

    def _hooks(self, modules: Mapping[str, nn.Module]) -> Hooks:
        yield from self._handler.hooks(modules)
        parallel = {plan.parallel_mlp for stack in self.view.stacks for plan in stack.plans}
        for mlp in filter(None, parallel):
            yield modules[mlp].register_forward_hook(self._parallel_mlp)
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
                yield from self._handler.hooks_in(module)
                yield module.register_forward_hook(self._leave, always_call=True)
            for name in stack.idle:
                yield modules[name].register_forward_pre_hook(self._wakes(name))
            if stack.final_norm is not None:
                yield modules[stack.final_norm].register_forward_hook(self._final(stack))
        yield self.view.model.register_forward_hook(lambda *seen: self._end_pass(seen[-1]), always_call=True)

    def _begin_pass(self) -> None:
        """A forward pass of the model begins."""
        self.open, self._norm_depth = None, 0
        self.in_pass = not is_asleep()
        self._calls_made = {stack.name: 0 for stack in self.view.stacks}
        self._memory.begin_pass()
        self._handler.begin_pass()

    def _enter(self, stack: Stack, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_asleep() or (not self.in_pass and not self._handler.follows_repeats):
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
            # Opened after the handler was asked, so that what an observer computes there is not followed.
            self._handler.enter(call, taken)
            self.open = call
            if not self.in_pass:  # torch disables modes inside torch functions, such as ``loss.backward()``
                self.during_call.enter_context(self.re_enabled())

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
        if not self.in_pass:
            return self._memory.number(stack, name, entry)
        number = self._calls_made[stack.name]
        if number >= len(stack.calls) or stack.calls[number].module_name != name:
            return None
        self._calls_made[stack.name] = number + 1
        if self._handler.follows_repeats:
            self._memory.remember(stack, number, entry)
        return number

    def re_enabled(self) -> AbstractContextManager[Any]:
        """Put the mode on torch's stack, unless it is there."""
        stack: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return nullcontext() if any(mode is self for mode in stack) else self

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # Closed first, so that what the handler computes as the block ends is not taken for a part of the block.
        call, self.open = self.open, None
        self.during_call.close()
        if call is None or output is None:
            return  # the block raised; checkpointing does so on purpose once it has all it needs
        out = output_tensor(output)
        if out is None:
            raise SiteError(
                f"{call.call.module_name} returned no tensor that could be the stream. Name the right blocks with "
                "blocks='layers.*'; `rankscope doctor` shows which were found."
            )
        call.check_complete(attention=self._handler.reads_attention)
        if not self.in_pass:
            self._memory.remember_output(call.stack, call.number, out)
        with unseen():
            left = stream_out(call.stack.stream, output)
            if left is None:
                raise SiteError(
                    f"{call.call.module_name} returned a {type(output).__name__} without the tensors that "
                    f"stream=Stream(slot={call.stack.stream.slot!r}) asks for. Declare the slot in which the stream is."
                )
            left = left if call.taken is None else call.taken + left
        self._handler.leave(call, module, output, left)

    def _enter_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._norm_depth += 1

    def _leave_norm(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._norm_depth -= 1
            call, out, x = self.open, output_tensor(output), first_tensor(args, kwargs)
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
        return self._handler.norm(call, norm, x, out, of_stream=call.meet(norm, call.is_stream(x)))

    def _parallel_mlp(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, out = self.open, output_tensor(output)
        if call is None or out is None:
            return None
        new = self._handler.parallel_mlp(call, out)
        return with_output_tensor(output, new) if new is not out else None

    def _final(self, stack: Stack) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            out = output_tensor(output)
            if self._calls_made.get(stack.name) != len(stack.calls) or out is None or not args:
                return None
            new = self._handler.final(stack, args[0], out)
            return new if new is not out else None

        return hook

    def _end_pass(self, output: Any) -> None:
        """A forward pass of the model has ended; ``output`` is None if it raised."""
        is_over, self.in_pass = self.in_pass and output is not None, False
        short = [stack for stack in self.view.stacks if self._calls_made.get(stack.name) != len(stack.calls)]
        self._handler.end_pass(is_complete=is_over and not short)
        if is_over and short:
            made = self._calls_made[short[0].name]
            missing = ", ".join(call.module_name for call in short[0].calls[made:][:4])
            raise SiteError(
                f"Only {made} of {len(short[0].calls)} block calls happened in this pass; not fired: {missing}. "
                "Layers that are skipped at random (layer drop) must be switched off with model.eval()."
            )
