"""Small transformers whose parts a fault can reach, and the text, images and views they are trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope.models.inputs.text import sample_text
from rankscope.models.pretrained import pretrained_folder

Place = Literal["pre", "post"]
TOKENS, HEADS = 24, 2
SPECIAL = 2
PAD, HIDDEN = 0, 1
"""Ids of padding and of a masked character."""
ADAPTER = 4
"""Rank of an adapter."""


def text_ids() -> tuple[Tensor, int]:
    """The built-in sample text, character by character, after the special ids."""
    text = sample_text()
    number = {letter: place + SPECIAL for place, letter in enumerate(sorted(set(text)))}
    return torch.tensor([number[letter] for letter in text]), len(number) + SPECIAL


def words() -> tuple[Tensor, int]:
    """The same text in the tokens of MiniLM (``./dev fetch minilm``)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pretrained_folder("minilm"))
    return torch.tensor(tokenizer(sample_text(), add_special_tokens=False)["input_ids"]), len(tokenizer)


def windows(ids: Tensor, count: int, generator: torch.Generator, tokens: int = TOKENS) -> Tensor:
    """Random stretches of the text."""
    starts = torch.randint(0, len(ids) - tokens, (count,), generator=generator)
    return torch.stack([ids[start : start + tokens] for start in starts.tolist()])


