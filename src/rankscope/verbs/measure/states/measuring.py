"""Feeds stored hidden states to the reader that otherwise observes a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tqdm.auto import tqdm

from rankscope.errors import InputError
from rankscope.execution.findings import Finished
from rankscope.models.inputs import Batch, Inputs, Prepared, TokensPolicy
from rankscope.models.loading.dtypes import parse_dtype
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.verbs.measure import MEASURE
from rankscope.verbs.measure.passes import Observers
from rankscope.verbs.measure.states.layout import DEFAULT_SITE
from rankscope.verbs.measure.states.reading import StateSet, coarsest_format, only_first, state_sets
from rankscope.verbs.reader import SiteReader

FOR_STATES = ("sequences", "tokens_policy", "labels", "seed")
"""Fields of ``Inputs`` that have a meaning for hidden states."""
ARGUMENTS = {"stream": "layout", "dtype": "computed_in"}
"""Options of ``measure`` that have another name in ``judge``."""


def refuse_fields(inputs: Inputs) -> None:
    """Refuse inputs that say something about running a model.

    Raises:
        InputError: another field than those that hidden states have.
    """
    for entry in dataclasses.fields(inputs):
        if entry.name not in FOR_STATES and getattr(inputs, entry.name) is not entry.default:
            raise InputError(f"{entry.name} is about running a model, and states are not run. Leave it out.")


def judge_arguments(values: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """The arguments of ``judge`` from the options of ``measure`` on the command line.

    Args:
        values: the values of the options.
        others: values of options that states do not have.

    Raises:
        InputError: an option that is about running a model.
    """
    if values["model"] is not None:
        raise InputError("Pass a model or states, not both: states are measured as they are, without a model.")
    inputs = {name: values[name] for name in FOR_STATES if name in values}
    arguments = {ARGUMENTS[name]: values[name] for name in ARGUMENTS}
    for option in MEASURE.options:
        name = option.name
        value = others.get(name, values.get(name))
        if name in inputs or name in ARGUMENTS or (not option.in_python and name not in others):
            continue
        if option.noun is None and name not in (*others, "sites", "attention_algorithm"):
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
        sets = state_sets(states, layout=layout, at=at, dtype=declared)
        if sequences is not None:
            sets = only_first(sets, sequences)
        if policy not in ("content", "no-first"):
            raise InputError(
                f"tokens_policy={policy!r} needs to know the special tokens: pass 'content' or 'no-first'."
            )
        number_format = declared or coarsest_format(sets)
        batches: list[Batch] = []
        for one in sets:
            first = sum(batch.sequences for batch in batches)
            inputs = {} if one.ids is None else {"input_ids": one.ids}
            batches.append(Batch(inputs, one.keep(policy), first, one.sequences))
        lengths = tuple(
            count
            for one, batch in zip(sets, batches, strict=True)
            for count in ([one.tokens] * one.sequences if batch.keep is None else batch.keep.sum(dim=1).tolist())
        )
        notes = _remarks(sets, at, declared, number_format)
        name = _name(states, sets)
        prepared = Prepared(tuple(batches), f"hidden states, {len(sets[0].layers)} layers", lengths, policy)
        return cls(tuple(sets), prepared, DescribedStates(name, notes), number_format)

    @property
    def selection(self) -> SiteSelection:
        """All sites that are there."""
        return SiteSelection({layer.ref.site: None for layer in self.sets[0].layers})

    @property
    def has_ids(self) -> bool:
        """Whether all token ids are known."""
        return all(one.ids is not None for one in self.sets)


def _name(states: Any, sets: Sequence[StateSet]) -> str:
    """What the run calls the model."""
    if isinstance(states, (str, Path)):
        return str(states)
    return sets[0].name if Path(sets[0].name).suffix and len(sets) == 1 else "hidden states"


def _remarks(
    sets: Sequence[StateSet], at: object, declared: torch.dtype | None, found: torch.dtype | None
) -> tuple[str, ...]:
    first = sets[0]
    refs = [layer.ref for layer in first.layers]
    axes = " ".join(first.layers[0].axes.words)
    remarks = [
        f"arrays were read as '{axes}': {first.sequences} x {first.tokens} tokens of width {first.dim} in {first.name}"
    ]
    if at is None and {ref.site for ref in refs} == {DEFAULT_SITE}:
        remarks.append(
            f"the {len(refs)} layers are called {DEFAULT_SITE} {refs[0].layer} to {refs[-1].layer}; at= (--at) says "
            "otherwise, e.g. if the first are embeddings or the last were normalised"
        )
    stored = {dtype for one in sets for dtype in one.dtypes}
    if found is not None and declared is None:
        word, wide = (str(dtype).removeprefix("torch.") for dtype in (found, next(iter(stored))))
        remarks.append(
            f"every {wide} value is representable in {word}, so the float floor is that of {word}; "
            f"dtype='{wide}' (--dtype) says otherwise"
        )
    return tuple(remarks)


class StatePasses:
    """Measures the metrics on hidden states.

    Args:
        held: the states.
        reader: reads them.
        writer: collects its rows.
        selection: the sites to measure.
        observers: the reader, and what stands beside it.

    Attributes:
        prepared: the inputs that were finished.
        reader: knows the dtypes, shapes and lengths seen.
        finished: counts the finished sequences.
    """

    def __init__(
        self,
        held: HeldStates,
        reader: SiteReader,
        writer: RowWriter,
        selection: SiteSelection,
        observers: Observers,
    ) -> None:
        self._held, self._writer, self._selection = held, writer, selection
        self.reader, self.prepared = reader, held.prepared
        self._observers = observers
        self.finished = Finished(writer, held.prepared.sequences, "sequences")

    def run(self, *, progress: bool) -> None:
        """All sequences."""
        observers = self._observers
        chosen = [[layer for layer in one.layers if layer.ref in self._selection] for one in self._held.sets]
        observers.expect(self.prepared.sequences, max(map(len, chosen), default=0))
        bar = tqdm(total=sum(map(len, chosen)), desc="measure", unit="layer", disable=not progress)
        with bar, self.finished.saved_on_interrupt(), torch.no_grad():
            for part, layers in zip(self._held.prepared, chosen, strict=True):
                observers.start(part)
                for layer in layers:
                    observers(layer.ref, layer.read())
                    bar.update()
                observers.commit()
                self.finished.add(part.sequences)
        observers.finish()
        self.prepared = self.finished.sequences_of(self._held.prepared)

    @property
    def extra(self) -> dict[str, Any]:
        """Further entries of the run, besides the rows."""
        return self._observers.extra(self.prepared.sequences)

    def classes(self) -> dict[str, Any]:
        """How far the classes of the inputs are apart; empty if they are not known."""
        return self._observers.classes()

    def notes(self) -> list[str]:
        """Notes about what was observed but not measured."""
        return self.reader.notes()

    def table(self) -> pa.Table:
        """The rows.

        Raises:
            InputError: there are none.
        """
        table = self._writer.table()
        if table.num_rows == 0:
            there = ", ".join(dict.fromkeys(layer.ref.site for layer in self._held.sets[0].layers))
            raise InputError(
                f"The chosen sites ({', '.join(self._selection.layers)}) are not among the states: {there}."
            )
        return table


def without_inputs_hash(run: Run) -> Run:
    """The run of unknown tokens: it must not be paired with another one by an equal hash of nothing."""
    return dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, inputs_hash=None))
