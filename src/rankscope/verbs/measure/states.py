"""Hidden states that were computed elsewhere: files or arrays, as sets of equally long sequences, and their passes.

A file is read twice, once for its shapes and once to be measured, so that no two are in memory at once. An order of
axes is never guessed from sizes that allow two: sequences and tokens, or layers and tokens, would be exchanged without
a trace.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from rankscope._types import kind_of, path_of
from rankscope.errors import InputError, LoadError
from rankscope.models.inputs import Batch, Inputs, Prepared, TokensPolicy
from rankscope.models.inputs.opening import tensors_in
from rankscope.models.inputs.rows import TokenRows, all_or_some, kept_tokens
from rankscope.models.loading.dtypes import parse_dtype
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SITES, SiteRef, SiteSelection
from rankscope.verbs.measure import MEASURE
from rankscope.verbs.measure.passes import ObservedPasses, Observers
from rankscope.verbs.reader import SiteReader

FOR_STATES = ("sequences", "tokens_policy", "labels", "seed")
"""Fields of ``Inputs`` that have a meaning for hidden states."""
ARGUMENTS = {"stream": "layout", "dtype": "computed_in"}
"""Options of ``measure`` that have another name in ``judge``."""
ENDINGS = (".safetensors", ".npz")
IDS, MASK = ("token_ids", "input_ids"), "attention_mask"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
AXES = ("batch", "layers", "tokens", "dim")
DEFAULT_SITE = "block.out"
EXPECTED = "a .safetensors or .npz file, a folder of them, a dictionary of arrays, an array, or a list of these"
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_SITE_NAME = re.compile(r"([a-z_]+\.?[a-z_]*)@(\d{1,6})")
_LAST_NUMBER = re.compile(r"\d{1,6}(?=\D*$)")

Load = Callable[[], Mapping[str, Tensor]]
"""Gives named arrays: those of a file, which it reads, or those of the caller."""


@dataclass(frozen=True)
class StateSet:
    """Sequences of one length, possibly padded: those of one file, dictionary or array.

    Attributes:
        name: the file, or words for what was passed.
        load: gives the arrays.
        layers: the array of each site, and its place in that array if it holds all layers; in order of depth.
        axes: the order of the axes of every array.
        sequences: how many.
        tokens: length of each, with padding.
        dim: width.
        dtypes: formats of the arrays.
        exact_in: coarser formats that represent every value.
        ids: token ids ``(sequences, tokens)``, if known.
        mask: False where a token is padding, if any is.
    """

    name: str
    load: Load
    layers: Mapping[SiteRef, tuple[str, int | None]]
    axes: tuple[str, ...]
    sequences: int
    tokens: int
    dim: int
    dtypes: frozenset[torch.dtype]
    exact_in: frozenset[torch.dtype]
    ids: Tensor | None
    mask: Tensor | None

    def read(self) -> Iterator[tuple[SiteRef, Tensor]]:
        """The states of each site as ``batch tokens dim``."""
        arrays = self.load()
        for ref, (key, index) in self.layers.items():
            yield ref, _in_order(arrays[key], self.axes, index)

    def keep(self, policy: TokensPolicy) -> Tensor | None:
        """Which tokens count; None for all."""
        content = torch.ones(self.sequences, self.tokens, dtype=torch.bool) if self.mask is None else self.mask
        return all_or_some(kept_tokens(TokenRows(content.long(), content), policy, None))


def state_sets(states: Any, *, layout: str | None = None, at: Sequence[str] | str | None = None) -> list[StateSet]:
    """What was passed, as sets of sequences; files are read one after the other.

    Args:
        states: see :func:`rankscope.judge`.
        layout: the order of the axes of every array.
        at: the site of each layer, in order.

    Raises:
        InputError: it is not clear what is what, or a file is damaged.
    """
    axes = None if layout is None else _parsed_axes(layout)
    sites = None if at is None else parse_sites(at)
    parts = list(_parts(states, axes))
    sets = [_one(name, load, axes, sites, is_sequence=len(parts) > 1) for name, load in parts]
    if not sets:
        raise InputError(f"states holds nothing; expected {EXPECTED}.")
    first, mine = sets[0], list(sets[0].layers)
    for other in sets[1:]:
        theirs = list(other.layers)
        if mine != theirs:
            raise InputError(
                f"{other.name} holds {len(theirs)} layers ({theirs[0]} to {theirs[-1]}) and {first.name} {len(mine)} "
                f"({mine[0]} to {mine[-1]}). All sequences need the same layers."
            )
        if other.dim != first.dim:
            raise InputError(
                f"{other.name} has states of width {other.dim} and {first.name} of width {first.dim}. Either they are "
                "of different models, or the last axis is not the width: pass layout=."
            )
    return sets


def _parts(states: Any, axes: tuple[str, ...] | None) -> Iterator[tuple[str, Load]]:
    """Named groups of arrays; each is one file, one dictionary or one array."""
    if isinstance(states, (str, os.PathLike)):
        path = path_of(states, "states", EXPECTED)
        files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS) if path.is_dir() else [path]
        if not files:
            raise LoadError(f"The folder {str(path)!r} holds no {' or '.join(ENDINGS)} file.")
        for file in files:
            if file.suffix not in ENDINGS:
                raise LoadError(
                    f"{file} is not a {' or '.join(ENDINGS)} file. Save hidden states with "
                    "safetensors.torch.save_file, or numpy.savez."
                )
            yield str(file), partial(tensors_in, file)
    elif isinstance(states, Mapping):
        arrays = {str(name): array_of(value, str(name)) for name, value in states.items()}
        yield "the dictionary", lambda: arrays
    elif not isinstance(states, (list, tuple)):
        alone = {"states": array_of(states, "states")}
        yield "the array", lambda: alone
    elif all(isinstance(entry, (str, os.PathLike, Mapping)) for entry in states):
        for place, entry in enumerate(states):
            for name, load in _parts(entry, axes):
                yield f"dictionary {place}" if isinstance(entry, Mapping) else name, load
    elif axes is None:
        raise InputError(
            "A list of arrays may hold one array per layer or one per sequence. Pass layout='batch tokens dim' or "
            "'tokens dim' for one per layer, or with layers, as in 'layers tokens dim', for one per sequence."
        )
    elif "layers" in axes:
        for place, entry in enumerate(states):
            yield from _parts({"states": array_of(entry, f"states[{place}]")}, axes)
    else:
        layers = {f"layer {place}": array_of(entry, f"states[{place}]") for place, entry in enumerate(states)}
        yield "the list", lambda: layers


def array_of(given: object, name: str) -> Tensor:
    """An array of the caller's: a torch tensor, a numpy array, or one of another library through DLPack.

    Raises:
        InputError: anything else.
    """
    if isinstance(given, Tensor):
        return given.detach()
    if isinstance(given, np.ndarray):
        if given.dtype.kind not in "fiub":
            raise InputError(f"{name} is a numpy array of {given.dtype}; expected floating-point numbers.")
        return torch.from_numpy(np.array(given) if not given.flags.writeable else given)
    if hasattr(given, "__dlpack__"):
        try:
            return torch.from_dlpack(given)  # type: ignore[attr-defined]
        except (BufferError, RuntimeError, TypeError) as error:
            raise InputError(
                f"{name} is {kind_of(given)}, which torch cannot read through DLPack ({error}). Convert it to numpy."
            ) from error
    raise InputError(
        f"{name} is {kind_of(given)}; expected an array: torch, numpy, or one with __dlpack__ such as JAX's."
    )


def _one(
    name: str, load: Load, axes: tuple[str, ...] | None, at: tuple[SiteRef, ...] | None, *, is_sequence: bool
) -> StateSet:
    """Look at the arrays of one file or dictionary: which are layers, of which sites, and with which axes."""
    arrays = load()
    ids, mask = _ids_and_mask(name, arrays)
    states = {key: array for key, array in arrays.items() if key not in (*IDS, MASK)}
    if not states:
        raise InputError(f"{name} holds no hidden states; got {', '.join(arrays) or 'nothing'}.")
    for key, array in states.items():
        if array.dtype not in FLOATS:
            floats = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise InputError(f"{name}: {key!r:.80} is {array.dtype}; hidden states are {floats}.")

    # One array that is not called after a layer holds them all, unless the declared axes say otherwise.
    key, first = next(iter(states.items()))
    alone = len(states) == 1 and not any(letter.isdigit() for letter in key)
    is_stack = "layers" in axes if axes is not None else alone
    if is_stack and len(states) > 1:
        raise InputError(f"{name} holds {len(states)} arrays, and layout='{' '.join(axes or ())}' describes one.")
    layers: dict[SiteRef, tuple[str, int | None]] = {}
    if is_stack:
        if axes is None:
            raise InputError(
                _rows_unknown(first.shape, f"{name}: {key!r:.80}")
                if first.ndim == 2
                else f"One array with all layers needs its axes declared: {name}: {key!r:.80} has shape "
                f"{tuple(first.shape)}. Pass layout='tokens layers dim' (as vLLM writes it) or 'layers tokens dim' "
                "(--layout on the command line)."
            )
        _check(axes, first.shape, f"{name}: {key!r:.80}")
        for index in range(first.shape[axes.index("layers")]):
            layers[SiteRef(None, index, DEFAULT_SITE)] = key, index
    else:
        sites = {key: SiteRef(None, 0, DEFAULT_SITE)} if alone else _sites_of_names(list(states), name)
        layers = {ref: (other, None) for other, ref in sites.items()}
    if at is not None:
        if len(at) != len(layers):
            raise InputError(f"{name} holds {len(layers)} layers, and at= names {len(at)} sites. Name one per layer.")
        layers = dict(zip(at, layers.values(), strict=True))
    if axes is None:
        is_matrix = first.ndim == 2
        if is_matrix and not (is_sequence or ids is not None or mask is not None):
            raise InputError(_rows_unknown(first.shape, f"{name}: {key!r:.80}"))
        axes = ("tokens", "dim") if is_matrix else ("batch", "tokens", "dim")
    for other, array in states.items():
        _check(axes, array.shape, f"{name}: {other!r:.80}")

    shapes = {tuple(_in_order(states[key], axes, index).shape) for key, index in layers.values()}
    if len(shapes) > 1:
        raise InputError(
            f"{name}: the layers have different shapes, {sorted(shapes)} as sequences, tokens and width. Either the "
            "last axis is not the width (pass layout=), or they are of different inputs."
        )
    sequences, tokens, dim = shapes.pop()
    return StateSet(
        name,
        load,
        layers,
        axes,
        sequences,
        tokens,
        dim,
        frozenset(array.dtype for array in states.values()),
        _formats_that_fit([_in_order(states[key], axes, index) for key, index in layers.values()]),
        _matching(name, "token ids", ids, sequences, tokens),
        _matching(name, MASK, mask, sequences, tokens),
    )


def _ids_and_mask(name: str, arrays: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Token ids and mask."""
    given = [key for key in IDS if key in arrays]
    if len(given) > 1:
        raise InputError(f"{name} holds {' and '.join(given)}; leave one out.")
    for key in (*given, MASK):
        if key in arrays and (arrays[key].dtype in FLOATS or arrays[key].ndim not in (1, 2)):
            got = f"{arrays[key].dtype} of shape {tuple(arrays[key].shape)}"
            raise InputError(f"{name}: {key} is {got}; expected whole numbers, one per token.")
    # vLLM writes empty ids for a request that was given as embeddings.
    ids = arrays[given[0]].long() if given and arrays[given[0]].numel() else None
    mask = arrays.get(MASK)
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"{name}: {MASK} holds other values than 0 and 1.")
    return ids, None if mask is None else mask.bool()


