"""Every form of attention, and token mixers that are none."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.case import ALL, READS, SKIPS, block_case, case
from tests.hostile.parts import DIM, HEADS, TOKENS, Attention, Block, Net
from tests.hostile.twin import Cut, Twin

CORE = {"uniform", "exact"}
put = partial(case, core=CORE)
put_block = partial(block_case, core=CORE)

BUT_UNIFORM = ALL - {"uniform"}
ONLY_READ = READS - {"exact_whole"}


def block_with(attention: type[nn.Module], *, mask: bool = False) -> type[Block]:
    class Its(Block):
        def make_attention(self) -> nn.Module:
            return attention(causal=True) if mask else attention()

    Its.__name__ = f"{attention.__name__}Block"
    return Its


class Kernel(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if hidden is None else ~hidden)


class CausalKernel(Attention):
    def __init__(self) -> None:
        super().__init__(causal=True)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4)

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        return super().mix_by_hand(q * 0.4 * q.shape[-1] ** 0.5, k, v, hidden, cut)


class Torch(nn.Module):
    """nn.MultiheadAttention."""

    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=self.batch_first)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        qkv = x @ self.inner.in_proj_weight.T + self.inner.in_proj_bias
        q, k, v = (plain.split(part, HEADS) for part in qkv.chunk(3, dim=-1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        mixed = torch.einsum("bhqk,bhkd->bhqd", plain.probabilities(scores, hidden, cut), v)
        return plain.linear(self.inner.out_proj, plain.merge(mixed))


class TorchWithWeights(Torch):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        out, _ = self.inner(x, x, x)
        return out


class TorchTokensFirst(Torch):
    batch_first = False

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1)


class SoftmaxOverAxisOne(Attention):
    """One head, scores (batch, key, query): the softmax runs over axis 1."""

    def __init__(self) -> None:
        super().__init__(heads=1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scores = torch.bmm(k[:, 0], q[:, 0].transpose(1, 2)) / q.shape[-1] ** 0.5
        return torch.bmm(scores.softmax(dim=1).transpose(1, 2), v[:, 0]).unsqueeze(1)


class HeadsLast(Attention):
    """Probabilities (batch, query, key, heads)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bqkh", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bqkh,bhkd->bhqd", scores.softmax(dim=2), v)


class FoldedHeads(Attention):
    """Heads folded into the batch, as fairseq has them."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        probs = F.softmax(torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, dim=-1)
        return torch.bmm(probs, v).unflatten(0, (-1, self.heads))


class ByExponentials(Attention):
    """A softmax without a call of one."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        weights = torch.exp(q @ k.transpose(-1, -2) / 10)
        return (weights / weights.sum(-1, keepdim=True)) @ v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        return super().mix_by_hand(q / 10 * q.shape[-1] ** 0.5, k, v, hidden, cut)


class ByLogSoftmax(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return torch.log_softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1).exp() @ v


class HeadByHead(Attention):
    """A loop over heads: one softmax call for each."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        mixed = [
            torch.softmax(q[:, head] @ k[:, head].transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1) @ v[:, head]
            for head in range(self.heads)
        ]
        return torch.stack(mixed, dim=1)


class Sink(Attention):
    """A learned score beside the keys takes a part of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.empty(HEADS))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        sink = self.sink[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1] @ v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        beside = self.sink[:, None, None].expand(*scores.shape[:-1], 1)
        probs = plain.softmax(torch.cat([scores, beside], dim=-1), None)[..., :-1]
        if cut.uniform:
            probs = probs.sum(-1, keepdim=True).expand_as(probs) / probs.shape[-1]
        return torch.einsum("bhqk,bhkd->bhqd", probs, v)


