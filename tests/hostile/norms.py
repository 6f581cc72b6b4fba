"""Every form of norm: torch's own, written by hand as a module or in a line, functional, and over other axes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.case import ALL, READS, block_case, case
from tests.hostile.parts import DIM, Attention, Block, Mlp, Net
from tests.hostile.skips import PostNorm
from tests.hostile.twin import Cut, Twin

CORE = {"norm", "exact", "ablate"}
put = partial(case, core=CORE)
put_block = partial(block_case, core=CORE)

BUT_NORM = ALL - {"norm", "ablate"}


class RmsEpsNone(Block):
    def make_norm(self) -> nn.Module:
        return nn.RMSNorm(DIM)


class RmsEpsNoneSmall(RmsEpsNone):
    """A stream so small that the epsilon is felt: it has to be that of the model's own format."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + 3e-4 * branch

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * x + 3e-4 * branch


class Small(Net):
    def start(self, ids: Tensor) -> Tensor:
        return 3e-4 * super().start(ids)

    def start_twin(self, ids: Tensor) -> Tensor:
        return 3e-4 * super().start_twin(ids)


class RmsEps(Block):
    def make_norm(self) -> nn.Module:
        return nn.RMSNorm(DIM, eps=1e-5)


class Weightless(Block):
    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(DIM, elementwise_affine=False)


class NoBias(Block):
    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(DIM, bias=False)


class LlamaNorm(nn.Module):
    """By hand, with the name of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def by_hand(self, x: Tensor) -> Tensor:
        return plain.rms_norm(x, self.weight, 1e-6)


class HandWritten(Block):
    def make_norm(self) -> nn.Module:
        return LlamaNorm()


class Rescale(LlamaNorm):
    """By hand, and nothing in its name says so."""


class HandWrittenUnnamed(Block):
    def make_norm(self) -> nn.Module:
        return Rescale()


class ScaleNorm(nn.Module):
    """Unit length times one learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.size * F.normalize(x, dim=-1)

    def by_hand(self, x: Tensor) -> Tensor:
        return self.size * x / x.pow(2).sum(-1, keepdim=True).sqrt()


class Scaled(Block):
    def make_norm(self) -> nn.Module:
        return ScaleNorm()


class Group(Block):
    """Two groups of channels, each over all tokens: a norm that mixes tokens."""

    def make_norm(self) -> nn.Module:
        return GroupNorm()


class GroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GroupNorm(2, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)

    def by_hand(self, x: Tensor) -> Tensor:
        groups = x.unflatten(2, (2, -1))
        centred = groups - groups.mean((1, 3), keepdim=True)
        out = centred / (centred.pow(2).mean((1, 3), keepdim=True) + self.inner.eps).sqrt()
        return out.flatten(2) * self.inner.weight + self.inner.bias


class GroupPerToken(Block):
    """Two groups of channels, each token by itself."""

    def make_norm(self) -> nn.Module:
        return TokenGroups()