def _matching(name: str, what: str, given: Tensor | None, sequences: int, tokens: int) -> Tensor | None:
    """Ids or mask as ``(sequences, tokens)``."""
    if given is None:
        return None
    matching = given.unsqueeze(0) if given.ndim == 1 else given
    if tuple(matching.shape) != (sequences, tokens):
        raise InputError(
            f"{name}: {what} of shape {tuple(given.shape)} do not fit {sequences} sequences of {tokens} tokens. If the "
            "axes of the states are in another order, pass layout=."
        )
    return matching


def _parsed_axes(text: str) -> tuple[str, ...]:
    """Read words such as ``"tokens layers dim"``."""
    words = tuple(text.split())
    is_known = set(words) <= set(AXES) and len(set(words)) == len(words)
    if not is_known or "dim" not in words or not {"tokens", "batch"} & set(words):
        raise InputError(
            f"layout={text!r}: expected dim and tokens, or batch for inputs of one vector each, or both, and "
            "optionally layers, each once, in the order of the array's axes, e.g. 'tokens layers dim'."
        )
    return words


def _check(axes: tuple[str, ...], shape: Sequence[int], name: str) -> None:
    """Refuse an array with another number of axes, or an empty one."""
    if len(shape) != len(axes):
        raise InputError(
            f"{name} has shape {tuple(shape)}, which is not '{' '.join(axes)}'. Pass layout= with one word "
            f"per axis out of {', '.join(AXES)}."
        )
    if 0 in shape:
        raise InputError(f"{name} has shape {tuple(shape)}: it is empty.")


