"""Equal models of transformers share what was found about them: a quarter of the suite's time went there.

Tests of what is found, and of what changes it, do not take part: see ``AGAIN``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.inputs import Batch
from rankscope.models.inputs.given import digest_of
from rankscope.models.unchanged import Snapshot
from rankscope.models.view import ModelView
from rankscope.stream import viewing

AGAIN = (
    "graph",
    "find",
    "stream",
    "hostile",
    "surgery",
    "contracts",
    "models",
    "exact_arithmetic",
    "device",
    "execution",
    "fuzz",
)
"""Folders whose tests find the structure of every model anew."""
_LARGEST = 1 << 20
"""Parameters of a model whose numbers are compared."""
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)

_views: dict[object, dict[object, Any]] = {}
_proven: dict[object, ModelView] = {}


def takes_part(path: Path) -> bool:
    """Whether the tests of a file share structures."""
    return not set(AGAIN) & set(path.parts)


def fingerprint(model: nn.Module) -> object:
    """Equal for models of the same classes, settings and numbers; None if that is not known of all of their parts."""
    seen: dict[int, int] = {}
    numbers = hashlib.blake2b()
    facts: list[object] = [str(vars(getattr(model, "config", model)))]
    for name, module in model.named_modules(remove_duplicate=False):
        own, kind = vars(module), type(module)
        hooks = any(value for key, value in own.items() if key.endswith("_hooks"))
        if kind.__module__.partition(".")[0] not in ("torch", "transformers") or hooks or "forward" in own:
            return None
        settings = tuple((key, value) for key, value in own.items() if isinstance(value, _SIMPLE))
        facts.append((name, kind, kind.forward, settings))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.is_sparse:
                return None
            tied = seen.setdefault(id(tensor), len(seen))
            facts.append((key, tied, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad))
            if tensor.numel() > _LARGEST:
                return None
            numbers.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return (*facts, numbers.hexdigest())


@contextmanager
def found_once() -> Iterator[None]:
    """Inside this block, a model is given what was found about an equal one on the same inputs."""
    find: Callable[..., ModelView] = viewing._view_of
    prove: Callable[..., ModelView] = viewing.with_leaks

    def view_of(model: nn.Module, batch: Batch, *words: Any) -> ModelView:
        same = None if model in viewing._VIEWS else fingerprint(model)
        if same is None:
            return find(model, batch, *words)
        known = _views.setdefault(same, {})
        viewing._VIEWS[model] = {key: (Snapshot(model), stacks) for key, stacks in known.items()}
        view = find(model, batch, *words)
        known |= {key: stacks for key, (_, stacks) in viewing._VIEWS[model].items()}
        return view

    def with_leaks(view: ModelView, run: Callable[[], object], sequences: int) -> ModelView:
        (_, probe), same = viewing._LAST[view.model], fingerprint(view.model)
        if same is None:
            return prove(view, run, sequences)
        key = same, repr(view.stacks), digest_of((probe.arguments, dict(probe.inputs)))
        if key not in _proven:
            _proven[key] = prove(view, run, sequences)
        return ModelView(view.model, _proven[key].stacks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(viewing, "_view_of", view_of)
        patch.setattr(viewing, "with_leaks", with_leaks)
        yield
