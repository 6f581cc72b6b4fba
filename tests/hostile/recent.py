"""Designs of recent years: depth that depends on the data, latents, merged and permuted tokens, joint streams."""

from __future__ import annotations

import math
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hostile import twin as plain
from tests.hostile.attentions import CrossAttention, block_with
from tests.hostile.case import ALL, EDITS, block_case, case
from tests.hostile.masks import AttentionMask, content, given
from tests.hostile.parts import DIM, HEADS, TOKENS, Attention, Block, Mlp, Net, ids
from tests.hostile.twin import Cut, Twin

NONE: frozenset[str] = frozenset()
put = partial(case, equal=NONE)
put_block = partial(block_case, equal=NONE)


class Latents(Net):
    """A Perceiver: as many latents as the input has tokens, whose padding says nothing about the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.empty(TOKENS, DIM))
        self.read = CrossAttention()

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.start(ids) * attention_mask[..., None].to(self.latents.dtype)
        x = self.latents.expand(len(ids), -1, -1) + self.read(self.latents.expand(len(ids), -1, -1), x)
        for block in self.blocks:
            x = block(x)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        x = self.start_twin(ids) * attention_mask[..., None].to(self.latents.dtype)
        first = self.latents.expand(len(ids), -1, -1)
        x, states = first + self.read.by_hand(first, x, plain.WHOLE), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class Permuted(AttentionMask):
    """Tokens are reversed after every block, and the mask with them (bidirectional scans, point clouds)."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, hidden = self.start(ids), (attention_mask == 0)[:, None, None, :]
        for block in self.blocks:
            x, hidden = block(x, hidden).flip(1), hidden.flip(-1)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        hidden = (attention_mask == 0)[:, None, None, :]
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), hidden)
            # the states in the order of the input, so that the mask is the input's own
            states.append(x if layer % 2 == 0 else x.flip(1))
            x, hidden = x.flip(1), hidden.flip(-1)
        return Twin(self.close_twin(x), states, attention_mask == 1)


class Shifted(AttentionMask):
    """A token of the model's own comes first and the last one is dropped: the mask is off by one."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(1, 1, DIM))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = torch.cat([self.own.expand(len(ids), -1, -1), self.start(ids)[:, :-1]], dim=1)
        hidden = F.pad(attention_mask[:, :-1] == 0, (1, 0))[:, None, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        x = torch.cat([self.own.repeat(len(ids), 1, 1), self.start_twin(ids)[:, :-1]], dim=1)
        keep = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), attention_mask[:, :-1] == 1], 1)
        states = []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), ~keep[:, None, None])
            states.append(x)
        return Twin(self.close_twin(x), states, keep)


class Registers(AttentionMask):
    """Two tokens of the model's own after the input, which is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(1, 2, DIM))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = torch.cat([self.start(ids), self.own.expand(len(ids), -1, -1)], dim=1)
        hidden = F.pad(attention_mask == 0, (0, 2))[:, None, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        x = torch.cat([self.start_twin(ids), self.own.repeat(len(ids), 1, 1)], dim=1)
        keep, states = torch.cat([attention_mask == 1, torch.ones(len(ids), 2, dtype=torch.bool)], 1), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), ~keep[:, None, None])
            states.append(x)
        return Twin(self.close_twin(x), states, keep)


