"""Tiny models of other libraries: transformers, timm, diffusers, x-transformers and litgpt.

Each library lists its architectures by name and builds one with random weights and inputs that it accepts. Sizes are
set by the names that configurations use for them; what a library cannot build in this way raises :class:`NotBuilt`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankscope import load
from rankscope.models.presets import PRESETS
from tests.tiny_presets import TINY_PRESETS

BATCH, TOKENS, LAYERS, WIDTH, HEADS, VOCABULARY = 3, 11, 4, 32, 4, 120
LARGEST = 60_000_000
"""Parameters of the largest model that is run."""


class NotBuilt(Exception):  # noqa: N818 (not an error of rankscope, and none of the library)
    """The library needs more than sizes, such as weights, or other inputs than are tried here."""


_VISION = torch.library.Library("torchvision", "FRAGMENT")


def declare_vision_operators() -> None:
    """Let torchvision be imported beside a CPU torch.

    timm, transformers and others import it for its transforms. Package indexes have it built for CUDA: beside a CPU
    torch its operators are missing, and the import fails. Declared without a kernel they are enough, as none is called.
    """
    for name in ("nms", "qnms"):
        if not torch.cuda.is_available() and not hasattr(torch.ops.torchvision, name):
            _VISION.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Built:
    """A model, what it is run on, and the numbers of layers that its configuration names."""

    model: nn.Module
    inputs: Any
    layers: frozenset[int]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The same weights every time, in evaluation mode."""
    torch.manual_seed(0)
    return build().eval()


def accepted(model: nn.Module, candidates: Iterator[Any]) -> Any:
    """The first inputs on which the model runs."""
    last: Exception | None = None
    for inputs in candidates:
        try:
            with torch.no_grad():
                model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        except Exception as error:  # noqa: BLE001 (any exception means: not these inputs)
            last = error
        else:
            return inputs
    raise NotBuilt(f"no inputs tried: {type(last).__name__}: {last}" if last else "nothing to try")


def noise(*shape: int) -> torch.Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def token_ids(tokens: int = TOKENS) -> torch.Tensor:
    """Ordinary tokens: special ones are below 20."""
    return torch.randint(20, VOCABULARY - 10, (BATCH, tokens), generator=torch.Generator().manual_seed(2))


# --- transformers -----------------------------------------------------------------------------------------------------

_WIDTHS = (
    "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim encoder_hidden_size decoder_hidden_size "
    "projection_dim proj_codevector_dim embedding_dim feature_size model_dim width hidden_channels encoder_embed_dim "
    "decoder_embed_dim out_hidden_size proj_dim input_embedding_size output_embedding_size word_embed_proj_dim "
    "output_dim encoder_dim d_embed audio_embed_dim text_embed_dim latent_dim prompt_encoder_hidden_size "
    "decoder_hidden_dim mm_hidden_size cross_attention_dim output_hidden_size backbone_hidden_size "
    "encoder_width lm_hidden_size vision_hidden_size text_hidden_size hidden_dim lru_width"
)
_INNER = (
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dim_feedforward d_inner "
    "mlp_dim ffn_intermediate_size encoder_intermediate_size decoder_intermediate_size feed_forward_dim "
    "dense_intermediate_size ffn_size mlp_hidden_size"
)
_LAYERS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth encoder_depth decoder_depth "
    "num_decoder_hidden_layers num_encoder_hidden_layers decoder_num_layers encoder_num_layers num_block n_blocks "
    "layers"
)
_HEADS = (
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "num_attention_head encoder_num_heads decoder_num_heads"
)
_KEY_VALUE = (
    "num_key_value_heads decoder_num_key_value_heads encoder_num_key_value_heads num_kv_heads "
    "encoder_key_value_heads multi_query_group_num swa_num_key_value_heads"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), WIDTH),
    **dict.fromkeys(_INNER.split(), 2 * WIDTH),
    **dict.fromkeys(_LAYERS.split(), LAYERS),
    **dict.fromkeys(_HEADS.split(), HEADS),
    **dict.fromkeys(_KEY_VALUE.split(), 2),
    **dict.fromkeys(_EXPERTS.split(), 4),
    "vocab_size": VOCABULARY,
    "text_vocab_size": VOCABULARY,
    "head_dim": WIDTH // HEADS,
    "attention_head_dim": WIDTH // HEADS,
    "d_kv": WIDTH // HEADS,
    "global_head_dim": WIDTH // HEADS,
    "swa_head_dim": WIDTH // HEADS,
    "image_size": 32,
    "patch_size": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "mamba_d_state": 8,
    "state_size": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "type_vocab_size": 2,
    "num_mel_bins": 16,
    "num_labels": 3,
    "num_queries": 7,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "sliding_window": 4,
}
_LISTS: dict[str, Callable[[int], list[int]]] = {
    "depths": lambda n: [2] * n,
    "num_heads": lambda n: [2] * n,
    "num_attention_heads": lambda n: [2] * n,
    "hidden_sizes": lambda n: [16 * (k + 1) for k in range(n)],
    "embed_dims": lambda n: [16 * (k + 1) for k in range(n)],
    "embed_dim": lambda n: [16 * (k + 1) for k in range(n)],
    "conv_dim": lambda n: [16] * n,
    "num_hidden_layers": lambda n: [2] * n,
    "depth": lambda n: [2] * n,
    "num_blocks": lambda n: [2] * n,
}
# What is left out, step by step, if a configuration with all sizes cannot be built.
_WITHOUT: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"head_dim", "sliding_window", "patch_size", "image_size"}),
    frozenset(
        {"num_key_value_heads", "head_dim", "attention_head_dim", "hidden_dim", "dim", "depth", "sliding_window"}
    ),
    frozenset(SIZES) - frozenset(_LAYERS.split()) - {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"},
)


