"""Which tensors of a checkpoint a parameter is made of, as transformers itself maps them when it loads a model.

transformers renames some tensors, and stacks the matrices of the experts of a mixture into one parameter. Both are
followed here as far as a parameter is still made of whole stored tensors; everything else stays without a source and is
refused where it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rankscope.models.weight_files.tensors import StoredTensor


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor, and which part of a parameter it is.

    Attributes:
        stored: the tensor.
        entry: its number along the first axis of the parameter; None if it is the whole parameter.
        rows: first and last row within that entry; None for all.
    """

    stored: StoredTensor
    entry: int | None = None
    rows: tuple[int, int] | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The part of ``parameter`` that this tensor fills."""
        place = parameter if self.entry is None else parameter[self.entry]
        return place if self.rows is None else place[self.rows[0] : self.rows[1]]


def converted_parts(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredPart, ...]]:
    """The parts of every parameter, by its name in the model; none if transformers computes it from what is stored."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    meta_state = model.state_dict()
    sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=dot_natural_key):
        # The state of the model decides whether the prefix of its base is added or removed, as in loading.
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta_state)
        sources[target][pattern].append(name)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    parts_by_name: dict[str, tuple[StoredPart, ...]] = {}
    for target, names in sources.items():
        if target not in meta_state:
            continue
        if list(names) == [None]:
            parts = [StoredPart(tensors[names[None][0]])] if len(names[None]) == 1 else []
        else:
            parts = _stacked(names, by_pattern, tensors, tuple(meta_state[target].shape))
        parts_by_name[target] = tuple(parts)
    return parts_by_name


def _stacked(
    names: Mapping[str | None, list[str]],
    converters: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    shape: tuple[int, ...],
) -> list[StoredPart]:
    """The parts of a stack of experts; none if transformers does more than stack them and join the rows of each."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if None in names:
        return []
    converter = converters[str(next(iter(names)))]
    patterns = [pattern for pattern in converter.source_patterns if pattern in names]
    kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    joins = kinds == [(MergeModulelist, 0), (Concatenate, 1)]
    if (kinds != [(MergeModulelist, 0)] and not joins) or patterns != list(converter.source_patterns):
        return []
    if len(converter.target_patterns) != 1 or (not joins and len(patterns) != 1) or set(patterns) != set(names):
        return []
    parts: list[StoredPart] = []
    row = 0
    for pattern in patterns:
        stored = [tensors[name] for name in names[pattern]]
        height = stored[0].shape[0] if stored[0].shape else 0
        rows = (row, row + height) if joins else None
        expected = (height, *shape[2:]) if joins else shape[1:]
        if len(stored) != shape[0] or any(one.shape != expected for one in stored):
            return []
        parts += [StoredPart(one, entry, rows) for entry, one in enumerate(stored)]
        row += height
    return parts if not joins or row == shape[1] else []
