"""Every mechanism at one size: whole, without skips, and without skips, MLPs and norms.

Two things are measured: how far apart tokens are after every block, and the behaviour near collapse. There, tokens are
so close together that a block responds with the leading power of their distance. That power is its order; 0 means that
equal tokens leave the block unequal.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.errors import DiscoveryError, UnsupportedArithmeticError, UnsupportedOperationError
from rankscope.exact_arithmetic.float64 import WideArithmetic
from rankscope.exact_arithmetic.registry import refuse
from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.measuring.network import SITES, measure_network
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.mechanisms.rows import FULL, IN_SMALL, MECHANISMS, SMALL, Mechanism, MechanismSize
from rankscope.ext.papers.mechanisms.show import AS_IT_IS
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.models.inputs import Batch, Prepared, prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.discovery import discover
from rankscope.stream.frames import first_tensor
from rankscope.stream.sites import SiteRef
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import undisturbed
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablate.variants import variant_named
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader

METRICS = ("mu_over_norm", "mean_cosine", "stable_rank", "effective_rank")
COORDINATES = ("mechanism", "change", "variant", "arithmetic", "seed", "note")
REFUSALS = (UnsupportedOperationError, UnsupportedArithmeticError)
LOG10 = math.log(10.0)
NEAR, NEARER = -200.0, -201.0
"""Natural logarithms of the two factors by which tokens are drawn together in exact arithmetic."""
CLOSE, CLOSER = 1e-2, 1e-3
"""The same factors in float64, where less room is left."""
UNEQUAL = 1e-12
"""Relative residual above which tokens that entered equal have left unequal; their rounding stays near 1e-15."""
STILL = 1e-3
"""A change of a logarithm below this counts as none."""
BELOW_ROUNDING = math.log(1e-13)
"""A block of order 1 that shrinks a deviation by more than this does so with rows of attention that differ by rounding
alone: nothing after it can be told."""
NO_SINK = -math.inf
"""A score to which a softmax gives nothing, exactly: exact arithmetic sees a weight of e^-10000."""
EMBEDDINGS_UP = 50.0
"""Brings embeddings of standard deviation 0.02 to 1, the size that a norm gives to the input of a branch."""


@dataclass(frozen=True)
class Change:
    """One component changed in one mechanism, to test whether it explains the row.

    Attributes:
        mechanism: the row it explains.
        name: of the change.
        apply: changes the weights in place; None if the configuration is changed.
        config: keys of the configuration that are changed.
    """

    mechanism: str
    name: str
    apply: Callable[[nn.Module], None] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def _fill(ending: str, value: float, model: nn.Module) -> None:
    parameters = [parameter for name, parameter in model.named_parameters() if name.endswith(ending)]
    assert parameters, f"no parameter ends with {ending}"
    for parameter in parameters:
        parameter.fill_(value)


@torch.no_grad()
def _raise_embeddings(model: nn.Module) -> None:
    model.get_input_embeddings().weight.mul_(EMBEDDINGS_UP)  # type: ignore[operator]


CHANGES: tuple[Change, ...] = (
    Change("sinks", "no sinks", partial(_fill, ".sinks", NO_SINK)),
    Change("nystrom", "no convolution", partial(_fill, "self.conv.weight", 0.0)),
    Change("llama", "embeddings x 50", _raise_embeddings),
    Change("modernbert", "no epsilon", config={"norm_eps": 1e-60}),
    Change("relative-bias", "no bias", partial(_fill, "relative_attention_bias.weight", 0.0)),
)


def measure(settings: Settings) -> Run:
    """The whole table, the rows of ``settings.only``, or a few rows at a tiny size."""
    started = time.perf_counter()
    size = settings.pick(FULL, SMALL)
    names = settings.only or (IN_SMALL if settings.small else tuple(MECHANISMS))
    common = {"size": (SMALL if settings.small else FULL).to_json(), "text": str(settings.text)}
    parts = []
    for name in names:
        config = MECHANISMS[name].config(size)
        for change in (None, *(change for change in CHANGES if change.mechanism == name)):
            for seed in range(size.seeds):
                part = "-".join((name, (change.name if change else AS_IT_IS).replace(" ", "_"), str(seed)))
                make = partial(_measure_one, MECHANISMS[name], change, seed, size, settings.text)
                parts.append(WorkPart(part, {"part": part, **common, "config": config}, make))
    writer = measured_parts(settings, COORDINATES, parts)
    loaded = built(MECHANISMS[names[-1]], size, size.seeds - 1)
    prepared = inputs_of(loaded, size, settings.text)
    reader = SiteReader([], prepared.policy, RowWriter())
    provenance = replace(
        provenance_of(loaded, prepared, reader, 0, time.perf_counter() - started),
        model=f"{len(set(names))} mechanisms",
        origin="init",
        config_hash=None,
    )
    return finished_run(settings, writer, provenance, floor_of({torch.float64}), size=size.to_json())


def _measure_one(
    mechanism: Mechanism, change: Change | None, seed: int, size: MechanismSize, text: Path | None, rows: RowRecorder
) -> None:
    """One mechanism, as it is or changed, at one initialisation."""
    loaded = built(mechanism, size, seed, None if change is None else change.config)
    if change is not None and change.apply is not None:
        change.apply(loaded.model)
    rows = rows.under(mechanism=mechanism.name, change=AS_IT_IS if change is None else change.name, seed=seed)
    prepared = inputs_of(loaded, size, text)
    with undisturbed(loaded.model), quiet_transformers(), WideArithmetic():
        try:
            view = structure(loaded.model, prepared[0])
        except DiscoveryError as error:
            _note(rows, "refused", 1.0, str(error))
            return
        _note(rows, "parameters", float(loaded.parameters))
        _note(rows, "initial_std", initial_std(view))
        network = MechanismReader(loaded.model, prepared, view)
        network.read("full", rows.under(variant="full"))
        if mechanism.uncut:
            _note(rows.under(variant="cut"), "refused", 1.0, mechanism.uncut)
        else:
            network.read("cut", rows.under(variant="cut"))
            network.read("pure", rows.under(variant="pure"))


def _note(rows: RowRecorder, metric: str, value: float, note: str | None = None) -> None:
    """A fact about the whole network, kept at its first block."""
    rows.add(metric, value, "block.in", note=note)


def _add(
    rows: RowRecorder, metric: str, ref: SiteRef, value: float, arithmetic: str, status: Status = Status.OK
) -> None:
    """One value of the first sequence; one that is not finite is undefined."""
    if not math.isfinite(value):
        value, status = math.nan, Status.UNDEFINED
    rows.add(metric, value, ref.site, stack=ref.stack, layer=ref.layer, status=status, arithmetic=arithmetic)


def built(
    mechanism: Mechanism, size: MechanismSize, seed: int, changed: Mapping[str, Any] | None = None
) -> LoadedModel:
    """The mechanism at this size, initialised as the library does it, in float64; ``changed`` keys replace its own."""
    config = {"model_type": mechanism.model_type, **mechanism.config(size), **(changed or {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        loaded = load(f"init:{path}", seed=seed, dtype="float64", model_class=mechanism.model_class)
    return replace(loaded, spec=f"mechanism {mechanism.name}")


def inputs_of(loaded: LoadedModel, size: MechanismSize, text: Path | None) -> Prepared:
    """The same text for every text model, as hashed words, and the same smooth images for every vision model."""
    given = text if loaded.input_kind == "text" else None
    return prepare_inputs(loaded, given, sequences=size.sequences, tokens=size.tokens, batch=size.sequences)


def _taken(batch: Batch, rows: int) -> Batch:
    """The first ``rows`` sequences, repeated from the start if there are fewer."""

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch.sequences
        return value[torch.arange(rows) % batch.sequences] if whole else value

    return replace(batch, inputs={name: cut(value) for name, value in batch.inputs.items()}, sequences=rows)


def structure(model: nn.Module, batch: Batch) -> ModelView:
    """Its blocks, found on sequences of full length: some attention patterns differ on shorter ones."""
    probe = replace(_taken(batch, max(2, batch.sequences)), keep=None, first_sequence=0)
    with undisturbed(model):
        return discover(model, lambda: probe.run(model), batch=probe.sequences)


def initial_std(view: ModelView) -> float:
    """Median over the weight matrices of the blocks of the standard deviation of their entries."""
    modules = view.modules()
    names = dict.fromkeys(call.module_name for stack in view.stacks for call in stack.calls)
    matrices = [p for name in names for p in modules[name].parameters() if p.dim() == 2 and min(p.shape) > 1]
    return float(torch.stack([p.detach().double().std() for p in matrices]).median())


@contextmanager
def drawn_together(view: ModelView, factor: float) -> Iterator[None]:
    """Tokens that enter the first block are drawn to their mean by this factor; 0 makes them equal."""
    first = view.modules()[view.stacks[0].calls[0].module_name]
    fresh = [True]

    def draw(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        entry = first_tensor(args, kwargs)
        if entry is None or not fresh[0]:
            return None
        fresh[0] = False
        mean = entry.flatten(1, -2).mean(dim=1).reshape(entry.shape[0], *(1,) * (entry.dim() - 2), -1)
        new = mean + factor * (entry - mean) if factor else mean.expand(entry.shape).clone()
        return (
            tuple(new if value is entry else value for value in args),
            {name: new if value is entry else value for name, value in kwargs.items()},
        )

    handle = first.register_forward_pre_hook(draw, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _operation(variant: str, view: ModelView) -> Operation:
    """What is cut; a stack without MLPs has none to drop."""
    if variant == "full":
        return Operation()
    if variant == "cut":
        return variant_named("+norm+mlp").operation
    has_mlp = any({"mlp", "both"} & set(plan.skips) for stack in view.stacks for plan in stack.plans)
    pure = variant_named("pure").operation
    return pure if has_mlp else replace(pure, mlp="keep")


Values = dict[SiteRef, float]


@dataclass
class MechanismReader:
    """One network with its inputs and its structure; orders found without skips serve the next variant."""

    model: nn.Module
    prepared: Prepared
    view: ModelView
    orders: Values | None = None

    def read(self, variant: str, rows: RowRecorder) -> None:
        """Metrics and order in float64; with skips cut, also in exact arithmetic, as float64 soon shows rounding."""
        operation = _operation(variant, self.view)

        def size_too(ref: SiteRef, x: Tensor, part: Batch) -> None:
            if ref.site == "block.out":
                size = float(x[0].square().mean().sqrt())
                _add(rows, "log10_token_size", ref, math.log10(size) if size > 0 else -math.inf, "float64")

        try:
            measure_network(
                self.model,
                self.prepared,
                operation,
                metrics=METRICS,
                writer=rows.writer,
                at={**rows.at, "arithmetic": "float64"},
                beside=size_too,
                view=self.view,
            )
            with operating(self.model, operation, view=self.view):
                unequal = self._order_in_float(rows)
                # If equal tokens leave unequal, nothing falls below the float floor: one seed shows that both agree.
                if variant != "full" and not (unequal and rows.at["seed"]):
                    self._exactly(variant, rows)
        except REFUSALS as error:
            _note(rows, "refused", 1.0, str(error))

    def _order_in_float(self, rows: RowRecorder) -> bool:
        """Order near collapse and what equal tokens become, in float64, of the first sequence.

        Returns:
            Whether the first block already makes equal tokens unequal.
        """
        equal, close, closer = (self._relative(factor) for factor in (0.0, CLOSE, CLOSER))
        floor = float_floor(next(self.model.parameters()).dtype)
        before: SiteRef | None = None
        for ref in close:
            if ref.site == "block.out":
                assert before is not None
                status = Status.FLOOR if equal[ref] <= UNEQUAL else Status.OK
                _add(rows, "equal_tokens", ref, equal[ref], "float64", status)
                if equal[ref] > UNEQUAL:
                    _add(rows, "order", ref, 0.0, "float64")
                elif closer[ref] > 1e3 * floor:
                    slope = _slope(close[ref], closer[ref]) / _slope(close[before], closer[before])
                    _add(rows, "order", ref, slope, "float64")
                    _add(rows, "log10_near_collapse", ref, math.log10(closer[ref]), "float64")
            before = ref
        return next(value for ref, value in equal.items() if ref.site == "block.out") > UNEQUAL

    def _relative(self, factor: float) -> Values:
        """Relative residuals of the first sequence when tokens are drawn together by this factor."""
        values: Values = {}

        def observe(ref: SiteRef, x: Observed) -> None:
            assert isinstance(x, Tensor)
            values[ref] = float(Tokens(x[:1], None).relative_deviation[0])

        with drawn_together(self.view, factor), trace(self.view, SITES, observe):
            self.prepared[0].run(self.model)
        return values

    def _exactly(self, variant: str, rows: RowRecorder) -> None:
        """Order and residuals in exact arithmetic, however small.

        The order is a property of the mechanism: it is read with MLPs and norms, and holds without them.

        Raises:
            UnsupportedArithmeticError: the model does something that has no rule.
        """
        if variant == "cut":
            near, norms = self._log_residuals(NEAR)
            nearer, _ = self._log_residuals(NEARER)
            self.orders = _orders(near, nearer)
            _check_orders(self.orders)
            for ref, order in self.orders.items():
                _add(rows, "order", ref, order, "exact")
            if min(self.orders.values()) > 0.5:
                _write_until_rounding(rows, "log10_near_collapse", near, norms, self.orders)
        if self.orders is not None:
            _write_until_rounding(rows, "log10_relative_residual", *self._log_residuals(0.0), self.orders)

    def _log_residuals(self, log_shrink: float) -> tuple[Values, Values]:
        """Logarithms of residuals and norms of the first sequence."""
        logs: Values = {}
        norms: Values = {}

        def observe(number: int, ref: SiteRef, x: Deviation, keep: Tensor | None) -> None:
            logs[ref], norms[ref] = x.log_residual(keep), x.log_norm(keep)

        exact_stream(self.view, _taken(self.prepared[0], 1), observe, sites=SITES, log_shrink=log_shrink)
        return logs, norms


def _slope(close: float, closer: float) -> float:
    return math.log(close / closer) if close > 0 and closer > 0 else math.nan


def _orders(near: Values, nearer: Values) -> Values:
    """The factor by which the logarithm of a block's output follows that of its input; 0 if it does not follow."""
    step, orders = NEARER - NEAR, {}
    for ref in (ref for ref in near if ref.site == "block.out"):
        change = nearer[ref] - near[ref]
        if not math.isfinite(change):
            break
        orders[ref] = change / step if abs(change) > STILL and abs(step) > STILL else 0.0
        step = change
    return orders


def _check_orders(orders: Values) -> None:
    """Refuse orders that are not a leading power a block can have: they mean that some cancellation was not exact."""
    for ref, order in orders.items():
        if min(abs(order - known) for known in (0, 1, 3)) > 0.05:
            refuse(f"a cancellation in {ref}", f"near collapse it reads order {order:.2f}, which is neither 0, 1 nor 3")


def _write_until_rounding(rows: RowRecorder, metric: str, logs: Values, norms: Values, orders: Values) -> None:
    last = math.inf
    for ref, value in logs.items():
        relative = value - norms[ref]
        if ref.site == "block.out":
            beyond = relative - last < BELOW_ROUNDING and orders.get(ref, 1.0) < 2
            if beyond or not math.isfinite(relative):
                return
            _add(rows, metric, ref, relative / LOG10, "exact")
        last = relative