class Block(nn.Module):
    """A transformer block. Faults change its attributes while it trains, as a faulty edit of the code would.

    Attributes:
        skip: factor on the stream at both adds.
        branch: factor on both branches.
        sharpness: factor on the scores.
        causal: whether a token sees only earlier ones.
        half: whether the stream is stored in float16 after the block.
        axis: over which scores are normalised.
        most: largest entry of the stream after the block.
        levels: steps from zero to the largest entry that the stream is rounded to after the block; 0 for no rounding.
        visible: the keys that a token sees: "all" that the mask allows, the "first" one, or "itself".
        slope: what a score loses per position of distance (ALiBi).
        batch_first: whether attention takes the second axis for the tokens, and not the first.
        doubled: whether what attention returns is added to itself, and not to the stream (pre-norm).
    """

    def __init__(self, width: int, place: Place, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.place = place
        self.skip, self.branch, self.sharpness, self.causal, self.half = 1.0, 1.0, 1.0, causal, False
        self.visible, self.axis, self.most, self.levels = "all", -1, math.inf, 0
        self.slope, self.batch_first, self.doubled = 0.0, True, False
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention."""
        if not self.batch_first:
            x = x.transpose(0, 1)
        batch, tokens, width = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, HEADS, -1).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = self.sharpness * (q @ k.transpose(-1, -2)) / math.sqrt(width // HEADS)
        if self.slope:
            places = torch.arange(tokens)
            scores = scores - self.slope * (places[:, None] - places).abs()
        if self.causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -1e9)
        if self.visible != "all":
            seen = (
                torch.eye(tokens).bool() if self.visible == "itself" else torch.arange(tokens).expand(tokens, -1) == 0
            )
            scores = scores.masked_fill(~seen, -1e9)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        mixed = self.out_proj((scores.softmax(self.axis) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return mixed if self.batch_first else mixed.transpose(0, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Two branches, each added to the stream."""
        if self.place == "pre":
            attended = self.branch * self.dropout(self.attend(self.norm1(x), mask))
            x = (attended if self.doubled else self.skip * x) + attended
            x = self.skip * x + self.branch * self.dropout(self.mlp(self.norm2(x)))
        else:
            x = self.norm1(self.skip * x + self.branch * self.dropout(self.attend(x, mask)))
            x = self.norm2(self.skip * x + self.branch * self.dropout(self.mlp(x)))
        x = x.clamp(-self.most, self.most)
        if self.levels:
            scale = x.detach().abs().max() / self.levels
            x = x + ((x / scale).round() * scale - x).detach()
        return x.half().float() if self.half else x


class Net(nn.Module):
    """Embeddings, blocks and a head.

    Args:
        vocabulary: number of ids.
        layers: number of blocks.
        width: of the stream.
        place: of the norms.
        causal: whether a token sees only earlier ones.
        dropout: on both branches.
    """

    def __init__(
        self, vocabulary: int, layers: int, width: int, place: Place, *, causal: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Block(width, place, causal=causal, dropout=dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width) if place == "pre" else nn.Identity()
        self.head = nn.Linear(width, vocabulary)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The stream after the last block and norm."""
        x = self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.norm(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits."""
        return self.head(self.encode(input_ids, attention_mask))


class SeriesNet(Net):
    """The same, from three values to the next one of the first."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(1, layers, width, "pre", causal=True)
        self.embed = nn.Linear(3, width)  # type: ignore[assignment]

    def forward(self, series: Tensor) -> Tensor:  # type: ignore[override]
        """Predictions."""
        return self.head(self.encode(series))


def build(family: str, vocabulary: int, layers: int, width: int, *, dropout: float) -> nn.Module:
    """A model of a family: five of our own, and those of transformers."""
    own = {"pre": ("pre", True), "post": ("post", True), "pre-mlm": ("pre", False), "post-mlm": ("post", False)}
    if family in own:
        place, causal = own[family]
        return Net(vocabulary, layers, width, place, causal=causal, dropout=dropout)  # type: ignore[arg-type]
    if family == "series":
        return SeriesNet(layers, width)
    return _from_transformers(family, vocabulary, layers, width)


def _from_transformers(family: str, vocabulary: int, layers: int, width: int) -> nn.Module:
    import transformers as hf

    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": 4 * width, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    if family == "minilm":
        return hf.BertModel.from_pretrained(pretrained_folder("minilm"), add_pooling_layer=False)
    if family == "gpt2":
        sizes = {"n_layer": layers, "n_embd": width, "n_head": HEADS, "n_positions": TOKENS}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=vocabulary, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
        )
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**shape, use_cache=False, num_key_value_heads=1))
    if family == "neox":
        return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**shape, use_cache=False))
    if family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**shape, **experts, use_cache=False))
    if family == "t5":
        sizes = {"d_model": width, "d_kv": width // HEADS, "d_ff": 4 * width, "num_layers": layers, "num_heads": HEADS}
        return hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=vocabulary, dropout_rate=0.0, use_cache=False, **sizes)
        )
    if family == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**shape))
    assert family == "vit", family
    del shape["vocab_size"], shape["max_position_embeddings"]
    return hf.ViTForImageClassification(
        hf.ViTConfig(**shape, image_size=16, patch_size=4, num_channels=1, num_labels=8)
    )


class Adapter(nn.Module):
    """A frozen linear map plus a low-rank one that learns and starts at zero.

    Args:
        base: the linear map.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, ADAPTER, bias=False)
        self.up = nn.Linear(ADAPTER, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Both, added."""
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: nn.Module) -> None:
    """Adapters on queries and values."""
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        block.q_proj, block.v_proj = Adapter(block.q_proj), Adapter(block.v_proj)


def encoded(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The stream after the last block and norm."""
    if isinstance(model, Net):
        return model.encode(input_ids, attention_mask)
    return model(input_ids=input_ids).last_hidden_state


def place_in_word(ids: Tensor) -> Tensor:
    """For each character: whether it is a space, or the first, the last or another one of its word."""
    space = F.pad(ids, (1, 1)) == SPECIAL + 1
    before, here, after = space[:, :-2], space[:, 1:-1], space[:, 2:]
    return torch.where(here, 0, torch.where(before, 1, torch.where(after, 2, 3)))


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Gratings of eight orientations in noise, and which one each is."""
    kinds = torch.randint(8, (count,), generator=generator)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = kinds[:, None, None] * math.pi / 8
    phase = 6.28 * torch.rand(count, 1, 1, generator=generator)
    wave = torch.sin((x * angle.cos() + y * angle.sin()) + phase)
    return (wave + 0.5 * torch.randn(count, 16, 16, generator=generator))[:, None], kinds


def series(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three waves of one frequency in noise, and the next value of the first."""
    frequency = 0.2 + torch.rand(count, 1, 1, generator=generator)
    phase = 6.28 * torch.rand(count, 1, 3, generator=generator)
    waves = 1.4 * torch.sin(frequency * torch.arange(TOKENS + 1)[None, :, None] + phase)
    waves = waves + 0.1 * torch.randn(waves.shape, generator=generator)
    return waves[:, :-1], waves[:, 1:, :1]


def translation(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """The text in another alphabet, for an encoder and a decoder."""
    labels = vocabulary + 1 - ids
    start = torch.full_like(labels[:, :1], PAD)
    return {"input_ids": ids, "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1), "labels": labels}


def masked(ids: Tensor, generator: torch.Generator, share: float = 0.2) -> tuple[Tensor, Tensor]:
    """A share of the characters hidden, and the labels of those."""
    hidden = torch.rand(ids.shape, generator=generator) < share
    return torch.where(hidden, HIDDEN, ids), torch.where(hidden, ids, -100)


def replaced(ids: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """A view of the sequences in which a third of the characters are drawn anew."""
    other = torch.randint(SPECIAL, vocabulary, ids.shape, generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 1 / 3, other, ids)


def hidden_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the last block returns."""
    blocks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = max(blocks, key=len)[-1].register_forward_hook(keep)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    return kept[0]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Those that learn."""
    return (parameter for parameter in model.parameters() if parameter.requires_grad)
