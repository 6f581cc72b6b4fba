"""Finds which of the first two axes of the inputs counts sequences and which counts tokens, by experiment.

PyTorch's own encoder takes ``(tokens, batch)`` by default, others ``(batch, tokens)``, and nothing
in a tensor of shape ``(35, 8)`` says which it is. The model does: tokens of one sequence act on each other, sequences
never do. So parts of the input are replaced, and every tensor that the model computes is compared with what it was.
Where its entries are does not matter, only which of them change, so that any layout inside the model will do.

Four passes on two sequences: as they are, with one token of the last sequence replaced, with all its other tokens
replaced, and with the first sequence replaced. None of them can be left out or run as further sequences of another one,
which would assume what is to be proven. They can be observed: what the structure of the model is needs the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.errors import IgnoredInputError, InputError
from rankscope.linalg.rounding import differs
from rankscope.models.inputs.record import AXES, Axes, Batch, is_mask_like
from rankscope.models.loading.devices import seed_generators
from rankscope.models.unchanged import Snapshot
from rankscope.models.wrapping import (
    hidden,
    needs_all_ranks,
    once_more_uncompiled,
    resharded,
    uncompiled,
    whole,
    with_parameters,
    without_fastpath,
)

Cut = Callable[[int], Batch]
"""The first two sequences of the inputs, if sequences are counted along the axis of this number."""

_Place = tuple[int, int, int]
"""Where a tensor comes from: the module, the number of its call, and the place among what it returns."""

_ROUNDINGS = 16
"""Number of roundings of the largest entry by which a tensor may differ although nothing that it depends on does."""
_TRACES = 256
"""The same, for a model that is declared not to depend on its inputs; in half precision it would be the whole entry."""
_ROOM = 1 << 26
"""Bytes of computed values to compare; the first blocks of a large model show as much as all of them."""

_PROVEN: WeakKeyDictionary[nn.Module, tuple[Snapshot, dict[object, int]]] = WeakKeyDictionary()


class Observer(Protocol):
    """Observes the passes of the experiment.

    Every pass is made inside ``passing`` with its number, in order. If the first one fails there, it is made once more
    outside, and the observer is not asked again.
    """

    def passing(self, number: int) -> AbstractContextManager[None]:
        """Surrounds the pass of this number."""


ONE_TOKEN, FIRST_SEQUENCE = 1, 3
"""Numbers of the passes in which the middle token of the last sequence, and all of the first sequence, are replaced."""

_OBSERVERS: list[Callable[[nn.Module, Batch], Observer | None]] = []


def observe_experiments(observer: Callable[[nn.Module, Batch], Observer | None]) -> None:
    """Let this function observe all experiments from now on: it is given the model and the inputs of the first pass."""
    _OBSERVERS.append(observer)


@dataclass(frozen=True)
class _Finding:
    """What an experiment says about one axis as the axis of sequences.

    Attributes:
        mixes: a tensor depends on several tokens of one sequence, and not on the other sequence.
        crosses: a tensor as large as the inputs depends on both sequences, so that this axis counts tokens.
        error: why the model could not be run on two sequences.
        varies: a module that ran for some entries only.
        depends: an output of the model depends on any of them.
    """

    mixes: bool = False
    crosses: bool = False
    error: Exception | None = None
    varies: str = ""
    depends: bool = True

    @property
    def is_proof(self) -> bool:
        return self.mixes and not self.crosses


def sequence_axis(
    model: nn.Module,
    cut: Cut,
    key: object,
    axes: Axes | None = None,
    *,
    entire: Callable[[], Batch] | None = None,
    gather: Callable[[bytes], Sequence[bytes]] = lambda own: [own],
) -> int:
    """The axis of the inputs along which sequences are counted: 0 or 1.

    Args:
        model: the model.
        cut: gives two sequences of the inputs along an axis; raises ``InputError`` if their shapes rule it out.
        key: what kind of inputs these are. What was found is remembered for the model and this key.
        axes: what the user declared; it is tested as well.
        entire: all of the inputs, as they were given. If the model fails on these too, its own exception is raised.
        gather: collects what each rank that runs the model has to say, in the order of ranks. They all decide alike.

    Raises:
        InputError: the experiment contradicts the declaration, or there is none and the experiment cannot decide; or
            the model runs on the whole inputs and not on two sequences of them.
    """
    before, known = _PROVEN.get(model, (None, {}))
    if before is None or not before.fits(model):
        # Which axis is which does not depend on weights, and a model that is trained is looked at often.
        known = {}
        _PROVEN[model] = Snapshot(model, with_weights=False), known
    if axes is None and key in known:
        return known[key]
    first = 0 if axes is None else AXES.index(axes)
    if known.get(key) == first:
        return first
    findings = {first: _agreed(_experiment(model, cut, first), gather)}
    if not findings[first].is_proof:
        findings[1 - first] = _agreed(_experiment(model, cut, 1 - first), gather)
    proven = [axis for axis, finding in findings.items() if finding.is_proof] or _left_over(findings)
    if not proven and not needs_all_ranks(model) and not any(f.crosses or f.error for f in findings.values()):
        with with_parameters(
            model, _other_weights(model)
        ):  # attention that is saturated, or weights of zero, hide what acts on what
            redrawn = {axis: _experiment(model, cut, axis) for axis in (first, 1 - first)}
        proven = [axis for axis, finding in redrawn.items() if finding.is_proof]
    if proven and axes is not None and proven[0] != first:
        raise InputError(
            f"axes={axes!r} says that {_words(first)} of the inputs counts sequences. The model computes tensors that "
            f"depend on several entries along it, and never on several along {_words(1 - first)}, so it reads the "
            f"inputs as {AXES[1 - first]!r}. Leave axes out, or transpose the inputs."
        )
    if not proven and (axes is None or findings[first].error is not None):
        _explain(model, cut, [axis for axis, finding in findings.items() if finding.error is not None])
        fails = all(finding.error is not None for finding in findings.values())
        if entire is not None and fails and not _makes_nested(findings):
            with as_written(model):
                entire().run(model)
        raise _undecided(findings)
    known[key] = proven[0] if proven else first
    return known[key]


def _other_weights(model: nn.Module) -> dict[str, Tensor]:
    """Small random matrices in place of the model's, which show how it is wired, whatever it has learned."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(own.shape, generator=draw) / max(own.shape[-1], 1) ** 0.5).to(own.data)
        for name, own in model.named_parameters()
        if own.ndim >= 2 and own.is_floating_point() and not own.is_meta
    }