class SinkToken(Attention):
    """A learned key and value in front of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = (
            nn.Parameter(torch.empty(1, HEADS, 1, DIM // 2)),
            nn.Parameter(torch.empty(1, HEADS, 1, 4)),
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        k = torch.cat([self.key.expand(k.shape[0], -1, -1, -1), k], dim=2)
        v = torch.cat([self.value.expand(v.shape[0], -1, -1, -1), v], dim=2)
        return super().mix(q, k, v, hidden)

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        k = torch.cat([self.key.repeat(k.shape[0], 1, 1, 1), k], dim=2)
        v = torch.cat([self.value.repeat(v.shape[0], 1, 1, 1), v], dim=2)
        return super().mix_by_hand(q, k, v, hidden, cut)


class Biased(Attention):
    """A distance bias on the scores (ALiBi)."""

    def _bias(self, tokens: int) -> Tensor:
        place = torch.arange(tokens)
        slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
        return -slopes[:, None, None] * (place[:, None] - place[None, :]).abs()

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(q.shape[2]).to(q.dtype))

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5 + self._bias(q.shape[2])
        return torch.einsum("bhqk,bhkd->bhqd", plain.probabilities(scores, hidden, cut), v)


class TalkingHeads(Attention):
    """Probabilities are mixed across heads after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Parameter(torch.empty(HEADS, HEADS))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        probs = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(dim=-1)
        return torch.einsum("hg,bgqk->bhqk", self.talk, probs) @ v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        probs = plain.probabilities(scores, hidden, cut)
        return torch.einsum("hg,bgqk,bhkd->bhqd", self.talk, probs, v)


class Differential(Attention):
    """The difference of two softmaxes (differential attention): rows do not sum to one."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        one = (q1 @ k1.transpose(-1, -2)).softmax(dim=-1)
        return (one - 0.3 * (q2 @ k2.transpose(-1, -2)).softmax(dim=-1)) @ v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        one = plain.probabilities(q1 @ k1.transpose(-1, -2), hidden, cut)
        return (one - 0.3 * plain.probabilities(q2 @ k2.transpose(-1, -2), hidden, cut)) @ v


class Linear(Attention):
    """Linear attention: no softmax anywhere."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(2).unsqueeze(-1))

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if cut.uniform:
            weights = torch.ones_like(weights)
        return torch.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdim=True), v)


class FeatureSoftmax(Attention):
    """Linear attention with a softmax over features: a softmax that is no attention over keys."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return q.softmax(dim=-1) @ (k.softmax(dim=-2).transpose(-1, -2) @ v)

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        q, k = q.softmax(-1), k.softmax(-2)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if cut.uniform:
            weights = torch.full_like(weights, 1 / weights.shape[-1])
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Sigmoid(Attention):
    """Each score through a sigmoid, divided by the number of keys."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return torch.sigmoid(q @ k.transpose(-1, -2)) @ v / k.shape[2]

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        weights = 1 / (1 + (-torch.einsum("bhqd,bhkd->bhqk", q, k)).exp()) / k.shape[2]
        if cut.uniform:
            weights = torch.full_like(weights, 1 / k.shape[2])
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


class Convolution(nn.Module):
    """A depthwise convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        weight, edge = self.conv.weight[:, 0], torch.zeros_like(x[:, :1])
        before, after = torch.cat([edge, x[:, :-1]], dim=1), torch.cat([x[:, 1:], edge], dim=1)
        out = before * weight[:, 0] + x * weight[:, 1] + after * weight[:, 2]
        if cut.uniform:
            out = x.mean(1, keepdim=True).expand_as(x)
        return out + self.conv.bias


class TokenMlp(nn.Module):
    """Tokens meet in a matrix of their own (MLP-Mixer)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.weights(x.transpose(1, 2)).transpose(1, 2)

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        if cut.uniform:
            return x.mean(1, keepdim=True).expand_as(x)
        return torch.einsum("qk,bkd->bqd", self.weights.weight, x) + self.weights.bias[:, None]


