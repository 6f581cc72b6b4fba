"""Every network of the figure on every model, into one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from rankscope._errors import LoadError
from rankscope.models.inputs import Batch, Prepared, prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.papers._recipe import Settings
from rankscope.papers.dong2021.networks import AUTHORS, NETWORKS, Network, prepared_for
from rankscope.papers.dong2021.texts import Cut, repeat_share, text_for
from rankscope.papers.measuring.one_network import measure_network
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteRef
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader

METRIC = "relative_composite_residual"
IN_FLOAT32 = "relative_composite_residual_float32"
"""The same number with the mean, the differences and the sums in float32, as the authors took them."""

COORDINATES = ("model", "weights", "reading", "curve", "text", "seed")
FAMILIES = {"BERT": "bert", "ALBERT": "albert", "XLNet": "xlnet"}
_LABELS = {family: model for model, family in FAMILIES.items()}
TRAINED = {"minilm": "BERT", "reaction-bert": "BERT", "antiberty": "BERT", "reaction-albert": "ALBERT"}
SEEDS, SEQUENCES, TOKENS = 6, 32, 128
FEWER_SEEDS = 2
"""Initialisations for the theorem's reading, and for a second cut of the text."""

CUTS: dict[str, tuple[Cut, ...]] = {"BERT": ("words",), "ALBERT": ("pieces",), "XLNet": ("pieces", "words")}


@dataclass(frozen=True)
class Subject:
    """One model with its inputs, and the networks to be made of it."""

    model: str
    weights: str
    text: str
    seed: int
    loaded: LoadedModel
    prepared: Prepared
    networks: tuple[Network, ...]


def measure_figure(settings: Settings, models: Sequence[str] = (*FAMILIES, *TRAINED)) -> Run:
    """All models of the figure at random initialisation, then whatever trained ones there are; or those named."""
    started = time.perf_counter()
    grid = _Grid(RowWriter(coordinates=COORDINATES))
    for subject in tqdm(
        _subjects(settings, models, grid.notes), desc="dong2021-fig2", unit="model", disable=not settings.progress
    ):
        grid.run(subject)
    assert grid.last is not None
    assert grid.reader is not None
    return Run(
        kind="reproduce:dong2021-fig2",
        provenance=provenance_of(
            grid.last.loaded, grid.last.prepared, grid.reader, grid.last.seed, time.perf_counter() - started
        ),
        floor=floor_of({torch.float32}),
        verdict="",
        table=grid.writer.table(),
        notes=tuple(dict.fromkeys(grid.notes)),
    )


@dataclass
class _Grid:
    writer: RowWriter
    notes: list[str] = field(default_factory=list)
    last: Subject | None = None
    reader: SiteReader | None = None

    def run(self, subject: Subject) -> None:
        for network in subject.networks:
            at: dict[str, str | int | None] = {
                "model": subject.model,
                "weights": subject.weights,
                "reading": network.reading,
                "curve": network.name,
                "text": subject.text,
                "seed": subject.seed,
            }
            beside = _InFloat32(self.writer, at) if network.reading == "authors" and subject.seed == 0 else None
            with prepared_for(network, subject.loaded):
                self.reader = measure_network(
                    subject.loaded.model,
                    subject.prepared,
                    network.operation,
                    metrics=(METRIC,),
                    writer=self.writer,
                    at=at,
                    beside=beside,
                )
        self.last = subject


@dataclass(frozen=True)
class _InFloat32:
    """Writes the number as float32 arithmetic gives it, where it is small enough to differ."""

    writer: RowWriter
    at: dict[str, str | int | None]

    def __call__(self, ref: SiteRef, x: Tensor, batch: Batch) -> None:
        if x.dtype is not torch.float32 or batch.keep is not None:
            return
        values = (_composite(x - x.mean(dim=1, keepdim=True)) / _composite(x)).double().numpy()
        if float(values.max()) > 1e-4:
            return
        self.writer.add(
            metric=IN_FLOAT32,
            site=ref.site,
            stack=ref.stack,
            layer=ref.layer,
            first_sequence=batch.first_sequence,
            values=values,
            statuses=np.zeros(values.shape, dtype=np.int8),
            head_axis=False,
            at=self.at,
        )


def _composite(x: Tensor) -> Tensor:
    size = x.abs()
    return (size.sum(dim=-2).amax(dim=-1) * size.sum(dim=-1).amax(dim=-1)).sqrt()


def _subjects(settings: Settings, models: Sequence[str], notes: list[str]) -> Iterator[Subject]:
    sequences, tokens = (4, 32) if settings.small else (SEQUENCES, TOKENS)
    for model, family in ((name, FAMILIES[name]) for name in models if name in FAMILIES):
        for seed in range(settings.seeds or (2 if settings.small else SEEDS)):
            loaded = load(f"init:tiny-{family}" if settings.small else f"init:{family}-base", seed=seed)
            for cut in CUTS[model] if seed < FEWER_SEEDS else CUTS[model][:1]:
                prepared = text_for(loaded, cut, settings.text, sequences=sequences, tokens=tokens)
                if seed == 0:
                    notes.append(
                        f"{model}, text cut into {cut}: two tokens of a sequence are the same with chance "
                        f"{repeat_share(prepared):.3f}."
                    )
                both = cut == CUTS[model][0] and seed < FEWER_SEEDS
                yield Subject(model, "init", cut, seed, loaded, prepared, NETWORKS if both else AUTHORS)
    yield from _trained(settings, models, notes, sequences, tokens)


def _trained(
    settings: Settings, models: Sequence[str], notes: list[str], sequences: int, tokens: int
) -> Iterator[Subject]:
    for model, spec in settings.checkpoints.items():
        loaded = load(spec)
        yield Subject(
            _LABELS[model],
            "trained",
            "tokenizer",
            0,
            loaded,
            prepare_inputs(loaded, settings.text, sequences=sequences, tokens=tokens),
            NETWORKS,
        )
    if settings.small:
        return
    for name in (name for name in models if name in TRAINED):
        try:
            loaded = load(pretrained_folder(name), model_class=PRETRAINED[name].model_class)
        except LoadError as error:
            notes.append(str(error))
            continue
        texts = list(PRETRAINED[name].texts) or settings.text
        prepared = prepare_inputs(loaded, texts, sequences=sequences, tokens=tokens)
        yield Subject(name, "trained", "tokenizer", 0, loaded, prepared, NETWORKS)
