"""What is known about a model before rows are asked, and the passes that find out more."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from rankscope.examination.experiments.scan import Dropouts, Scan
from rankscope.examination.findings import NOT_MADE, CarriedOut, FileEdit
from rankscope.examination.outcomes import FAILS, Outcome, outcome_of
from rankscope.examination.source import Edit, SourcePlace, fitting, said, tried
from rankscope.examination.tensors import apart, change_between, changed_entries, main_output, redrawn
from rankscope.models.inputs import Batch
from rankscope.models.inputs.axes import main_tensors
from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import same_buffers, with_parameters, without_fastpath
from rankscope.stream.viewing import undisturbed

T = TypeVar("T")
Loss = Callable[..., Tensor]

ROOM = 1 << 28
"""Bytes of the outputs of modules that one pass keeps: a quarter of a gigabyte, so that large models fit."""
SEGMENTS = 3
"""Different ids up to which an input counts segments or types of tokens, as those of BERT and of packed texts do."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module in a pass.

    Attributes:
        name: qualified name; None for a module that the model does not hold.
        module: the module.
        given: its first floating tensor.
        output: the first floating tensor it returned.
        is_alone: whether ``given`` is the only tensor it was given, so that it can be called again with another.
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

    @property
    def is_idle(self) -> bool:
        """Whether it returned what it was given, as dropout does in evaluation mode."""
        given, out = self.given, self.output
        return given is not None and out is not None and given.shape == out.shape and torch.equal(given, out)


@dataclass(frozen=True)
class _Pass:
    """What is kept of a pass: calls of modules, classes of modules that were made, what was returned, operations."""

    calls: tuple[ModuleCall, ...]
    made: tuple[str, ...]
    returned: Any
    scan: Scan | None


@dataclass(frozen=True)
class Backward:
    """A pass with gradients.

    Attributes:
        dropped: the innermost module and the share, for each call that drops.
        ran: names of the modules in which something was computed.
        apart: how much the outputs of different inputs differ.
        gradients: of each parameter that requires one, of the loss or of a random projection of all outputs.
        last_functions: the name of the last function of autograd that made each tensor, apart from shaping.
    """

    dropped: list[tuple[str, float]]
    ran: set[str | None]
    apart: float | None
    gradients: Mapping[str, Tensor | None]
    last_functions: tuple[str, ...]


