"""How a stream and what a branch made of it are added: the same sum in some fifty spellings, and some weighted sums.

A form takes the stream and the branch in the network's own layout, of any number of axes. ``carry`` and ``add`` are
its weights, by which a twin writes the sum.
"""

from __future__ import annotations

import copy
import functools
import io
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Form = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sum:
    """``carry * stream + add * branch``, and how the network writes it."""

    name: str
    write: Form
    carry: float = 1.0
    add: float = 1.0


SUMS: dict[str, Sum] = {}


def form(carry: float = 1.0, add: float = 1.0) -> Callable[[Form], Form]:
    def put(write: Form) -> Form:
        SUMS[write.__name__] = Sum(write.__name__, write, carry, add)
        return write

    return put


def put(name: str, write: Form, carry: float = 1.0, add: float = 1.0) -> None:
    SUMS[name] = Sum(name, write, carry, add)


def both(x: Tensor, f: Tensor) -> Tensor:
    return torch.stack([x, f])


def flat(x: Tensor, f: Tensor) -> Tensor:
    return both(x, f).flatten(1)


def ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=x.dtype)


put("plus", lambda x, f: x + f)
put("branch_plus", lambda x, f: f + x)
put("torch_add", lambda x, f: torch.add(x, f))
put("method_add", lambda x, f: x.add(f))
put("keywords", lambda x, f: torch.add(input=x, other=f))
put("alpha", lambda x, f: torch.add(x, f, alpha=0.7), add=0.7)
put("alpha_on_stream", lambda x, f: f.add(x, alpha=0.8), carry=0.8)
put("scaled", lambda x, f: 0.8 * x + 0.6 * f, carry=0.8, add=0.6)
put("halved", lambda x, f: (x + f) / 2, carry=0.5, add=0.5)
put("minus_negative", lambda x, f: x - (-f))
put("minus", lambda x, f: x - 0.5 * f, add=-0.5)
put("lerp", lambda x, f: torch.lerp(x, f, 0.4), carry=0.6, add=0.4)
put("addcmul", lambda x, f: torch.addcmul(x, f, torch.full_like(f, 0.9)), add=0.9)
put("addcdiv", lambda x, f: torch.addcdiv(x, f, torch.full_like(f, 2.0)), add=0.5)
put("twice_the_stream", lambda x, f: x + f + x, carry=2.0)
put("in_halves", lambda x, f: x / 2 + f + x / 2)
put("builtin_sum", lambda x, f: sum([x, f]))
put("reduce", lambda x, f: functools.reduce(operator.add, (x, f)))
put("aten_add", lambda x, f: torch.ops.aten.add.Tensor(x, f))
put("foreach_add", lambda x, f: torch._foreach_add([x], [f])[0])
put("stack_sum", lambda x, f: both(x, f).sum(0))
put("stack_mean", lambda x, f: both(x, f).mean(0) * 2)
put("stack_last_sum", lambda x, f: torch.stack([x, f], -1).sum(-1))
put("nansum", lambda x, f: both(x, f).nansum(0))
put("cumsum", lambda x, f: both(x, f).cumsum(0)[-1])
put("cumsum_mean", lambda x, f: both(x, f).cumsum(0).mean(0) * 2 - x)
put("aten_sum", lambda x, f: torch.ops.aten.sum.dim_IntList(both(x, f), [0]))
put("cat_unflatten_sum", lambda x, f: torch.cat([x, f], -1).unflatten(-1, (2, -1)).sum(-2))
put("cat_first_sum", lambda x, f: torch.cat([x, f]).unflatten(0, (2, -1)).sum(0))
put("cat_then_split", lambda x, f: torch.tensor_split(torch.cat([x + f, x], 1), 2, 1)[0])
put("movedim_sum", lambda x, f: both(x, f).movedim(0, -1).sum(-1))
put("einsum", lambda x, f: torch.einsum("s...->...", both(x, f)))
put(
    "einsum_weights",
    lambda x, f: torch.einsum("s,s...->...", torch.tensor([0.9, 1.1], dtype=x.dtype), both(x, f)),
    carry=0.9,
    add=1.1,
)
put("matvec", lambda x, f: torch.stack([x, f], -1) @ ones(x, 2))
put("tensordot", lambda x, f: torch.tensordot(ones(x, 2), both(x, f), dims=1))
put("multi_dot", lambda x, f: torch.linalg.multi_dot([ones(x, 1, 2), flat(x, f)]).view(x.shape))
put("linear", lambda x, f: F.linear(torch.stack([x, f], -1), ones(x, 1, 2))[..., 0])
put(
    "addmm",
    lambda x, f: torch.addmm(
        x.reshape(-1, x.shape[-1]), f.reshape(-1, x.shape[-1]), torch.eye(x.shape[-1], dtype=x.dtype)
    ).view(x.shape),
)
put(
    "baddbmm",
    lambda x, f: torch.baddbmm(
        x.reshape(1, -1, x.shape[-1]),
        f.reshape(1, -1, x.shape[-1]),
        torch.eye(x.shape[-1], dtype=x.dtype)[None],
        beta=0.9,
    ).view(x.shape),
    carry=0.9,
)
put("fourier", lambda x, f: torch.fft.fft(both(x, f), dim=0)[0].real)
put("complex_parts", lambda x, f: (torch.complex(x, f) * torch.complex(torch.ones_like(x), -torch.ones_like(x))).real)
put("through_complex", lambda x, f: (x.to(torch.complex128) + f).real)
put("average_pool", lambda x, f: F.avg_pool1d(flat(x, f).T[:, None], 2)[:, 0, 0].view(x.shape) * 2)
put("adaptive_pool", lambda x, f: F.adaptive_avg_pool1d(flat(x, f).T[:, None], 1)[:, 0, 0].view(x.shape) * 2)
put("convolution", lambda x, f: F.conv1d(flat(x, f).T[:, None], ones(x, 1, 1, 2))[:, 0, 0].view(x.shape))
put("sparse", lambda x, f: torch.sparse.mm(ones(x, 1, 2).to_sparse(), flat(x, f)).view(x.shape))
put(
    "segment_reduce",
    lambda x, f: torch.segment_reduce(flat(x, f), "sum", lengths=torch.tensor([2]), axis=0).view(x.shape),
)
put(
    "embedding_bag",
    lambda x, f: F.embedding_bag(
        torch.arange(2 * x.numel() // x.shape[-1]).view(2, -1).T.contiguous(),
        torch.cat([x.reshape(-1, x.shape[-1]), f.reshape(-1, x.shape[-1])]),
        mode="sum",
    ).view(x.shape),
)
put("scatter_add", lambda x, f: x.reshape(-1).scatter_add(0, torch.arange(x.numel()), f.reshape(-1)).view(x.shape))
put("index_add", lambda x, f: torch.index_add(x, 0, torch.arange(x.shape[0]), f))
put("index_put", lambda x, f: x.index_put((torch.arange(x.shape[0]),), f, accumulate=True))
put("trapezoid", lambda x, f: torch.trapezoid(both(x, f), dim=0) * 2)
put("diff", lambda x, f: torch.diff(both(-x, f), dim=0)[0])
put("log_of_product", lambda x, f: ((x / 8).exp() * (f / 8).exp()).log() * 8)
put("through_numpy", lambda x, f: torch.from_numpy(np.add(x.detach().numpy(), f.detach().numpy())))
put("copied_by_numpy", lambda x, f: f + torch.from_numpy(x.detach().numpy().copy()))
put("through_a_list", lambda x, f: f + torch.tensor(x.tolist(), dtype=x.dtype))
put("deep_copy", lambda x, f: copy.deepcopy(x.detach()) + f)
put("map", lambda x, f: x.clone().contiguous().map_(f.contiguous(), lambda a, b: a + b))
put("checkpointed", lambda x, f: checkpoint(lambda a, b: a + b, x, f, use_reentrant=False))
put("vmap", lambda x, f: torch.func.vmap(lambda a, b: a + b)(x, f))
put("jvp", lambda x, f: torch.func.jvp(lambda a: a * 1.0, (x,), (x,))[1] + f)
put("where", lambda x, f: torch.where(torch.ones_like(x, dtype=torch.bool), x + f, x))
put("data", lambda x, f: x.data + f)
put("compose", lambda x, f: torch.maximum(x, f) + torch.minimum(x, f))
put("square_root", lambda x, f: (x.square() + 2 * x * f + f.square()).sqrt() * torch.sign(x.detach() + f.detach()))

_POOL = ThreadPoolExecutor(1)


@form()
def in_place(x: Tensor, f: Tensor) -> Tensor:
    x += f
    return x


@form()
def into_the_branch(x: Tensor, f: Tensor) -> Tensor:
    return f.clone().add_(x)


@form()
def out_buffer(x: Tensor, f: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.add(x, f, out=out)
    return out


@form()
def in_slices(x: Tensor, f: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    half = x.shape[-1] // 2
    out[..., :half] = x[..., :half] + f[..., :half]
    out[..., half:] = x[..., half:] + f[..., half:]
    return out


@form()
def copied_into_itself(x: Tensor, f: Tensor) -> Tensor:
    out = x.clone()
    out.copy_(out + f)
    return out


@form()
def row_by_row(x: Tensor, f: Tensor) -> Tensor:
    return torch.stack([a + b for a, b in zip(x, f, strict=True)])


@form()
def in_a_thread(x: Tensor, f: Tensor) -> Tensor:
    return _POOL.submit(lambda: x + f).result()


@form()
def through_a_file(x: Tensor, f: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    return torch.load(buffer) + f