def _rows_unknown(shape: Sequence[int], name: str) -> str:
    """The question what the rows of a matrix are."""
    return (
        f"{name} has shape {tuple(shape)}, and its rows may be the {shape[0]} tokens of one sequence, which are "
        f"compared with each other, or {shape[0]} inputs of one vector each, such as embeddings of sentences. "
        "Pass layout='tokens dim' or layout='batch dim' (--layout on the command line)."
    )


def _in_order(array: Tensor, axes: tuple[str, ...], index: int | None) -> Tensor:
    """An array, or one layer of it, as ``batch tokens dim``."""
    words = list(axes)
    if index is not None:
        array = array.select(words.index("layers"), index)
        words.remove("layers")
    for word in {"batch", "tokens"} - set(words):
        words.append(word)
        array = array.unsqueeze(-1)
    return array.permute([words.index(word) for word in ("batch", "tokens", "dim")])


def parse_sites(words: Sequence[str] | str) -> tuple[SiteRef, ...]:
    """Sites in order, e.g. ``["block.in@0", "block.out@0-2"]``.

    Example:
        >>> [str(ref) for ref in parse_sites("block.in@0 block.out@0-1")]
        ['block 0 block.in', 'block 0 block.out', 'block 1 block.out']
    """
    refs: list[SiteRef] = []
    for word in words.split() if isinstance(words, str) else words:
        site, at, numbers = word.partition("@")
        if site not in SITES or site.endswith((".probs", ".mixed")) or not at:
            raise InputError(
                f"at: {word!r} is not a stream site with block numbers, as in 'block.out@0-11' or 'final@11'."
            )
        for piece in numbers.split(","):
            match = _RANGE.fullmatch(piece)
            if match is None:
                raise InputError(
                    f"at: {word!r}: after '@' come block numbers, as in 'block.out@0-11' or 'block.out@1,15'."
                )
            first, last = int(match[1]), int(match[2] or match[1])
            refs.extend(SiteRef(None, layer, site) for layer in range(first, last + 1))
    if len(set(refs)) < len(refs):
        raise InputError("at: a site is named twice.")
    return tuple(refs)


