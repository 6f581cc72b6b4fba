"""The forward passes of ``bound``: the numbers of one block after the other, for every sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rankscope._errors import ResultError
from rankscope.execution.findings import Findings
from rankscope.execution.passes import Execution
from rankscope.models.inputs import Prepared
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.stream.viewing import need_plain_stream
from rankscope.surgery.session import operations_on
from rankscope.theory.attention_graph import AttentionGraph
from rankscope.theory.contraction import Gains, Interval
from rankscope.theory.lanczos import LanczosEnds
from rankscope.theory.lipschitz import LipschitzConstants
from rankscope.theory.theorems import HeadSizes, LayerQuantities, Passage, StreamState
from rankscope.verbs.bound.reading import BoundReader, Found, Measured, StepFacts
from rankscope.verbs.reader import SiteReader

_KINDS = {
    kind.__name__: kind
    for kind in (
        AttentionGraph,
        Found,
        Gains,
        HeadSizes,
        Interval,
        LanczosEnds,
        LayerQuantities,
        LipschitzConstants,
        Passage,
        StepFacts,
        StreamState,
    )
}


class BoundPasses:
    """Reads the numbers of all sequences, block by block.

    Args:
        execution: how the model is run.
        prepared: its inputs.
        steps: of Lanczos; None leaves the gains out.

    Attributes:
        counted: has seen formats and lengths.
    """

    def __init__(self, execution: Execution, prepared: Prepared, steps: int | None) -> None:
        self._execution, self._prepared, self._steps = execution, prepared, steps
        self.counted = SiteReader([], "content", RowWriter())
        self._found: dict[tuple[str | None, int], Found] = {}

    def run(self, blocks: str | Sequence[str] | None, stream: Stream | None) -> list[Measured]:
        """All batches."""
        execution, config = self._execution, self._execution.loaded.config
        view = execution.plan(
            self._prepared, (self._steps,), blocks=blocks, stream=stream, variants=1, reads_weights=True
        )
        need_plain_stream(view, "bound")
        has_norm = _has_norm(view)
        findings = Findings(RowWriter(), {"": self.counted}, rest=self._known, learn_rest=self._learn)
        with execution.stages(findings) as stages:
            for stage in stages:
                reader = BoundReader(stage.view, config, self._steps, has_norm)
                for part in execution.batches():
                    before = stage.left(part)
                    with stage.through(part):
                        found = reader.read_part(part, before)
                    for stack, new in found.items():
                        key = (stack, part.first_sequence)
                        self._found[key] = new if key not in self._found else _joined(self._found[key], new)
                self.counted.dtypes |= reader.dtypes
                for stack, lengths in reader.lengths.items():
                    self.counted.lengths.setdefault(stack, {}).update(lengths)
        execution.collect(findings)
        whole = BoundReader(view, config, self._steps, has_norm)
        ends = [(part, key) for part in self._prepared for key in self._found if key[1] == part.first_sequence]
        return [found for part, key in ends for found in whole.finished(key[0], part.first_sequence, self._found[key])]

    def _known(self) -> list[Any]:
        return [[stack, first, written(found)] for (stack, first), found in self._found.items()]

    def _learn(self, known: list[Any]) -> None:
        self._found |= {(stack, first): revived(found) for stack, first, found in known}


def _has_norm(view: ModelView) -> bool:
    """Whether a norm acts anywhere in a block, and was not taken out."""
    cut = any(operation.get("norm") == "identity" for operation in operations_on(view.model))
    return not cut and any(plan.has_norm for stack in view.stacks for plan in stack.plans)


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
