"""Five networks under four masks, a temperature sweep and a deep run, into one table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from tqdm.auto import tqdm

from rankscope.errors import LoadError
from rankscope.ext.papers._spec import ExperimentSize, Settings
from rankscope.ext.papers.measuring.network import measure_network
from rankscope.ext.papers.measuring.parts import finished_run
from rankscope.masks import parse_mask
from rankscope.models.inputs import Prepared, prepare_inputs
from rankscope.models.loading import LoadedModel, load, load_initialised_twin
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.viewing import view_of
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, provenance_of

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
DEEP_VARIANTS = ("SAN", "SAN+LN", "transformer")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class MaskGridSize(ExperimentSize):
    """How much is run."""

    model: str = "init:bert-base"
    sequences: int = 8
    tokens: int = 128
    seeds: int = 2
    masks: tuple[str, ...] = MASKS
    temperatures: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    deep: int = 128
    trained: tuple[str, ...] = ("minilm", "reaction-bert")


FULL = MaskGridSize()
SMALL = MaskGridSize(
    model="init:tiny-bert",
    sequences=2,
    tokens=16,
    seeds=1,
    masks=MASKS[:2],
    temperatures=(0.1, 1.0),
    deep=8,
    trained=(),
)


@dataclass(frozen=True)
class MaskedNetwork:
    """One network under one mask and temperature, with its inputs and coordinates."""

    loaded: LoadedModel
    prepared: Prepared
    operation: Operation
    at: Mapping[str, str | int | None]


def measure(settings: Settings) -> Run:
    """The figure, both readings of LayerNorm, the temperature sweep and the deep run."""
    started = time.perf_counter()
    writer, notes = RowWriter(coordinates=COORDINATES), list[str]()
    view: ModelView | None = None
    networks = _networks(settings, settings.pick(FULL, SMALL), notes)
    for network in tqdm(networks, desc=settings.name, unit="network", disable=not settings.progress):
        model, prepared = network.loaded.model, network.prepared
        if view is None or view.model is not model:
            view = view_of(model, prepared[0])
        reader = measure_network(
            model, prepared, network.operation, metrics=METRICS, writer=writer, at=network.at, view=view
        )
    provenance = provenance_of(network.loaded, network.prepared, reader, 0, time.perf_counter() - started)
    return finished_run(settings, writer, provenance, floor_of({torch.float32}), notes=notes)


def _networks(settings: Settings, size: MaskGridSize, notes: list[str]) -> Iterator[MaskedNetwork]:
    def grid(
        loaded: LoadedModel,
        prepared: Prepared,
        variants: Mapping[str, Operation],
        at: Mapping[str, str | int],
        masks: Sequence[str] = size.masks,
        temperatures: Sequence[float] = (1.0,),
    ) -> Iterator[MaskedNetwork]:
        for variant, mask, temperature in product(variants, masks, temperatures):
            where = {**at, "variant": variant, "mask": mask, "temperature": f"{temperature:g}"}
            operation = replace(variants[variant], mask=parse_mask(mask), temperature=temperature)
            yield MaskedNetwork(loaded, prepared, operation, where)

    def inputs(loaded: LoadedModel, sequences: int = size.sequences) -> Prepared:
        return prepare_inputs(loaded, settings.text, sequences=sequences, tokens=size.tokens)

    for seed in range(size.seeds):
        for dtype in DTYPES:
            loaded = load(size.model, seed=seed, dtype=dtype)
            prepared = inputs(loaded)
            at: dict[str, str | int] = {"model": "BERT", "weights": "init", "dtype": dtype, "seed": seed}
            yield from grid(loaded, prepared, VARIANTS, {**at, "part": "figure"})
            if dtype == "float64" and seed == 0:
                yield from grid(loaded, prepared, SCALED, {**at, "part": "figure"})
                some, heated = {name: VARIANTS[name] for name in ("SAN", "SAN+LN")}, {**at, "part": "temperature"}
                yield from grid(loaded, prepared, some, heated, size.masks[:3], size.temperatures)
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
                prepare_inputs(loaded, texts, sequences=size.sequences, tokens=size.tokens) if texts else inputs(loaded)
            )
            at = {"model": name, "weights": "trained", "dtype": dtype, "seed": 0, "part": "figure"}
            yield from grid(loaded, prepared, VARIANTS, at)
    # The same architecture, far deeper: the weights are drawn once, in float32, and then widened.
    shallow = load(size.model)
    assert shallow.config is not None
    shallow.config.num_hidden_layers = size.deep
    deep = load_initialised_twin(shallow, seed=0)
    del shallow
    for dtype, torch_dtype in DTYPES.items():
        # Attention without norms runs in float64 only: its tokens shrink in every block, and in float32 they become
        # subnormal long before the end, where every product is slow and nothing is left to measure.
        variants = {name: VARIANTS[name] for name in DEEP_VARIANTS if dtype == "float64" or name != "SAN"}
        deep.model.to(torch_dtype)
        loaded = load(deep.model)
        at = {"model": "BERT", "weights": "init", "dtype": dtype, "seed": 0, "part": "deep"}
        yield from grid(loaded, inputs(loaded, sequences=2), variants, at)
