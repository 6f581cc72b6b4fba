"""Synthetic images and audio with structure at every scale, for vision and audio models without data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import interpolate

from rankscope.errors import InputError
from rankscope.models.inputs.given import batches_from_mapping, completed, on_device
from rankscope.models.inputs.record import Batch, InputPlan, Prepared
from rankscope.models.inputs.rows import ordinary_ids, random_rows, special_ids
from rankscope.models.loading import LoadedModel


def prepare_synthetic(loaded: LoadedModel, config: Any, plan: InputPlan) -> Prepared:
    """Batches of images or audio; a decoder after an audio encoder gets random ids."""
    if plan.policy == "no-special":
        raise InputError(f"tokens_policy 'no-special' is about text; for {loaded.input_kind} take another.")
    if loaded.input_kind == "image":
        made, what = image_inputs(config, plan.wanted, plan.seed), "images"
    else:
        main = str(loaded.model.main_input_name)
        made, what = audio_inputs(config, main, plan.wanted, plan.tokens, plan.seed), "sounds"
    dtype = next(loaded.model.parameters()).dtype
    inputs: dict[str, Any] = {name: value.to(dtype) for name, value in made.items()}
    if config.is_encoder_decoder:
        special = frozenset[int]().union(*special_ids(config).values())
        most = min(plan.tokens, config.to_dict().get("max_target_positions", plan.tokens))
        inputs["decoder_input_ids"] = random_rows(ordinary_ids(config, special), plan.wanted, most, plan.seed).ids
    parts = on_device(batches_from_mapping(completed(loaded, inputs), plan.batch), loaded.inputs_device)
    if plan.policy == "no-first":
        parts = tuple(replace(part, keep=_all_but_first(loaded.model, part)) for part in parts)
    return Prepared(parts, f"synthetic {what}, seed {plan.seed}", (), plan.policy)


def _all_but_first(model: torch.nn.Module, part: Batch) -> torch.Tensor:
    """All tokens but the first; their number is found by running one input."""
    one = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in part.inputs.items()}
    with torch.no_grad():
        tokens = model(**one)[0].shape[1]
    keep = torch.ones(part.sequences, tokens, dtype=torch.bool, device=next(model.parameters()).device)
    keep[:, 0] = False
    return keep


def smooth_images(count: int, channels: int, height: int, width: int, seed: int) -> torch.Tensor:
    """Smooth noise: random grids of 2, 4, 8, ... cells, enlarged and added with weights 1, 1/2, 1/4, ...

    Each image depends on the seed and its own number only, and has mean 0 and standard deviation 1.
    """
    images = []
    for index in range(count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        image = torch.zeros(1, channels, height, width)
        cells, weight = 2, 1.0
        while cells <= max(height, width):
            grid = torch.randn(1, channels, cells, cells, generator=generator)
            image += weight * interpolate(grid, size=(height, width), mode="bicubic", align_corners=False)
            cells, weight = 2 * cells, weight / 2
        images.append((image - image.mean()) / image.std())
    return torch.cat(images)


def chirps(count: int, samples: int, seed: int) -> torch.Tensor:
    """Audio of five sliding tones and a little noise, (count, samples), mean 0 and standard deviation 1."""
    time = torch.linspace(0, 1, samples)
    sounds = []
    for index in range(count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        start, slide, phase = torch.rand(3, 5, 1, generator=generator)
        cycles = samples * (0.005 + 0.1 * start) * (1 + slide * time) * time
        sound = torch.sin(2 * math.pi * (cycles + phase)).sum(dim=0)
        sound += 0.1 * torch.randn(samples, generator=generator)
        sounds.append((sound - sound.mean()) / sound.std())
    return torch.stack(sounds)


def image_inputs(config: Any, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Synthetic ``pixel_values`` of the size given in a vision configuration."""
    described = config.to_dict()
    vision = described.get("vision_config") or described
    size = vision.get("image_size")
    if size is None:
        raise InputError(f"The {config.model_type} configuration names no image_size; pass pixel_values yourself.")
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": smooth_images(count, vision.get("num_channels", 3), height, width, seed)}


def audio_inputs(config: Any, main_input: str, count: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Synthetic audio: a waveform of about ``tokens`` frames, or a spectrogram of the size that the model reads."""
    described = config.to_dict()
    if main_input == "input_features":
        frames, bands = 2 * described.get("max_source_positions", tokens), described.get("num_mel_bins", 80)
        return {"input_features": smooth_images(count, 1, bands, frames, seed)[:, 0]}
    strides, kernels = described.get("conv_stride", (320,)), described.get("conv_kernel", (400,))
    samples = tokens
    for stride, kernel in zip(reversed(strides), reversed(kernels), strict=True):
        samples = (samples - 1) * stride + kernel
    return {"input_values": chirps(count, samples, seed)}