def transformers_names() -> list[str]:
    """Every model type that one of the AutoModel mappings knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def sizes_for(kind: type, leave_out: frozenset[str]) -> dict[str, Any]:
    """Small values for the parameters that a class of configurations has."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        default = parameter.default
        if name in _LISTS and isinstance(default, (list, tuple)):
            if name not in leave_out:
                found[name] = _LISTS[name](len(default))
        elif name in leave_out or isinstance(default, (list, tuple, dict)):
            continue
        elif name in SIZES:
            found[name] = SIZES[name]
        elif re.search(r"token_(id|index)$", name):
            found[name] = 3 + sum(map(ord, name)) % 16
    return found


def small_config(kind: type, leave_out: frozenset[str]) -> Any:
    """A configuration with small sizes, its parts included."""
    from transformers import AutoConfig

    words = sizes_for(kind, leave_out)
    whole = None
    for part, of in getattr(kind, "sub_configs", {}).items():
        if of is AutoConfig:
            whole = kind() if whole is None else whole
            given = getattr(whole, part, None)
            of = type(given) if given is not None else None
        if of is not None:
            words[part] = small_config(of, leave_out)
    config = kind(**words)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:  # halves of a head, shared out to three axes
        half = (getattr(config, "head_dim", None) or WIDTH // HEADS) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def layers_in(config: Any) -> Iterator[int]:
    """Every number of layers that a configuration, or a part of it, names."""
    for name, value in config.to_dict().items() if hasattr(config, "to_dict") else config.items():
        if isinstance(value, Mapping):
            yield from layers_in(value)
        elif name in _LAYERS.split() and isinstance(value, int):
            yield value
        elif (
            name in (*_LISTS, "stage_num_blocks")
            and isinstance(value, (list, tuple))
            and all(isinstance(v, int) for v in value)
        ):
            yield sum(value)
            yield from value
        elif name == "layer_types" and isinstance(value, (list, tuple)):
            yield len(value)


def without_cross_attention(config: Any, inputs: Mapping[str, Any]) -> frozenset[int]:
    """The layers that run without an image, if those that attend to images are skipped then (Mllama)."""
    text = getattr(config, "text_config", config)
    crossing = getattr(text, "cross_attention_layers", None)
    if not isinstance(crossing, list) or "pixel_values" in inputs:
        return frozenset()
    return frozenset({text.num_hidden_layers - sum(layer < text.num_hidden_layers for layer in crossing)})


def model_class(model_type: str) -> Any:
    """The bare model, or else the first head class of the AutoModel mappings."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    for mapping in ["MODEL_MAPPING_NAMES", *sorted(set(mappings) - {"MODEL_MAPPING_NAMES"})]:
        found = getattr(modeling_auto, mapping).get(model_type)
        for name in [found] if isinstance(found, str) else list(found or ()):
            if hasattr(transformers, name):
                return getattr(transformers, name)
    raise NotBuilt("no AutoModel mapping has it")


def transformers_model(model_type: str) -> Built:
    """A model type at tiny size; those that need more than sizes as rankscope's own preset has them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, last = model_class(model_type), None
    for leave_out in _WITHOUT:
        try:
            config = small_config(CONFIG_MAPPING[model_type], leave_out)
            if leave_out:
                with torch.device("meta"):
                    size = sum(p.numel() for p in kind(config).parameters())
                if size > LARGEST:
                    raise NotBuilt(f"{size:,} parameters")
            model = seeded(lambda config=config: kind(config))
            inputs = accepted(model, transformers_inputs(model, config))
        except Exception as error:  # noqa: BLE001 (configurations refuse sizes in many ways)
            last = last or error
        else:
            return Built(model, inputs, frozenset(layers_in(config)) | without_cross_attention(config, inputs))
    same = [name for name in TINY_PRESETS if PRESETS[name].model_type.replace("-", "_") == model_type.replace("-", "_")]
    if same:
        model = seeded(lambda: load(f"init:{same[0]}").model)
        inputs = accepted(model, transformers_inputs(model, model.config))
        return Built(model, inputs, frozenset(layers_in(model.config)))
    raise NotBuilt(f"{type(last).__name__}: {last}")


def transformers_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """What such a model may take, the most usual first."""
    takes = set(inspect.signature(model.forward).parameters)
    text: dict[str, Any] = {"input_ids": token_ids()}
    if "use_cache" in takes:
        text["use_cache"] = False
    later = {"decoder_input_ids": token_ids(9)} if "decoder_input_ids" in takes else {}
    if "input_ids" in takes:
        yield text | later
        yield text
    images = list(_images(config))
    for name in ("pixel_values", "pixel_values_videos", "flattened_patches"):
        if name in takes:
            for image in images:
                yield {name: image}
                if "input_ids" in takes:
                    yield {name: image} | text
    for name in ("input_values", "input_features", "audio_values", "audio_input_values"):
        if name in takes:
            for sound in (noise(BATCH, 1600), noise(BATCH, 16, 40), noise(BATCH, 40, 16), noise(BATCH, 16, 128)):
                yield {name: sound} | later
            for bins in (80, 128, 160):
                yield {name: noise(BATCH, bins, 128)} | later
                yield {name: noise(BATCH, 40, bins)} | later
    for name in ("inputs_embeds", "hidden_states", "past_values", "x", "inputs", "sequence"):
        if name in takes:
            yield {name: noise(BATCH, TOKENS, WIDTH)} | (
                {} if not later else {"decoder_inputs_embeds": noise(3, 9, WIDTH)}
            )
            yield {name: noise(BATCH, getattr(config, "context_length", TOKENS) or TOKENS)}
            yield {name: noise(BATCH, getattr(config, "context_length", TOKENS) or TOKENS, 1)}


def _images(config: Any) -> Iterator[torch.Tensor]:
    parts = [config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)]
    sizes = [getattr(part, "image_size", None) for part in parts if part is not None]
    channels = next((part.num_channels for part in parts if hasattr(part, "num_channels")), 3)
    flat = [
        size if isinstance(size, int) else size[0] for size in sizes if isinstance(size, (int, list, tuple)) and size
    ]
    for size in dict.fromkeys([*flat, 32, 64, 128, 224]):
        yield noise(BATCH, channels, size, size)
    for size in dict.fromkeys([*flat, 32, 64]):
        for frames in (getattr(config, "num_frames", None), 4, 8):
            if frames:
                yield noise(BATCH, frames, channels, size, size)