class RoundedUp(Net):
    """Seven tokens are padded to eight inside, and nobody sees the eighth."""

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = F.pad(self.start(ids), (0, 0, 0, -tokens % 4))
        hidden = (torch.arange(x.shape[1]) >= tokens)[None, None, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.close(x[:, :tokens])

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class MergedInside(Block):
    """Tokens are merged in pairs between attention and MLP (ToMe)."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x.unflatten(1, (-1, 2)).mean(2)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)
        return self.mlp_twin((x[:, ::2] + x[:, 1::2]) / 2, cut)


class Pruned(Net):
    """Every block keeps the longest tokens, as many as are left."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
            kept = x.norm(dim=-1).topk(x.shape[1] - 1, dim=1).indices.sort(dim=1).values
            x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            states.append(x)
            least = x.pow(2).sum(-1).argmin(1)
            x = torch.stack([torch.cat([row[:n], row[n + 1 :]]) for row, n in zip(x, least.tolist(), strict=True)])
        return Twin(self.close_twin(x), states)


class ExitsByToken(Net):
    """A token leaves when it is long enough; the later blocks see it as it was."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        live = torch.ones_like(x[..., :1], dtype=torch.bool)
        for block in self.blocks:
            x = torch.where(live, block(x), x)
            live = live & (x.norm(dim=-1, keepdim=True) < 4)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        live = torch.ones_like(x[..., :1])
        for layer, block in enumerate(self.blocks):
            x = live * block.twin(x, cut.at(layer)) + (1 - live) * x
            states.append(x)
            live = live * (x.pow(2).sum(-1, keepdim=True) < 16)
        return Twin(self.close_twin(x), states)


class ExitsEarly(Net):
    """The whole batch leaves when its tokens are alike enough; here after the second of four blocks."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for number, block in enumerate(self.blocks):
            if number >= 2 and float(x.detach().norm()) > 0.1:
                break
            x = block(x)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks[:2]):
            x = block.twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class ExitsByInput(Net):
    """Two blocks for a sequence that begins with an even id, four for one that begins with an odd one."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks[: 2 + 2 * int(ids[0, 0] % 2)]:
            x = block(x)
        return self.close(x)


class PrunedBlock(Net):
    """A block was taken out of a trained model and replaced with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Identity()

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer in (0, 1, 2):
            x = x if layer == 1 else self.blocks[layer].twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class Hypersphere(Block):
    """nGPT: a step from the stream towards the branch, written as in the paper, then back to the sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.step1, self.step2 = nn.Parameter(torch.empty(DIM)), nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = F.normalize(x + self.step1 * (F.normalize(self.attention(x), dim=-1) - x), dim=-1)
        return F.normalize(x + self.step2 * (F.normalize(self.mlp(x), dim=-1) - x), dim=-1)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        def unit(v: Tensor) -> Tensor:
            return v / v.pow(2).sum(-1, keepdim=True).sqrt()

        x = unit(cut.skip * (1 - self.step1) * x + self.step1 * unit(self.attention.by_hand(x, cut)))
        if not cut.mlp:
            return x
        return unit(cut.skip * (1 - self.step2) * x + self.step2 * unit(self.mlp.by_hand(x)))


class Step(Block):
    """The same step without norms: the stream is in the sum twice."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + 0.3 * (branch - x)

    def joined(self, x: Tensor, branch: Tensor, gain: float) -> Tensor:
        return gain * 0.7 * x + 0.3 * branch


class DepthAttention(Net):
    """Each block reads a softmax over the outputs of all blocks before it, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(3, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        seen = [self.start(ids)]
        for layer, block in enumerate(self.blocks):
            stacked = torch.stack(seen, dim=2)
            weights = (stacked @ self.query[layer]).softmax(dim=-1)
            seen.append(block((weights[..., None] * stacked).sum(2)))
        return self.close(seen[-1])

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        seen = [self.start_twin(ids)]
        for layer, block in enumerate(self.blocks):
            stacked = torch.stack(seen, dim=2)
            weights = plain.softmax(torch.einsum("btsd,d->bts", stacked, self.query[layer]), None)
            read = torch.einsum("bts,btsd->btd", weights, stacked)
            seen.append(block.twin(read, cut.at(layer)))
        return Twin(self.close_twin(seen[-1]), seen[1:])


class _Experts(nn.Module):
    """As many soft experts as there are tokens, mixed by a softmax of shape (batch, tokens, experts)."""

    def __init__(self, experts: int = TOKENS) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.weight = nn.Parameter(torch.empty(experts, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(dim=-1)
        return torch.einsum("bte,edf,btd->btf", gates, self.weight, x)

    def by_hand(self, x: Tensor) -> Tensor:
        gates = plain.softmax(plain.linear(self.router, x), None)
        return sum(gates[..., e, None] * (x @ self.weight[e]) for e in range(len(self.weight)))


class SoftExperts(Block):
    def make_mlp(self) -> nn.Module:
        return _Experts()


class Flex(Attention):
    """flex_attention without a compiler, with a bias of the distance."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without")
            return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j).abs())

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        place = torch.arange(q.shape[2], dtype=q.dtype)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = scores - 0.1 * (place[:, None] - place[None, :]).abs()
        return torch.einsum("bhqk,bhkd->bhqd", plain.probabilities(scores, hidden, cut), v)


