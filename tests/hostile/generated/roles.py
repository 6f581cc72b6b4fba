"""What a branch does with its tokens: attention, other token mixers, MLPs.

Every part takes (batch, tokens, dim) and gives the same back. ``MIXERS`` let tokens reach each other, ``MLPS`` do not;
that is the truth a network is judged by, whatever its parts are called and whatever operations they use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIXERS: dict[str, Callable[[int], nn.Module]] = {}
MLPS: dict[str, Callable[[int], nn.Module]] = {}
LONGEST = 16


def mixer(cls: type[nn.Module]) -> type[nn.Module]:
    MIXERS[cls.__name__] = cls
    return cls


def mlp(cls: type[nn.Module]) -> type[nn.Module]:
    MLPS[cls.__name__] = cls
    return cls


class Two(nn.Module):
    """Two projections, which most mixers need."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim)


@mixer
class Attention(nn.Module):
    heads, causal = 2, False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def heads_of(self, h: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1)]

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.heads_of(h)
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            past = k.shape[-2] - q.shape[-2]
            hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + past)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v


@mixer
class CausalAttention(Attention):
    causal = True


@mixer
class OneHead(Attention):
    heads = 1


@mixer
class Fused(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@mixer
class FusedCausal(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@mixer
class TorchAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h, h, h, need_weights=False)[0]


@mixer
class LinearAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


@mixer
class SigmoidAttention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(q @ k.mT / math.sqrt(q.shape[-1]) - math.log(k.shape[-2])) @ v


@mixer
class VmapAttention(Two):
    def forward(self, h: Tensor) -> Tensor:
        return torch.func.vmap(lambda z: (self.gate(z) @ self.core(z).mT / 3).softmax(-1) @ z)(h)


@mixer
class MinGru(Two):
    def forward(self, h: Tensor) -> Tensor:
        z, new = torch.sigmoid(self.gate(h)), self.core(h)
        state, out = torch.zeros_like(new[:, 0]), []
        for t in range(h.shape[1]):
            state = (1 - z[:, t]) * state + z[:, t] * new[:, t]
            out.append(state)
        return torch.stack(out, 1)


@mixer
class ScanInPlace(Two):
    def forward(self, h: Tensor) -> Tensor:
        z, out = torch.sigmoid(self.gate(h)), self.core(h).clone()
        for t in range(1, h.shape[1]):
            out[:, t] += z[:, t] * out[:, t - 1]
        return out


@mixer
class Pooling(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return F.avg_pool1d(h.mT, 3, 1, 1, count_include_pad=False).mT - h


@mixer
class CumulativeMean(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None])


@mixer
class Wkv(Two):
    def forward(self, h: Tensor) -> Tensor:
        k = self.gate(h).clamp(-3, 3).exp()
        return (k * self.core(h)).cumsum(1) / k.cumsum(1)


@mixer
class BiGru(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(h)[0]


@mixer
class Lstm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(h)[0]


@mixer
class Roll(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(torch.roll(h, 1, 1))


@mixer
class TokenShift(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(F.pad(h, (0, 0, 1, -1))) + self.gate(h)


@mixer
class Gather(Two):
    def forward(self, h: Tensor) -> Tensor:
        order = torch.arange(h.shape[1]).flip(0).roll(1)
        return self.core(h.gather(1, order[None, :, None].expand_as(h)))


@mixer
class Sort(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(h.sort(1).values)


@mixer
class Interpolate(Two):
    def forward(self, h: Tensor) -> Tensor:
        small = F.interpolate(h.mT, size=max(2, h.shape[1] // 2), mode="linear")
        return self.core(F.interpolate(small, size=h.shape[1], mode="linear").mT)


@mixer
class MaxGate(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(h) * torch.sigmoid(self.gate(h.amax(1, keepdim=True)))


@mixer
class SqueezeExcite(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(h) * torch.sigmoid(self.gate(h.mean(1, keepdim=True)))


@mixer
class EnergyGradient(Two):
    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            z = h.detach().requires_grad_()
            energy = torch.logsumexp(self.core(z) @ self.gate(z).mT / 3, -1).sum()
            return torch.autograd.grad(energy, z)[0].detach()


@mixer
class SparseProduct(Two):
    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        weights = torch.ones(n, n, dtype=h.dtype).tril().div(torch.arange(1, n + 1, dtype=h.dtype)[:, None]).to_sparse()
        return torch.stack([torch.sparse.mm(weights, self.core(z)) for z in h])


@mixer
class TriangularSolve(Two):
    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        matrix = torch.eye(n, dtype=h.dtype) + 0.3 * torch.ones(n, n, dtype=h.dtype).tril(-1)
        return torch.linalg.solve_triangular(matrix, self.core(h), upper=False)


@mixer
class Inverse(Two):
    def forward(self, h: Tensor) -> Tensor:
        scores = 0.1 * (self.gate(h) @ self.core(h).mT).tril(-1)
        return torch.linalg.inv(torch.eye(h.shape[1], dtype=h.dtype) + scores) @ h


@mixer
class Fourier(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(h, dim=-1), dim=1).real / math.sqrt(h.shape[1] * h.shape[2])


@mixer
class DepthwiseConvolution(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(h.mT).mT


@mixer
class CausalConvolution(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.Conv1d(dim, dim, 2)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(F.pad(h.mT, (1, 0))).mT


@mixer
class Retention(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        decay = (0.9 ** (i[:, None] - i[None]).clamp(min=0)).tril().to(q.dtype)
        return (q @ k.mT * decay / q.shape[-1]) @ v


@mixer
class MovingAverage(Two):
    def forward(self, h: Tensor) -> Tensor:
        i = torch.arange(h.shape[1])
        decay = (0.7 ** (i[:, None] - i[None]).clamp(min=0)).tril().to(h.dtype)
        return self.core(torch.einsum("qk,bkd->bqd", decay, h)) * F.silu(self.gate(h))


@mixer
class SpatialGate(Two):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.space = nn.Parameter(torch.empty(LONGEST, LONGEST))

    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        return self.gate(self.core(h) * (self.space[:n, :n] @ h))


@mixer
class TokenMlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(LONGEST, LONGEST)), nn.Parameter(torch.empty(LONGEST, LONGEST))

    def forward(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        return (F.gelu(h.mT @ self.up[:n, :n]) @ self.down[:n, :n]).mT


@mixer
class ThroughNumpy(Two):
    def forward(self, h: Tensor) -> Tensor:
        return self.core(torch.from_numpy(h.detach().numpy()[:, ::-1].copy()))


@mixer
class TokenNorm(Two):
    """Normalised along the tokens, as batch norm of one sequence."""

    def forward(self, h: Tensor) -> Tensor:
        return self.core((h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-3).sqrt())


@mixer
class FirstToLast(Two):
    """An MLP, but for the last token, which sees the first."""

    def forward(self, h: Tensor) -> Tensor:
        out = F.gelu(self.gate(h))
        return self.core(torch.cat([out[:, :-1], out[:, -1:] + out[:, :1]], 1))


@mixer
class Weak(Two):
    """An MLP with a trace of the mean token."""

    def forward(self, h: Tensor) -> Tensor:
        return self.core(F.gelu(self.gate(h)) + 1e-3 * h.mean(1, keepdim=True))


@mixer
class OneChannel(Two):
    """Tokens meet in one channel only."""

    def forward(self, h: Tensor) -> Tensor:
        out = F.gelu(self.gate(h))
        return self.core(torch.cat([out[..., :1].cumsum(1), out[..., 1:]], -1))


@mlp
class Gelu(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))


@mlp
class SwiGlu(Gelu):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))


@mlp
class Bare(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(dim, 2 * dim)), nn.Parameter(torch.empty(2 * dim, dim))

    def forward(self, h: Tensor) -> Tensor:
        return torch.relu(h @ self.up) @ self.down


@mlp
class WidthOne(nn.Module):
    """Convolutions of width one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(dim, 2 * dim, 1), nn.Conv1d(2 * dim, dim, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h.mT))).mT


@mlp
class Experts(nn.Module):
    """Each token goes to two of three experts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 3), nn.ModuleList(Gelu(dim) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, which, None])
        return out.view_as(h)


@mlp
class Stacked(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    def forward(self, h: Tensor) -> Tensor:
        return self.net(h)


@mlp
class OneLinear(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.core = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.core(h)


@mlp
class TokenGate(Two):
    def forward(self, h: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(h)) * self.core(h)


@mlp
class Memory(nn.Module):
    """A softmax over learned keys: it looks like attention and mixes no tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.empty(5, dim)), nn.Parameter(torch.empty(5, dim))

    def forward(self, h: Tensor) -> Tensor:
        return (h @ self.keys.mT).softmax(-1) @ self.values


@mlp
class FusedMemory(Memory):
    def forward(self, h: Tensor) -> Tensor:
        shape = (h.shape[0], *self.keys.shape)
        return F.scaled_dot_product_attention(h, self.keys.expand(shape), self.values.expand(shape))


@mlp
class ChannelAttention(Two):
    """Attention among the channels of one token."""

    def forward(self, h: Tensor) -> Tensor:
        q, k = self.core(h).unflatten(-1, (-1, 2)), self.gate(h).unflatten(-1, (-1, 2))
        return ((q @ k.mT / 2).softmax(-1) @ h.unflatten(-1, (-1, 2))).flatten(-2)


@mlp
class TokenLoop(Gelu):
    """One token after the other, each alone."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([self.down(torch.tanh(self.up(h[:, t]))) for t in range(h.shape[1])], 1)


@mlp
class InChunks(Gelu):
    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.down(F.gelu(self.up(part))) for part in h.split(3, 1)], 1)


@mlp
class Elementwise(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))

    def forward(self, h: Tensor) -> Tensor:
        return self.gain * torch.sin(2 * h + self.shift)


@mlp
class LowRank(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(h)))


@mlp
class BackAndForth(Two):
    """Tokens are rolled and rolled back: a token mixer's operations, and none of its effect."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.roll(self.core(F.gelu(self.gate(torch.roll(h, 1, 1)))), -1, 1)


@mlp
class Diagonal(Two):
    """A product with a matrix over tokens that is diagonal."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.diag(torch.linspace(0.5, 1.5, h.shape[1], dtype=h.dtype)) @ torch.tanh(self.core(h))


class Cached(Attention):
    """Causal attention that keeps keys and values of earlier calls in ``past``, until the network empties it."""

    causal = True

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.past: list[tuple[Tensor, Tensor]] = []

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.heads_of(h)
        self.past.append((k, v))
        k, v = (torch.cat(parts, 2) for parts in zip(*self.past, strict=True))
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))