# --- timm -------------------------------------------------------------------------------------------------------------

_TIMM_MODULES = [
    "beit",
    "cait",
    "coat",
    "convit",
    "crossvit",
    "davit",
    "deit",
    "efficientformer",
    "efficientformer_v2",
    "efficientvit_mit",
    "efficientvit_msra",
    "eva",
    "edgenext",
    "fastvit",
    "focalnet",
    "gcvit",
    "hiera",
    "hieradet_sam2",
    "levit",
    "maxxvit",
    "metaformer",
    "mambaout",
    "mlp_mixer",
    "mobilevit",
    "mvitv2",
    "naflexvit",
    "nest",
    "nextvit",
    "pit",
    "pvt_v2",
    "repvit",
    "sequencer",
    "shvit",
    "swiftformer",
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
    "tiny_vit",
    "tnt",
    "twins",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "visformer",
    "vitamin",
    "volo",
    "xcit",
    "rdnet",
    "starnet",
    "csatv2",
    "dinov3",
    "fasternet",
    "swiftformer",
    "bat_resnext",
    "byoanet",
    "botnet",
    "halonet",
    "lambda_resnets",
    "mobilevitv2",
]
_SIZE_WORDS = re.compile(
    r"(?<=_)(pico|femto|atto|nano|zepto|xxtiny|xtiny|tiny|xxs|xs|xsmall|small|little|medium|mediumd|base|plus|large|xlarge|xxlarge|huge|"
    r"giant|gigantic|enormous|so\d+m?|wee|pwee|dwee|mci|betwixt|patch\d+|window\d+|p\d+|\d+to\d+|\d+|[stbmlhg]|xl|xxl|"
    r"[smlx]{1,3}\d+|[bl]\d+|v1|t\d+|w\d+|r\d+)(?=_|$)"
)
_TIMM_SIZES: tuple[dict[str, Any], ...] = (
    {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": LAYERS, "num_heads": 4},
    {"img_size": 64, "embed_dim": 48, "depth": LAYERS, "num_heads": 4},
    {"img_size": 64, "embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (2, 2, 2, 2), "window_size": 4},
    {"img_size": 64, "embed_dim": 24, "depths": (2, 2, 2, 2), "num_heads": (2, 2, 2, 2)},
    {"img_size": 64, "embed_dims": (16, 32, 48, 64), "depths": (2, 2, 2, 2), "num_heads": (2, 2, 2, 2)},
    {"img_size": 64, "depths": (2, 2, 2, 2)},
    {"depths": (2, 2, 2, 2)},
    {"img_size": 64},
    {},
)


def timm_names() -> list[str]:
    """The smallest of every family of entry points in the files with transformers: names without sizes."""
    import timm

    families: dict[str, list[str]] = {}
    for module in _TIMM_MODULES:
        for name in timm.list_models(module=module):
            before = None
            family = f"{name}_"
            while family != before:
                before, family = family, _SIZE_WORDS.sub("", family).replace("__", "_")
            families.setdefault(f"{module}:{family}", []).append(name)
    order = ("test", "pico", "atto", "nano", "femto", "xxs", "xtiny", "tiny", "_t", "xs", "small", "_s")
    rank = {word: place for place, word in enumerate(order)}
    smallest = (
        min(some, key=lambda n: min((rank[w] for w in rank if w in n), default=99)) for some in families.values()
    )
    return sorted(set(smallest))


def timm_model(name: str) -> Built:
    """An entry point, with as many of its sizes changed as it lets one change."""
    import timm

    last: Exception | None = None
    for sizes in _TIMM_SIZES:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name, pretrained=False, **sizes).parameters())
            if size > LARGEST:
                raise NotBuilt(f"{size:,} parameters")
        except NotBuilt as error:
            last = error
            continue
        except Exception as error:  # noqa: BLE001 (an entry point refuses words in many ways)
            if "meta" not in str(error):
                last = last or error
                continue
        try:
            model = seeded(lambda sizes=sizes: timm.create_model(name, pretrained=False, **sizes))
            sides = (sizes.get("img_size", 64), 128, model.default_cfg["input_size"][-1], 224, 256)
            inputs = accepted(model, iter([noise(BATCH, 3, side, side) for side in dict.fromkeys(sides)]))
        except Exception as error:  # noqa: BLE001 (so does its first forward pass)
            last = last or error
            continue
        depths = [sizes[key] for key in ("depth", "depths") if key in sizes]
        layers = {sum(d) if isinstance(d, tuple) else d for d in depths} | ({2} if "depths" in sizes else set())
        if name.startswith("davit"):  # each of its depths is a block over places and one over channels
            layers = {2 * depth for depth in layers}
        return Built(model, inputs, frozenset(layers))
    raise NotBuilt(f"{type(last).__name__}: {last}")


