"""How much of what a branch writes is new to the sequence."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.branch import Branch
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, branch_metric


@branch_metric(
    symbol=r"\|Y(I - P_X)\|_F^2 / \|Y\|_F^2",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    depends_on_length=True,
    cites=(Cite("cirrincione2026rank"),),
)
def outside_span_share(branch: Branch) -> Tensor:
    r"""Share of the energy written outside the span of the tokens read, :math:`\|Y(I - P_X)\|_F^2 / \|Y\|_F^2`.

    **Exact.** :math:`P_X` projects onto the span of the tokens X that the branch reads, and Y is what it adds to the
    stream. 0 if every output is a combination of the inputs of the same sequence, 1 if all of it is new; a random
    output has 1 - r/d, with r the rank of X. Directions of X below the float floor of its format do not count. If the
    smallest that counts is below 9e-10 of the largest, rounding leaves fewer than six digits, and the status is
    ``estimated``.
    Undefined if X spans all channels, as d tokens or more usually do, because then nothing can lie outside: measure
    shorter inputs. Undefined for X = 0 or Y = 0.

    Example:
        >>> import torch
        >>> outside_span_share(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 2.0, 2.0]])).item()
        0.8888888888888888
    """
    return branch.energy_outside
