"""Paths of a pre-norm GPT-2 written out: attention from the raw weights, norms by hand, every path by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layer:
    """What one block does when attention and its norm's scale are held."""

    probs: Tensor  # batch heads query key
    scale: Tensor  # batch tokens 1
    gain: Tensor  # dim
    value: list[Tensor]  # one dim x d per head
    output: list[Tensor]  # one d x dim per head
    constant: Tensor  # what the attention branch adds to zeros
    mlp: Tensor  # what the MLP adds

    def head(self, x: Tensor, h: int) -> Tensor:
        normed = (x - x.mean(-1, keepdim=True)) * self.scale * self.gain
        return self.probs[:, h] @ (normed @ self.value[h]) @ self.output[h]


@dataclass
class Written:
    """The whole stack."""

    entry: Tensor
    layers: list[Layer]
    final_scale: Tensor
    final_gain: Tensor
    final_shift: Tensor
    out: Tensor

    def final(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.final_scale * self.final_gain


def write_out_gpt2(model: torch.nn.Module, ids: Tensor) -> Written:
    """Run a GPT-2 (eager attention) by its own parts and keep what the paths need."""
    heads = model.config.n_head
    positions = torch.arange(ids.shape[1])
    x = model.wte(ids) + model.wpe(positions)
    entry, layers = x, []
    for block in model.h:
        normed = block.ln_1(x)
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        dim = x.shape[-1]
        query, key, _ = (normed @ weight + bias).split(dim, dim=-1)
        width = dim // heads
        probs, constant = [], block.attn.c_proj.bias.expand(x.shape).clone()
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = query[..., part] @ key[..., part].transpose(-1, -2) / width**0.5
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
            probs.append(scores.softmax(-1))
            shift = block.ln_1.bias @ weight[:, 2 * dim :][:, part] + bias[2 * dim :][part]
            constant = constant + probs[-1] @ shift.expand(*x.shape[:2], width) @ block.attn.c_proj.weight[part]
        variance = x.var(-1, unbiased=False, keepdim=True)
        values = [weight[:, 2 * dim :][:, h * width : (h + 1) * width] for h in range(heads)]
        outputs = [block.attn.c_proj.weight[h * width : (h + 1) * width] for h in range(heads)]
        scale = (variance + block.ln_1.eps).rsqrt()
        layer = Layer(torch.stack(probs, 1), scale, block.ln_1.weight, values, outputs, constant, torch.empty(0))
        x = x + sum(layer.head(x, h) for h in range(heads)) + constant
        layer.mlp = block.mlp(block.ln_2(x))
        x = x + layer.mlp
        layers.append(layer)
    variance = x.var(-1, unbiased=False, keepdim=True)
    norm = model.ln_f
    return Written(entry, layers, (variance + norm.eps).rsqrt(), norm.weight, norm.bias, norm(x))


def every_path(written: Written) -> Iterator[tuple[int, tuple[int | None, ...], Tensor]]:
    """Layer at which a source enters (0 the embedding), the choices from there on, and what arrives at the end."""
    depth, heads = len(written.layers), len(written.layers[0].value)
    sources = [(0, written.entry)]
    sources += [(i + 1, layer.constant) for i, layer in enumerate(written.layers)]
    sources += [(i + 1, layer.mlp) for i, layer in enumerate(written.layers)]
    for start, source in sources:
        for choice in itertools.product((None, *range(heads)), repeat=depth - start):
            x = source
            for layer, head in zip(written.layers[start:], choice, strict=True):
                x = x if head is None else layer.head(x, head)
            yield start, choice, written.final(x)