# --- x-transformers ---------------------------------------------------------------------------------------------------

_X: dict[str, dict[str, Any]] = {
    "plain": {},
    "rmsnorm": {"use_rmsnorm": True},
    "simple rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "dynamic tanh": {"use_dynamic_tanh": True},
    "derf": {"use_derf": True},
    "adaptive rmsnorm off, layer scale": {"use_layerscale": True},
    "post-norm": {"pre_norm": False},
    "sandwich norm": {"sandwich_norm": True},
    "resi dual": {"resi_dual": True},
    "pre- and post-branch norm": {"pre_norm_has_final_norm": False},
    "glu": {"ff_glu": True},
    "swiglu": {"ff_glu": True, "ff_swish": True},
    "swiglu without bias": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "relu squared": {"ff_relu_squared": True},
    "feedforward with norm inside": {"ff_post_act_ln": True},
    "macaron": {"macaron": True},
    "rotary": {"rotary_pos_emb": True},
    "rotary with xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "alibi in half the heads": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "t5 relative positions": {"rel_pos_bias": True},
    "dynamic position bias": {"dynamic_pos_bias": True},
    "data-dependent alibi": {"attn_data_dependent_alibi": True},
    "one key-value head": {"attn_one_kv_head": True},
    "grouped keys and values": {"attn_kv_heads": 2},
    "multi-latent attention": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
    "latent queries too": {
        "attn_use_latent_kv": True,
        "attn_dim_latent_kv": 16,
        "attn_use_latent_q": True,
        "attn_dim_latent_q": 16,
    },
    "qk norm": {"attn_qk_norm": True},
    "qk norm by dimension": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "sparse top-k attention": {"attn_sparse_topk": 4},
    "gated values": {"attn_gate_values": True},
    "gated value heads": {"attn_gate_value_heads": True},
    "attention on attention": {"attn_on_attn": True},
    "memory keys and values": {"attn_num_mem_kv": 4},
    "zero key": {"attn_add_zero_kv": True},
    "softclamped logits": {"attn_softclamp_logits": True},
    "head scale": {"attn_head_scale": True},
    "laser attention": {"attn_laser": True},
    "selective attention": {"attn_selective": True},
    "cog signed": {"attn_cog_signed": True},
    "learned sinks": {"attn_head_learned_sinks": True},
    "shifted tokens": {"shift_tokens": 1},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "residual attention": {"residual_attn": True},
    "value residual": {"add_value_residual": True, "learned_value_residual_mix": True},
    "hyper-connections": {"num_residual_streams": 2},
    "dynamic LIMe": {"integrate_layers": True},
    "u-net skips": {"unet_skips": True},
    "shared layers": {"weight_tie_layers": True},
    "sandwich of attention and feedforward": {"sandwich_coef": 1},
    "two attentions, one feedforward": {"custom_layers": ("a", "f", "a", "a", "f", "f")},
    "polar positions": {"polar_pos_emb": True},
    "forgetting transformer": {"attn_data_dependent_alibi": True, "attn_gate_values": True},
    "orthogonal projected values": {"attn_orthog_projected_values": True},
    "kv shared across layers": {"share_attn_kv": True},
    "attention only": {"only_attn": True},
    "conformer-like convolution": {"conv_kernel": 3},
}
_X_ATTENTION = ("Encoder", "Decoder")