class TiedQk(Attention):
    """Keys are the queries."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, _, v = super().project(x)
        return q, q, v

    def mix_by_hand(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, cut: Cut) -> Tensor:
        return super().mix_by_hand(q, q, v, hidden, cut)


class JointAttention(nn.Module):
    """Two streams attend over their union (MM-DiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        both = self.inner(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]], both[:, x.shape[1] :]


class _Joint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Block(), Block()
        del self.image.attention, self.text.attention
        self.attention = JointAttention()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.attention(self.image.norm1(x), self.text.norm1(y))
        x, y = x + a, y + b
        return x + self.image.mlp(self.image.norm2(x)), y + self.text.mlp(self.text.norm2(y))

    def twin(self, x: Tensor, y: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        read = torch.cat([plain.norm(self.image.norm1, x, cut), plain.norm(self.text.norm1, y, cut)], 1)
        both = self.attention.inner.by_hand(read, cut)
        x, y = cut.skip * x + both[:, : x.shape[1]], cut.skip * y + both[:, x.shape[1] :]
        return self.image.mlp_twin(x, cut), self.text.mlp_twin(y, cut)


class TwoModalities(Net):
    """An image of seven tokens and a text of four."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(_Joint() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, y = self.start(ids), self.start(ids.flip(1)[:, :4])
        for block in self.blocks:
            x, y = block(x, y)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, y, states = self.start_twin(ids), self.start_twin(ids.flip(1)[:, :4]), []
        for layer, block in enumerate(self.blocks):
            x, y = block.twin(x, y, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class Modulated(Block):
    """DiT: shift, scale and gate of each branch come from a conditioning vector."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(DIM, 6 * DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        x = x + c * self.attention(self.norm1(x) * (1 + a) + b)
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)

    def twin(self, x: Tensor, cut: Cut, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = plain.linear(self.modulation, condition / (1 + (-condition).exp()))[:, None].chunk(6, dim=-1)
        x = cut.skip * x + c * self.attention.by_hand(plain.norm(self.norm1, x, cut) * (1 + a) + b, cut)
        return cut.skip * x + f * self.mlp.by_hand(plain.norm(self.norm2, x, cut) * (1 + d) + e) if cut.mlp else x


class Conditioned(Net):
    def __init__(self) -> None:
        super().__init__(Modulated)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        condition = x.mean(1)
        for block in self.blocks:
            x = block(x, condition)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        condition = x.sum(1) / x.shape[1]
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), condition)
            states.append(x)
        return Twin(self.close_twin(x), states)


class Doubled(Net):
    """Classifier-free guidance: every sequence a second time, with its tokens reversed, in one batch."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(torch.cat([ids, ids.flip(1)]))
        for block in self.blocks:
            x = block(x)
        good, bad = self.close(x).chunk(2)
        return bad + 2 * (good - bad)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(torch.cat([ids, ids.flip(1)])), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            states.append(x)
        good, bad = self.close_twin(x).chunk(2)
        return Twin(bad + 2 * (good - bad), states)


class LeftMask(AttentionMask):
    """Padded on the left."""

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        hidden = (attention_mask == 0)[:, None, None]
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), hidden)
            states.append(x)
        return Twin(self.close_twin(x), states, attention_mask == 1)


class BothMasked(Net):
    """An encoder and a decoder of the same length, of which only the encoder's input is padded."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(_MaskedReader() for _ in range(2))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        memory, hidden = self.start(ids), (attention_mask == 0)[:, None, None]
        for block in self.encoder:
            memory = block(memory, hidden)
        x = self.start(ids.flip(1))
        for block in self.decoder:
            x = block(x, memory, hidden[:, 0])
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, attention_mask: Tensor) -> Twin:
        memory, states, hidden = self.start_twin(ids), [], (attention_mask == 0)[:, None, None]
        for layer, block in enumerate(self.encoder):
            memory = block.twin(memory, cut.at(layer), hidden)
            states.append(memory)
        x = self.start_twin(ids.flip(1))
        for layer, block in enumerate(self.decoder):
            x = block.twin(x, cut.at(layer), memory, hidden[:, 0])
            states.append(x)
        return _ByStack(self.close_twin(x), states, attention_mask == 1)


