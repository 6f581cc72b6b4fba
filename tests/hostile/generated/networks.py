"""Random networks that know the truth about themselves.

``Network(seed)`` composes roles, sums, layouts, call patterns, placements of norms and names. ``forward`` is what
rankscope sees; ``by_hand`` is the same function without layout, spelling of sums or call pattern, with a gain on what
skips carry and with or without MLPs, and gives the hidden states after each block.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hostile.generated.layouts import LAYOUTS, Layout
from tests.hostile.generated.roles import LONGEST, MIXERS, MLPS, Cached
from tests.hostile.generated.sums import SUMS, Sum

VOCABULARY = 40
HONEST = {True: ["attention", "attn", "self_attn", "mixer", "token_mixer"], False: ["mlp", "ffn", "feed_forward"]}
MISLEADING = {
    True: ["mlp", "ffn", "feed_forward", "channel_mix", "op", "branch", "f", "rnn", "lru", "s4", "sgu", "time_mix"],
    False: ["attention", "attn", "self_attn", "mixer", "token_mixer", "op", "branch", "g", "retention", "core"],
}
CONTAINERS = ["blocks", "layers", "h", "stages", "attention", "mlp", "steps"]
POINTWISE = {
    "Gelu",
    "SwiGlu",
    "Bare",
    "Stacked",
    "OneLinear",
    "TokenGate",
    "Memory",
    "Elementwise",
    "LowRank",
    "ChannelAttention",
    "Experts",
}
"""MLPs that run on any shape with channels last, so also in the network's own layout."""

NORMS_OF = {"pre": ["before"], "post": ["post"], "sandwich": ["before", "after"], "after": ["after"], "none": []}
PARTS = {**MIXERS, **MLPS, "Cached": Cached}
CHANGES_ITS_INPUT = {"in_place"}
READS_TWICE = {"same input twice", "mean of two calls", "two stacks"}
PATTERNS = {
    "once": 10,
    "shared": 2,
    "alternating": 1,
    "looped": 2,
    "same input twice": 1,
    "mean of two calls": 1,
    "chunked": 1,
    "chunked with a cache": 1,
    "block by block in chunks": 1,
    "sequence by sequence": 1,
    "checkpointed": 1,
    "tied": 1,
    "two stacks": 1,
}
STRUCTURES = {"mixer mlp": 10, "mlp mixer": 2, "mixer": 1, "mixer mixer mlp": 2, "mlp mixer mlp": 2, "mixer+mlp": 2}
PLACEMENTS = {"pre": 8, "post": 4, "sandwich": 2, "after": 1, "none": 1}


def pick(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


@dataclass
class Sublayer:
    """One sum of a block: which modules make the branch, how it is normalised and how it is added."""

    branches: list[tuple[str, bool]]
    before: str | None
    after: str | None
    post: str | None
    sum: Sum
    gain: str | None = None
    on_stream: bool = False

    def mixes(self) -> bool:
        return any(mixes for _, mixes in self.branches)


@dataclass
class Geometry:
    """What the blocks of one network share: sizes that are known only once inputs arrive."""

    layout: Layout
    rows: int = 0
    local: int | None = None
    """Tokens per window if branches see one window at a time, as by-hand splits of the sequence."""


class Block(nn.Module):
    def __init__(self, geometry: Geometry, dim: int) -> None:
        super().__init__()
        self.geometry, self.dim = geometry, dim
        self.sublayers: list[Sublayer] = []
        self.returns, self.direct = "tensor", False
        if geometry.layout.streams > 1:
            self.read, self.write = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, None] | dict[str, Tensor]:
        for sub in self.sublayers:
            x = self._add(sub, x)
        if self.returns == "tuple":
            return x, None
        return {"hidden": x} if self.returns == "dict" else x

    def _add(self, sub: Sublayer, x: Tensor) -> Tensor:
        layout, rows = self.geometry.layout, self.geometry.rows
        native = self.direct or (layout.axis == -1 and layout.streams == 1 and self._pointwise(sub))
        h = x if native else self._read(layout.unfold(x, rows))
        f = self._branch(sub, h)
        f = f if native else layout.fold(self._write(f))
        if sub.gain is not None:
            gain = getattr(self, sub.gain)
            gain = gain.view([-1] + [1] * (x.dim() - 1 - layout.axis % x.dim()))
            x, f = (x * gain, f) if sub.on_stream else (x, gain * f)
        x = sub.sum.write(x, f)
        if sub.post is None:
            return x
        if layout.axis == -1 and layout.name not in ("batch heads tokens dim",) and layout.streams == 1:
            return getattr(self, sub.post)(x)
        return layout.fold(getattr(self, sub.post)(layout.unfold(x, rows)))

    def _pointwise(self, sub: Sublayer) -> bool:
        kinds = {type(getattr(self, name)).__name__ for name, _ in sub.branches}
        return kinds <= POINTWISE and self.geometry.layout.name != "batch heads tokens dim"

    def _branch(self, sub: Sublayer, h: Tensor, keep_mlp: bool = True) -> Tensor:
        if sub.before is not None:
            h = getattr(self, sub.before)(h)
        parts = [getattr(self, name)(h) for name, mixes in sub.branches if mixes or keep_mlp]
        f = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return f if sub.after is None else getattr(self, sub.after)(f)

    def _read(self, x: Tensor) -> Tensor:
        if self.geometry.layout.streams == 1:
            return x
        return torch.einsum("btsd,s->btd", x.unflatten(2, (2, -1)), self.read)

    def _write(self, f: Tensor) -> Tensor:
        if self.geometry.layout.streams == 1:
            return f
        return (f[:, :, None] * self.write[:, None]).flatten(2)

    def by_hand(self, x: Tensor, skip: float, keep_mlp: bool) -> Tensor:
        """(batch, tokens, channels); an MLP that is left out takes its sub-layer along, but for the weight of x."""
        for sub in self.sublayers:
            carried = x
            size = self.geometry.local or x.shape[1]
            if keep_mlp or sub.mixes():
                parts = [self._branch(sub, part, keep_mlp) for part in self._read(x).split(size, 1)]
                f, gain = self._write(torch.cat(parts, 1)), skip
            else:
                f, gain = torch.zeros_like(x), 1.0
            if sub.gain is not None:
                vector = getattr(self, sub.gain).repeat(self.geometry.layout.streams)
                carried, f = (x * vector, f) if sub.on_stream else (x, f * vector)
            x = gain * sub.sum.carry * carried + sub.sum.add * f
            if sub.post is not None:
                x = getattr(self, sub.post)(x)
        return x


