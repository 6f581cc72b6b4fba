"""What has no rule is refused, with the operation and the reason."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.errors import UnsupportedArithmeticError
from rankscope.exact_arithmetic.registry import rule
from tests.exact_arithmetic.test_first_order import DEEP, KERNEL, MATRIX, ROWS, deviation

Function = Callable[[Tensor], Tensor]

REFUSED: dict[str, tuple[Function, str]] = {
    "norm of another order": (lambda x: torch.linalg.vector_norm(x, ord=1, dim=-1), "the norm of order 1"),
    "layer norm over two axes": (lambda x: F.layer_norm(x, (4, 6)), "over 2 axes"),
    "product with a vector": (lambda x: x @ torch.ones(6).double(), "a single vector"),
    "kernels made of tokens": (lambda x: F.conv1d(KERNEL[:, :4].transpose(0, 1), x[:, None, :3]), "weights depend"),
    "triangle": (torch.tril, "triangle"),
    "reduction on writing": (
        lambda x: torch.scatter(x, 1, ROWS, torch.ones(4, 2).double(), reduce="add"),
        "it reduces by",
    ),
    "complex cast": (lambda x: x.to(torch.complex128), "a cast to complex numbers"),
    "resize in place": (lambda x: x.clone().unsqueeze_(0), "no rule"),
    "writing into what is expanded": (lambda x: x[:1].expand(4, 6).mul_(2.0), "still in use"),
    "power of a negative number": (lambda x: (-x.abs() - 1) ** (2 * torch.ones(6).double()), "base is not positive"),
    "negative number to the power": (lambda x: (-2.0) ** x, "base is not positive"),
    "plain buffer": (lambda x: torch.add(x, x, out=torch.empty(4, 6).double()), "into a plain tensor"),
    "numpy": (lambda x: torch.from_numpy(x.numpy()), "leaves torch"),
    "array": (lambda x: torch.as_tensor(np.asarray(x)), "leaves torch"),
    "dlpack": (lambda x: torch.from_dlpack(np.from_dlpack(x)), "leaves torch"),
    "list": (lambda x: torch.tensor(x.tolist()), "leaves torch"),
    "no rule": (torch.special.i0, "it has no rule"),
}
if hasattr(torch.ops.aten, "_grouped_mm"):  # not in torch 2.6
    REFUSED["experts without groups"] = (lambda x: torch.ops.aten._grouped_mm(x, MATRIX), "in groups")


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_with_the_reason(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(UnsupportedArithmeticError, match=reason):
        function(deviation(0, DEEP))


def test_a_buffer_that_is_a_deviation_takes_the_result() -> None:
    x = deviation(0, DEEP)
    buffer = torch.empty_like(x)
    assert torch.add(x, x, alpha=2.0, out=buffer) is buffer
    assert buffer.log_residual() == pytest.approx(x.log_residual() + math.log(3.0), rel=1e-14)


def test_a_second_rule_for_an_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="has two rules"):
        rule(torch.ops.aten.mm)(lambda a, b: a)


def test_the_module_that_runs_is_named() -> None:
    class Strange(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.i0(x)

    with pytest.raises(UnsupportedArithmeticError, match=r"aten.i0 in .*\.Strange: it has no rule"):
        nn.Sequential(Strange())(deviation(0, DEEP))
    with pytest.raises(UnsupportedArithmeticError, match="in no module"):
        torch.special.i0(deviation(0, DEEP))
