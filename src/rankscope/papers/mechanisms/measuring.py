"""Every mechanism at one size: whole, without skips, and without skips, MLPs and norms, into one table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from rankscope._errors import DiscoveryError, UnsupportedArithmeticError, UnsupportedOperationError
from rankscope.exact_arithmetic.float64 import WideArithmetic
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.papers._recipe import Settings
from rankscope.papers.measuring.one_network import measure_network
from rankscope.papers.mechanisms.building import built, initial_std, inputs_of, structure
from rankscope.papers.mechanisms.changes import CHANGES, Change
from rankscope.papers.mechanisms.declaring import FULL, SMALL, Mechanism, Size
from rankscope.papers.mechanisms.readings import (
    Orders,
    Rows,
    read_in_float,
    read_order_exactly,
    read_residuals_exactly,
)
from rankscope.papers.mechanisms.table_rows import IN_SMALL, MECHANISMS
from rankscope.papers.training.keeping import written
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteRef
from rankscope.stream.viewing import undisturbed
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader

METRICS = ("mu_over_norm", "mean_cosine", "stable_rank", "effective_rank")
COORDINATES = ("mechanism", "change", "variant", "arithmetic", "seed", "note")
VARIANTS = ("full", "cut", "pure")
AS_IT_IS = "none"
REFUSALS = (UnsupportedOperationError, UnsupportedArithmeticError)


@dataclass(frozen=True)
class Part:
    """One mechanism, as it is or changed, at one initialisation."""

    mechanism: Mechanism
    change: Change | None
    seed: int

    @property
    def name(self) -> str:
        """A name that no other part has."""
        return "-".join((self.mechanism.name, self.change_name.replace(" ", "_"), str(self.seed)))

    @property
    def change_name(self) -> str:
        """Of the change, or that there is none."""
        return AS_IT_IS if self.change is None else self.change.name


def measure_mechanisms(settings: Settings) -> Run:
    """The whole table, the rows of ``settings.only``, or a few rows at a tiny size."""
    started = time.perf_counter()
    size = SMALL if settings.small else FULL
    writer = RowWriter(coordinates=COORDINATES)
    parts = list(_parts(settings, size))
    for part in tqdm(parts, desc="mechanisms", unit="network", disable=not settings.progress):
        facts = {"part": part.name, "size": asdict(size), "text": str(settings.text), "config": _config(part, size)}
        written(writer, settings.keep, part.name, facts, _maker(part, size, settings))
    loaded = built(parts[-1].mechanism, size, parts[-1].seed)
    prepared = inputs_of(loaded, size, settings.text)
    reader = SiteReader([], prepared.policy, writer)
    provenance = provenance_of(loaded, prepared, reader, 0, time.perf_counter() - started)
    seeds = settings.seeds or size.seeds
    return Run(
        kind="reproduce:mechanisms",
        provenance=replace(
            provenance,
            model=f"{len({p.mechanism.name for p in parts})} mechanisms",
            origin="init",
            config_hash=None,
        ),
        floor=floor_of({torch.float64}),
        verdict="",
        table=writer.table(),
        extra={"size": {**asdict(size), "seeds": seeds}},
    )


def _config(part: Part, size: Size) -> dict[str, Any]:
    return dict(part.mechanism.config(size))


def _parts(settings: Settings, size: Size) -> Iterator[Part]:
    names = settings.only or (IN_SMALL if settings.small else tuple(MECHANISMS))
    for name in names:
        changes = [change for change in CHANGES if change.mechanism == name]
        for change in (None, *changes):
            for seed in range(settings.seeds or size.seeds):
                yield Part(MECHANISMS[name], change, seed)


def _maker(part: Part, size: Size, settings: Settings) -> Callable[[RowWriter], None]:
    def make(writer: RowWriter) -> None:
        change = part.change
        loaded = built(part.mechanism, size, part.seed, None if change is None else change.config)
        if change is not None:
            change.apply(loaded.model)
        at: dict[str, str | int | None] = {
            "mechanism": part.mechanism.name,
            "change": part.change_name,
            "seed": part.seed,
        }
        _read(part.mechanism, loaded, inputs_of(loaded, size, settings.text), Rows(writer, at))

    return make


def _read(mechanism: Mechanism, loaded: LoadedModel, prepared: Prepared, rows: Rows) -> None:
    with undisturbed(loaded.model), quiet_transformers(), WideArithmetic():
        try:
            view = structure(loaded.model, prepared[0])
        except DiscoveryError as error:
            rows.note("refused", 1.0, str(error))
            return
        rows.note("parameters", float(loaded.parameters))
        rows.note("initial_std", initial_std(view))
        network = Network(loaded, prepared, view)
        network.read("full", replace(rows, at={**rows.at, "variant": "full"}))
        for variant in VARIANTS[1:] if not mechanism.uncut else ():
            network.read(variant, replace(rows, at={**rows.at, "variant": variant}))
        if mechanism.uncut:
            replace(rows, at={**rows.at, "variant": "cut"}).note("refused", 1.0, mechanism.uncut)


def _operation(variant: str, view: ModelView) -> Operation:
    """What is cut; a stack without MLPs has none to drop."""
    if variant == "full":
        return Operation()
    if variant == "cut":
        return variant_named("+norm+mlp").operation
    has_mlp = any({"mlp", "both"} & set(plan.skips) for stack in view.stacks for plan in stack.plans)
    pure = variant_named("pure").operation
    return pure if has_mlp else replace(pure, mlp="keep")


@dataclass
class Network:
    """One mechanism with its inputs and its structure; orders found without skips serve the next variant."""

    loaded: LoadedModel
    prepared: Prepared
    view: ModelView
    orders: Orders | None = None

    def read(self, variant: str, rows: Rows) -> None:
        """Battery and order in float64, and in exact arithmetic where skips are cut, as there float64 is soon blind."""
        operation = _operation(variant, self.view)
        try:
            unequal = self._in_float(operation, rows)
            # Where equal tokens leave unequal nothing falls below the float floor: one seed shows that both agree.
            if variant != "full" and not (unequal and rows.at["seed"]):
                with operating(self.loaded.model, operation, view=self.view):
                    self._exactly(variant, rows)
        except REFUSALS as error:
            rows.note("refused", 1.0, str(error))

    def _in_float(self, operation: Operation, rows: Rows) -> bool:
        def size_too(ref: SiteRef, x: Tensor, part: Batch) -> None:
            if ref.site == "block.out":
                size = float(x[0].square().mean().sqrt())
                rows.add("log10_token_size", ref, math.log10(size) if size > 0 else -math.inf, "float64")

        model, at = self.loaded.model, {**rows.at, "arithmetic": "float64"}
        measure_network(
            model,
            self.prepared,
            operation,
            metrics=METRICS,
            writer=rows.writer,
            at=at,
            beside=size_too,
            view=self.view,
        )
        with operating(model, operation, view=self.view):
            return read_in_float(self.view, self.prepared[0], rows)

    def _exactly(self, variant: str, rows: Rows) -> None:
        """The order is one of the mechanism: it is read with MLPs and norms, and holds without them."""
        first = _first(self.prepared[0])
        if variant == "cut":
            self.orders = read_order_exactly(self.view, first, rows)
        if self.orders is not None:
            read_residuals_exactly(self.view, first, rows, self.orders)


def _first(batch: Batch) -> Batch:
    """The first sequence alone."""

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch.sequences
        return value[:1] if whole else value

    return replace(batch, inputs={name: cut(value) for name, value in batch.inputs.items()}, sequences=1)
