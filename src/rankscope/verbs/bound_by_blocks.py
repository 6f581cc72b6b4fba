"""``bound`` on a model larger than memory: numbers of one block after the other, for every sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rankscope._errors import ResultError
from rankscope.runs.rows import RowWriter
from rankscope.shards.walking import Walk
from rankscope.theory.attention_graph import AttentionGraph
from rankscope.theory.contraction import GainInterval, LayerGains
from rankscope.theory.lanczos import LanczosEnds
from rankscope.theory.lipschitz import LipschitzConstants
from rankscope.theory.theorems import HeadSizes, LayerQuantities, Passage, StreamState
from rankscope.verbs.bound_found import Found, Measured, StepFacts
from rankscope.verbs.bound_reading import BoundReader
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.streaming import RowProgress, each_stage

_KINDS = {
    kind.__name__: kind
    for kind in (
        AttentionGraph,
        Found,
        LayerGains,
        HeadSizes,
        GainInterval,
        LanczosEnds,
        LayerQuantities,
        LipschitzConstants,
        Passage,
        StepFacts,
        StreamState,
    )
}


class BoundByBlocks:
    """Reads all batches block by block.

    Args:
        config: of the model.
        steps: of Lanczos; None leaves the gains out.
        has_norm: whether a norm acts anywhere in a block.

    Attributes:
        counted: has seen formats and lengths.
    """

    def __init__(self, config: Any, steps: int | None, has_norm: bool) -> None:
        self._config, self._steps, self._has_norm = config, steps, has_norm
        self.counted = SiteReader([], "content", RowWriter())
        self._found: dict[tuple[str | None, int], Found] = {}

    def run(self, walk: Walk, *, shown: bool) -> list[Measured]:
        """All blocks."""
        progress = RowProgress(RowWriter(), self.counted, rest=self._known, learn=self._learn)
        for stage in each_stage(walk, progress, verb="bound", shown=shown):
            reader = BoundReader(stage.view, self._config, self._steps, self._has_norm)
            for part in walk.prepared:
                before = stage.left(part)
                with stage.through(part):
                    found = reader.read_part(part, before)
                for stack, new in found.items():
                    key = (stack, part.first_sequence)
                    self._found[key] = new if key not in self._found else _joined(self._found[key], new)
            self.counted.dtypes |= reader.dtypes
            for stack, lengths in reader.lengths.items():
                self.counted.lengths.setdefault(stack, {}).update(lengths)
        whole = BoundReader(walk.view, self._config, self._steps, self._has_norm)
        ends = [
            (part.first_sequence, key) for part in walk.prepared for key in self._found if key[1] == part.first_sequence
        ]
        return [measured for first, key in ends for measured in whole.finished(key[0], first, self._found[key])]

    def _known(self) -> list[Any]:
        return [[stack, first, written(found)] for (stack, first), found in self._found.items()]

    def _learn(self, known: list[Any]) -> None:
        self._found = {(stack, first): revived(found) for stack, first, found in known}


def _joined(before: Found, new: Found) -> Found:
    """Sequences go on where they were; what the steps have in common is common to more of them."""
    old, more = before.facts, new.facts
    facts = StepFacts(
        bare=old.bare and more.bare,
        has_skip=old.has_skip or more.has_skip,
        has_source=old.has_source or more.has_source,
        nothing_else=old.nothing_else and more.nothing_else,
        any_skip=old.any_skip or more.any_skip,
        kinds=[*old.kinds, *more.kinds],
        width=old.width,
        qk_norm=old.qk_norm or more.qk_norm,
    )
    return Found([[*a, *b] for a, b in zip(before.layers, new.layers, strict=True)], facts)


def written(value: Any) -> Any:
    """Numbers in frozen records as JSON, each record under the name of its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: written(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, tuple):
        return {"kind": "tuple", "fields": [written(item) for item in value]}
    return [written(item) for item in value] if isinstance(value, list) else value


def revived(value: Any) -> Any:
    """What :func:`written` was given; nothing but the records named here is ever made.

    Raises:
        ResultError: a kind that is none of them.
    """
    if isinstance(value, list):
        return [revived(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind, fields = value["kind"], value["fields"]
    if kind == "tuple":
        return tuple(revived(item) for item in fields)
    if kind not in _KINDS:
        raise ResultError(f"{kind!r} is not one of {', '.join(_KINDS)}.")
    return _KINDS[kind](**{name: revived(item) for name, item in fields.items()})