class TokenGroups(GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)

    def by_hand(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        out = torch.cat([plain.layer_norm(part, None, None, self.inner.eps) for part in (left, right)], dim=-1)
        return out * self.inner.weight + self.inner.bias


class Batch(Block):
    """Statistics of training, in evaluation mode: a fixed affine map."""

    def make_norm(self) -> nn.Module:
        return BatchNorm()


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(DIM)
        self.inner.running_mean.copy_(torch.linspace(-0.5, 0.5, DIM))
        self.inner.running_var.copy_(torch.linspace(0.5, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)

    def by_hand(self, x: Tensor) -> Tensor:
        inner = self.inner
        return (x - inner.running_mean) / (inner.running_var + inner.eps).sqrt() * inner.weight + inner.bias


class FunctionalNorm(nn.Module):
    """Parameters of a norm without a call of their own: the block calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(DIM)), nn.Parameter(torch.empty(DIM))

    def by_hand(self, x: Tensor) -> Tensor:
        return plain.layer_norm(x, self.weight, self.bias, 1e-5)


class Functional(Block):
    def make_norm(self) -> nn.Module:
        return FunctionalNorm()

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), norm.weight, norm.bias)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.normed(self.norm1, x), hidden)
        return x + self.mlp(self.normed(self.norm2, x))


class FunctionalPostNorm(Functional):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = self.normed(self.norm1, x + self.attention(x, hidden))
        return self.normed(self.norm2, x + self.mlp(x))

    twin = PostNorm.twin


class InLine(Functional):
    """Written out in the block, line by line."""

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * norm.weight + norm.bias


class InLinePostNorm(InLine, FunctionalPostNorm):
    """The stream itself goes through a norm that is not a call."""

    forward, twin = FunctionalPostNorm.forward, PostNorm.twin


class VarMean(Functional):
    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return torch.addcmul(norm.bias, (x - mean) * torch.rsqrt(var + 1e-5), norm.weight)


class NoNorm(Block):
    def make_norm(self) -> nn.Module:
        return nn.Identity()

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(x, cut, hidden)
        if not cut.mlp:
            return x
        return cut.skip * x + self.mlp.by_hand(x)


class OneNormOfTwo(Block):
    """One norm is a module and the other is written out: half a replacement would be silent."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        centred = x - x.mean(-1, keepdim=True)
        read = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.norm2.eps)
        return x + self.mlp(read * self.norm2.weight + self.norm2.bias)


class TanhNorm(nn.Module):
    """A norm that computes no statistic (DyT)."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.weight, self.bias = (nn.Parameter(torch.empty(n)) for n in (1, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.slope * x) + self.bias

    def by_hand(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.slope * x) + self.bias


class Tanh(Block):
    def make_norm(self) -> nn.Module:
        return TanhNorm()


class _NormedQueries(Attention):
    """Queries and keys through norms of their own, which are part of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // 2, eps=1e-6), nn.RMSNorm(DIM // 2, eps=1e-6)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return super().mix(2 * self.q_norm(q), self.k_norm(k), v, hidden)

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        return super().mix_by_hand(2 * plain.norm(self.q_norm, q), plain.norm(self.k_norm, k), v, hidden, cut)


class QkNorm(Block):
    def make_attention(self) -> nn.Module:
        return _NormedQueries()


class _NormInTheMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(DIM, 2 * DIM), nn.LayerNorm(2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))

    def by_hand(self, x: Tensor) -> Tensor:
        return plain.linear(self.down, plain.norm(self.norm, plain.gelu(plain.linear(self.up, x))))


class SubNorm(Block):
    """A norm inside the MLP, of another width: a part of the MLP, not of the block (NormFormer)."""

    def make_mlp(self) -> nn.Module:
        return _NormInTheMlp()


