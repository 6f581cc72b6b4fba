"""Every form of skip inside a block: what is added, how it is scaled, and the ways to write it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.case import READS, block_case
from tests.hostile.parts import DIM, Attention, Block, Mlp
from tests.hostile.twin import Cut

CORE = {"skip0", "mlp", "exact"}
put_block = partial(block_case, core=CORE, skips="in a block")


class BranchFirst(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return branch + x


class TorchAdd(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch)


class AlphaOne(Block):
    """As OLMo-core writes every skip."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=1.0)


class Alpha(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=0.7)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + 0.7 * branch


class AlphaOnStream(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return branch.add(x, alpha=0.8)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return branch + gain * 0.8 * x


class InputKeyword(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(input=x, other=branch)


class InPlace(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        x += branch
        return x


class InPlaceAlpha(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x.add_(branch, alpha=0.7)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + 0.7 * branch


class IntoTheBranch(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        branch += x
        return branch


class OutBuffer(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.add(x, branch, out=out)
        return out


class ScalarGain(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return 0.8 * x + 0.6 * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * 0.8 * x + 0.6 * branch


class DividedGain(Block):
    """Variance kept by division, as in diffusion U-Nets."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return (x + branch) / 2**0.5

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return (gain * x + branch) / 2**0.5


class DividedStream(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x / 1.25 + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x / 1.25 + branch


class WithGain(Block):
    """A learned gain, one number per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(DIM))


class ChannelGain(WithGain):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.gain * x + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x * self.gain + branch


class LayerScale(WithGain):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.gain * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + branch * self.gain


class LearnedScalar(Block):
    """One learned number for the skip and one for the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.carry, self.add = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(1))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x * self.carry + self.add * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * self.carry * x + self.add * branch


class ComputedScalar(LearnedScalar):
    """A gain computed from a parameter: no parameter itself, and nothing of the stream in it."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.sigmoid(self.carry) * x + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x / (1 + (-self.carry).exp()) + branch


class TensorGain(Block):
    """A buffer with one gain per position and channel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("profile", torch.linspace(0.4, 1.2, 16 * DIM).view(16, DIM))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.mul(x, self.profile[: x.shape[1]]) + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x * self.profile[: x.shape[1]] + branch


class Gated(Block):
    """A gate that depends on the input stands on the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * x + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        gate = 1 / (1 + (-plain.linear(self.gate, x)).exp())
        return gain * gate * x + branch


class GatedBranch(Gated):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        gate = 1 / (1 + (-plain.linear(self.gate, x)).exp())
        return gain * x + gate * branch


class Highway(Gated):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * branch + (1 - t) * x

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        t = 1 / (1 + (-plain.linear(self.gate, x)).exp())
        return t * branch + gain * (1 - t) * x


class AddcmulOnto(WithGain):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.addcmul(x, branch, self.gain)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + branch * self.gain


class AddcmulCarries(WithGain):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.addcmul(branch, x, self.gain, value=0.9)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return branch + gain * 0.9 * x * self.gain


class Lerp(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.lerp(x, branch, 0.4)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * 0.6 * x + 0.4 * branch


class SubNegative(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x - (-branch)


class SubStream(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.sub(branch, x, alpha=0.7)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return branch - gain * 0.7 * x


class Where(Block):
    """Some entries are replaced, the others carried; the stream itself decides which."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.where(x > 0.1, x, branch)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        kept = (x > 0.1).to(x.dtype)
        return gain * x * kept + branch * (1 - kept)


class StackSum(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.stack([x, branch]).sum(dim=0)


class SumOfList(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return sum([x, branch])


class EinsumMix(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(2))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.einsum("s,sbtd->btd", self.mix, torch.stack([x, branch]))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * self.mix[0] * x + self.mix[1] * branch


class CatProjection(Block):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2 * DIM, DIM)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.project(torch.cat([x, branch], dim=-1))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return plain.linear(self.project, torch.cat([gain * x, branch], dim=-1))


class CatBranchFirst(CatProjection):
    """The branch in front, and a product with the parameter itself."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.concat((branch, x), -1) @ self.project.weight.T + self.project.bias

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return plain.linear(self.project, torch.cat([branch, gain * x], dim=-1))


class CatInTheBranch(CatProjection):
    """The projection of both is a branch: the stream is carried by the sum as well."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.project(torch.cat([x, branch], dim=-1))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + plain.linear(self.project, torch.cat([gain * x, branch], dim=-1))


class CatAsGate(CatProjection):
    """What reads both is a gate."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + torch.sigmoid(self.project(torch.cat([x, branch], dim=-1))) * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        gate = 1 / (1 + (-plain.linear(self.project, torch.cat([x, branch], dim=-1))).exp())
        return gain * x + gate * branch


class CatMlp(Block):
    """Stream and branch go through an MLP together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2 * DIM, DIM), nn.Linear(DIM, DIM)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.cat([x, branch], dim=-1))))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        inner = plain.linear(self.up, torch.cat([gain * x, branch], dim=-1))
        return plain.linear(self.down, plain.gelu(inner))


class CatOfThree(Block):
    """Both branches of a parallel block beside the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        read = self.norm1(x)
        return self.project(torch.cat([x, self.attention(read, hidden), self.mlp(read)], dim=-1))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        read = plain.norm(self.norm1, x, cut)
        mlp = self.mlp.by_hand(read) if cut.mlp else torch.zeros_like(x)
        return plain.linear(self.project, torch.cat([cut.skip * x, self.attention.by_hand(read, cut, hidden), mlp], -1))


class CatConvolution(Block):
    """Channels first for a moment, side by side along them, and a convolution of width one."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv1d(2 * DIM, DIM, 1)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.project(torch.cat([x.transpose(1, 2), branch.transpose(1, 2)], dim=1)).transpose(1, 2)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        both = torch.cat([gain * x, branch], dim=-1)
        return both @ self.project.weight[..., 0].T + self.project.bias


class CatConvolutionOnce(CatConvolution):
    """The same around the MLP alone, after a plain sum."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        return self.join(x, self.mlp(self.norm2(x)))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        return self.mlp_twin(x, cut)


class CatTurned(CatProjection):
    """Side by side along channels that come second, and a projection once they are last again."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        both = torch.cat([x.transpose(1, 2), branch.transpose(1, 2)], dim=1)
        return self.project(both.transpose(1, 2))


class StackMean(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.stack([branch, x], dim=2).mean(dim=2)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return (gain * x + branch) / 2


class StackLast(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.sum(torch.stack((x, branch), -1), -1)


class EinsumReversed(EinsumMix):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.einsum("kbtd, k -> btd", torch.stack([x, branch]), self.mix)


class EinsumOverTokens(EinsumMix):
    """One weight per token of each, which is no weight per tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(2, 16))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.einsum("st,sbtd->btd", self.mix[:, : x.shape[1]], torch.stack([x, branch]))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        mix = self.mix[:, : x.shape[1], None]
        return gain * mix[0] * x + mix[1] * branch


class LerpGate(Gated):
    """A gate of the input between stream and branch, as one call."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x.lerp(branch, torch.sigmoid(self.gate(x)))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        t = 1 / (1 + (-plain.linear(self.gate, x)).exp())
        return gain * (1 - t) * x + t * branch


class WhereMethod(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return branch.where(x.abs() > 0.4, x)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        taken = (x.abs() > 0.4).to(x.dtype)
        return taken * branch + gain * (1 - taken) * x


class IndexAddInPlace(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        out = x.clone()
        out.index_add_(1, torch.arange(x.shape[1]), branch)
        return out


class StochasticDepth(Block):
    """A branch is left out at random in training, and kept whole in evaluation."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.training:
            branch = branch * torch.empty(x.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)
        return x + branch


class ProjectedSkip(Block):
    """The skip goes through a matrix of its own, as where a ResNet changes width."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM, bias=False)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.project(x) + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * plain.linear(self.project, x) + branch


class Baddbmm(Block):
    """The last matrix of each branch is multiplied into the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.empty(DIM, DIM))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.baddbmm(x, branch, self.last.expand(x.shape[0], -1, -1))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + branch @ self.last


class Addmm(Baddbmm):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.addmm(x.reshape(-1, DIM), branch.reshape(-1, DIM), self.last).view_as(x)


class Dropout(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.dropout(x) + self.dropout(branch)


class Views(Block):
    """The stream is turned, flattened and cut on its way into the sum."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        turned = x.transpose(0, 1).flatten(1) + branch.transpose(0, 1).flatten(1)
        return turned.unflatten(1, (-1, DIM)).transpose(0, 1)


class Chunks(Block):
    """Two halves of the channels are added one by one."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        pairs = zip(x.chunk(2, dim=-1), branch.chunk(2, dim=-1), strict=True)
        return torch.cat([left + right for left, right in pairs], dim=-1)


class SliceAdd(Block):
    """The sum is written into a slice of a copy."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        out = x.clone()
        out[:, :] += branch
        return out


class IndexAdd(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x.index_add(1, torch.arange(x.shape[1]), branch)


class Scripted(Block):
    """One fused function, as Megatron's bias-dropout-add: a function mode does not see what is inside."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return _scripted_add(x, branch)


@torch.jit.script
def _scripted_add(x: Tensor, branch: Tensor) -> Tensor:
    return x + branch


class OwnFunction(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return _Add.apply(x, branch)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class Activated(Block):
    """The sum goes through an activation, as in a ResNet."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return F.leaky_relu(x + branch, 0.2)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        total = gain * x + branch
        return torch.maximum(total, 0.2 * total)


class ActivatedSkip(Block):
    """What is carried goes through an activation."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.tanh(x) + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * torch.tanh(x) + branch


class Attribute(Block):
    """The stream waits in an attribute until the branch is done."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: Tensor | None = None

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        self.saved = x
        x = self.attention(self.norm1(x), hidden) + self.saved
        self.saved = x
        x = self.mlp(self.norm2(x)) + self.saved
        self.saved = None
        return x


class InATuple(Block):
    """Sub-layers hand on what they were given beside what they made."""

    def _attend(self, pair: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
        return pair[0], self.attention(self.norm1(pair[0]), pair[1])

    def _think(self, x: Tensor) -> dict[str, Tensor]:
        return {"carried": x, "new": self.mlp(self.norm2(x))}

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x, branch = self._attend((x, hidden))
        x = x + branch
        found = self._think(x)
        return found["carried"] + found["new"]


class PositionsBefore(Block):
    """Positions are added again in front of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Parameter(torch.empty(16, DIM))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.again[: x.shape[1]]
        return super().forward(x, hidden)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        return super().twin(x + self.again[: x.shape[1]], cut, hidden)


class PositionsInTheBranch(PositionsBefore):
    """Positions enter attention alone, as in DETR: the skip does not carry them."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x + self.again[: x.shape[1]]), hidden)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        read = plain.norm(self.norm1, x + self.again[: x.shape[1]], cut)
        return self.mlp_twin(cut.skip * x + self.attention.by_hand(read, cut, hidden), cut)


class OneSkip(Block):
    """One skip around attention and MLP together."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return x + self.mlp(self.norm2(self.attention(self.norm1(x), hidden)))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        branch = self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        return cut.skip * x + self.mlp.by_hand(plain.norm(self.norm2, branch, cut))


class SkipFromTheEntry(Block):
    """The second skip starts at the block's entry, not at the sum before it."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        middle = x + self.attention(self.norm1(x), hidden)
        return x + self.mlp(self.norm2(middle))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        middle = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        if not cut.mlp:
            return x
        return cut.skip * x + self.mlp.by_hand(plain.norm(self.norm2, middle, cut))


class TwiceTheStream(Block):
    """The stream is in the sum twice."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch + x

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return 2 * gain * x + branch


class NoSkip(Block):
    """Attention and MLP one after the other, with nothing around them."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.mlp(self.norm2(self.attention(self.norm1(x), hidden)))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        branch = self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        return self.mlp.by_hand(plain.norm(self.norm2, branch, cut)) if cut.mlp else branch


class Parallel(Block):
    """Attention and MLP read the same norm, and are added one after the other."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        read = self.norm1(x)
        return x + self.attention(read, hidden) + self.mlp(read)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        read = plain.norm(self.norm1, x, cut)
        x = cut.skip * x + self.attention.by_hand(read, cut, hidden)
        return x + self.mlp.by_hand(read) if cut.mlp else x


class ParallelAtOnce(Parallel):
    """Their sum is added at once."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        read = self.norm1(x)
        return (self.attention(read, hidden) + self.mlp(read)) + x


class ParallelAlpha(Parallel):
    """Both are added by `torch.add` with `alpha`."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        read = self.norm1(x)
        return torch.add(torch.add(x, self.attention(read, hidden), alpha=1.0), self.mlp(read), alpha=1.0)


class PostNorm(Block):
    """The norm of each sum is the stream."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.norm1(self.join(x, self.attention(x, hidden)))
        return self.norm2(self.join(x, self.mlp(x)))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = plain.norm(self.norm1, self.joined(x, self.attention.by_hand(x, cut, hidden), cut.skip), cut)
        if not cut.mlp:
            return plain.norm(self.norm2, self.joined(x, torch.zeros_like(x), 1.0), cut)
        return plain.norm(self.norm2, self.joined(x, self.mlp.by_hand(x), cut.skip), cut)


class DeepNorm(PostNorm):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x * 1.3 + branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * 1.3 * x + branch


class Sandwich(Block):
    """A norm on either side of each branch (peri-norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.norm4 = self.make_norm(), self.make_norm()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.join(x, self.norm3(self.attention(self.norm1(x), hidden)))
        return self.join(x, self.norm4(self.mlp(self.norm2(x))))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        branch = self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        x = self.joined(x, plain.norm(self.norm3, branch, cut), cut.skip)
        if not cut.mlp:
            return self.joined(x, torch.zeros_like(x), 1.0)
        branch = self.mlp.by_hand(plain.norm(self.norm2, x, cut))
        return self.joined(x, plain.norm(self.norm4, branch, cut), cut.skip)


class NormAfterBranch(Sandwich):
    """A norm behind each branch and none before (Swin v2, OLMo 2)."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.join(x, self.norm3(self.attention(x, hidden)))
        return self.join(x, self.norm4(self.mlp(x)))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = self.joined(x, plain.norm(self.norm3, self.attention.by_hand(x, cut, hidden), cut), cut.skip)
        if not cut.mlp:
            return self.joined(x, torch.zeros_like(x), 1.0)
        return self.joined(x, plain.norm(self.norm4, self.mlp.by_hand(x), cut), cut.skip)


class NormedSkip(Block):
    """What is carried is the norm that the branch reads."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.norm1(x)
        x = x + self.attention(x, hidden)
        x = self.norm2(x)
        return x + self.mlp(x)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = plain.norm(self.norm1, x, cut)
        x = cut.skip * x + self.attention.by_hand(x, cut, hidden)
        x = plain.norm(self.norm2, x, cut)
        return cut.skip * x + self.mlp.by_hand(x) if cut.mlp else x


class _BertAttention(nn.Module):
    """The skip and its norm are inside the attention module, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Attention(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x) + x)


class InsideTheParts(Block):
    """Both skips are inside the parts; the block only calls them one after the other."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.attention, self.output = _BertAttention(), _BertOutput()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.attention(x)
        return self.output(x, x)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        attention, output = self.attention, self.output
        x = plain.norm(attention.norm, cut.skip * x + attention.inner.by_hand(x, cut), cut)
        return plain.norm(output.norm, cut.skip * x + output.mlp.by_hand(x) if cut.mlp else x, cut)


class _BertOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, carried: Tensor) -> Tensor:
        return self.norm(self.mlp(x) + carried)


class _Residual(nn.Module):
    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class ResidualWrappers(Block):
    """A block is a sequence of two wrappers that add what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(_Residual(self.norm1, self.attention), _Residual(self.norm2, self.mlp))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.both(x)


class GruGate(Block):
    """A gated recurrent unit in the place of the sum (GTrXL)."""

    def __init__(self) -> None:
        super().__init__()
        self.update, self.new = nn.Linear(2 * DIM, DIM), nn.Linear(2 * DIM, DIM)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        pair = torch.cat([x, branch], dim=-1)
        z = torch.sigmoid(self.update(pair))
        return (1 - z) * x + z * torch.tanh(self.new(pair))

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        pair = torch.cat([x, branch], dim=-1)
        z = 1 / (1 + (-plain.linear(self.update, pair)).exp())
        return gain * (1 - z) * x + z * torch.tanh(plain.linear(self.new, pair))


@torch.library.custom_op("hostile::fused_add", mutates_args=())
def _fused_add(x: Tensor, branch: Tensor) -> Tensor:
    return x + branch


@torch.library.custom_op("hostile::fused_add_into", mutates_args=("x",))
def _fused_add_into(x: Tensor, branch: Tensor) -> None:
    x.add_(branch)


class CustomOp(Block):
    """An operation of somebody's own, as fused kernels are: nothing sees what is inside."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return _fused_add(x, branch)


class CustomOpInPlace(Block):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        x = x.clone()
        _fused_add_into(x, branch)
        return x


class ThroughNumpy(Block):
    """The sum is made outside of torch."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() + branch.detach().numpy())


class ChosenTokens(Block):
    """The branch is added for some of the tokens alone; the others are carried as they are."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        chosen = torch.arange(x.shape[1]) % 3 != 0
        out = x.clone()
        out[:, chosen] = x[:, chosen] + branch[:, chosen]
        return out

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        chosen = (torch.arange(x.shape[1]) % 3 != 0).to(x.dtype)[:, None]
        return gain * x + chosen * branch


put_block("plain", Block)
put_block("branch_first", BranchFirst)
put_block("torch_add", TorchAdd)
put_block("alpha_one", AlphaOne)
put_block("alpha", Alpha)
put_block("alpha_on_stream", AlphaOnStream)
put_block("input_keyword", InputKeyword)
put_block("in_place", InPlace)
put_block("in_place_alpha", InPlaceAlpha)
put_block("into_the_branch", IntoTheBranch)
put_block("out_buffer", OutBuffer)
put_block("scalar_gain", ScalarGain)
put_block("divided_gain", DividedGain, equal=READS)
put_block("divided_stream", DividedStream, equal=READS)
put_block("channel_gain", ChannelGain)
put_block("layer_scale", LayerScale)
put_block("learned_scalar", LearnedScalar)
put_block("computed_scalar", ComputedScalar)
put_block("tensor_gain", TensorGain)
put_block("gated", Gated, equal=READS)
put_block("gated_branch", GatedBranch)
put_block("highway", Highway, equal=READS)
put_block("addcmul_onto", AddcmulOnto, equal=READS)
put_block("addcmul_carries", AddcmulCarries, equal=READS)
put_block("lerp", Lerp, equal=READS - {"exact_whole"})
put_block("sub_negative", SubNegative)
put_block("sub_stream", SubStream, equal=READS)
put_block("where", Where)
put_block("stack_sum", StackSum)
put_block("sum_of_list", SumOfList)
put_block("einsum_mix", EinsumMix)
put_block("cat_projection", CatProjection)
put_block("cat_branch_first", CatBranchFirst, core={"skip0"})
put_block("cat_in_the_branch", CatInTheBranch, equal=READS, core={"skip0"})
put_block("cat_as_gate", CatAsGate, equal=READS, core={"skip0"})
put_block("cat_mlp", CatMlp, equal=READS, core={"skip0"})
put_block("cat_of_three", CatOfThree, equal=READS, core={"skip0"})
put_block("cat_convolution", CatConvolution, equal=READS - {"exact_whole"}, core={"skip0"})
put_block("cat_convolution_once", CatConvolutionOnce, equal=READS - {"exact_whole"}, core={"skip0"})
put_block("cat_turned", CatTurned, equal=READS, core={"skip0"})
put_block("stack_mean", StackMean, core={"skip0"})
put_block("stack_last", StackLast, core={"skip0"})
put_block("einsum_reversed", EinsumReversed, core={"skip0"})
put_block("einsum_over_tokens", EinsumOverTokens, equal=READS, core={"skip0"})
put_block("lerp_gate", LerpGate, equal=READS - {"exact_whole"}, core={"skip0"})
put_block("where_method", WhereMethod, core={"skip0"})
put_block("index_add_in_place", IndexAddInPlace, core={"skip0"})
put_block("stochastic_depth", StochasticDepth, core={"skip0"})
put_block("projected_skip", ProjectedSkip, equal=READS)
put_block("baddbmm", Baddbmm, equal=READS)
put_block("addmm", Addmm, equal=READS)
put_block("dropout", Dropout)
put_block("views", Views, equal=READS)
put_block("chunks", Chunks, equal=READS)
put_block("slice_add", SliceAdd, equal=READS)
put_block("index_add", IndexAdd)
put_block("scripted", Scripted, equal=READS - {"exact_whole"})
put_block("own_function", OwnFunction, equal=READS - {"exact_whole"})
put_block("activated", Activated, equal=READS)
put_block("activated_skip", ActivatedSkip, equal=READS)
put_block("attribute", Attribute)
put_block("in_a_tuple", InATuple)
put_block("positions_before", PositionsBefore)
put_block("positions_in_the_branch", PositionsInTheBranch)
put_block("one_skip", OneSkip, equal=READS)
put_block("skip_from_the_entry", SkipFromTheEntry, equal=READS)
put_block("twice_the_stream", TwiceTheStream, equal=READS)
put_block("no_skip", NoSkip, equal=READS | {"norm", "uniform"})
put_block("parallel", Parallel)
put_block("parallel_at_once", ParallelAtOnce)
put_block("parallel_alpha", ParallelAlpha)
put_block("post_norm", PostNorm)
put_block("deep_norm", DeepNorm)
put_block("sandwich", Sandwich)
put_block("norm_after_branch", NormAfterBranch)
put_block("normed_skip", NormedSkip, equal=READS)
put_block("inside_the_parts", InsideTheParts)
put_block("residual_wrappers", ResidualWrappers)
put_block("gru_gate", GruGate, equal=READS)
put_block("custom_op", CustomOp, equal=frozenset())
put_block("custom_op_in_place", CustomOpInPlace, equal=frozenset())
put_block("through_numpy", ThroughNumpy, equal=frozenset())
put_block("chosen_tokens", ChosenTokens, equal=READS - {"exact_whole"})