def x_names() -> list[str]:
    """Options of x-transformers, in an encoder and in a decoder."""
    return [f"{kind}: {name}" for name in _X for kind in _X_ATTENTION]


def x_model(name: str) -> Built:
    """A transformer with one option."""
    import x_transformers

    kind, _, option = name.partition(": ")
    words = dict(_X[option])
    stack = getattr(x_transformers, kind)
    allowed = set(inspect.signature(x_transformers.x_transformers.AttentionLayers.__init__).parameters)
    of_attention = set(inspect.signature(x_transformers.x_transformers.Attention.__init__).parameters)
    of_feedforward = set(inspect.signature(x_transformers.x_transformers.FeedForward.__init__).parameters)
    for word in words:
        plain = word.removeprefix("attn_").removeprefix("ff_")
        if word not in allowed and plain not in of_attention | of_feedforward:
            raise NotBuilt(f"this version has no option {word}")
    try:
        model = seeded(
            lambda: x_transformers.TransformerWrapper(
                num_tokens=VOCABULARY,
                max_seq_len=64,
                attn_layers=stack(dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=8, **words),
            )
        )
        # Sub-layers in another order than attention and MLP in turn are no fixed number of blocks.
        layers = frozenset() if {"sandwich_coef", "custom_layers"} & set(words) else frozenset({LAYERS})
        return Built(model, accepted(model, iter([token_ids()])), layers)
    except Exception as error:  # noqa: BLE001 (options refuse each other in many ways)
        raise NotBuilt(f"{type(error).__name__}: {error}") from None