class Fourier(nn.Module):
    """FNet: no weights at all."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return torch.fft.fft2(x, dim=(1, 2)).real / x.shape[1]

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        if cut.uniform:
            return x.mean(1, keepdim=True).expand_as(x)
        tokens, dim = (torch.arange(n, dtype=x.dtype) for n in x.shape[1:])
        angles = (
            2
            * torch.pi
            * (torch.outer(tokens, tokens)[:, :, None, None] / len(tokens) + torch.outer(dim, dim) / len(dim))
        )
        return torch.einsum("qked,bkd->bqe", angles.cos(), x) / x.shape[1]


class GroupedKeys(Attention):
    """Two query heads share one key head, by the kernel's own option."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).split([DIM, DIM // 2, DIM // 2], dim=-1)
        q = q.unflatten(-1, (2, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        q, k, v = plain.linear(self.qkv, x).split([DIM, DIM // 2, DIM // 2], dim=-1)
        k, v = (plain.split(torch.cat([part, part], dim=-1), 2) for part in (k, v))
        return plain.linear(self.out, plain.merge(self.mix_by_hand(plain.split(q, 2), k, v, None, cut)))


class TwoAttentions(Block):
    """Two attentions in a row, each with its own skip."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.norm3 = Kernel(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        x = x + self.second(self.norm3(x), hidden)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)
        x = cut.skip * x + self.second.by_hand(plain.norm(self.norm3, x, cut), cut, hidden)
        return self.mlp_twin(x, cut)


class AttentionAndConvolution(Block):
    """One branch is the sum of an attention and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Convolution()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        read = self.norm1(x)
        x = x + (self.attention(read) + self.conv(read))
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        read = plain.norm(self.norm1, x, cut)
        branch = self.attention.by_hand(read, cut) + self.conv.by_hand(read, Cut())
        return self.mlp_twin(cut.skip * x + branch, cut)


class AttentionOnly(Block):
    """No MLP."""

    def make_mlp(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return x + self.attention(self.norm1(x), hidden)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        return cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, hidden)


class OwnLayers(Net):
    """torch's own encoder layers."""

    norm_first = True

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, HEADS, 2 * DIM, activation="gelu", batch_first=True, norm_first=self.norm_first
            )
            for _ in range(3)
        )

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = self._layer(block, x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)

    def _attend(self, block: nn.Module, x: Tensor, cut: Cut) -> Tensor:
        holder = Torch()
        holder.inner = block.self_attn
        return holder.by_hand(x, cut)

    def _layer(self, block: nn.Module, x: Tensor, cut: Cut) -> Tensor:
        x = cut.skip * x + self._attend(block, plain.norm(block.norm1, x, cut), cut)
        if not cut.mlp:
            return x
        read = plain.norm(block.norm2, x, cut)
        return cut.skip * x + plain.linear(block.linear2, plain.gelu(plain.linear(block.linear1, read)))


class OwnLayersPostNorm(OwnLayers):
    norm_first = False

    def _layer(self, block: nn.Module, x: Tensor, cut: Cut) -> Tensor:
        x = plain.norm(block.norm1, cut.skip * x + self._attend(block, x, cut), cut)
        mlp = plain.linear(block.linear2, plain.gelu(plain.linear(block.linear1, x)))
        return plain.norm(block.norm2, cut.skip * x + mlp if cut.mlp else x, cut)


class Nameless(Net):
    """No name says what anything is."""

    def __init__(self) -> None:
        super().__init__(_A)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        return super().twin(cut, ids)


class _B(Attention):
    pass


class _C(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(F.relu(self.p(x)))

    def by_hand(self, x: Tensor) -> Tensor:
        return plain.linear(self.q, plain.linear(self.p, x).clamp(min=0))


class _A(Block):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.a, self.b, self.c, self.d = _B(), _C(), nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.a(self.c(x))
        return x + self.b(self.d(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.a.by_hand(plain.norm(self.c, x, cut), cut)
        return cut.skip * x + self.b.by_hand(plain.norm(self.d, x, cut)) if cut.mlp else x


class MisleadingNames(Net):
    """The MLP is called attention and the attention mlp."""

    def __init__(self) -> None:
        super().__init__(_Misled)


class _Misled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = _C(), _B()

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.mlp(self.norm1(x))
        return x + self.attention(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.mlp.by_hand(plain.norm(self.norm1, x, cut), cut)
        return cut.skip * x + self.attention.by_hand(plain.norm(self.norm2, x, cut)) if cut.mlp else x


class EncoderDecoder(Net):
    """Two stacks; the second looks at the first by cross-attention."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.encoder, self.decoder = (
            nn.ModuleList(Block() for _ in range(2)),
            nn.ModuleList(_Reader() for _ in range(2)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.start(ids)
        for block in self.encoder:
            memory = block(memory)
        x = self.start(ids.flip(1))
        for block in self.decoder:
            x = block(x, memory)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        memory, states = self.start_twin(ids), []
        for layer, block in enumerate(self.encoder):
            memory = block.twin(memory, cut.at(layer))
            states.append(memory)
        x = self.start_twin(ids.flip(1))
        for layer, block in enumerate(self.decoder):
            x = block.twin(x, cut.at(layer), memory)
            states.append(x)
        return Twin(self.close_twin(x), states)


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.both, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.both(memory).chunk(2, dim=-1)
        return self.out(F.scaled_dot_product_attention(self.query(x)[:, None], key[:, None], value[:, None])[:, 0])

    def by_hand(self, x: Tensor, memory: Tensor, cut: Cut) -> Tensor:
        key, value = plain.linear(self.both, memory).chunk(2, dim=-1)
        scores = plain.linear(self.query, x) @ key.transpose(1, 2) / DIM**0.5
        return plain.linear(self.out, plain.probabilities(scores, None, cut) @ value)


class _Reader(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cross_attention, self.norm3 = CrossAttention(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross_attention(self.norm3(x), memory)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, memory: Tensor) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)
        x = cut.skip * x + self.cross_attention.by_hand(plain.norm(self.norm3, x, cut), memory, cut)
        return self.mlp_twin(x, cut)


put_block("kernel", block_with(Kernel))
put_block("kernel_causal", block_with(CausalKernel))
put_block("causal", block_with(Attention, mask=True))
put_block("torch_attention", block_with(Torch))
put_block("torch_attention_with_weights", block_with(TorchWithWeights))
put_block("torch_attention_tokens_first", block_with(TorchTokensFirst))
put_block("softmax_over_axis_one", block_with(SoftmaxOverAxisOne), equal=BUT_UNIFORM)
put_block("heads_last", block_with(HeadsLast), equal=BUT_UNIFORM)
put_block("folded_heads", block_with(FoldedHeads))
put_block("by_exponentials", block_with(ByExponentials), equal=BUT_UNIFORM)
put_block("by_log_softmax", block_with(ByLogSoftmax), equal=BUT_UNIFORM - {"exact", "exact_whole"})
put_block("head_by_head", block_with(HeadByHead), equal=BUT_UNIFORM)
put_block("sink", block_with(Sink), equal=BUT_UNIFORM)
put_block("sink_token", block_with(SinkToken), equal=BUT_UNIFORM)
put_block("biased", block_with(Biased))
put_block("talking_heads", block_with(TalkingHeads), equal=BUT_UNIFORM - {"exact", "exact_whole"})
put_block("differential", block_with(Differential), equal=BUT_UNIFORM)
put_block("linear_attention", block_with(Linear), equal=BUT_UNIFORM - {"exact", "exact_whole"})
put_block("feature_softmax", block_with(FeatureSoftmax), equal=BUT_UNIFORM - {"exact", "exact_whole"})
put_block("sigmoid_attention", block_with(Sigmoid), equal=BUT_UNIFORM - {"exact", "exact_whole"})
put_block("convolution", block_with(Convolution), equal=ONLY_READ)
put_block("token_mlp", block_with(TokenMlp), equal=ONLY_READ)
put_block("fourier", block_with(Fourier), equal=ONLY_READ)
put_block("grouped_keys", block_with(GroupedKeys))
put_block("two_attentions", TwoAttentions)
put_block("attention_and_convolution", AttentionAndConvolution, equal=BUT_UNIFORM)
put_block("attention_only", AttentionOnly, equal=READS | SKIPS - {"ablate"} | {"norm", "uniform"})
put("own_layers", OwnLayers)
put("own_layers_post_norm", OwnLayersPostNorm)
put("nameless", Nameless)
put("misleading_names", MisleadingNames, equal=READS | SKIPS - {"ablate"})
put("encoder_decoder", EncoderDecoder, equal=ALL - {"exact", "exact_whole"})
