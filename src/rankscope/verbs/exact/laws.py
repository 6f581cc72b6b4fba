"""What the cubic law says of a real model's weights, beside what exact arithmetic finds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rankscope._errors import UnsupportedConfigError
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.inputs import Batch
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.surgery.session import operations_on
from rankscope.theory.cubic_law import cubic_step
from rankscope.verbs.exact.readings import LOG10, Readings, State

_PURE: Mapping[str, object] = {"attention_skip": 0.0, "mlp_skip": 0.0, "mlp": "drop", "norm": "identity"}


def predict_blocks(loaded: LoadedModel, view: ModelView, states: Mapping[SiteRef, State], readings: Readings) -> bool:
    """Write the law's prediction for every block, where its hypotheses hold; returns whether it reached all of them.

    They are those of pure attention: no skip, MLP or norm (:func:`is_pure`), a complete mask (:func:`sees_everything`)
    and position-free scores; and the family must tell where its head weights are. Elsewhere nothing is written.
    """
    modules = view.modules()
    for stack in view.stacks:
        for call in stack.calls:
            ref = SiteRef(stack.name, call.first_layer, "block.in")
            heads = _heads(loaded, modules[call.module_name])
            if heads is None or ref not in states:
                return False
            state = states[ref]
            found = cubic_step(state.direction, heads, state.log_scale, base=state.base)
            after = SiteRef(stack.name, call.first_layer, "block.out")
            readings.add("log10_residual", after, float(found.log_residual) / LOG10, "law")
    return True


def is_pure(loaded: LoadedModel) -> bool:
    """Whether the one operation under way leaves nothing but attention, unmasked."""
    described = operations_on(loaded.model)
    return loaded.config is not None and len(described) == 1 and described[0] == _PURE


def _heads(loaded: LoadedModel, block: object) -> HeadWeights | None:
    try:
        heads = head_weights(block, loaded.config)  # type: ignore[arg-type]
    except UnsupportedConfigError:
        return None
    return None if heads.rotary or heads.qk_norm or heads.notes else heads


def sees_everything(view: ModelView, batch: Batch) -> bool:
    """Whether every query of every head sees every key."""
    complete = True

    def look(ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        nonlocal complete
        assert isinstance(seen, AttentionCall)
        support = seen.support()
        complete = complete and (support is None or bool(support.all()))

    with trace(view, SiteSelection.parse(("attention.probs", "cross_attention.probs")), look):
        batch.run(view.model)
    return complete