# --- litgpt -----------------------------------------------------------------------------------------------------------


def litgpt_names() -> list[str]:
    """One configuration of every set of switches: those that differ only in sizes are the same architecture."""
    from litgpt.config import configs

    found: dict[tuple[Any, ...], str] = {}
    for config in configs:
        switches = tuple(
            (key, str(value))
            for key, value in sorted(config.items())
            if isinstance(value, (bool, str)) and key not in ("name", "hf_config", "org")
        )
        heads, groups = config.get("n_head", 32), config.get("n_query_groups")
        grouped = "one" if groups == 1 else "all" if groups in (None, heads) else "some"
        rotates = config.get("rotary_percentage", 0.25) == 1.0
        special = tuple(
            bool(config.get(key)) for key in ("sliding_window_size", "n_expert", "attention_logit_softcapping")
        )
        found.setdefault((switches, grouped, rotates, special), config["name"])
    return sorted(found.values())


def litgpt_model(name: str) -> Built:
    """A configuration with its switches and small sizes."""
    import litgpt
    from litgpt.config import name_to_config

    given = name_to_config[name]
    groups = given.get("n_query_groups")
    grouped = 1 if groups == 1 else HEADS if groups in (None, given.get("n_head", 32)) else 2
    words: dict[str, Any] = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_query_groups": grouped,
        "head_size": WIDTH // HEADS,
        "intermediate_size": 2 * WIDTH,
        "block_size": 64,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY,
    }
    if given.get("n_expert"):
        words |= {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 16}
    if given.get("sliding_window_indices"):
        words["sliding_window_indices"] = list(given["sliding_window_indices"])[:LAYERS]
    if given.get("rope_indices"):
        words["rope_indices"] = list(given["rope_indices"])[:LAYERS]
    if given.get("sliding_window_size"):
        words["sliding_window_size"] = 4
    try:
        config = litgpt.Config.from_name(name, **words)
        model = seeded(lambda: litgpt.GPT(config))
        return Built(model, accepted(model, iter([token_ids()])), frozenset({LAYERS}))
    except NotBuilt:
        raise
    except Exception as error:  # noqa: BLE001 (options refuse each other in many ways)
        raise NotBuilt(f"{type(error).__name__}: {error}") from None


# --- diffusers --------------------------------------------------------------------------------------------------------

_DIFFUSERS_SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "num_single_layers": LAYERS,
    "num_refiner_layers": 1,
    "n_layers": LAYERS,
    "n_refiner_layers": 1,
    "depth": LAYERS,
    "num_mmdit_layers": LAYERS,
    "num_single_dit_layers": LAYERS,
    "num_attention_heads": HEADS,
    "n_heads": HEADS,
    "num_heads": HEADS,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 64,
    "dim": 64,
    "caption_channels": 24,
    "joint_attention_dim": 24,
    "cross_attention_dim": 24,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 20,
    "text_embed_dim": 24,
    "text_dim": 24,
    "cap_feat_dim": 24,
    "encoder_hid_dim": 24,
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "axes_dims_rope": (4, 4, 8),
    "axes_dims": (4, 4, 8),
    "norm_num_groups": 2,
    "num_embeds_ada_norm": 100,
    "num_vector_embeds": 30,
    "inner_dim": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "num_cross_attention_heads": HEADS,
    "cross_attention_head_dim": 16,
    "time_embed_dim": 32,
    "freq_dim": 32,
    "max_text_seq_length": TOKENS,
    "sample_width": 16,
    "sample_height": 16,
    "sample_frames": 1,
    "rank": 8,
}


def diffusers_names() -> list[str]:
    """Every transformer model that diffusers exports."""
    import diffusers

    return sorted(
        name
        for name in dir(diffusers)
        if re.search(r"(Transformer\w*Model|DiTModel|Transformer\dD|Prior\w*Transformer)$", name)
    )


