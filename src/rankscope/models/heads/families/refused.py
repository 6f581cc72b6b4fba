"""Known architectures whose attention cannot be written as heads with one query, key and value matrix."""

from __future__ import annotations

from rankscope.models.heads.family import REFUSED

_LATENT = "keys and values are expanded from a compressed latent (multi-head latent attention)"
_STATE_SPACE = "it mixes tokens by a state-space recurrence and has no attention heads"
_MIXED = "only some of its blocks have attention; the others mix tokens by recurrence or convolution"
_DISENTANGLED = "its attention is disentangled: content and position scores have projections of their own"
_APPROXIMATE = "its attention is an approximation that is not a softmax of query times key"

REFUSED.update(
    {
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "minicpm3": _LATENT,
        "mamba": _STATE_SPACE,
        "mamba2": _STATE_SPACE,
        "falcon_mamba": _STATE_SPACE,
        "rwkv": "it mixes tokens by a linear recurrence and has no attention heads",
        "jamba": _MIXED,
        "bamba": _MIXED,
        "lfm2": _MIXED,
        "qwen3_next": _MIXED,
        "recurrent_gemma": _MIXED,
        "deberta": _DISENTANGLED,
        "deberta-v2": _DISENTANGLED,
        "fnet": "it mixes tokens by a Fourier transform and has no attention heads",
        "nystromformer": _APPROXIMATE,
        "yoso": _APPROXIMATE,
        "mra": _APPROXIMATE,
        "longformer": "its attention is windowed, with projections of their own for global tokens",
        "led": "its encoder attention is windowed, with projections of their own for global tokens",
        "diffllama": "each head is the difference of two attention maps",
        "bitnet": "a norm stands between the heads and the output projection",
        "convbert": "half of its heads are convolutions",
        "squeezebert": "its projections are grouped convolutions",
        "llama4_text": "its rotation is complex and layers differ in normalisation and temperature",
        "jetmoe": "each token chooses the query and output projections of its heads",
        "swin": "attention is within windows and its stages differ in width and heads",
        "swinv2": "its attention is a cosine within windows",
    }
)