def _sites_of_names(names: Sequence[str], where: str) -> dict[str, SiteRef]:
    """The site of each array of one layer, from its name.

    ``block.in@0`` says it all. Otherwise the names must be equal up to their last number, as in ``layers.0``,
    ``layers.1``: it is that of the block, and the site is ``block.out``.
    """
    named = [name for name in names if _SITE_NAME.fullmatch(name)]
    if named:
        if odd := [name for name in names if name not in named or name.partition("@")[0] not in SITES]:
            raise InputError(f"{where}: {odd[0]!r:.80} is not a site such as 'block.out@3', while other names are.")
        return dict(zip(names, parse_sites(names), strict=True))
    stems = {name: _LAST_NUMBER.sub("#", name) for name in names}
    if odd := [name for name in names if stems[name] != stems[names[0]] or stems[name] == name]:
        like = "" if odd[0] == names[0] else f" like {names[0]!r:.80}"
        raise InputError(
            f"{where}: {odd[0]!r:.80} is not the name of a layer{like}. Name the arrays after their sites "
            "('block.in@0', 'block.out@0', ...) or number them ('layers.0', 'layers.1', ...); token_ids and "
            "attention_mask may be there too."
        )
    numbers = {name: int(_LAST_NUMBER.findall(name)[0]) for name in names}
    if len(set(numbers.values())) < len(numbers):
        raise InputError(f"{where}: two names, such as {names[0]!r:.80}, stand for the same block.")
    return {name: SiteRef(None, numbers[name], DEFAULT_SITE) for name in sorted(names, key=lambda name: numbers[name])}


