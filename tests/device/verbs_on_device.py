"""Every verb on the simulated device and on the processor, and the table of the results in the docs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import rankscope as rs
from rankscope.errors import RankscopeError
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.single import sample_paths
from rankscope.linalg.precision import has_float64
from rankscope.models.inputs import prepare_inputs
from rankscope.stream.viewing import undisturbed, view_of
from tests.device.simulated import SimulatedDevice
from tests.flat_calls import flat

DATA = Path(__file__).parents[2] / "docs" / "data"
FOUND, TABLE = DATA / "devices.json", DATA / "devices.inc"

PRESETS = ("tiny-bert", "tiny-gpt2", "tiny-llama", "tiny-t5", "tiny-vit")
FEATURES = ("float32", "bfloat16", "float32, no float64", "bfloat16, no float64")
EQUAL = 1e-9
"""Largest relative difference of equal values. An accelerator evaluates metrics for several blocks at once and takes
distances between tokens from differences; on the processor they come from products, which leave ten digits."""
CLOSE = 1e-4
"""Largest relative difference of the gauge without float64, which then sums norms of gradients in float32; and in
bfloat16, where the gradient of an embedding that is used three times (T5) is a sum in another order on a device, whose
backward pass has a thread of its own."""

REMEDIES = ("residual_scale", "qk_norm", "neutreno")
"""One on the stream, one on the scores of each row, one with parameters of its own."""

Values = NDArray[np.float64]
SHAPE = {"sequences": 2, "tokens": 12}


def _values(run: rs.Run) -> Values:
    return np.array(run.table["value"].to_pylist(), dtype=float)


def _measured(model: nn.Module, **options: Any) -> Values:
    return _values(flat(rs.measure, model, **{**SHAPE, **options}))


def _operated(model: nn.Module) -> Values:
    found = []
    for surgery in ({"skip": 0.0, "mlp": "drop"}, {"mask": "causal", "norm": "rms"}, {"attention": "centred"}):
        with rs.operate(model, rs.Surgery(**surgery)):
            found.append(_measured(model, metrics=["relative_residual", "attention_entropy"]))
    return np.concatenate(found)


def _doctor(model: nn.Module) -> Values:
    return np.array([check.status == "pass" for check in rs.doctor(model).checks], dtype=float)


def _paths(model: nn.Module) -> Values:
    loaded = rs.load(model).loaded
    batch = prepare_inputs(loaded, sequences=1, tokens=8)[0]
    with undisturbed(model):
        networks = freeze_network(view_of(model, batch), loaded.config, batch)
    found = []
    for network in networks.values():
        found += sample_paths(network, 1, 4).streams.flatten(1).norm(dim=1).tolist()
    return np.array(found)


def _gauge(model: nn.Module) -> Values:
    """Two steps of training without dropout, with gradients."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = prepare_inputs(rs.load(model).loaded, sequences=2, tokens=12)[0].inputs
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    model.train()
    found = []
    with rs.Gauge(model, dict(inputs), schedule=1, strict=True) as gauge:
        for step in range(2):
            loss = model(**inputs)[0].float().square().mean()
            loss.backward()
            gauge.after_backward(step)
            optimizer.step()
            optimizer.zero_grad()
            found += [value.mean for value in gauge.step(step, loss=loss).table]
    return np.array(found, dtype=float)


VERBS: dict[str, Callable[[nn.Module], Values]] = {
    "measure": lambda m: _measured(m, metrics=list(rs.METRICS), similarity=True, null=True),
    "measure, no-first": lambda m: _measured(m, tokens_policy="no-first"),
    "measure, blockwise": lambda m: _measured(m, metrics=["attention_entropy"], attention_algorithm="blockwise"),
    "doctor": _doctor,
    "operate": _operated,
    "ablate": lambda m: _values(rs.ablate(m, rs.Inputs(**SHAPE), variants=["pure", "full"])),
    "exact": lambda m: _values(rs.exact(m, rs.Inputs(sequences=1, tokens=8), rs.Surgery(skip=0.0))),
    "decompose": lambda m: _values(rs.decompose(m, rs.Inputs(sequences=1, tokens=8), marginals=["heads", "layers"])),
    "bound": lambda m: _values(rs.bound(m, rs.Inputs(sequences=1, tokens=8))),
    "paths": _paths,
    "remedy": lambda m: _values(rs.remedy(m, rs.Inputs(sequences=1, tokens=8), remedies=REMEDIES)),
    "gauge": _gauge,
}


def _attempt(verb: str, preset: str, dtype: str, device: str) -> Values | str:
    """The values, or the refusal in words; an error of torch itself is a failure of the test."""
    model = rs.load(f"init:{preset}", dtype=dtype).model.to(device)
    torch.manual_seed(0)
    try:
        return VERBS[verb](model)
    except RankscopeError as error:
        return str(error)


@functools.cache
def on_processor(verb: str, preset: str, dtype: str) -> Values | str:
    """What the verb gives on the processor."""
    return _attempt(verb, preset, dtype, "cpu")


def compared(device: SimulatedDevice, verb: str, preset: str, feature: str) -> str:
    """The entry of the table: ``equal``, ``close``, ``refused``, or what is different."""
    dtype = feature.partition(",")[0]
    want = on_processor(verb, preset, dtype)
    lacks = "no float64" in feature
    has_float64.cache_clear()
    try:
        with device.without_float64() if lacks else nullcontext():
            got = _attempt(verb, preset, dtype, "sim")
    finally:
        has_float64.cache_clear()
    if isinstance(got, str):
        is_same = (isinstance(want, str) and got == want) or (lacks and "in float64, which sim:0 does not have" in got)
        return "refused" if is_same else f"different: {got}"
    if isinstance(want, str) or want.shape != got.shape:
        return f"different: {want}"
    both = np.isfinite(want) & np.isfinite(got)
    worst = float((np.abs(want[both] - got[both]) / np.maximum(np.abs(want[both]), 1e-300)).max(initial=0.0))
    is_finite_alike = np.array_equal(np.isfinite(want), np.isfinite(got))
    if is_finite_alike and worst <= EQUAL:
        return "equal"
    is_close = is_finite_alike and worst <= CLOSE
    may_be_close = verb == "gauge" and (lacks or dtype == "bfloat16")
    return "close" if may_be_close and is_close else f"different: by {worst:.2e}"


def rendered(found: dict[str, dict[str, dict[str, str]]]) -> str:
    """The table of the docs: one row per verb, one column per feature."""
    lines = ["| verb | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for verb in VERBS:
        cells = []
        for feature in FEATURES:
            by_result: dict[str, list[str]] = {}
            for preset in PRESETS:
                by_result.setdefault(found[verb][feature][preset], []).append(preset.removeprefix("tiny-"))
            most = max(by_result, key=lambda result: len(by_result[result]))
            others = [f"{', '.join(names)}: {result}" for result, names in by_result.items() if result != most]
            cells.append("; ".join([most, *others]))
        lines.append(f"| {verb} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def committed() -> dict[str, dict[str, dict[str, str]]]:
    """The results in the docs, by verb, feature and preset."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(FOUND.read_text())["results"]
    return found
