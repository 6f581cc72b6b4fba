"""Contract tests of registered entries, for packages that add some: each raises ``AssertionError`` with what is broken.

Example:
    >>> from rankscope.testing import check_metric
    >>> check_metric("stable_rank")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankscope.errors import UnsupportedOperationError
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from rankscope.metrics._spec import Invariance
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.remedies import REMEDIES, applied
from rankscope.stream.frames import tensors_in
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.verbs import VERBS

__all__ = ["check_metric", "check_remedy", "check_verb"]

_MOST_PARAMETERS = 11


def check_metric(name: str, *, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """A metric of tokens keeps what it declares: invariances, range, the value at collapse, one float64 per sequence.

    Raises:
        AssertionError: it does not.
    """
    spec = METRICS[name]
    assert spec.side == "tokens", f"{name} is measured of {spec.side}; only metrics of tokens are checked here"
    low, high = spec.range
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 7, 5, generator=draw, dtype=torch.float64) + torch.randn(4, 1, 5, generator=draw)
        before = x.clone()
        value = spec.function(Tokens(x))
        assert value.dtype is torch.float64, f"{name} returns {value.dtype}, expected float64"
        assert value.shape == (4,), (
            f"{name} returns the shape {tuple(value.shape)} for 4 sequences, expected one value each"
        )
        assert torch.equal(x, before), f"{name} changes its input"
        assert bool(((value >= low - 1e-14) & (value <= high + 1e-14)).all()), (
            f"{name} leaves its range {spec.range}: {value}"
        )
        alone = torch.stack([spec.function(Tokens(one)) for one in x]).reshape(4)
        assert _near(alone, value), f"{name} of a sequence depends on the other sequences"
        for flag, change in _changes(draw, x).items():
            if flag in spec.invariant_to:
                other = spec.function(Tokens(change(x)))
                assert _near(other, value), f"{name} declares {flag.name}, and changes from {value} to {other}"
    if spec.at_collapse is not None:
        alike = torch.ones(3, 5, dtype=torch.float64) * torch.arange(1.0, 6.0)
        at = float(spec.function(Tokens(alike)))
        assert abs(at - spec.at_collapse) <= 1e-12, f"{name} declares {spec.at_collapse} at collapse, and is {at}"


def _changes(draw: torch.Generator, x: Tensor) -> dict[Invariance, Callable[[Tensor], Tensor]]:
    tokens, channels = (torch.randperm(size, generator=draw) for size in x.shape[-2:])
    turn = torch.linalg.qr(torch.randn(x.shape[-1], x.shape[-1], generator=draw, dtype=x.dtype)).Q
    return {
        Invariance.TOKEN_ORDER: lambda x: x[..., tokens, :],
        Invariance.CHANNEL_ORDER: lambda x: x[..., channels],
        Invariance.ROTATION: lambda x: x @ turn,
        Invariance.SCALE: lambda x: 3e-7 * x,
        Invariance.SHIFT: lambda x: x + 3.0 * x.abs().max() * turn[0],
    }


def _near(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-9 * other.abs().clamp_min(1.0)).all())


def check_remedy(name: str, models: Sequence[str] = ("init:tiny-bert", "init:tiny-gpt2", "init:tiny-llama")) -> None:
    """A remedy leaves the model as it was, changes nothing at its neutral strength, and something at its own.

    A model that it refuses with a sentence is passed over, but not all of them.

    Raises:
        AssertionError: it does not.
    """
    spec, refused = REMEDIES[name], []
    for model in models:
        loaded = load(model, dtype=torch.float64)
        batch = prepare_inputs(loaded, None, sequences=2, tokens=10, batch=2)[0]

        def outputs(loaded: object = loaded, batch: object = batch) -> list[Tensor]:
            found = tensors_in(batch.run(loaded.model), depth=4)  # type: ignore[attr-defined]
            return [tensor for tensor in found if tensor.is_floating_point()]

        with undisturbed(loaded.model), torch.no_grad():
            view = view_of(loaded.model, batch)
            bare = outputs()
            try:
                with applied(loaded.model, name, view=view, strength=spec.strength):
                    treated = outputs()
                if spec.neutral is not None:
                    with applied(loaded.model, name, view=view, strength=spec.neutral):
                        neutral = outputs()
                    assert _equal(neutral, bare), f"{name} changes {model} at its neutral strength {spec.neutral}"
            except UnsupportedOperationError as error:
                refused.append(f"{model}: {error}")
                continue
            assert not _equal(treated, bare), f"{name} changes nothing in {model}"
            assert _equal(outputs(), bare), f"{name} leaves {model} changed"
    assert len(refused) < len(models), f"{name} is refused by every model: {' '.join(refused)}"


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_verb(name: str) -> None:
    """A verb's signature is what it declares: the nouns first, its own arguments by name, with the declared defaults.

    Raises:
        AssertionError: it is not.
    """
    verb = VERBS[name]
    parameters = dict(inspect.signature(verb.run()).parameters)
    assert len(parameters) <= _MOST_PARAMETERS, f"{name} has {len(parameters)} parameters, more than {_MOST_PARAMETERS}"
    nouns = [noun for noun in ("model", "inputs", "surgery") if any(one.noun == noun for one in verb.options)]
    assert list(parameters)[: len(nouns)] == nouns, f"{name} begins with {list(parameters)[:3]}, expected {nouns}"
    for option in verb.options:
        if option.in_python and option.noun is None and not option.is_argument:
            found = parameters.get(option.name)
            assert found is not None, f"{name} declares {option.name} and does not take it"
            assert found.default == option.default, (
                f"{name}: {option.name} is {found.default!r}, not {option.default!r}"
            )
    assert verb.examples, f"{name} has no example for its help"