def diffusers_model(name: str) -> Built:
    """A class with small sizes, on what its forward method asks for by name."""
    import diffusers

    kind = getattr(diffusers, name)
    has = inspect.signature(kind.__init__).parameters
    sizes = {
        key: value
        for key, value in _DIFFUSERS_SIZES.items()
        if key in has and isinstance(has[key].default, (tuple, list)) == isinstance(value, (tuple, list))
    }
    for key in ("axes_dims_rope", "axes_dims"):
        if key in sizes and len(has[key].default) != 3:
            sizes.pop(key)
    last: Exception | None = None
    keep = {"num_layers", "num_single_layers", "n_layers", "depth", "num_refiner_layers", "n_refiner_layers"}
    for less in (set(), {"hidden_size", "dim", "inner_dim"}, set(sizes) - keep):
        try:
            words = {key: value for key, value in sizes.items() if key not in less}
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(**words).parameters())
            if size > LARGEST:
                raise NotBuilt(f"{size:,} parameters")
            model = seeded(lambda words=words: kind(**words))
            inputs = accepted(model, diffusers_inputs(model))
        except Exception as error:  # noqa: BLE001 (classes refuse sizes in many ways)
            last = last or error
        else:
            return Built(model, inputs, frozenset(v for k, v in words.items() if k in keep))
    raise NotBuilt(f"{type(last).__name__}: {last}")


def diffusers_inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Tensors for the parameters of ``forward``, with images, sequences or videos in the main one."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    channels = getattr(config, "in_channels", None) or 4
    text = next(
        (
            getattr(config, key)
            for key in (
                "joint_attention_dim",
                "caption_channels",
                "cross_attention_dim",
                "text_embed_dim",
                "text_dim",
                "cap_feat_dim",
            )
            if getattr(config, key, None)
        ),
        24,
    )
    text = text if isinstance(text, int) else text[0]
    positions = torch.zeros(64, 3)
    positions[:, 1], positions[:, 2] = torch.arange(64) // 8, torch.arange(64) % 8
    mains = [
        noise(BATCH, channels, 16, 16),
        noise(BATCH, 64, channels),
        noise(BATCH, channels, 2, 16, 16),
        noise(BATCH, 2, channels, 16, 16),
        noise(BATCH, channels, 32),
    ]
    for main in mains:
        for time in (torch.full((BATCH,), 3.0), torch.full((BATCH,), 3)):
            words: dict[str, Any] = {
                "hidden_states": main,
                "timestep": time,
                "encoder_hidden_states": noise(BATCH, TOKENS, text),
                "pooled_projections": noise(BATCH, getattr(config, "pooled_projection_dim", 20) or 20),
                "class_labels": torch.tensor([1, 2, 3]),
                "img_ids": positions,
                "txt_ids": torch.zeros(TOKENS, 3),
                "guidance": torch.full((BATCH,), 2.0),
                "proj_embedding": noise(BATCH, getattr(config, "embedding_dim", 24) or 24),
                "encoder_attention_mask": torch.ones(BATCH, TOKENS),
                "encoder_hidden_states_mask": torch.ones(BATCH, TOKENS).bool(),
                "img_shapes": [[(1, 8, 8)]] * BATCH,
                "txt_seq_lens": [TOKENS] * BATCH,
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
                "num_frames": 2,
                "height": 16,
                "width": 16,
            }
            required = {key for key, p in takes.items() if p.default is inspect.Parameter.empty}
            useful = {"timestep", "encoder_hidden_states", "class_labels", "pooled_projections", "img_ids", "txt_ids"}
            yield {key: value for key, value in words.items() if key in takes and key in required | useful}
            yield {key: value for key, value in words.items() if key in takes}
            yield {key: value for key, value in words.items() if key in required}


NAMES: dict[str, Callable[[], list[str]]] = {
    "transformers": transformers_names,
    "timm": timm_names,
    "x-transformers": x_names,
    "litgpt": litgpt_names,
    "diffusers": diffusers_names,
}
BUILD: dict[str, Callable[[str], Built]] = {
    "transformers": transformers_model,
    "timm": timm_model,
    "x-transformers": x_model,
    "litgpt": litgpt_model,
    "diffusers": diffusers_model,
}
