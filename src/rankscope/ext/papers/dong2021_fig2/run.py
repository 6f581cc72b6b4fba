"""Every network of the figure, as run by the authors and as stated in the theorem, on every model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from rankscope.errors import LoadError, UnsupportedOperationError
from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.dong2021_fig2.show import IN_FLOAT32, METRIC, TEXTS, TRAINED
from rankscope.ext.papers.measuring.network import measure_network
from rankscope.ext.papers.measuring.parts import RowRecorder, finished_run
from rankscope.models.inputs import Batch, Prepared, prepare_inputs
from rankscope.models.inputs.rows import hash_tokenizer, read_text, rows_from_cycle
from rankscope.models.inputs.text import sample_text
from rankscope.models.loading import LoadedModel, load
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteRef
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, provenance_of

COORDINATES = ("model", "weights", "reading", "curve", "text", "seed")
FAMILIES = {"BERT": "bert", "ALBERT": "albert", "XLNet": "xlnet"}
SEEDS, SEQUENCES, TOKENS = 6, 32, 128
FEWER_SEEDS = 2
"""Initialisations for the theorem's reading, and for a second way to split the text."""

Cut = Literal["words", "pieces"]
CUTS: Mapping[str, tuple[Cut, ...]] = {"BERT": ("words",), "ALBERT": ("pieces",), "XLNet": ("pieces", "words")}
assert all(cuts[0] == TEXTS[model] for model, cuts in CUTS.items())


@dataclass(frozen=True)
class FigureNetwork:
    """One curve of the figure.

    Attributes:
        name: as the paper labels it.
        reading: ``"authors"`` (as they ran it) or ``"theorem"`` (as it is stated).
        operation: the surgery.
        without_mlp: whether the MLP is also removed the way the authors did it.
    """

    name: Literal["SAN", "SAN+MLP", "SAN+skip", "transformer"]
    reading: Literal["authors", "theorem"]
    operation: Operation
    without_mlp: bool = False


_NO_SKIP = Operation(attention_skip=0.0)
NETWORKS: tuple[FigureNetwork, ...] = (
    FigureNetwork("SAN", "authors", _NO_SKIP, without_mlp=True),
    FigureNetwork("SAN+MLP", "authors", _NO_SKIP),
    FigureNetwork("SAN+skip", "authors", Operation(), without_mlp=True),
    FigureNetwork("transformer", "authors", Operation()),
    FigureNetwork("SAN", "theorem", variant_named("pure").operation),
    FigureNetwork("SAN+MLP", "theorem", variant_named("+mlp").operation),
    FigureNetwork("SAN+skip", "theorem", variant_named("+skip").operation),
)
AUTHORS = tuple(network for network in NETWORKS if network.reading == "authors")