class _ByStack(Twin):
    """The mask is the first stack's."""

    def relative_residuals(self) -> list[list[float]]:
        half = len(self.states) // 2
        first, second = self._replace(states=self.states[:half]), self._replace(states=self.states[half:], counts=None)
        return Twin.relative_residuals(first) + Twin.relative_residuals(second)


class _MaskedCross(CrossAttention):
    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        key, value = self.both(memory).chunk(2, dim=-1)
        scores = self.query(x) @ key.transpose(1, 2) / math.sqrt(DIM)
        return self.out(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value)

    def by_hand(self, x: Tensor, memory: Tensor, cut: Cut, hidden: Tensor) -> Tensor:
        key, value = plain.linear(self.both, memory).chunk(2, dim=-1)
        scores = plain.linear(self.query, x) @ key.transpose(1, 2) / DIM**0.5
        return plain.linear(self.out, plain.probabilities(scores, hidden, cut) @ value)


class _MaskedReader(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cross_attention, self.norm3 = _MaskedCross(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross_attention(self.norm3(x), memory, hidden)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, memory: Tensor, hidden: Tensor) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)
        x = cut.skip * x + self.cross_attention.by_hand(plain.norm(self.norm3, x, cut), memory, cut, hidden)
        return self.mlp_twin(x, cut)


class StateInADict(Net):
    """One dictionary goes through the blocks, with pairs of tokens beside the tokens (Evoformer)."""

    def __init__(self) -> None:
        super().__init__(_DictBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        state = {"pairs": x[:, :, None] * x[:, None], "single": x}
        for block in self.blocks:
            state = block(state)
        return self.close(state["single"])

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        pairs = torch.einsum("bid,bjd->bijd", x, x)
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            now = cut.at(layer)
            pairs = now.skip * pairs + torch.einsum("bid,bjd->bijd", x, x)
            x = x + pairs.mean(2)
            states.append(x)
        return Twin(self.close_twin(x), states)


class _DictBlock(Block):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = super().forward(state["single"])
        pairs = state["pairs"] + x[:, :, None] * x[:, None]
        return {"pairs": pairs, "single": x + pairs.mean(2)}


class SharedKeys(Net):
    """Later blocks use the keys and values of the first (YOCO, cross-layer attention)."""

    def __init__(self) -> None:
        super().__init__(_KeysBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x, kept = self.start(ids), None
        for block in self.blocks:
            x, kept = block(x, kept)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states, kept = self.start_twin(ids), [], None
        for layer, block in enumerate(self.blocks):
            now, attention = cut.at(layer), block.attention
            read = plain.norm(block.norm1, x, now)
            q, k, v = (plain.split(part, HEADS) for part in plain.linear(attention.qkv, read).chunk(3, dim=-1))
            kept = kept or (k, v)
            mixed = plain.merge(attention.mix_by_hand(q, *kept, None, now))
            x = block.mlp_twin(now.skip * x + plain.linear(attention.out, mixed), now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class _KeysBlock(Block):
    def forward(self, x: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.attention.project(self.norm1(x))
        kept = kept or (k, v)
        mixed = self.attention.mix(q, *kept, None)
        x = x + self.attention.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x)), kept


class Documents(Net):
    """Several documents in one row: attention within each, told by ids of documents."""

    def forward(self, ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.start(ids)
        hidden = (document_ids[:, :, None] != document_ids[:, None, :])[:, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, document_ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        hidden = (document_ids[:, :, None] != document_ids[:, None, :])[:, None]
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), hidden)
            states.append(x)
        return Twin(self.close_twin(x), states)


class WiderStream(Net):
    """The stream is kept in more digits than the blocks compute with."""

    def __init__(self) -> None:
        super().__init__(_NarrowBranches)

    def start(self, ids: Tensor) -> Tensor:
        return super().start(ids).double()

    def close(self, x: Tensor) -> Tensor:
        return super().close(x.float())


class _NarrowBranches(Block):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x.float())).double()
        return x + self.mlp(self.norm2(x.float())).double()