class NormedEmbedding(Net):
    """The embedding goes through a norm before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(DIM)

    def start(self, ids: Tensor) -> Tensor:
        return self.first(super().start(ids))

    def start_twin(self, ids: Tensor) -> Tensor:
        return plain.norm(self.first, super().start_twin(ids))


class Unrolled(nn.Module):
    """All sub-layers in one module, which ends with something that is not recognised as a norm."""

    def __init__(self, blocks: nn.ModuleList, ending: nn.Module) -> None:
        super().__init__()
        parts = ([b.norm1, b.attention] if first else [b.norm2, b.mlp] for b in blocks for first in (True, False))
        self.layers = nn.ModuleList(nn.ModuleList(part) for part in parts)
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        for norm, branch in self.layers:
            x = x + branch(norm(x))
        return self.ending(x)


class Squash(TanhNorm):
    """Not even named like a norm."""


class UnrolledNet(Net):
    """x-transformers with ``use_dynamic_tanh``: the last block ends with its sum, not with what the module returns."""

    def __init__(self, ending: nn.Module) -> None:
        super().__init__()
        self.stack = Unrolled(self.blocks, ending)
        del self.blocks

    def forward(self, ids: Tensor) -> Tensor:
        return self.close(self.stack(self.start(ids)))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        layers = list(self.stack.layers)
        for layer, ((norm1, attention), (norm2, mlp)) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            here = cut.at(layer)
            x = here.skip * x + attention.by_hand(plain.norm(norm1, x, here), here, None)
            if here.mlp:
                x = here.skip * x + mlp.by_hand(plain.norm(norm2, x, here))
            states.append(x)
        ending = self.stack.ending
        return Twin(
            self.close_twin(ending.by_hand(x) if isinstance(ending, TanhNorm) else plain.linear(ending, x)), states
        )


class UnrolledMacaron(Net):
    """MLP, attention, MLP, all in one module: the sums alone do not say which MLP ends a block."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Unrolled(self.blocks, nn.LayerNorm(DIM))
        del self.blocks
        parts = list(self.stack.layers)
        for place in (4, 2, 0):
            parts.insert(place, nn.ModuleList([nn.LayerNorm(DIM), Mlp(DIM)]))
        self.stack.layers = nn.ModuleList(parts)

    def forward(self, ids: Tensor) -> Tensor:
        return self.close(self.stack(self.start(ids)))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for number, (norm, branch) in enumerate(self.stack.layers):
            here = cut.at(number // 3)
            read = plain.norm(norm, x, here)
            if number % 3 == 1:
                x = here.skip * x + branch.by_hand(read, here, None)
            elif here.mlp:
                x = here.skip * x + branch.by_hand(read)
            if number % 3 == 2:
                states.append(x)
        return Twin(self.close_twin(plain.norm(self.stack.ending, x)), states)


class UnrolledUnet(Net):
    """All in one module, and halfway the stream goes through a matrix, together with an earlier state."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.stack = Unrolled(self.blocks, nn.LayerNorm(DIM))
        self.stack.combine = nn.Linear(2 * DIM, DIM, bias=False)
        self.stack.forward = self.through
        del self.blocks

    def through(self, x: Tensor) -> Tensor:
        for number, (norm, branch) in enumerate(self.stack.layers):
            if number == 2:
                early = x
            if number == 4:
                x = self.stack.combine(torch.cat([x, early], dim=-1))
            x = x + branch(norm(x))
        return self.stack.ending(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.close(self.stack(self.start(ids)))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for number, (norm, branch) in enumerate(self.stack.layers):
            here = cut.at(number // 2)
            if number == 2:
                early = x
            if number == 4:
                x = plain.linear(self.stack.combine, torch.cat([x, early], dim=-1))
            read = plain.norm(norm, x, here)
            if number % 2 == 0:
                x = here.skip * x + branch.by_hand(read, here, None)
            else:
                x = here.skip * x + branch.by_hand(read) if here.mlp else x
                states.append(x)
        return Twin(self.close_twin(plain.norm(self.stack.ending, x)), states)


put_block("rms_eps_none", RmsEpsNone)
put_block("rms_eps_none_float32", RmsEpsNone, dtype=torch.float32)
put("rms_eps_none_small_float32", lambda: Small(RmsEpsNoneSmall), dtype=torch.float32)
put_block("rms_eps", RmsEps)
put_block("weightless_norm", Weightless)
put_block("norm_without_bias", NoBias)
put_block("hand_written_norm", HandWritten)
put_block("hand_written_norm_unnamed", HandWrittenUnnamed, equal=BUT_NORM)
put_block("scale_norm", Scaled, equal=BUT_NORM - {"exact", "exact_whole"})
# Its MLP reads a mean over tokens, through a view of another shape: it responds like a mixer.
put_block("group_norm", Group, equal=BUT_NORM - {"exact", "exact_whole", "mlp"})
put_block("group_norm_per_token", GroupPerToken, equal=BUT_NORM - {"exact", "exact_whole"})
put_block("batch_norm", Batch, equal=BUT_NORM - {"exact", "exact_whole"})
put_block("functional_norm", Functional)
put_block("functional_post_norm", FunctionalPostNorm)
put_block("in_line_norm", InLine, equal=BUT_NORM)
put_block("in_line_post_norm", InLinePostNorm, equal=frozenset({"doctor", "measure", "exact_whole"}))
put_block("var_mean_norm", VarMean, equal=BUT_NORM - {"exact", "exact_whole"})
put_block("no_norm", NoNorm, equal=BUT_NORM)
put_block("one_norm_of_two", OneNormOfTwo, equal=BUT_NORM)
put_block("tanh_norm", Tanh, equal=BUT_NORM)
put_block("qk_norm", QkNorm)
put_block("sub_norm", SubNorm, equal=BUT_NORM)
put("normed_embedding", NormedEmbedding)
# What follows the last sum is a norm only if it is linear in the normed token, and a tanh is not.
put("unrolled_with_tanh_at_the_end", lambda: UnrolledNet(Squash()), equal=READS | {"norm", "uniform"})
put("unrolled_macaron", UnrolledMacaron)
put("unrolled_unet", UnrolledUnet, equal=frozenset())
put("unrolled_with_projection_at_the_end", lambda: UnrolledNet(nn.Linear(DIM, DIM)))