@dataclass
class Facts:
    """What was drawn, for the report."""

    layout: str = ""
    pattern: str = ""
    roles: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    placement: str = ""
    inputs: str = "ids"
    structures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What is not left to chance: names of parts, or None."""

    layout: str | None = None
    pattern: str | None = None
    structure: str | None = None
    placement: str | None = None
    mixer: str | None = None
    mlp: str | None = None
    sum: str | None = None
    tokens_first: bool | None = None
    depth: int | None = None

    def plain(self) -> Wanted:
        """The ordinary choice for all that is left open."""
        return Wanted(
            self.layout or "batch tokens dim",
            self.pattern or "once",
            self.structure or "mixer mlp",
            self.placement or "pre",
            self.mixer or "Attention",
            self.mlp or "Gelu",
            self.sum or "plus",
            bool(self.tokens_first),
            self.depth or 2,
        )


class Network(nn.Module):
    """The network of a seed, in float64; ``given`` is what it runs on."""

    def __init__(self, seed: int, wanted: Wanted | None = None) -> None:
        super().__init__()
        self.wanted = Wanted() if wanted is None else wanted
        chance = random.Random(seed)
        self.seed, self.facts = seed, Facts()
        self._twins: dict[tuple[float, bool, float], tuple[Tensor, list[list[Tensor]]]] = {}
        self.pattern = self.wanted.pattern or pick(chance, PATTERNS)
        self.layout = LAYOUTS[self.wanted.layout] if self.wanted.layout else self._layout(chance)
        self.dim = chance.choice([8, 12])
        rows, tokens = chance.choice([2, 3]), chance.choice([5, 6, 6, 7, 8])
        if tokens % 2 and (self.layout.windows > 1 or "image" in self.layout.name):
            tokens += 1
        self.geometry = Geometry(self.layout)
        self.tokens_first = chance.random() < 0.08
        if self.wanted.tokens_first is not None:
            self.tokens_first = self.wanted.tokens_first
        self.chunk = chance.choice([3, 4])
        if self.pattern in ("chunked", "block by block in chunks"):
            self.geometry.local = self.chunk
        direct = False
        if self.layout.windows > 1 and chance.random() < 0.6:
            self.geometry.local, direct = tokens // self.layout.windows, True
        direct = direct or self.layout.name == "batch tokens dim"
        self._make_blocks(chance, direct)
        channels = self.dim * self.layout.streams
        self.embed = nn.Embedding(VOCABULARY, channels)
        self.positions = nn.Parameter(torch.empty(LONGEST, channels)) if chance.random() < 0.8 else None
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, 5, bias=False)
        self.pooled = chance.choice(["no", "no", "no", "mean", "first"])
        self._describe()
        self.double()
        self._draw(seed)
        self.eval()
        numbers = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=numbers)
        self.given = self.ids.T.contiguous() if self.tokens_first else self.ids

    def _layout(self, chance: random.Random) -> Layout:
        if self.pattern in ("chunked", "chunked with a cache", "block by block in chunks", "sequence by sequence"):
            return LAYOUTS["batch tokens dim"]
        if chance.random() < 0.6:
            return LAYOUTS["batch tokens dim"]
        return LAYOUTS[chance.choice(list(LAYOUTS))]

    def _make_blocks(self, chance: random.Random, direct: bool) -> None:
        depth = chance.choice([2, 2, 2, 2, 2, 3, 3, 4])
        depth = self.wanted.depth or depth
        self.placement = self.wanted.placement or pick(chance, PLACEMENTS)
        structure, one_sum = self.wanted.structure or pick(chance, STRUCTURES), chance.random() < 0.4
        hybrid, same_roles = chance.random() < 0.3 and not self.wanted.structure, chance.random() < 0.5
        plain = "plus" if chance.random() < 0.3 else chance.choice(list(SUMS))
        honest = chance.random() < 0.5
        norm = chance.choice(["layer", "layer", "rms"])
        names: dict[tuple[int, bool], str] = {}
        kinds: dict[tuple[int, bool], str] = {}
        mixers = ["Cached"] if self.pattern == "chunked with a cache" else list(MIXERS)
        if chance.random() < 0.25 and "Cached" not in mixers:
            mixers = ["Attention", "CausalAttention", "OneHead", "Fused", "FusedCausal", "TorchAttention"]
        # Diagonal reads how many tokens there are: in chunks it would be another function.
        mlps = [kind for kind in MLPS if kind != "Diagonal" or "Cached" not in mixers]
        returns = chance.choice(["tensor"] * 8 + ["tuple", "dict"])
        calls = {"shared": 1, "alternating": 2}.get(self.pattern, depth)
        made = []
        for _ in range(calls):
            block = Block(self.geometry, self.dim)
            block.returns, block.direct = returns, direct
            form = structure if not hybrid or chance.random() < 0.5 else pick(chance, STRUCTURES)
            self.facts.structures.append(form)
            for place, word in enumerate(form.split()):
                branches = []
                for part in word.split("+"):
                    mixes = part == "mixer"
                    key = (place, mixes)
                    kind = chance.choice(mixers if mixes else mlps)
                    kind = kinds.setdefault(key, kind) if same_roles else kind
                    if kind != "Cached":
                        kind = (self.wanted.mixer if mixes else self.wanted.mlp) or kind
                    name = chance.choice((HONEST if honest else MISLEADING)[mixes])
                    name = names.setdefault(key, name)
                    while hasattr(block, name):
                        name += "_"
                    setattr(block, name, PARTS[kind](self.dim))
                    branches.append((name, mixes))
                    self.facts.roles.append(kind)
                chosen = plain if one_sum or chance.random() < 0.4 else chance.choice(list(SUMS))
                if chosen in CHANGES_ITS_INPUT and self.pattern in (
                    "same input twice",
                    "mean of two calls",
                    "two stacks",
                ):
                    chosen = "plus"
                chosen = self.wanted.sum or chosen
                self.facts.sums.append(chosen)
                block.sublayers.append(self._sublayer(block, branches, SUMS[chosen], norm, place, chance))
            made.append(block)
        self.depth = depth
        self._hang(made, chance)

    def _sublayer(
        self, block: Block, branches: list[tuple[str, bool]], form: Sum, norm: str, place: int, chance: random.Random
    ) -> Sublayer:
        sub = Sublayer(branches, None, None, None, form)
        wanted = {
            "pre": ("before",),
            "post": ("post",),
            "sandwich": ("before", "after"),
            "after": ("after",),
            "none": (),
        }
        for role in wanted[self.placement]:
            width = self.dim * self.layout.streams if role == "post" else self.dim
            name = f"norm{place}{role[0]}"
            setattr(block, name, nn.LayerNorm(width) if norm == "layer" else nn.RMSNorm(width, eps=1e-6))
            setattr(sub, role, name)
        if chance.random() < 0.12 and not self.wanted.sum and self.layout.name != "batch heads tokens dim":
            sub.gain, sub.on_stream = f"gain{place}", chance.random() < 0.5
            setattr(block, sub.gain, nn.Parameter(torch.empty(self.dim)))
        return sub

    def _hang(self, made: list[Block], chance: random.Random) -> None:
        """Give the blocks their place: a list, attributes of their own, or two lists."""
        if self.pattern == "two stacks":
            self.left, self.right = nn.ModuleList(made[::2]), nn.ModuleList(made[1::2])
        elif self.pattern == "once" and chance.random() < 0.1 and not self.wanted.pattern:
            for number, block in enumerate(made):
                setattr(self, f"part{number}", block)
        else:
            setattr(self, chance.choice(CONTAINERS), nn.ModuleList(made))
        if self.pattern == "tied":
            for block in made[1:]:
                theirs = dict(block.named_parameters())
                for name, first in made[0].named_parameters():
                    if name in theirs and theirs[name].shape == first.shape:
                        owner, _, last = name.rpartition(".")
                        setattr(block.get_submodule(owner), last, first)
        object.__setattr__(self, "made", made)

    def _describe(self) -> None:
        self.facts.layout, self.facts.pattern, self.facts.placement = self.layout.name, self.pattern, self.placement
        self.facts.inputs = "ids, tokens first" if self.tokens_first else "ids"

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
            if parameter.dim() >= 2:
                scale = 1.0 if "embed" in name else 1.6 / math.sqrt(parameter[0].numel())
                parameter.copy_(value * scale)
            else:
                parameter.copy_((0.0 if "bias" in name else 0.9) + 0.2 * value)

    def order(self) -> list[Block]:
        """The blocks in the order of their calls, one entry per block of the truth."""
        made: list[Block] = self.made
        if self.pattern == "looped":
            return made * 2
        return [made[number % len(made)] for number in range(self.depth)]

    def start(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x if self.positions is None else x + self.positions[: ids.shape[1]]

    def close(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = {"no": lambda: x, "mean": lambda: x.mean(1), "first": lambda: x[:, 0]}[self.pooled]()
        return self.head(x)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.T if self.tokens_first else ids
        self.geometry.rows = ids.shape[0]
        x = self.layout.fold(self.start(ids))
        x = self._run(x)
        return self.close(self.layout.unfold(x, ids.shape[0]))

    def _run(self, x: Tensor) -> Tensor:
        if self.pattern in ("chunked", "chunked with a cache"):
            done = []
            for part in x.split(self.chunk, 1):
                for block in self.order():
                    part = _tensor(block(part))
                done.append(part)
            self.forget()
            return torch.cat(done, 1)
        if self.pattern == "sequence by sequence":
            done = []
            for row in x.split(1):
                for block in self.order():
                    row = _tensor(block(row))
                done.append(row)
            return torch.cat(done)
        if self.pattern == "two stacks":
            y = x.clone()
            for number in range(len(self.left)):
                x = _tensor(self.left[number](x))
                if number < len(self.right):
                    y = _tensor(self.right[number](y))
            return x + y
        for block in self.order():
            x = self._call(block, x)
        return x

    def _call(self, block: Block, x: Tensor) -> Tensor:
        if self.pattern == "checkpointed":
            return _tensor(checkpoint(block, x, use_reentrant=False))
        if self.pattern == "same input twice":
            with torch.no_grad():
                block(x)
        if self.pattern == "mean of two calls":
            return (_tensor(block(x)) + _tensor(block(x))) / 2
        if self.pattern == "block by block in chunks":
            return torch.cat([_tensor(block(part)) for part in x.split(self.chunk, 1)], 1)
        return _tensor(block(x))

    def forget(self) -> None:
        for module in self.modules():
            if isinstance(module, Cached):
                module.past.clear()

    def twin(self, skip: float = 1.0, mlp: bool = True, nudge: float = 0.0) -> tuple[Tensor, list[list[Tensor]]]:
        """``by_hand``, computed once."""
        key = (skip, mlp, nudge)
        if key not in self._twins:
            self._twins[key] = self.by_hand(*key)
        return self._twins[key]

    @torch.no_grad()
    def by_hand(self, skip: float = 1.0, mlp: bool = True, nudge: float = 0.0) -> tuple[Tensor, list[list[Tensor]]]:
        """Output, and by stack the hidden states after each block, (batch, tokens, channels).

        ``nudge`` moves the input by so much, relatively, to see whether the network magnifies rounding errors.
        """
        x = self.start(self.ids)
        x = x * (1 + nudge * torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape))
        order = self.order()
        stacks = [order[::2], order[1::2]] if self.pattern == "two stacks" else [order]
        ends, states = [], []
        for stack in stacks:
            y, after = x, []
            for block in stack:
                y = block.by_hand(y, skip, mlp)
                self.forget()
                after.append(y)
            ends.append(y)
            states.append(after)
        return self.close(ends[0] + ends[1] if len(ends) == 2 else ends[0]), states

    def has_mlp(self) -> bool:
        return any(not mixes for block in self.made for sub in block.sublayers for _, mixes in sub.branches)


def _tensor(out: Tensor | tuple[Tensor, None] | dict[str, Tensor]) -> Tensor:
    if isinstance(out, dict):
        return out["hidden"]
    return out[0] if isinstance(out, tuple) else out
