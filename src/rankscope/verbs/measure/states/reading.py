"""Everything a caller may pass as hidden states, as sets of equally long sequences with one array per site."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope._types import path_of
from rankscope.errors import InputError, LoadError
from rankscope.models.inputs import TokensPolicy
from rankscope.models.inputs.rows import TokenRows, all_or_some, kept_tokens
from rankscope.models.weight_files.tensors import StoredTensor
from rankscope.stream.sites import SiteRef
from rankscope.verbs.measure.states.arrays import ENDINGS, NARROW_READ, Array, Packed, array_of, arrays_in, whole
from rankscope.verbs.measure.states.layout import (
    DEFAULT_SITE,
    Axes,
    axes_of_layer,
    axes_of_stack,
    parse_sites,
    relabelled,
    sites_of_names,
)

IDS = ("token_ids", "input_ids")
MASK = "attention_mask"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EXPECTED = "a .safetensors or .npz file, a folder of them, a dictionary of arrays, an array, or a list of these"


@dataclass(frozen=True)
class Layer:
    """The hidden states of one site: an array, or one layer of it."""

    ref: SiteRef
    array: Array
    axes: Axes
    index: int | None

    def read(self) -> Tensor:
        """The states as ``batch tokens dim``."""
        words = list(self.axes.words)
        if self.index is None:
            state = whole(self.array)
        else:
            axis = words.index("layers")
            assert not isinstance(self.array, Packed)
            state = self.array.select(axis, self.index)
            del words[axis]
        if "batch" not in words:
            words.insert(0, "batch")
            state = state.unsqueeze(0)
        if "tokens" not in words:  # inputs of one vector each
            words.append("tokens")
            state = state.unsqueeze(-1)
        return state.permute([words.index(word) for word in ("batch", "tokens", "dim")])


@dataclass(frozen=True)
class StateSet:
    """Sequences of one length, possibly padded.

    Attributes:
        name: the file, or words for what was passed.
        layers: in order of depth.
        sequences: how many.
        tokens: length of each, with padding.
        dim: width.
        ids: token ids ``(sequences, tokens)``, if known.
        mask: False where a token is padding, if any is.
    """

    name: str
    layers: tuple[Layer, ...]
    sequences: int
    tokens: int
    dim: int
    ids: Tensor | None
    mask: Tensor | None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the arrays."""
        return {layer.array.dtype for layer in self.layers}

    def keep(self, policy: TokensPolicy) -> Tensor | None:
        """Which tokens count; None for all."""
        content = torch.ones(self.sequences, self.tokens, dtype=torch.bool) if self.mask is None else self.mask
        return all_or_some(kept_tokens(TokenRows(content.long(), content), policy, None))


def state_sets(
    states: Any, *, layout: str | None = None, at: Sequence[str] | str | None = None, dtype: torch.dtype | None = None
) -> list[StateSet]:
    """Read the headers of files, or look at arrays in memory; no hidden state is read.

    Args:
        states: see :func:`rankscope.judge`.
        layout: the order of the axes of every array.
        at: the site of each layer, in order.
        dtype: the format the model ran in.

    Raises:
        InputError: it is not clear what is what.
        LoadError: a file is damaged.
    """
    axes = None if layout is None else Axes.parse(layout)
    sites = None if at is None else parse_sites(at)
    parts = list(_parts(states, axes, dtype is torch.bfloat16))
    sets = [_one(name, arrays, axes, sites, is_sequence=len(parts) > 1) for name, arrays in parts]
    if not sets:
        raise InputError(f"states holds nothing; expected {EXPECTED}.")
    first = sets[0]
    for other in sets[1:]:
        mine, theirs = ([layer.ref for layer in one.layers] for one in (first, other))
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