class _Bypass(nn.Module):
    """Returns its second argument: BERT's MLP output, its skip and its norm are one module, and all of it goes."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """``input_tensor``, unchanged."""
        return input_tensor


MLP_SWAPS: Mapping[str, Mapping[str, Callable[[], nn.Module]]] = MappingProxyType(
    {
        # MLP, its skip and its norm go together.
        "bert": {"intermediate": nn.Identity, "output": _Bypass},
        # Both matrices go; the activation between them stays, and so do the MLP's skip and norm: LN(x + gelu(x)).
        "albert": {"ffn": nn.Identity, "ffn_output": nn.Identity},
        # MLP, its skip and its norm go together.
        "xlnet": {"ff": nn.Identity},
    }
)
"""By family: which modules of a layer the authors replace, and by what."""


@contextmanager
def mlp_taken_out(loaded: LoadedModel) -> Iterator[None]:
    """Remove the MLPs as the authors did, inside the ``with`` block; the model is restored afterwards.

    Raises:
        UnsupportedOperationError: for a family that the figure does not show.
    """
    family = "no transformers model" if loaded.config is None else str(loaded.config.model_type)
    if family not in MLP_SWAPS:
        raise UnsupportedOperationError(
            f"How the authors take the MLP out is known for {', '.join(MLP_SWAPS)}; {loaded.spec} is {family}."
        )
    layers = [m for m in loaded.model.modules() if type(m).__name__ in ("BertLayer", "AlbertLayer", "XLNetLayer")]
    with ExitStack() as restoring:
        for layer in layers:
            for name, replacement in MLP_SWAPS[family].items():
                restoring.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, replacement())
        yield


def in_pieces(text: str) -> str:
    """The text with a boundary word before every punctuation mark.

    The published curves read wiki_bio, where spaces surround punctuation. WordPiece (BERT) makes one token of a mark;
    SentencePiece (ALBERT, XLNet) makes two, a word boundary and the mark, so that one token fills a tenth of every
    sequence. This matters for XLNet, which has neither position embeddings nor a norm before its first block.

    Example:
        >>> in_pieces("a, b")
        'a wordboundary ,  b'
    """
    return re.sub(r"([^\w\s])", r" wordboundary \1 ", text)


def _text_for(loaded: LoadedModel, cut: Cut, source: Path | None, sequences: int, tokens: int) -> Prepared:
    """Full sequences of the built-in sample, or of a file, as hashed words."""
    text = sample_text() if source is None else read_text(source)
    text = in_pieces(text) if cut == "pieces" else text
    rows, _ = rows_from_cycle(text, hash_tokenizer(loaded.config), sequences, tokens, pad=0)
    return prepare_inputs(loaded, {"input_ids": rows.ids}, batch=8)


def _repeat_share(prepared: Prepared) -> float:
    """Mean over sequences of the probability that two random tokens of a sequence are equal."""
    counts = [torch.unique(row, return_counts=True)[1].double() for p in prepared for row in p.inputs["input_ids"]]
    shares = [float((count / count.sum()).square().sum()) for count in counts]
    return sum(shares) / len(shares)


@dataclass(frozen=True)
class Subject:
    """One model with its inputs, and the networks to derive from it."""

    model: str
    weights: str
    text: str
    seed: int
    loaded: LoadedModel
    prepared: Prepared
    networks: tuple[FigureNetwork, ...]


def measure(settings: Settings, models: Sequence[str] = (*FAMILIES, *TRAINED)) -> Run:
    """All models of the figure at random initialisation, then the trained ones that are available; or those named."""
    started = time.perf_counter()
    writer, notes = RowWriter(coordinates=COORDINATES), list[str]()
    subjects = _subjects(settings, models, notes)
    for subject in tqdm(subjects, desc=settings.name, unit="model", disable=not settings.progress):
        shared = RowRecorder(writer).under(
            model=subject.model, weights=subject.weights, text=subject.text, seed=subject.seed
        )
        for network in subject.networks:
            rows = shared.under(reading=network.reading, curve=network.name)
            beside = _InFloat32(rows) if network.reading == "authors" and subject.seed == 0 else None
            with mlp_taken_out(subject.loaded) if network.without_mlp else nullcontext():
                reader = measure_network(
                    subject.loaded.model,
                    subject.prepared,
                    network.operation,
                    metrics=(METRIC,),
                    writer=writer,
                    at=rows.at,
                    beside=beside,
                )
    seconds = time.perf_counter() - started
    provenance = provenance_of(subject.loaded, subject.prepared, reader, subject.seed, seconds)
    return finished_run(settings, writer, provenance, floor_of({torch.float32}), notes=notes)


@dataclass(frozen=True)
class _InFloat32:
    """Records the metric as float32 arithmetic gives it, if it is small enough to differ."""

    rows: RowRecorder

    def __call__(self, ref: SiteRef, x: Tensor, batch: Batch) -> None:
        if x.dtype is not torch.float32 or batch.keep is not None:
            return
        values = (_composite(x - x.mean(dim=1, keepdim=True)) / _composite(x)).double().numpy()
        if float(values.max()) <= 1e-4:
            first = batch.first_sequence
            self.rows.add(IN_FLOAT32, values, ref.site, stack=ref.stack, layer=ref.layer, sequence=first)


def _composite(x: Tensor) -> Tensor:
    size = x.abs()
    return (size.sum(dim=-2).amax(dim=-1) * size.sum(dim=-1).amax(dim=-1)).sqrt()


def _subjects(settings: Settings, models: Sequence[str], notes: list[str]) -> Iterator[Subject]:
    sequences, tokens = (4, 32) if settings.small else (SEQUENCES, TOKENS)
    for model, family in ((name, FAMILIES[name]) for name in models if name in FAMILIES):
        for seed in range(settings.seeds or (2 if settings.small else SEEDS)):
            loaded = load(f"init:tiny-{family}" if settings.small else f"init:{family}-base", seed=seed)
            for cut in CUTS[model] if seed < FEWER_SEEDS else CUTS[model][:1]:
                prepared = _text_for(loaded, cut, settings.text, sequences, tokens)
                if seed == 0:
                    notes.append(
                        f"{model}, text split into {cut}: two random tokens of a sequence are equal with probability "
                        f"{_repeat_share(prepared):.3f}."
                    )
                both = cut == CUTS[model][0] and seed < FEWER_SEEDS
                yield Subject(model, "init", cut, seed, loaded, prepared, NETWORKS if both else AUTHORS)

    def trained(name: str, loaded: LoadedModel, texts: list[str] | Path | None) -> Subject:
        prepared = prepare_inputs(loaded, texts, sequences=sequences, tokens=tokens)
        return Subject(name, "trained", "tokenizer", 0, loaded, prepared, NETWORKS)

    for model, spec in settings.checkpoints.items():
        label = next(name for name, family in FAMILIES.items() if family == model)
        yield trained(label, load(spec), settings.text)
    for name in (name for name in models if name in TRAINED and not settings.small):
        try:
            loaded = load(pretrained_folder(name), model_class=PRETRAINED[name].model_class)
        except LoadError as error:
            notes.append(str(error))
            continue
        yield trained(name, loaded, list(PRETRAINED[name].texts) or settings.text)
