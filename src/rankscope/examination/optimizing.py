"""What the optimizer holds and does."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.examination._examination import Examination
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import few


@cause(
    proof="the parameters of the model are looked up among those of the optimizer, by identity",
    change="make the optimizer from the parameters of this model, after it has its final form",
    order=22,
    needs={"optimizer"},
)
def optimizer_misses(x: Examination) -> Iterator[Finding]:
    """Parameters that the optimizer does not hold."""
    assert x.optimizer is not None
    held = {id(parameter) for group in x.optimizer.param_groups for parameter in group["params"]}
    wanted = {name: p for name, p in x.model.named_parameters() if p.requires_grad}
    missing = [name for name, parameter in wanted.items() if id(parameter) not in held]
    if not wanted and not any(id(parameter) in held for parameter in x.model.parameters()):
        yield Finding(
            "optimizer_misses",
            f"No parameter of the model requires a gradient, and the optimizer holds {len(held)} other tensors: no "
            "step changes the model.",
            "Set requires_grad of what is to be trained, and make the optimizer from these parameters",
            certainty="possible",  # a prompt or an input may be what is trained
            measured="parameters of the model that require a gradient",
            before=0.0,
        )
    if not missing:
        return
    used = [name for name in missing if x.gradients.get(name) is not None]
    if not used:
        return
    whole = len(missing) == len(wanted)
    what = "none of the model's parameters" if whole else f"{len(wanted) - len(missing)} of {len(wanted)} parameters"
    why = (
        " It was made from another model, or before the model was copied, wrapped or moved." if whole else
        f" Missing: {few(used)}."
    )  # fmt: skip
    yield Finding(
        "optimizer_misses",
        f"The optimizer holds {what}: the others get gradients and never move.{why}",
        "Make the optimizer from the parameters of this model, after it was built, copied and moved"
        if whole
        else "Give the others to the optimizer, or set requires_grad to False if they are not to be trained",
        certainty="shown" if whole else "possible",  # some may be left out on purpose
        measured="parameters with a gradient that a step moves",
        before=float(len(wanted) - len(missing)),
        after=float(len(wanted)),
        intervention="with an optimizer of model.parameters()",
    )


@cause(
    proof="requires_grad of every parameter is read",
    change="nothing, if they are meant to be frozen",
    order=25,
)
def frozen_parameters(x: Examination) -> Iterator[Finding]:
    """Most parameters do not require a gradient."""
    learns = {name: p.requires_grad for name, p in x.model.named_parameters()}
    trained = [name for name, required in learns.items() if required]
    if (x.loss is None and x.optimizer is None) or 2 * len(trained) >= len(learns):
        return
    if not trained and x.optimizer is not None:
        return  # what the optimizer holds says more
    places = list(dict.fromkeys(name.rpartition(".")[0] or name for name in trained))
    if not trained:
        yield Finding(
            "frozen_parameters",
            f"None of the {len(learns)} parameters requires a gradient: no step of any optimizer changes the model.",
            "Set requires_grad of what is to be trained",
            certainty="possible",  # a prompt or an input may be what is trained
            measured="parameters that require a gradient",
            before=0.0,
        )
        return
    which = f", those of {few(places)}" if places else ""
    yield Finding(
        "frozen_parameters",
        f"{len(trained)} of {len(learns)} parameters require a gradient{which}; all others stay as they are.",
        kind="note",
        measured="parameters that require a gradient",
        before=float(len(trained)),
    )


@cause(
    proof="the learning rate of every group is read",
    change="a learning rate above zero",
    order=22,
    needs={"optimizer"},
)
def learning_rate_zero(x: Examination) -> Iterator[Finding]:
    """A learning rate of zero."""
    assert x.optimizer is not None
    rates = [float(group.get("lr", 1.0)) for group in x.optimizer.param_groups]
    begun = max((float(group.get("initial_lr", 0.0)) for group in x.optimizer.param_groups), default=0.0)
    if rates and max(rates) == 0.0:
        yield Finding(
            "learning_rate_zero",
            "The learning rate of every group is 0: no step moves anything.",
            "Look at the scheduler: it may end at 0, or begin there",
            kind="note" if begun > 0 else "fault",  # a warm-up begins at 0
            measured="largest learning rate",
            before=0.0,
        )
