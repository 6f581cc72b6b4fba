"""What every run records about itself: the float floor and the provenance of its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from rankscope.linalg.precision import float_floor, lowered_products
from rankscope.models.inputs import Prepared
from rankscope.models.loading.devices import device_of
from rankscope.models.stream import Stream
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.stream.claims import claims_of
from rankscope.stream.viewing import known_view
from rankscope.surgery.session import is_operating, operations_on


def floor_of(dtypes: set[torch.dtype]) -> dict[str, Any]:
    """The float floor of the run: that of the coarsest dtype of any activation."""
    if not dtypes:
        return {"dtype": None, "relative": None, "meaning": "no activation was measured"}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return {
        "dtype": str(coarsest).removeprefix("torch."),
        "relative": float_floor(coarsest),
        "meaning": "relative residuals at or below this are rounding of the activations' own format",
    }


def exact_floors(own_dtype: str) -> dict[str, Any]:
    """The floors of the dtypes an exact run is compared with; exact arithmetic itself has none."""
    names = dict.fromkeys((own_dtype, "float32", "float64"))
    formats = {name: float_floor(getattr(torch, name)) for name in names}
    return {
        "dtype": own_dtype,
        "relative": formats[own_dtype],
        "formats": formats,
        "meaning": "relative residuals at or below its floor are rounding in that format; exact arithmetic has none",
    }


def provenance_of(
    loaded: Any,
    prepared: Prepared,
    counted: Any,
    seed: int,
    seconds: float,
    stream: Stream | None = None,
) -> Provenance:
    """The provenance of a run: model, inputs, arithmetic and active surgery.

    Args:
        loaded: the model, as :class:`~rankscope.models.loading.LoadedModel` describes it; its module may be None.
        prepared: the inputs.
        counted: what was seen of them: its ``dtypes``, and its ``lengths`` by stack and sequence.
        seed: of random inputs and of a random initialisation.
        seconds: how long it took.
        stream: the declared layout of the stream.
    """
    lengths: dict[int, int] = next(iter(counted.lengths.values()), {})
    view = None if loaded.model is None else known_view(loaded.model)
    return Provenance(
        model=loaded.spec,
        origin=loaded.origin,
        revision=loaded.revision,
        config_hash=loaded.config_hash,
        seed=seed,
        parameters=loaded.parameters,
        weights_dtype=loaded.dtype,
        arithmetic_dtype=_arithmetic(loaded, counted.dtypes),
        attention=loaded.attn_implementation,
        token_policy=prepared.policy,
        sequences=prepared.sequences,
        lengths=tuple(lengths[key] for key in sorted(lengths) if key < prepared.sequences) or prepared.lengths,
        operations=operations_on(loaded.model) if loaded.model is not None and is_operating() else (),
        layout=None if stream is None else str(stream),
        inputs=prepared.source,
        inputs_hash=prepared.digest,
        device=loaded.device,
        wall_seconds=round(seconds, 3),
        structure=() if view is None else tuple(map(dataclasses.asdict, claims_of(view))),
    )


def _arithmetic(loaded: Any, dtypes: set[torch.dtype]) -> str | None:
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    lowered = None if loaded.model is None else lowered_products(device_of(loaded.model.parameters()))
    return (f"{names} (products in {lowered})" if lowered else names) or None


def in_context(run: Run, prepared: Prepared) -> Run:
    """Add to the verdict what was changed in the model, and how the inputs differ from what the user passed."""
    changes = run.provenance.changes
    start = f"{changes[0].upper()}{changes[1:]}: " if changes else ""
    between = "\n" if "\n" in run.verdict else " "
    parts = (f"{start}{run.verdict}", *([" ".join(prepared.caveats)] if prepared.caveats else []))
    return dataclasses.replace(run, verdict=between.join(parts))