def _parts(states: Any, axes: Axes | None, bfloat16: bool) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Named groups of arrays; each is one file, one dictionary or one array."""
    if isinstance(states, (str, os.PathLike)):
        for path in _files(path_of(states, "states", EXPECTED)):
            yield str(path), arrays_in(path, bfloat16=bfloat16)
    elif isinstance(states, Mapping):
        yield "the dictionary", {str(name): array_of(value, str(name)) for name, value in states.items()}
    elif isinstance(states, (list, tuple)):
        yield from _listed(states, axes, bfloat16)
    else:
        yield "the array", {"states": array_of(states, "states")}


def _listed(states: Sequence[Any], axes: Axes | None, bfloat16: bool) -> Iterator[tuple[str, Mapping[str, Array]]]:
    if all(isinstance(entry, (str, os.PathLike, Mapping)) for entry in states):
        for place, entry in enumerate(states):
            for name, arrays in _parts(entry, axes, bfloat16):
                yield f"dictionary {place}" if isinstance(entry, Mapping) else name, arrays
        return
    if axes is None:
        raise InputError(
            "A list of arrays may hold one array per layer or one per sequence. Pass layout='batch tokens dim' or "
            "'tokens dim' for one per layer, or with layers, as in 'layers tokens dim', for one per sequence."
        )
    own = [array_of(entry, f"states[{place}]") for place, entry in enumerate(states)]
    if axes.is_stacked:
        yield from ((f"states[{place}]", {"states": array}) for place, array in enumerate(own))
    elif own:
        yield "the list", {f"layer {place}": array for place, array in enumerate(own)}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS)
    if not files:
        raise LoadError(f"The folder {str(path)!r} holds no {' or '.join(ENDINGS)} file.")
    return files


def _one(
    name: str, arrays: Mapping[str, Array], axes: Axes | None, at: tuple[SiteRef, ...] | None, *, is_sequence: bool
) -> StateSet:
    ids, mask = _beside(name, arrays)
    is_sequence |= ids is not None or mask is not None
    states = {key: array for key, array in arrays.items() if key not in (*IDS, MASK)}
    if not states:
        raise InputError(f"{name} holds no hidden states; got {', '.join(arrays) or 'nothing'}.")
    for key, array in states.items():
        if array.dtype not in FLOATS:
            floats = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise InputError(f"{name}: {key!r:.80} is {array.dtype}; hidden states are {floats}.")
    only = next(iter(states)) if len(states) == 1 else None
    numbered = only is None or any(letter.isdigit() for letter in only)
    if only is not None and (axes.is_stacked if axes else not numbered):
        layers = _stacked(name, only, states[only], axes, None if ids is None else tuple(ids.shape), at)
    elif axes is not None and axes.is_stacked:
        raise InputError(f"{name} holds {len(states)} arrays, and layout='{' '.join(axes.words)}' describes one.")
    elif only is not None and axes is not None and not numbered:
        layers = _by_name(name, {"layer 0": states[only]}, axes, at, is_sequence=True)
    else:
        layers = _by_name(name, states, axes, at, is_sequence=is_sequence)
    shapes = {_sizes(layer) for layer in layers}
    if len(shapes) > 1:
        raise InputError(
            f"{name}: the layers have different shapes, {sorted(shapes)} as sequences, tokens and width. Either the "
            "last axis is not the width (pass layout=), or they are of different inputs."
        )
    sequences, tokens, dim = shapes.pop()
    return StateSet(
        name,
        layers,
        sequences,
        tokens,
        dim,
        _matching(name, "token ids", ids, sequences, tokens),
        _matching(name, MASK, mask, sequences, tokens),
    )


def _beside(name: str, arrays: Mapping[str, Array]) -> tuple[Tensor | None, Tensor | None]:
    """Token ids and mask."""
    given = [key for key in IDS if key in arrays]
    if len(given) > 1:
        raise InputError(f"{name} holds {' and '.join(given)}; leave one out.")
    for key in (*given, MASK):
        if key in arrays and (arrays[key].dtype in FLOATS or len(arrays[key].shape) not in (1, 2)):
            got = f"{arrays[key].dtype} of shape {tuple(arrays[key].shape)}"
            raise InputError(f"{name}: {key} is {got}; expected whole numbers, one per token.")
    # vLLM writes empty ids for a request that was given as embeddings.
    ids = whole(arrays[given[0]]).long() if given and 0 not in arrays[given[0]].shape else None
    mask = whole(arrays[MASK]) if MASK in arrays else None
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(f"{name}: {MASK} holds other values than 0 and 1.")
    return ids, None if mask is None else mask.bool()


def _stacked(
    name: str, key: str, array: Array, axes: Axes | None, ids: tuple[int, ...] | None, at: tuple[SiteRef, ...] | None
) -> tuple[Layer, ...]:
    axes = axes_of_stack(array.shape, ids, f"{name}: {key!r:.80}") if axes is None else axes
    axes.check(array.shape, f"{name}: {key!r:.80}")
    depth = axes.size("layers", array.shape)
    axis = axes.words.index("layers")
    piece = array.dtype.itemsize
    for size in array.shape[axis + 1 :]:
        piece *= size
    if isinstance(array, Packed) or (isinstance(array, StoredTensor) and piece < NARROW_READ):
        array = whole(array)
    sites_by_name = {str(index): SiteRef(None, index, DEFAULT_SITE) for index in range(depth)}
    refs = sites_by_name if at is None else relabelled(sites_by_name, at, name)
    return tuple(Layer(ref, array, axes, int(index)) for index, ref in refs.items())


def _by_name(
    name: str, states: Mapping[str, Array], axes: Axes | None, at: tuple[SiteRef, ...] | None, *, is_sequence: bool
) -> tuple[Layer, ...]:
    sites_by_name = sites_of_names(list(states), name)
    refs = sites_by_name if at is None else relabelled(sites_by_name, at, name)
    layers = []
    for key, ref in refs.items():
        shape = states[key].shape
        own = axes_of_layer(shape, f"{name}: {key!r:.80}", is_sequence=is_sequence) if axes is None else axes
        own.check(shape, f"{name}: {key!r:.80}")
        layers.append(Layer(ref, states[key], own, None))
    return tuple(layers)


def _sizes(layer: Layer) -> tuple[int, int, int]:
    batch, tokens, dim = (layer.axes.size(word, layer.array.shape) for word in ("batch", "tokens", "dim"))
    return batch, tokens, dim


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
            raise InputError(
                f"{one.name} holds {one.sequences} sequences at once, of which {sequences} were asked for."
            )
        first_sets.append(one)
        sequences -= one.sequences
    return first_sets


def coarsest_format(sets: Sequence[StateSet]) -> torch.dtype | None:
    """The coarsest float format that represents every stored value exactly, if it is coarser than the stored one.

    **Heuristic.** A bfloat16 model whose states were saved as float32 shows bfloat16 rounding; that all values are
    representable in a format by chance is next to impossible. The search stops at the first layer that refutes all.
    """
    stored = set[torch.dtype]().union(*(one.dtypes for one in sets))
    if len(stored) > 1 or not stored & {torch.float32, torch.float64}:
        return None
    candidates = [
        dtype
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        if torch.finfo(dtype).eps > torch.finfo(next(iter(stored))).eps
    ]
    for one in sets:
        # The last layer first: embeddings alone may well be the rounded weights of a model that computes in float32.
        for layer in reversed(one.layers):
            if not candidates:
                return None
            values = layer.read()
            values = values[torch.isfinite(values)]
            candidates = [dtype for dtype in candidates if bool((values.to(dtype).to(values.dtype) == values).all())]
    return candidates[0] if candidates else None