def _formats_that_fit(layers: Sequence[Tensor]) -> frozenset[torch.dtype]:
    """The float formats, coarser than the stored one, that represent every value exactly.

    **Heuristic.** A bfloat16 model whose states were saved as float32 shows bfloat16 rounding; that all values are
    representable in a format by chance is next to impossible. The search stops at the first layer that refutes all.
    """
    if any(layer.dtype not in (torch.float32, torch.float64) for layer in layers):
        return frozenset()
    stored = max(torch.finfo(layer.dtype).eps for layer in layers)
    fit = [dtype for dtype in FLOATS if torch.finfo(dtype).eps > stored]
    # The last layer first: embeddings alone may well be the rounded weights of a model that computes in float32.
    for layer in reversed(layers):
        values = layer[torch.isfinite(layer)] if fit else layer
        fit = [dtype for dtype in fit if bool((values.to(dtype).to(values.dtype) == values).all())]
    return frozenset(fit)


def _coarsest_format(sets: Sequence[StateSet]) -> torch.dtype | None:
    """The coarsest format that represents every stored value, if it is coarser than the stored one."""
    if len(frozenset[torch.dtype]().union(*(one.dtypes for one in sets))) > 1:
        return None
    fit = frozenset.intersection(*(one.exact_in for one in sets))
    return max(fit, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def only_first(sets: Sequence[StateSet], sequences: int) -> list[StateSet]:
    """The first sets that hold this many sequences together; a set is not divided.

    Raises:
        InputError: the number falls inside a set.
    """
    first_sets: list[StateSet] = []
    for one in sets:
        if sequences <= 0:
            break
        if one.sequences > sequences:
            raise InputError(f"{one.name} holds {one.sequences} sequences at once, more than sequences={sequences}.")
        first_sets.append(one)
        sequences -= one.sequences
    return first_sets


def refuse_fields(inputs: Inputs) -> None:
    """Refuse inputs that say something about running a model.

    Raises:
        InputError: another field than those that hidden states have.
    """
    for entry in dataclasses.fields(inputs):
        if entry.name not in FOR_STATES and getattr(inputs, entry.name) is not entry.default:
            raise InputError(f"{entry.name} is about running a model, and states are not run. Leave it out.")


def judge_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``judge`` from the options of ``measure`` on the command line.

    Args:
        values: the values of the options.

    Raises:
        InputError: an option that is about running a model.
    """
    if values["model"] is not None:
        raise InputError("Pass a model or states, not both: states are measured as they are, without a model.")
    inputs = {name: values[name] for name in FOR_STATES if name in values}
    arguments = {ARGUMENTS[name]: values[name] for name in ARGUMENTS}
    for option in MEASURE.options:
        name = option.name
        value = values.get(name)
        if name in inputs or name in ARGUMENTS or not option.in_python:
            continue
        if option.noun is None and name not in ("sites", "attention_algorithm"):
            arguments[name] = value
        elif value not in (None, option.default):
            raise InputError(f"{name} is about running a model, and states are not run. Leave it out.")
    return {**arguments, "inputs": Inputs(**inputs), "progress": values["progress"]}


@dataclass(frozen=True)
class DescribedStates:
    """What is known about the model behind hidden states."""

    spec: str
    notes: tuple[str, ...]
    origin: str = "states"
    revision: None = None
    config_hash: None = None
    parameters: None = None
    dtype: None = None
    device: None = None
    attn_implementation: None = None
    model: None = None


@dataclass(frozen=True)
class HeldStates:
    """Hidden states, ready to be read.

    Attributes:
        sets: groups of sequences of one length.
        prepared: the inputs, as far as they are known.
        described: what the run records in place of a model.
        computed_in: the format that limits the values; None for that of the arrays.
    """

    sets: tuple[StateSet, ...]
    prepared: Prepared
    described: DescribedStates
    computed_in: torch.dtype | None

    @classmethod
    def of(
        cls,
        states: Any,
        *,
        layout: str | None,
        at: Sequence[str] | str | None,
        dtype: torch.dtype | str | None,
        policy: TokensPolicy,
        sequences: int | None,
    ) -> HeldStates:
        """Look at what was passed; see :func:`rankscope.judge`."""
        declared = parse_dtype(dtype)
        sets = state_sets(states, layout=layout, at=at)
        if sequences is not None:
            sets = only_first(sets, sequences)
        if policy not in ("content", "no-first"):
            raise InputError(
                f"tokens_policy={policy!r} needs to know the special tokens: pass 'content' or 'no-first'."
            )
        number_format = declared or _coarsest_format(sets)
        batches: list[Batch] = []
        lengths: list[int] = []
        for one in sets:
            inputs, keep = {} if one.ids is None else {"input_ids": one.ids}, one.keep(policy)
            batches.append(Batch(inputs, keep, len(lengths), one.sequences))
            lengths += [one.tokens] * one.sequences if keep is None else keep.sum(dim=1).tolist()
        notes = _remarks(sets, at, declared, number_format)
        if isinstance(states, (str, Path)):
            name = str(states)
        else:
            name = sets[0].name if Path(sets[0].name).suffix and len(sets) == 1 else "hidden states"
        source = f"hidden states, {len(sets[0].layers)} layers"
        prepared = Prepared(tuple(batches), source, tuple(lengths), policy)
        return cls(tuple(sets), prepared, DescribedStates(name, notes), number_format)

    @property
    def selection(self) -> SiteSelection:
        """All sites that are there."""
        return SiteSelection({ref.site: None for ref in self.sets[0].layers})

    @property
    def has_ids(self) -> bool:
        """Whether all token ids are known."""
        return all(one.ids is not None for one in self.sets)


def _remarks(
    sets: Sequence[StateSet], at: object, declared: torch.dtype | None, found: torch.dtype | None
) -> tuple[str, ...]:
    """How the arrays were read, where that was not declared."""
    first, refs = sets[0], list(sets[0].layers)
    axes = " ".join(first.axes)
    remarks = [
        f"arrays were read as '{axes}': {first.sequences} x {first.tokens} tokens of width {first.dim} in {first.name}"
    ]
    if at is None and {ref.site for ref in refs} == {DEFAULT_SITE}:
        remarks.append(
            f"the {len(refs)} layers are called {DEFAULT_SITE} {refs[0].layer} to {refs[-1].layer}; at= (--at) says "
            "otherwise, e.g. if the first are embeddings or the last were normalised"
        )
    if found is not None and declared is None:
        word, wide = (str(dtype).removeprefix("torch.") for dtype in (found, next(iter(first.dtypes))))
        remarks.append(
            f"every {wide} value is representable in {word}, so the float floor is that of {word}; "
            f"dtype='{wide}' (--dtype) says otherwise"
        )
    return tuple(remarks)


class StatePasses(ObservedPasses):
    """Measures the metrics on hidden states.

    Args:
        held: the states.
        reader: reads them.
        writer: collects its rows.
        observers: the reader and further observers.
    """

    def __init__(self, held: HeldStates, reader: SiteReader, writer: RowWriter, observers: Observers) -> None:
        super().__init__(held.prepared, reader, writer, observers)
        self._held = held

    def run(self, *, progress: bool) -> None:
        """All sequences."""
        observers, sets = self._observers, self._held.sets
        observers.expect(self.prepared.sequences, len(sets[0].layers))
        bar = tqdm(total=sum(len(one.layers) for one in sets), desc="measure", unit="layer", disable=not progress)
        with bar, torch.no_grad():
            for part, one in zip(self.prepared, sets, strict=True):
                observers.start(part)
                for ref, state in one.read():
                    observers(ref, state)
                    bar.update()
                observers.commit()
        observers.finish()


def without_inputs_hash(run: Run) -> Run:
    """The run of unknown tokens: it must not be paired with another one by an equal hash of nothing."""
    return dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, inputs_hash=None))
