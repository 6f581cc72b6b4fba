"""What the optimizer holds and does."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.causes._examination import Examination
from rankscope.causes._spec import Finding, cause


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
    if not missing:
        return
    used = [name for name in missing if x.gradients.get(name) is not None]
    if not used:
        return
    whole = len(missing) == len(wanted)
    what = "none of the model's parameters" if whole else f"{len(wanted) - len(missing)} of {len(wanted)} parameters"
    why = (
        " It was made from another model, or before the model was copied, wrapped or moved." if whole else
        f" Missing: {', '.join(used[:3])}{' ...' if len(used) > 3 else ''}."
    )  # fmt: skip
    name, rate = type(x.optimizer).__name__, float(x.optimizer.param_groups[0].get("lr", 1e-3))
    yield Finding(
        "optimizer_misses",
        f"The optimizer holds {what}: the others get gradients and never move.{why}",
        f"Run `optimizer = torch.optim.{name}(model.parameters(), lr={rate:g})` after the model was built, copied and "
        "moved",
        certainty="shown" if whole or 2 * len(missing) > len(wanted) else "possible",
        measured="parameters with a gradient that a step moves",
        before=float(len(wanted) - len(missing)),
        after=float(len(wanted)),
        intervention="with an optimizer of model.parameters()",
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
    if rates and max(rates) == 0.0:
        yield Finding(
            "learning_rate_zero",
            "The learning rate of every group is 0: no step moves anything. A scheduler may have set it.",
            "Set lr, or call scheduler.step() once per step, after optimizer.step().",
            measured="largest learning rate",
            before=0.0,
        )