@dataclass
class Examination:
    """A model, a batch and what was found out about them; rows share its passes.

    Args:
        model: the model.
        batch: what it runs on.
        view: its structure, or None if it was not found.
        why_no_view: the reason in that case.
        loss: function of the output, or of the output and the labels, or of the output and the inputs; None for none.
        labels: the labels that belong to the batch, first axis sequences.
        optimizer: the optimizer of the training.
        edits: whether changes may be carried out to see if they help, and copies trained.
        targets: labels that only the loss can read, such as a tuple or a dictionary of tensors.
        build: function that makes the model with its own first weights; None if it is not known.
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
    build: Callable[[], nn.Module] | None = None
    forward_passes: int = 0
    backward_passes: int = 0
    _known: dict[object, Any] = field(default_factory=dict, init=False)

    def outcome(self, name: str) -> Outcome:
        """What an experiment saw; it is carried out once."""
        return self.once(outcome_of, name)

    def once(self, make: Callable[..., T], *given: Any) -> T:
        """What ``make(self, *given)`` returns or raises; it is called once."""
        key = (make, *given)
        if key not in self._known:
            try:
                self._known[key] = make(self, *given), None
            except FAILS as error:
                self._known[key] = None, error
        found, raised = self._known[key]
        if raised is not None:
            raise raised
        return found  # type: ignore[no-any-return]

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

    def _observed(self, batch: Batch | None = None, scan: Scan | None = None) -> _Pass:
        """One pass with everything that is kept of it, with its operations noted by ``scan``."""
        names = {module: name for name, module in self.model.named_modules()}
        calls: list[ModuleCall] = []
        made: dict[str, None] = {}
        room = ROOM
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
            if scan is not None:
                hooks.enter_context(scan)
            returned = self.run(batch)
        if scan is not None:
            scan.ended(main_output(returned))
        return _Pass(tuple(calls), tuple(made), returned, scan)

    # The pass on the batch as it is.

    @cached_property
    def _first(self) -> _Pass:
        try:
            return self._observed(scan=Scan(self.tokens))
        except (RuntimeError, TypeError, NotImplementedError):
            return self._observed()  # an operator that cannot be followed, or an error of the model itself

    @property
    def base(self) -> tuple[ModuleCall, ...]:
        """Its calls of modules."""
        return self._first.calls

    @property
    def returned(self) -> Any:
        """Everything that the model returned."""
        return self._first.returned

    @property
    def scan(self) -> Scan:
        """Its operations."""
        if self._first.scan is None:
            raise RuntimeError("operations cannot be followed in this model")
        return self._first.scan

    @property
    def made_in_forward(self) -> tuple[str, ...]:
        """Classes of the modules that the forward pass creates."""
        return self._first.made

    @property
    def result(self) -> Tensor | None:
        """The main output."""
        return self.base[-1].output if self.base else None

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

    # Axes.

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch."""
        return self.batch.sequences

    @cached_property
    def mains(self) -> tuple[Tensor, ...]:
        """Ids or vectors that the model reads."""
        named = main_tensors(self.batch.inputs)
        return (*named.values(), *(value for value in self.batch.arguments if value.ndim in (2, 3)))

    @cached_property
    def texts(self) -> tuple[Tensor, ...]:
        """Those that are ids, ``sequences tokens``."""
        return tuple(
            value.transpose(0, self.batch.axis)
            for value in self.mains
            if not value.is_floating_point() and value.ndim == 2
        )

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the main input; of several, that which the output has; None if it has no such axis."""
        lengths = {value.shape[1 - self.batch.axis] for value in self.mains if value.ndim >= 2}
        out = self.result if len(lengths) > 1 and "_first" in vars(self) else None
        if out is not None and out.ndim > 2 and out.shape[1 - self.batch.axis] in lengths:
            return out.shape[1 - self.batch.axis]
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

    # Changes.

    def edited(
        self,
        fault: str,
        place: SourcePlace | None,
        edit: Callable[..., list[Edit]],
        *given: Any,
        better: Callable[[Examination], bool] | None = None,
    ) -> CarriedOut:
        """An edit of the source, if model and loss run with it and a fault is no longer seen.

        Args:
            fault: name of the experiment that saw it.
            place: where the edit is made.
            edit: the edit, as a function of the place.
            given: what else it is a function of.
            better: what to ask instead of the experiment.
        """

        def helps() -> bool:
            again = replace(self, edits=False)
            try:
                runs = again.result is not None and bool(torch.isfinite(again.result).all())
                if runs and self.loss is not None:
                    again.loss_of(again.returned)  # raises where the loss does not take what is returned then
                return runs and (not again.outcome(fault).seen if better is None else better(again))
            finally:
                self.forward_passes, self.backward_passes = again.forward_passes, again.backward_passes

        changes = fitting(edit, place, *given)
        if not self.edits or place is None or not changes or not tried(place, changes, helps):
            return NOT_MADE
        return CarriedOut(
            said(place, changes), tuple(FileEdit(place.file, place.name, one.old, one.new) for one in changes)
        )

    @cached_property
    def fresh(self) -> Mapping[str, Tensor]:
        """Weights as they begin: those of the user's own function, or else newly drawn ones."""
        if self.build is None:
            return redrawn([("", self.model)])
        with torch.random.fork_rng(devices=[]):
            made = dict(self.build().named_parameters())
        return {
            name: made[name].detach().to(one)
            for name, one in self.model.named_parameters()
            if name in made and made[name].shape == one.shape
        }

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

    # Gradients.

    @property
    def gradients(self) -> Mapping[str, Tensor | None]:
        """Gradient of each parameter in training mode; in evaluation mode if it gets none there.

        Some are dropped at random in training, and some attention has no backward pass on this machine.
        """
        try:
            own = self.once(in_training).gradients
        except FAILS:
            return self.once(in_evaluation).gradients
        if all(one is not None for one in own.values()):
            return own
        try:
            others = self.once(in_evaluation).gradients
        except FAILS:
            return own
        return {name: others.get(name) if one is None else one for name, one in own.items()}

    def backward(
        self,
        *,
        training: bool = True,
        drops: bool = True,
        gradients: bool = True,
        entering: bool = False,
        of_outputs: bool = False,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> Backward:
        """One pass with gradients, which are those of parameters of our own.

        They are read by ``backward()`` as a training calls it: reentrant checkpointing refuses any other way, and hooks
        of the user's parameters are not called.

        Args:
            training: whether in training mode.
            drops: False to drop nothing.
            gradients: False for the pass alone.
            entering: let what the modules outside the blocks return require a gradient, such as embeddings.
            of_outputs: whether of a random projection of all outputs, in place of the loss.
            replaced: other parameters.
        """
        seen = Dropouts(self.model, drops=drops)
        parameters = {name: (replaced or {}).get(name, one) for name, one in self.model.named_parameters()}
        learns = {name for name, one in self.model.named_parameters() if one.requires_grad}
        own = {name: nn.Parameter(one.detach(), requires_grad=name in learns) for name, one in parameters.items()}
        self.forward_passes += 1
        self.backward_passes += gradients
        with ExitStack() as opened:
            within = {part for _, block in self.blocks for part in block.modules()} if entering else set()
            for module in self.model.modules() if entering else ():
                if module not in within and next(module.children(), None) is None:
                    opened.callback(module.register_forward_hook(_require).remove)
            for module in [one for one in self.model.modules() if one.training is not training]:
                module.training = training
                opened.callback(setattr, module, "training", not training)
            opened.enter_context(same_buffers(self.model))
            opened.enter_context(torch.random.fork_rng(devices=[]))
            opened.enter_context(torch.set_grad_enabled(gradients))
            opened.enter_context(with_parameters(self.model, own))
            seed_generators(0)
            with seen.watching():
                returned = self.batch.call(self.model)
            output = main_output(returned)
            if gradients:
                total = _projection(returned) if of_outputs or self.loss is None else self.loss_of(returned)
                if total.requires_grad:
                    torch.autograd.backward(total)
        return Backward(
            seen.dropped,
            seen.ran,
            None if output is None else self.inputs_apart(output.detach()),
            {name: own[name].grad for name in own if name in learns},
            _last_functions(returned) if gradients else (),
        )


def in_training(x: Examination) -> Backward:
    """The pass in training mode, which several experiments share."""
    return x.backward()


def in_evaluation(x: Examination) -> Backward:
    """The pass in evaluation mode: the control of what is lost in training mode alone."""
    return x.backward(training=False)


def of_outputs(x: Examination) -> Backward:
    """The same of all outputs: what another output depends on is not lost, only not part of this loss."""
    return in_evaluation(x) if x.loss is None else x.backward(training=False, of_outputs=True)


def _require(module: nn.Module, args: Any, output: Any) -> None:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.is_leaf and torch.is_grad_enabled():
            leaf.requires_grad_()


def _projection(value: Any) -> Tensor:
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