def _left_over(findings: Mapping[int, _Finding]) -> list[int]:
    """The axis along which nothing acts on anything, if entries along the other one do: a single token has no other."""
    if len(findings) < 2 or any(finding.error is not None or finding.varies for finding in findings.values()):
        return []
    left = [axis for axis, finding in findings.items() if not finding.crosses]
    return left if len(left) == 1 else []


def _agreed(own: _Finding, gather: Callable[[bytes], Sequence[bytes]]) -> _Finding:
    """What all ranks found together: if heads are split among them, each sees its own."""
    said = gather(bytes([own.mixes, own.crosses, own.error is not None]))
    mixes, crosses, fails = map(any, zip(*said, strict=True))
    error = RuntimeError("the model fails in another process") if fails and own.error is None else own.error
    return _Finding(mixes and not fails, crosses, error, own.varies, own.depends)


def main_tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Ids and vectors: the inputs with an axis of sequences, one of tokens, and at most one more."""
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor)
        and value.ndim in (2, 3)
        and value.dtype is not torch.bool
        and not is_mask_like(name)
    }


def _words(axis: int) -> str:
    return "the first axis" if axis == 0 else "the second axis"


def _undecided(findings: Mapping[int, _Finding]) -> InputError:
    declare = (
        "Declare what the first two axes of the inputs are: rankscope.Inputs(x, axes='batch tokens') or "
        "rankscope.Inputs(x, axes='tokens batch'), on the command line --axes 'tokens batch'."
    )
    errors = [finding.error for finding in findings.values()]
    if all(errors) and _makes_nested(findings):
        return InputError(
            "The model makes nested tensors, in which tokens have no axis: "
            f"{_wording(errors[0])}. Pass sequences of one length to a model that takes plain tensors, with a padding "
            "mask if they have to be padded."
        )
    if all(errors):
        return InputError(
            f"The model fails on two sequences, along either of the first two axes: "
            f"{_wording(errors[0])} (first axis); {_wording(errors[1])} (second axis). Pass inputs of shape "
            "(batch, tokens), (batch, tokens, dim), or with the first two axes swapped, on which model(inputs) runs."
        )
    failed = next((error for error in errors if error is not None), None)
    if failed is not None and not isinstance(failed, InputError):
        where = _words(list(findings)[errors.index(failed)])
        declare = f"(Along {where}, the model fails on two sequences: {_wording(failed)}.) {declare}"
    varies = next((finding.varies for finding in findings.values() if finding.varies), "")
    if varies:
        declare = f"(Which modules run depends on the entries: {varies} runs for some only.) {declare}"
    if any(finding.crosses for finding in findings.values()):
        return InputError(
            "The axis of sequences is ambiguous: entries along both of the first two axes act on each other, as in "
            f"experts with a limited capacity. {declare}"
        )
    if not any(finding.depends for finding in findings.values() if finding.error is None):
        return IgnoredInputError(
            "The output does not depend on the inputs: with other entries everywhere the model returns the same. "
            "rankscope.doctor(model, inputs) says where they are lost: ids that are clamped, inputs that are "
            "multiplied by zero or scaled down until a bias or positions cover them, an embedding of equal rows. If "
            f"the outputs begin at zero on purpose: {declare[0].lower()}{declare[1:]}"
        )
    return InputError(
        f"The axis of sequences is ambiguous: no tokens act on each other along either of the first two axes. {declare}"
    )


def _makes_nested(findings: Mapping[int, _Finding]) -> bool:
    return any("nested" in str(finding.error).casefold() for finding in findings.values())


def _explain(model: nn.Module, cut: Cut, axes: list[int]) -> None:
    """Raise an error with the numbers that do not fit, if that is why the model cannot be run along these axes."""
    for axis in axes:
        why: InputError | None = None
        with suppress(Exception), as_written(model):  # what the model itself raises is in the message that follows
            try:
                cut(axis).run(model)
            except InputError as error:
                why = error if error.__cause__ is not None else None
        if why is not None:
            raise why


def _wording(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _experiment(model: nn.Module, cut: Cut, axis: int) -> _Finding:
    """Replace some tokens of the last sequence, then the rest of them, then the first sequence."""
    try:
        batch = _finite(cut(axis))
        plain, *others = once_more_uncompiled(lambda: _passes(model, batch))
        finding = _finding(model, batch, plain, others)
        if not finding.mixes and not finding.crosses:
            # One token may be dropped, or be alone in its window: half of them, drawn at random.
            some, rest = once_more_uncompiled(lambda: _halves(model, batch))
            finding = _finding(model, batch, plain, [some, rest, others[2]])
    except (InputError, RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        return _Finding(error=error)
    return finding


def _finding(
    model: nn.Module, batch: Batch, plain: dict[_Place, Tensor], others: Sequence[dict[_Place, Tensor]]
) -> _Finding:
    changes = [_changed(plain, other) for other in others]
    mains = [value[..., 0] if value.ndim == 3 else value for value in _mains(batch)]
    entries = sum(value.numel() for value in mains)
    crosses = mixes = False
    for some, rest, other in zip(*changes, strict=True):
        if some is None or rest is None or other is None:
            continue
        together = bool(((some | rest) & other).any())
        mixes |= bool((some & rest).any()) and not together
        crosses |= together and some.numel() >= entries
    depends = mixes or crosses or _depends(model, plain, others)
    return _Finding(mixes, crosses, varies=_varying(model, [plain, *others]), depends=depends)


def _depends(model: nn.Module, plain: Mapping[_Place, Tensor], others: Sequence[Mapping[_Place, Tensor]]) -> bool:
    """Whether an output of the model changes by more than a trace."""
    for place, one in plain.items():
        for other in others if place[0] == id(model) else ():
            if place not in other or other[place].shape != one.shape:
                return True
            roundings = _TRACES if torch.finfo(one.dtype).bits > 16 else _ROUNDINGS
            if bool(differs(one, other[place], roundings).any()):
                return True
    return False


def _passes(model: nn.Module, batch: Batch) -> list[dict[_Place, Tensor]]:
    def alone(tokens: int) -> Tensor:
        return torch.arange(tokens) == tokens // 2

    changed = (
        batch,
        _with_mains(batch, lambda value: _with_another_middle(value, batch.axis)),
        _replaced(batch, 1, lambda tokens: ~alone(tokens)),
        _replaced(batch, 0, lambda tokens: torch.ones(tokens, dtype=torch.bool)),
    )
    with as_written(model):
        made = [] if needs_all_ranks(model) else [make(model, batch) for make in _OBSERVERS]
        observers = [observer for observer in made if observer is not None]
        passes: list[dict[_Place, Tensor]] = []
        for number, one in enumerate(changed):
            try:
                passes.append(_computed(model, one, [observer.passing(number) for observer in observers]))
            except Exception:
                if number or not observers:
                    raise
                observers = []
                passes.append(_computed(model, one))
        return passes


def _halves(model: nn.Module, batch: Batch) -> list[dict[_Place, Tensor]]:
    """The division is drawn at random: a model may drop every second token, or mix those of a window only."""

    def half(tokens: int) -> Tensor:
        return torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)) % 2 == 0

    parts = (half, lambda tokens: ~half(tokens))
    with as_written(model):
        return [_computed(model, _replaced(batch, 1, part)) for part in parts]


def _varying(model: nn.Module, passes: Sequence[Mapping[_Place, Tensor]]) -> str:
    """Name of the first module that some passes called more often than others; empty if there is none."""
    called = [Counter(place[0] for place in one) for one in passes]
    names = (name for name, module in model.named_modules() if len({one[id(module)] for one in called}) > 1)
    return next(names, "")


def _mains(batch: Batch) -> list[Tensor]:
    return [*main_tensors(batch.inputs).values(), *(value for value in batch.arguments if value.ndim in (2, 3))]


def _replaced(batch: Batch, row: int, part: Callable[[int], Tensor]) -> Batch:
    """The batch with other ids or vectors in one sequence, for a part of its tokens, given their number."""

    def changed(value: Tensor) -> Tensor:
        where = torch.zeros(value.shape[:2], dtype=torch.bool, device=value.device)
        where.select(batch.axis, row)[:] = part(value.shape[1 - batch.axis]).to(value.device)
        return other_entries(value, where)

    return _with_mains(batch, changed)


def _with_another_middle(value: Tensor, axis: int) -> Tensor:
    """Ids or vectors with another token in the middle of the second sequence.

    It is one from within that sequence, if there is one: the first and last may be special, and so may others'.
    """
    value, place = value.clone(), value.shape[1 - axis] // 2
    own = value.select(axis, 1)
    others = [one for one in own[1:-1].tolist() if one != int(own[place])] if own.ndim == 1 else []
    where = torch.zeros(value.shape[:2], dtype=torch.bool, device=value.device)
    where.select(axis, 1)[place] = True
    if not others or value.is_floating_point():
        return other_entries(value, where)
    own[place] = others[0]
    return value


def _finite(batch: Batch) -> Batch:
    """The batch with numbers in place of NaN and infinity, which would hide what acts on what."""

    def changed(value: Tensor) -> Tensor:
        known = torch.isfinite(value)
        return value if bool(known.all()) else torch.where(known, value, torch.ones_like(value))

    return _with_mains(batch, changed)


def _with_mains(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    mains = {id(value) for value in _mains(batch)}

    def changed(value: Any) -> Any:
        return change(value) if id(value) in mains else value

    return replace(
        batch,
        inputs={name: changed(value) for name, value in batch.inputs.items()},
        arguments=tuple(map(changed, batch.arguments)),
    )


def other_entries(value: Tensor, where: Tensor) -> Tensor:
    """The tensor with other ids or vectors where ``where``, which has its first two axes, is True."""
    where = where.reshape(*where.shape, *[1] * (value.ndim - 2))
    if value.is_floating_point() or value.is_complex():
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return torch.where(where, drawn * value.abs().std().clamp_min(1e-3) + value.mean(), value)
    known, place = torch.unique(value, return_inverse=True)  # ids that occur in the batch have an embedding
    if len(known) == 1:
        return torch.where(where, value - 1 if int(known) > 0 else value + 1, value)
    return torch.where(where, known[(place + 1) % len(known)], value)


def _computed(
    model: nn.Module, batch: Batch, observed: Sequence[AbstractContextManager[None]] = ()
) -> dict[_Place, Tensor]:
    """Copies of what the modules return, in the order of the pass, while there is room; and of what the model does."""
    tensors: dict[_Place, Tensor] = {}
    calls: Counter[int] = Counter()
    room = _ROOM

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        calls[id(module)] += 1
        with hidden() if observed else nullcontext():
            keep(module, pytree.tree_leaves(output))

    def keep(module: nn.Module, outputs: Sequence[Any]) -> None:
        nonlocal room
        for number, tensor in enumerate(outputs):
            if isinstance(tensor, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue  # it exists inside torch.func only
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                tensor = whole(tensor)  # on all ranks, whether there is room or not
                room -= tensor.numel() * tensor.element_size()
                if (room > 0 or module is model) and not tensor.is_nested:
                    tensors[id(module), calls[id(module)], number] = tensor.detach().clone()

    with ExitStack() as hooks, torch.random.fork_rng(devices=[]):
        seed_generators(0)
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note).remove)
        for context in observed:
            hooks.enter_context(context)
        batch.call(model)
    return tensors


def _changed(before: Mapping[_Place, Tensor], after: Mapping[_Place, Tensor]) -> list[Tensor | None]:
    """Which entries of each tensor differ; None for those that cannot be compared, or that only one pass computed."""
    return [_differs(one, after[place]) if place in after else None for place, one in before.items()]


def _differs(before: Tensor, after: Tensor) -> Tensor | None:
    if before.shape != after.shape or before.numel() == 0:
        return None
    known = torch.isfinite(before) & torch.isfinite(after)
    # Not a number where there was one, or the reverse, is a change as well.
    return differs(before, after, _ROUNDINGS) if bool(known.any()) else None


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run a model as written, in evaluation mode and without gradients, without torch's fused encoder layer.

    The fused layer turns padded batches into nested tensors, which have no token axis. Mode, random state, FSDP2's
    shards and compiled code are restored.
    """
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        with (
            without_fastpath(),
            uncompiled(model),
            resharded(model),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            yield
    finally:
        for module in was_training:
            module.training = True