class Cached(Net):
    """Keys and values are written into buffers of the module, as fast decoders do."""

    def __init__(self) -> None:
        super().__init__(block_with(_CachedAttention, mask=True))


class _CachedAttention(Attention):
    def __init__(self, dim: int = DIM, heads: int = HEADS, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal=causal)
        self.register_buffer("keys", torch.zeros(2, HEADS, 16, DIM // HEADS), persistent=False)
        self.register_buffer("values", torch.zeros(2, HEADS, 16, DIM // HEADS), persistent=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        tokens = q.shape[2]
        self.keys[: len(k), :, :tokens] = k.detach()
        self.values[: len(k), :, :tokens] = v.detach()
        seen = torch.arange(16)[None, :] <= torch.arange(tokens)[:, None]
        scores = q @ self.keys[: len(k)].transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.values[: len(k)]


class MeanAdded(Block):
    """The mean token is added to every token: mixing without attention."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x)) + x.mean(1, keepdim=True)
        return x + self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        mean = x.sum(1, keepdim=True) / x.shape[1]
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut) + mean
        return self.mlp_twin(x, cut)


class Scattered(Block):
    """A router picks four tokens; what the branch makes of them is scattered onto the stream (mixture of depths)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 1)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        scores = self.router(x)[..., 0]
        weight, chosen = scores.topk(4, dim=1)
        at = chosen[..., None].expand(-1, -1, x.shape[-1])
        read = x.gather(1, at)
        made = self.attention(self.norm1(read)) + self.mlp(self.norm2(read))
        return x.scatter_add(1, at, weight.sigmoid()[..., None] * made)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        scores = plain.linear(self.router, x)[..., 0]
        chosen = scores.argsort(dim=1, descending=True)[:, :4]
        rows = []
        for row, score, places in zip(x, scores, chosen, strict=True):
            read = row[places][None]
            made = self.attention.by_hand(plain.norm(self.norm1, read, cut), cut)
            if cut.mlp:
                made = made + self.mlp.by_hand(plain.norm(self.norm2, read, cut))
            out = cut.skip * row
            for n, place in enumerate(places.tolist()):
                gated = made[0, n] / (1 + (-score[place]).exp())
                out = torch.cat([out[:place], (out[place] + gated)[None], out[place + 1 :]])
            rows.append(out)
        return torch.stack(rows)


class Macaron(Block):
    """Half an MLP before attention and half after it (Conformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp0, self.norm0 = Mlp(), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + 0.5 * self.mlp0(self.norm0(x))
        x = x + self.attention(self.norm1(x))
        return x + 0.5 * self.mlp(self.norm2(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        if cut.mlp:
            x = cut.skip * x + 0.5 * self.mlp0.by_hand(plain.norm(self.norm0, x, cut))
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)
        return cut.skip * x + 0.5 * self.mlp.by_hand(plain.norm(self.norm2, x, cut)) if cut.mlp else x


class MlpFirst(Block):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.mlp(self.norm2(x))
        return x + self.attention(self.norm1(x))

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        x = self.mlp_twin(x, cut)
        return cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)


class HalfStream(Block):
    """Attention writes the first half of the channels and the MLP the second."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        a = a + self.attention(self.norm1(x))[..., : DIM // 2]
        b = b + self.mlp(self.norm2(x))[..., DIM // 2 :]
        return torch.cat([a, b], dim=-1)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        half = DIM // 2
        a = cut.skip * x[..., :half] + self.attention.by_hand(plain.norm(self.norm1, x, cut), cut)[..., :half]
        b = x[..., half:]
        if cut.mlp:
            b = cut.skip * b + self.mlp.by_hand(plain.norm(self.norm2, x, cut))[..., half:]
        return torch.cat([a, b], dim=-1)


class ShiftBefore(Block):
    """Each token gets a share of the one before it, without a module (token shift, Canon layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(DIM))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.shift * F.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().forward(x)

    def twin(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return super().twin(cut.skip * x + self.shift * before, cut)


def left() -> Tensor:
    return content().flip(1).long()


def documents() -> Tensor:
    return torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]])


MASK = given("attention_mask", lambda: content().long())

MIXED = frozenset({"measure", "exact_whole", "mlp", "skip0", "uniform"})

put("latents", Latents, inputs=MASK, equal=EDITS | {"skip0"}, core={"measure", "skip0"})
put("permuted", Permuted, inputs=MASK, equal=EDITS | {"skip0"}, core={"measure"})
put("shifted", Shifted, inputs=MASK, equal=EDITS | {"skip0"}, core={"measure"})
put("registers", Registers, inputs=MASK, equal=EDITS | {"skip0"}, core={"measure", "measure_cut"})
put("rounded_up", RoundedUp, equal=ALL, core={"measure", "doctor", "skip0"})
put_block("merged_inside", MergedInside, inputs=lambda: ids(2, 12), core={"measure"})
put("pruned", Pruned, equal=ALL, core={"measure", "skip0"})
put("exits_by_token", ExitsByToken, core={"measure"})
put("exits_early", ExitsEarly, equal=MIXED, core={"measure"})
put("pruned_block", PrunedBlock, equal={"measure", "exact_whole", "skip0"}, core={"measure", "mlp"})
put_block("hypersphere", Hypersphere, equal={"measure", "exact_whole", "uniform"}, core={"skip0"})
put_block("step", Step, equal={"measure", "exact_whole", "uniform"}, core={"skip0", "mlp"})
put("depth_attention", DepthAttention, equal={"measure", "uniform", "mlp"}, core={"uniform"})
put_block("soft_experts", SoftExperts, equal=MIXED, core={"uniform"})
put_block("flex", block_with(Flex), equal=set(), core={"measure", "uniform"}, dtype=torch.float32)
put_block("tied_qk", block_with(TiedQk), equal=MIXED, core=NONE)
put("two_modalities", TwoModalities, equal={"measure", "exact_whole"}, core={"skip0"})
put("conditioned", Conditioned, equal={"measure", "exact_whole", "uniform"}, core=NONE)
put("doubled", Doubled, core={"measure"})
put("both_masked", BothMasked, inputs=MASK, equal={"skip0", "uniform", "mlp"}, core={"measure"})
put("state_in_a_dict", StateInADict, core={"measure"})
put("shared_keys", SharedKeys, equal=MIXED, core={"skip0"})
put("documents", Documents, inputs=given("document_ids", documents), equal=MIXED, core={"measure"})
put("wider_stream", WiderStream, equal=MIXED, core={"skip0"}, dtype=torch.float32)
put("cached", Cached, equal=MIXED - {"exact_whole"}, core={"skip0"})
put_block("mean_added", MeanAdded, equal=ALL, core={"skip0", "mlp"})
put_block("scattered", Scattered, core={"measure"})
put_block("half_stream", HalfStream, equal={"measure", "exact_whole", "uniform"}, core={"skip0"})
put_block("shift_before", ShiftBefore, equal=ALL, core={"measure", "mlp", "uniform"})
put_block("macaron", Macaron, equal=ALL, core={"measure", "mlp", "one_block", "ablate"})
put_block("mlp_first", MlpFirst, equal=ALL, core={"measure"})
put("int8_mask", AttentionMask, inputs=given("attention_mask", lambda: content().char()), equal=MIXED, core=NONE)
put("left_mask", LeftMask, inputs=given("attention_mask", left), equal=MIXED, core={"measure"})
