"""What is known about a model before causes are looked for, and the passes that find out more."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from rankscope.examination._outcomes import Outcome, outcome_of
from rankscope.examination._softmaxes import Softmaxes
from rankscope.examination._source import Edit, SourcePlace, tried
from rankscope.examination._tensors import apart, change_between, changed_entries, main_output, tokens_apart
from rankscope.models.inputs import Batch
from rankscope.models.inputs.axes import other_entries
from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import with_parameters, without_fastpath
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import undisturbed

_ROOM = 1 << 28
"""Bytes of the outputs of modules that one pass keeps."""
_SEGMENTS = 3
"""Different ids up to which an input counts segments or types of tokens, as those of BERT and of packed texts do."""
Loss = Callable[..., Tensor]

_Look = Callable[["Examination"], Iterator[Any]]
"""What a cause looks for; `_spec` names it in full, and imports this module."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module in a pass.

    Attributes:
        name: qualified name; None for a module that the model does not hold.
        module: the module.
        given: its first floating tensor.
        output: the first floating tensor it returned.
        is_alone: whether ``given`` is the only tensor it was given, so that it can be called again with another.
        is_leaf: whether it holds no other module.
    """

    name: str | None
    module: nn.Module
    given: Tensor | None
    output: Tensor | None
    is_alone: bool = False

    @property
    def is_leaf(self) -> bool:
        """Whether it holds no other module."""
        return next(self.module.children(), None) is None


@dataclass(frozen=True)
class _Pass:
    """What is kept of a pass.

    Attributes:
        calls: of modules.
        made: classes of the modules that were made.
        returned: by the model.
        softmaxes: its softmax calls, if they were noted.
    """

    calls: tuple[ModuleCall, ...]
    made: tuple[str, ...]
    returned: Any
    softmaxes: Softmaxes | None


@dataclass(frozen=True)
class AttentionSeen:
    """The attention of one block, as numbers.

    Attributes:
        entropy: relative entropy of the rows that see several keys, by head.
        spread: standard deviation of the scores of a row, by head.
        largest: largest score.
    """

    entropy: Tensor
    spread: Tensor
    largest: float


@dataclass
class Examination:
    """A model, a batch and what was found out about them; causes share its passes.

    Args:
        model: the model.
        batch: what it runs on.
        view: its structure, or None if it was not found.
        why_no_view: the reason in that case.
        loss: function of the output, or of the output and the labels, or of the output and the inputs; None for none.
        labels: the labels that belong to the batch, first axis sequences.
        optimizer: the optimizer of the training.
        edits: whether changes may be carried out to see if they help.
        targets: labels that only the loss can read, such as a tuple or a dictionary of tensors.
        last_functions: names of what made each returned tensor, once gradients were read.
    """

    model: nn.Module
    batch: Batch
    view: ModelView | None = None
    why_no_view: str = ""
    loss: Loss | None = None
    labels: Tensor | None = None
    optimizer: torch.optim.Optimizer | None = None
    edits: bool = True
    targets: Any = None
    forward_passes: int = 0
    backward_passes: int = 0
    last_functions: tuple[str, ...] = ()
    _no_gradients: RuntimeError | None = None
    _outcomes: dict[str, Outcome] = field(default_factory=dict, init=False)

    def outcome(self, name: str) -> Outcome:
        """What an experiment saw; it is carried out once."""
        if name not in self._outcomes:
            self._outcomes[name] = outcome_of(self, name)
        return self._outcomes[name]

    # Passes.

    def run(self, batch: Batch | None = None, *, replaced: Mapping[str, Tensor] | None = None) -> Any:
        """One pass in evaluation mode without gradients, by the same kernels every time, so that outputs compare."""
        self.forward_passes += 1
        with undisturbed(self.model), with_parameters(self.model, replaced or {}), without_fastpath():
            return (batch or self.batch).call(self.model)

    def output(self, batch: Batch | None = None, *, replaced: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """The main output of one pass."""
        return main_output(self.run(batch, replaced=replaced))

    def calls(self, batch: Batch | None = None) -> tuple[ModuleCall, ...]:
        """What every module took and returned in one pass, in the order in which they ended; the model is the last."""
        return self._observed(batch).calls

    def _observed(self, batch: Batch | None = None, mode: Softmaxes | None = None) -> _Pass:
        """One pass with everything that is kept of it, with softmax calls noted by ``mode``."""
        names = {module: name for name, module in self.model.named_modules()}
        calls: list[ModuleCall] = []
        made: dict[str, None] = {}
        room = _ROOM

        hooked = {module for module in names if module._forward_hooks}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():  # our own copies are not noted
                take(module, args, output)

        def note_unhooked(module: nn.Module, args: Any, output: Any) -> None:
            if module not in hooked:
                note(module, args, output)

        def take(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal room
            leaves = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            given = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
            out = main_output(output)
            for tensor in (given, out):
                room -= 0 if tensor is None or tensor.is_nested else tensor.numel() * tensor.element_size()
            keep = room > 0 or module is self.model
            kept = [_kept(tensor) if keep else None for tensor in (given, out)]
            calls.append(ModuleCall(names.get(module), module, kept[0], kept[1], len(leaves) == 1))

        def registered(module: nn.Module, name: str, parameter: Any) -> None:
            made[type(module).__name__] = None

        with ExitStack() as hooks:
            hooks.callback(register_module_forward_hook(note_unhooked).remove)
            for module in hooked:  # a hook of all modules would run before their own, which may change the output
                hooks.callback(module.register_forward_hook(note).remove)
            hooks.callback(torch.nn.modules.module.register_module_parameter_registration_hook(registered).remove)
            if mode is not None:
                hooks.enter_context(mode)
            returned = self.run(batch)
        if mode is not None:
            mode.ended(main_output(returned))
        return _Pass(tuple(calls), tuple(made), returned, mode)

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        was_training = [module for module in self.model.modules() if module.training]
        for module in was_training:
            module.training = False
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                seed_generators(0)
                yield
        finally:
            for module in was_training:
                module.training = True

    # The shared evidence.

    @cached_property
    def base(self) -> tuple[ModuleCall, ...]:
        """The calls of the pass on the batch as it is."""
        return self._first.calls

    @cached_property
    def _first(self) -> _Pass:
        try:
            return self._observed(mode=Softmaxes())
        except (RuntimeError, TypeError, NotImplementedError):
            return self._observed()  # an operator that cannot be followed, or an error of the model itself

    @property
    def returned(self) -> Any:
        """Everything that the model returned on the batch as it is."""
        return self._first.returned

    @property
    def softmaxes(self) -> Softmaxes:
        """The softmax calls of the pass on the batch as it is."""
        if self._first.softmaxes is None:
            raise RuntimeError("softmax calls cannot be followed in this model")
        return self._first.softmaxes

    @property
    def made_in_forward(self) -> tuple[str, ...]:
        """Classes of the modules that the forward pass creates."""
        return self._first.made

    @property
    def result(self) -> Tensor | None:
        """The main output on the batch as it is."""
        return self.base[-1].output if self.base else None

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch."""
        return self.batch.sequences

    @cached_property
    def mains(self) -> tuple[Tensor, ...]:
        """Ids or vectors that the model reads."""
        from rankscope.models.inputs.axes import main_tensors

        named = main_tensors(self.batch.inputs)
        return (*named.values(), *(value for value in self.batch.arguments if value.ndim in (2, 3)))

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the main input; None if it has no such axis."""
        lengths = {value.shape[1 - self.batch.axis] for value in self.mains if value.ndim >= 2}
        return lengths.pop() if len(lengths) == 1 else None

    def sequence_axis(self, states: Tensor) -> int | None:
        """Which axis of some states counts sequences; None if there is only one sequence or no such axis."""
        if self.sequences < 2:
            return None
        for axis in (self.batch.axis, 0, 1):
            if states.ndim > axis and states.shape[axis] == self.sequences:
                return axis
        return None

    def token_axis(self, states: Tensor) -> int | None:
        """Which axis of some states counts tokens."""
        axis = self.sequence_axis(states)
        if axis is None or states.ndim < 3 or axis > 1 or self.tokens is None:
            return None
        return 1 - axis if states.shape[1 - axis] == self.tokens else None

    def inputs_apart(self, states: Tensor) -> float | None:
        """How much inputs differ in some states; None if these do not count them."""
        axis = self.sequence_axis(states)
        return None if axis is None or not bool(torch.isfinite(states).all()) else apart(states, axis)

    def changed(self, where: Callable[[Tensor], object], only: Tensor | None = None) -> Batch:
        """The batch with other ids or vectors where ``where`` sets True, given a mask ``sequences tokens``.

        Ids of segments and of types of tokens are left as they are, unless they are all that there is.
        """
        several = [value for value in self.mains if value.is_floating_point() or len(torch.unique(value)) > _SEGMENTS]
        mains = {id(value) for value in ((only,) if only is not None else several or self.mains)}

        def change(value: Any) -> Any:
            if id(value) not in mains:
                return value
            mask = torch.zeros(value.shape[:2], dtype=torch.bool, device=value.device)
            where(mask.transpose(0, self.batch.axis))
            return other_entries(value, mask)

        inputs = {name: change(value) for name, value in self.batch.inputs.items()}
        return replace(self.batch, inputs=inputs, arguments=tuple(map(change, self.batch.arguments)))

    @cached_property
    def with_other_first(self) -> tuple[ModuleCall, ...]:
        """The calls with another first token in every sequence."""
        return self.calls(self.changed(lambda mask: mask[:, 0].fill_(True)))

    @cached_property
    def with_other_middle(self) -> tuple[ModuleCall, ...]:
        """The calls with another token in the middle of every sequence."""
        middle = (self.tokens or 0) // 2
        return self.calls(self.changed(lambda mask: mask[:, middle].fill_(True)))

    @cached_property
    def with_other_sequence(self) -> tuple[ModuleCall, ...]:
        """The calls with another second sequence."""
        return self.calls(self.changed(lambda mask: mask[1].fill_(True)))

    @cached_property
    def with_equal_sequences(self) -> tuple[ModuleCall, ...]:
        """The calls with the first sequence in every place of the batch."""

        def first(name: str, value: Tensor, axis: int) -> Tensor:
            return value.narrow(axis, 0, 1).repeat_interleave(self.sequences, axis)

        return self.calls(self.batch.mapped(first))

    @cached_property
    def noise(self) -> float:
        """How much two passes on the same batch differ, with other random numbers; 0 up to rounding."""
        with torch.random.fork_rng(devices=[]):
            seed_generators(1)  # passes begin with the state they find: the same one would draw the same numbers
            again = self.run()
        ones, others = (pytree.tree_leaves(value) for value in (self.returned, again))
        pairs = [pair for pair in zip(ones, others, strict=False) if all(isinstance(one, Tensor) for one in pair)]
        moved = [(one, other) for one, other in pairs if (gap := changed_entries(one, other)) is not None and gap.any()]
        return max((change_between(one, other) for one, other in moved), default=0.0)

    # Changes.

    def mends(
        self, look: _Look, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> bool:
        """Whether a cause is no longer found: in a changed copy of the model, or while the source of it is edited."""
        again = replace(self, model=model or self.model, optimizer=optimizer or self.optimizer, edits=False)
        broken = again.result is None or not bool(torch.isfinite(again.result).all())
        found = broken or any(one.kind == "fault" for one in look(again))
        self.forward_passes, self.backward_passes = again.forward_passes, again.backward_passes
        return not found

    def edited(self, look: _Look, place: SourcePlace | None, changes: Sequence[Edit]) -> str:
        """An edit of the source as a sentence, if the model runs with it and the cause is no longer found; or empty."""
        return tried(place, changes, lambda: self.mends(look)) if self.edits else ""

    def runs(self, look: _Look, line: str) -> bool:
        """Whether a line of Python runs on a copy of the model, and the cause is no longer found in it."""
        if not self.edits:
            return False
        try:
            names: dict[str, Any] = {"torch": torch, "nn": nn, "model": copy.deepcopy(self.model)}
            with torch.random.fork_rng(devices=[]):
                exec(compile(line, "<printed line>", "exec"), names)
        except (SyntaxError, RuntimeError, ValueError, TypeError, LookupError, NameError, AttributeError):
            return False
        return self.mends(look, names["model"])

    # Blocks.

    @cached_property
    def stack(self) -> Stack | None:
        """The deepest stack."""
        return None if self.view is None else max(self.view.stacks, key=lambda stack: stack.depth)

    @cached_property
    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The block modules in order, or the longest list of modules of one class that were called once each."""
        named = dict(self.model.named_modules())
        if self.stack is not None:
            names = [call.module_name for call in self.stack.calls]
            return tuple((name, named[name]) for name in names) if len(set(names)) == len(names) else ()
        counts = [call.name for call in self.base]
        best: tuple[tuple[str, nn.Module], ...] = ()
        for parent, module in self.model.named_modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential)):
                continue
            inside = [(f"{parent}.{name}" if parent else name, child) for name, child in module.named_children()]
            once = [pair for pair in inside if counts.count(pair[0]) == 1]
            # A list of branches, such as all MLPs, is not a stack: each module reads what the one before returned.
            if len({type(child) for _, child in once}) == 1 and len(once) > max(2, len(best)) and self._chained(once):
                best = tuple(once)
        return best

    def _chained(self, modules: Sequence[tuple[str, nn.Module]]) -> bool:
        calls = {call.name: call for call in self.base}
        pairs = [(calls[one].output, calls[other].given) for (one, _), (other, _) in pairwise(modules)]
        return all(a is not None and b is not None and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

    def block_states(
        self,
        *,
        add_input: Sequence[str] = (),
        replaced: Mapping[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """What each block returns, ``batch tokens dim``; with its input added for the blocks that are named."""
        by_block: list[Tensor] = []

        def note(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                states = main_output(output)
                if states is None:
                    return output
                new: Any = output
                if name in add_input:
                    given = next(
                        (t for t in pytree.tree_leaves((args, kwargs)) if _like(t, states)),
                        None,
                    )
                    if given is not None:
                        leaves, spec = pytree.tree_flatten(output)
                        total = states + given
                        new = pytree.tree_unflatten([total if leaf is states else leaf for leaf in leaves], spec)
                        states = total
                by_block.append(self._canonical(states.detach()))
                return new

            return hook

        with ExitStack() as hooks:
            for name, module in self.blocks:
                hooks.callback(module.register_forward_hook(note(name), with_kwargs=True).remove)
            self.run(replaced=replaced)
        return by_block

    def carried(self) -> dict[str, float]:
        """Mean cosine between a random change of what enters each block and that of what leaves it, by token.

        Every block is given what it took in the pass on the batch as it is, so that one pass is enough. Changes are as
        large as the tokens. Blocks that do not return what they take, or of which no copy was kept, are left out.
        """
        calls = {call.module: call for call in self.base}
        shares: dict[str, float] = {}
        drawn = torch.Generator().manual_seed(0)

        def note(name: str, given: Tensor, left: Tensor) -> tuple[Callable[..., Any], Callable[..., None]]:
            size = given.norm(dim=-1, keepdim=True) / given.shape[-1] ** 0.5
            change = torch.randn(given.shape, generator=drawn).to(given) * size

            def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
                leaves, spec = pytree.tree_flatten((args, kwargs))
                place = next((at for at, leaf in enumerate(leaves) if _like(leaf, given)), None)
                if place is not None:
                    leaves[place] = given + change
                return pytree.tree_unflatten(leaves, spec)

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                out = main_output(output)
                if out is not None and out.shape == left.shape:
                    along = nn.functional.cosine_similarity(out.detach().float() - left.float(), change.float(), dim=-1)
                    shares[name] = float(along.mean())

            return enter, leave

        with ExitStack() as hooks:
            for name, module in self.blocks:
                call = calls.get(module)
                if call is None or call.given is None or call.output is None or not _like(call.given, call.output):
                    continue
                enter, leave = note(name, call.given, call.output)
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            self.run()
        return shares

    def _canonical(self, states: Tensor) -> Tensor:
        if states.ndim == 2:
            return states[None]
        if self.stack is not None and self.stack.layout == "tokens batch dim":
            return states.transpose(0, 1)
        return states

    def residuals(self, states: Sequence[Tensor]) -> list[float]:
        """Mean relative residual of the tokens after each block."""
        return [tokens_apart(one, self._keep(one)) for one in states if one.ndim == 3]

    def _keep(self, states: Tensor) -> Tensor | None:
        keep = self.batch.keep
        return keep if keep is not None and keep.shape == states.shape[:2] else None

    @cached_property
    def plain_states(self) -> list[Tensor]:
        """What each block returns, in the pass on the batch as it is."""
        blocks = {module for _, module in self.blocks}
        outputs = [call.output for call in self.base if call.module in blocks]
        if any(one is None for one in outputs):  # more than is kept of a pass
            return self.block_states()
        return [self._canonical(one) for one in outputs if one is not None]

    @cached_property
    def curve(self) -> list[float]:
        """Relative residual of the tokens after each block; empty if there are no blocks."""
        return self.residuals(self.plain_states) if self.blocks else []

    @property
    def last(self) -> float:
        """The same after the last block; NaN without blocks."""
        return self.curve[-1] if self.curve else float("nan")

    @cached_property
    def entry(self) -> float:
        """Relative residual of the tokens as they enter the first block; NaN if that is not known."""
        if not self.blocks:
            return float("nan")
        first = next((call for call in self.base if call.module is self.blocks[0][1]), None)
        given = None if first is None else first.given
        return tokens_apart(self._canonical(given)) if given is not None and given.ndim in (2, 3) else float("nan")

    @cached_property
    def attention(self) -> dict[int, AttentionSeen]:
        """Attention by block; empty if it cannot be seen."""
        return self.attention_under()

    def attention_under(self, replaced: Mapping[str, Tensor] | None = None) -> dict[int, AttentionSeen]:
        """Attention by block in a new pass, with other parameters if given."""
        by_layer: dict[int, AttentionSeen] = {}
        if self.stack is not None:
            name = self.stack.name

            def see(call: AttentionCall, ref: SiteRef) -> None:
                if ref.stack == name and ref.layer not in by_layer:
                    by_layer[ref.layer] = _attention(call)

            self.see_attention(see, replaced)
        return by_layer

    def see_attention(
        self, note: Callable[[AttentionCall, SiteRef], None], replaced: Mapping[str, Tensor] | None = None
    ) -> None:
        """Every call of attention in a new pass, with other parameters if given."""
        if self.view is None:
            return

        def see(ref: SiteRef, seen: Observed) -> None:
            if isinstance(seen, AttentionCall):
                note(seen, ref)

        self.forward_passes += 1
        sites = SiteSelection.parse(("attention.probs",))
        with undisturbed(self.model), with_parameters(self.model, replaced or {}), trace(self.view, sites, see):
            self.batch.run(self.model)

    # The loss.

    def loss_of(self, output: Any, compared: Any = None) -> Tensor:
        """The loss of some output, compared with the labels or the inputs unless something else is given."""
        assert self.loss is not None
        compared = self.compared if compared is None else compared
        return self.loss(output) if compared is None else self.loss(output, compared)

    @property
    def compared(self) -> Any:
        """What the loss is given beside the output: labels, or the inputs, or nothing."""
        labels = self.targets if self.labels is None else self.labels
        if labels is not None or self.loss is None:
            return labels
        takes = [
            one
            for one in inspect.signature(self.loss).parameters.values()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
        ]
        if len(takes) == 1:
            return None
        return self.batch.arguments[0] if self.batch.arguments else dict(self.batch.inputs)

    def total(self, output: Any) -> Tensor:
        """What gradients are taken of: the loss, or a random projection of everything that the model returns."""
        return self._projection(output) if self.loss is None else self.loss_of(output)

    @cached_property
    def gradients(self) -> dict[str, Tensor | None]:
        """Gradient of each parameter, of the loss or of a random projection of the output.

        If the pass fails, it is not tried again for the next cause: some attention has no backward pass here.
        """
        if self._no_gradients is None:
            try:
                return self.gradients_with({})
            except RuntimeError as error:
                self._no_gradients = error
        raise self._no_gradients

    @cached_property
    def output_gradients(self) -> dict[str, Tensor | None]:
        """Gradient of each parameter, of a random projection of everything that the model returns."""
        return self.gradients if self.loss is None else self.gradients_with({}, of_outputs=True)

    def gradients_with(self, replaced: Mapping[str, Tensor], *, of_outputs: bool = False) -> dict[str, Tensor | None]:
        """The same as :attr:`gradients` with other parameters."""
        self.forward_passes += 1
        self.backward_passes += 1
        with self._gradients():
            named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            for name, tensor in replaced.items():
                named[name] = nn.Parameter(tensor)
            with with_parameters(self.model, {name: named[name] for name in replaced}):
                value = self.batch.call(self.model)
                total = self._projection(value) if of_outputs else self.total(value)
                if not replaced:
                    self.last_functions = _last_functions(value)
                if not total.requires_grad:
                    return dict.fromkeys(named)
                gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return dict(zip(named, gradients, strict=True))

    def _projection(self, value: Any) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not leaves:
            main = main_output(value)
            leaves = [] if main is None else [main]
        drawn = torch.Generator().manual_seed(0)
        parts = [(leaf.float() * torch.randn(leaf.shape, generator=drawn).to(leaf.device)).sum() for leaf in leaves]
        return torch.stack(parts).sum() if parts else torch.zeros(())


_SHAPING = ("View", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "Reshape", "Clone", "ToCopy")


def _last_functions(value: Any) -> tuple[str, ...]:
    """The name of the last function of autograd that made each tensor, apart from those that only shape it."""
    names = []
    for leaf in pytree.tree_leaves(value):
        node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
        while node is not None and node.name().startswith(_SHAPING) and node.next_functions:
            node = node.next_functions[0][0]
        names.append("" if node is None else node.name())
    return tuple(names)


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or tensor.is_nested else tensor.detach().clone()


def _like(value: Any, states: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == states.shape and value.is_floating_point()


def _attention(call: AttentionCall) -> AttentionSeen:
    probs = call.probs().detach().double()
    support = call.support()
    seen = torch.ones_like(probs, dtype=torch.bool) if support is None else support.expand_as(probs)
    several = seen.sum(-1) > 1
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(-1) / seen.sum(-1).clamp_min(2).log()
    heads = probs.shape[1] if probs.ndim == 4 else 1
    by_head = [float(entropy[:, h][several[:, h]].mean()) for h in range(heads)] if probs.ndim == 4 else []
    logs = probs.clamp_min(1e-30).log()
    mean = (logs * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    spread = (((logs - mean) * seen).square().sum(-1) / seen.sum(-1).clamp_min(1)).sqrt()
    spreads = [float(spread[:, h][several[:, h]].mean()) for h in range(heads)] if probs.ndim == 4 else []
    largest = call.largest_scores() if call.scores is not None or call.query is not None else None
    return AttentionSeen(
        torch.tensor(by_head, dtype=torch.float64),
        torch.tensor(spreads, dtype=torch.float64),
        float("nan") if largest is None else float(largest.max()),
    )
