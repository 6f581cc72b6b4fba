"""Five networks under four masks, a temperature sweep and a deep run, into one table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from tqdm.auto import tqdm

from rankscope._errors import LoadError
from rankscope.masks import parse_mask
from rankscope.models.inputs import Prepared, prepare_inputs
from rankscope.models.loading import LoadedModel, load, load_initialised_twin
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.models.view import ModelView
from rankscope.papers._recipe import Settings
from rankscope.papers.measuring.one_network import measure_network
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import view_of
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader

METRICS = ("mu", "mu_over_norm")
COORDINATES = ("part", "model", "weights", "dtype", "variant", "mask", "temperature", "seed")
MASKS = ("complete", "causal", "window(1)", "causal_window(1)")
VARIANTS: dict[str, Operation] = {
    "SAN": variant_named("pure").operation,
    "SAN+skip": variant_named("+skip").operation,
    "SAN+LN": variant_named("+norm").operation,
    "SAN+LN+skip": variant_named("+norm+skip").operation,
    "transformer": Operation(),
}
SCALED = {
    "SAN+row scaling": replace(VARIANTS["SAN+LN"], norm="scale"),
    "SAN+row scaling+skip": replace(VARIANTS["SAN+LN+skip"], norm="scale"),
}
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
DEEP_VARIANTS = ("SAN", "SAN+LN", "transformer")
DTYPES = ("float32", "float64")
TRAINED = ("minilm", "reaction-bert")
SEEDS, SEQUENCES, TOKENS, DEEP = 2, 8, 128, 128

Coordinates = dict[str, str | int | None]


@dataclass(frozen=True)
class Arm:
    """One network on one model."""

    loaded: LoadedModel
    prepared: Prepared
    operation: Operation
    at: Coordinates


def measure_figure(settings: Settings) -> Run:
    """The figure, both readings of LayerNorm, the temperature sweep and the deep run."""
    started = time.perf_counter()
    writer = RowWriter(coordinates=COORDINATES)
    notes: list[str] = []
    last: tuple[Arm, SiteReader] | None = None
    view: ModelView | None = None
    for arm in tqdm(_arms(settings, notes), desc="wu2024-fig2", unit="network", disable=not settings.progress):
        if view is None or view.model is not arm.loaded.model:
            view = view_of(arm.loaded.model, arm.prepared[0])
        reader = measure_network(
            arm.loaded.model, arm.prepared, arm.operation, metrics=METRICS, writer=writer, at=arm.at, view=view
        )
        last = (arm, reader)
    assert last is not None
    arm, reader = last
    return Run(
        kind="reproduce:wu2024-fig2",
        provenance=provenance_of(arm.loaded, arm.prepared, reader, 0, time.perf_counter() - started),
        floor=floor_of({torch.float32}),
        verdict="",
        table=writer.table(),
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True)
class _Size:
    model: str
    sequences: int
    tokens: int
    seeds: int
    masks: tuple[str, ...]
    temperatures: tuple[float, ...]
    deep: int
    trained: tuple[str, ...]


_FULL = _Size("init:bert-base", SEQUENCES, TOKENS, SEEDS, MASKS, TEMPERATURES, DEEP, TRAINED)
_SMALL = _Size("init:tiny-bert", 2, 16, 1, MASKS[:2], (0.1, 1.0), 8, ())


def _arms(settings: Settings, notes: list[str]) -> Iterator[Arm]:
    size = _SMALL if settings.small else _FULL
    for seed in range(settings.seeds or size.seeds):
        for dtype in DTYPES:
            loaded = load(size.model, seed=seed, dtype=dtype)
            prepared = _inputs(loaded, settings, size)
            at: Coordinates = {"model": "BERT", "weights": "init", "dtype": dtype, "seed": seed}
            yield from _grid(loaded, prepared, VARIANTS, size, {**at, "part": "figure"})
            if dtype == "float64" and seed == 0:
                yield from _grid(loaded, prepared, SCALED, size, {**at, "part": "figure"})
                yield from _temperatures(loaded, prepared, size, {**at, "part": "temperature"})
    yield from _trained(settings, notes, size)
    yield from _deep(settings, size)


def _inputs(loaded: LoadedModel, settings: Settings, size: _Size) -> Prepared:
    return prepare_inputs(loaded, settings.text, sequences=size.sequences, tokens=size.tokens)


def _grid(
    loaded: LoadedModel, prepared: Prepared, variants: dict[str, Operation], size: _Size, at: Coordinates
) -> Iterator[Arm]:
    for variant, operation in variants.items():
        for mask in size.masks:
            where = {**at, "variant": variant, "mask": mask, "temperature": "1"}
            yield Arm(loaded, prepared, replace(operation, mask=parse_mask(mask)), where)


def _temperatures(loaded: LoadedModel, prepared: Prepared, size: _Size, at: Coordinates) -> Iterator[Arm]:
    for variant in ("SAN", "SAN+LN"):
        for mask in size.masks[:3]:
            for temperature in size.temperatures:
                where = {**at, "variant": variant, "mask": mask, "temperature": f"{temperature:g}"}
                operation = replace(VARIANTS[variant], mask=parse_mask(mask), temperature=temperature)
                yield Arm(loaded, prepared, operation, where)


def _trained(settings: Settings, notes: list[str], size: _Size) -> Iterator[Arm]:
    given = {"BERT": settings.checkpoints["bert"]} if "bert" in settings.checkpoints else {}
    for name in (*given, *size.trained):
        for dtype in DTYPES:
            try:
                loaded = (
                    load(given[name], dtype=dtype)
                    if name in given
                    else load(pretrained_folder(name), dtype=dtype, model_class=PRETRAINED[name].model_class)
                )
            except LoadError as error:
                if name in given:
                    raise
                notes.append(str(error))
                break
            texts = list(PRETRAINED[name].texts) if name in PRETRAINED else []
            prepared = (
                prepare_inputs(loaded, texts, sequences=size.sequences, tokens=size.tokens)
                if texts
                else _inputs(loaded, settings, size)
            )
            at: Coordinates = {"model": name, "weights": "trained", "dtype": dtype, "seed": 0, "part": "figure"}
            yield from _grid(loaded, prepared, VARIANTS, size, at)


def _deep(settings: Settings, size: _Size) -> Iterator[Arm]:
    """The same architecture, far deeper: the weights are drawn once, in float32, and then widened.

    Attention without norms only in float64: its tokens shrink by a factor in every block, and in float32 they are
    below the least normal number, where every product is slow and nothing is measured, long before the last one.
    """
    shallow = load(size.model)
    assert shallow.config is not None
    shallow.config.num_hidden_layers = size.deep
    deep = load_initialised_twin(shallow, seed=0)
    del shallow
    for dtype in DTYPES:
        names = DEEP_VARIANTS if dtype == "float64" else tuple(name for name in DEEP_VARIANTS if name != "SAN")
        variants = {name: VARIANTS[name] for name in names}
        deep.model.to(torch.float64 if dtype == "float64" else torch.float32)
        loaded = load(deep.model)
        prepared = _inputs(loaded, settings, replace(size, sequences=2))
        at: Coordinates = {"model": "BERT", "weights": "init", "dtype": dtype, "seed": 0, "part": "deep"}
        yield from _grid(loaded, prepared, variants, size, at)
