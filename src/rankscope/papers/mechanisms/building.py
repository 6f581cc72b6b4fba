"""A mechanism as a model with random weights, and its structure."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.models.inputs import Batch, Prepared, prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.view import ModelView
from rankscope.papers.mechanisms.declaring import Mechanism, Size
from rankscope.stream.discovery import discover
from rankscope.stream.frames import first_tensor
from rankscope.stream.viewing import undisturbed


def built(mechanism: Mechanism, size: Size, seed: int, changed: Mapping[str, Any] | None = None) -> LoadedModel:
    """The mechanism at this size, initialised as the library does it, in float64; ``changed`` keys replace its own."""
    config = {"model_type": mechanism.model_type, **mechanism.config(size), **(changed or {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        loaded = load(f"init:{path}", seed=seed, dtype="float64", model_class=mechanism.model_class)
    return replace(loaded, spec=f"mechanism {mechanism.name}")


def inputs_of(loaded: LoadedModel, size: Size, text: Path | None) -> Prepared:
    """The same text for every text model, as hashed words, and the same smooth images for every vision model."""
    given = text if loaded.input_kind == "text" else None
    return prepare_inputs(loaded, given, sequences=size.sequences, tokens=size.tokens, batch=size.sequences)


def structure(model: nn.Module, batch: Batch) -> ModelView:
    """Its blocks, found on sequences of full length: some patterns need all their tokens to be what they are."""
    rows = max(2, batch.sequences)

    def taken(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch.sequences
        return value[torch.arange(rows) % batch.sequences] if whole else value

    probe = Batch({name: taken(value) for name, value in batch.inputs.items()}, None, 0, rows)
    with undisturbed(model):
        return discover(model, lambda: probe.run(model), batch=rows)


def initial_std(view: ModelView) -> float:
    """Median over the weight matrices of the blocks of the standard deviation of their entries."""
    modules = view.modules()
    names = dict.fromkeys(call.module_name for stack in view.stacks for call in stack.calls)
    matrices = [p for name in names for p in modules[name].parameters() if p.dim() == 2 and min(p.shape) > 1]
    return float(torch.stack([p.detach().double().std() for p in matrices]).median())


@contextmanager
def drawn_together(view: ModelView, factor: float) -> Iterator[None]:
    """Tokens that enter the first block are drawn to their mean by this factor; 0 makes them equal."""
    first = view.modules()[view.stacks[0].calls[0].module_name]
    fresh = [True]

    def draw(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        entry = first_tensor(args, kwargs)
        if entry is None or not fresh[0]:
            return None
        fresh[0] = False
        mean = entry.flatten(1, -2).mean(dim=1).reshape(entry.shape[0], *(1,) * (entry.dim() - 2), -1)
        new = mean + factor * (entry - mean) if factor else mean.expand(entry.shape).clone()
        return (
            tuple(new if value is entry else value for value in args),
            {name: new if value is entry else value for name, value in kwargs.items()},
        )

    handle = first.register_forward_pre_hook(draw, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
