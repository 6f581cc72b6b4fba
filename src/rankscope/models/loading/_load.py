"""One entry point for every model: a module in memory, a random initialisation, a folder, a GGUF file, a hub id."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import torch

from rankscope._types import is_named, kind_of, path_of
from rankscope.errors import InputError, LoadError
from rankscope.linalg.precision import has_float64
from rankscope.models.hf import hf_model_class, require_transformers
from rankscope.models.loading.affording import refuse_unaffordable
from rankscope.models.loading.config import config_from_json, config_hash, model_class_named
from rankscope.models.loading.devices import are_on, devices_of, parse_device
from rankscope.models.loading.dtypes import default_dtype, parse_dtype
from rankscope.models.loading.folder import weights_from_folder, weights_from_hub
from rankscope.models.loading.named import named_object, what_a_file_holds
from rankscope.models.loading.no_requests import no_requests
from rankscope.models.loading.pretrained import PretrainedWeights, Request
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.loading.spreading import distributed
from rankscope.models.presets import PRESETS, InputKind, preset
from rankscope.models.weight_files.files import hub_id, is_hub_id, is_remote, refuse_web_server
from rankscope.models.wrapping import Spread, is_loaded_double, note_dtype, unwrapped

Origin = Literal["memory", "init", "folder", "hub", "url"]
# transformers creates float32 constants inside the forward of these.
_ONLY_FLOAT32 = ("xlnet", "mra")
_SPECS = "a module, or words: init:NAME, a folder, a .gguf file or a hub id"


@dataclass(frozen=True)
class LoadedModel:
    """A model, and everything that results record about its origin.

    Attributes:
        model: the module itself; in eval mode unless it was passed in memory.
        tokenizer: its tokenizer, or None.
        input_kind: what it reads; ``"tensors"`` for a module that is not from transformers.
        spec: the requested model.
        origin: ``"memory"``, ``"init"``, ``"folder"``, ``"hub"``, or ``"url"`` for an object store.
        revision: the hub commit, if there is one.
        config_hash: SHA-256 of its configuration, None without one.
        seed: seed of the random initialisation, None if nothing was drawn.
        dtype: dtype of the parameters, e.g. ``"float32"``.
        device: device of the parameters, e.g. ``"cuda:0"``; several with commas.
        attn_implementation: that of transformers, None for other modules.
        parameters: number of trained parameters.
        notes: remarks worth printing, e.g. weights the checkpoint lacks.
        gather: returns what each rank hands in, in the order of ranks, if the model is sharded over several: they have
            to agree before each of its forward passes.
    """

    model: torch.nn.Module = field(repr=False)
    tokenizer: Any | None = field(repr=False)
    input_kind: InputKind
    spec: str
    origin: Origin
    revision: str | None
    config_hash: str | None
    seed: int | None
    dtype: str
    device: str
    attn_implementation: str | None
    parameters: int
    notes: tuple[str, ...] = ()
    gather: Callable[[bytes], Sequence[bytes]] = field(default=lambda own: [own], repr=False, compare=False)

    @property
    def config(self) -> Any | None:
        """The transformers configuration, or None for a module that has none."""
        return transformers_config(self.model)

    @property
    def arguments(self) -> frozenset[str]:
        """Names of the arguments of its forward pass."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @property
    def inputs_device(self) -> torch.device | None:
        """Where its inputs have to be moved: to its first parameter, unless that is on the CPU or offloaded (meta)."""
        first = next(self.model.parameters(), None)
        return None if first is None or first.device.type in ("cpu", "meta") else first.device

    @property
    def embeddings(self) -> int | None:
        """Number of token ids that it has an embedding for; None if it does not say which embedding it uses."""
        try:
            table = cast(Any, self.model).get_input_embeddings()
        except NotImplementedError:
            return None
        return table.num_embeddings if isinstance(table, torch.nn.Embedding) else None

    @property
    def positions(self) -> int | None:
        """Number of positions of a text model, None if unknown; a table with a padding row starts after it."""
        assert self.config is not None
        described = self.config.get_text_config().to_dict()
        limits = [described.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
        known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        for name, module in self.model.named_modules():
            is_table = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
            if is_table and module.padding_idx is not None:
                known.append(module.num_embeddings - module.padding_idx - 1)
        return min(known) if known else None


def load(
    spec: str | Path | torch.nn.Module | LoadedModel,
    *,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    model_class: str | None = None,
    spread: Spread | None = None,
) -> LoadedModel:
    """Load a model from a spec.

    Args:
        spec: a module (used as it is, without wrappers such as ``torch.compile``), ``init:NAME`` or ``init:PATH``
            (random initialisation of a preset or of a config.json), a folder, a .gguf file, or a hub id, also as
            ``hub:NAME`` or ``hub:NAME@REVISION``.
        seed: seed of a random initialisation; the global random state is not changed.
        dtype: dtype of the weights; None keeps the checkpoint's, or float32 for a random initialisation.
        device: device to move the model to, such as ``"cuda"``; None leaves it on the CPU. Move a module yourself.
        revision: revision of a hub id.
        trust_remote_code: run code shipped with the model. If False, such code is never run.
        allow_pickle: read ``pytorch_model.bin``, tensors only.
        model_class: the transformers class to build, instead of the backbone ``AutoModel`` chooses.
        spread: ``"fsdp"`` or ``"tensor"``: every process of the group loads its part; all must call this.

    Raises:
        LoadError: the spec does not name a model, or the machine does not have the device.
        InputError: it is neither a module nor a string.
        UnknownNameError: ``init:NAME`` with a name that is not a preset.

    Example:
        >>> load("init:tiny-bert").parameters
        46400
    """
    place = parse_device(device)
    if isinstance(spec, torch.nn.Module):
        model = unwrapped(spec)
        return _left_on(loaded_model(model, type(model).__qualname__, "memory"), place)
    if isinstance(spec, LoadedModel):
        return _left_on(spec, place)
    if place is not None:
        if spread is not None:
            raise InputError("device= names one device for the whole model. Leave it out with spread.")
        wanted = parse_dtype(dtype)
        if wanted is torch.float64 and not has_float64(place):
            raise LoadError(f"{place} has no float64. Leave dtype out, or device.")
    if not isinstance(spec, (str, PathLike)):
        raise InputError(f"model is {kind_of(spec)}; expected {_SPECS}{_what_to_do(spec)}.")
    text = str(spec)
    request = Request(seed, parse_dtype(dtype), revision, trust_remote_code, allow_pickle, model_class, spread)
    loaded = _loaded(text, request)
    if place is None:
        return loaded
    model = loaded.model.to(place)
    return replace(loaded, model=model, device=devices_of(model.parameters()))


def _left_on(held: LoadedModel, device: torch.device | None) -> LoadedModel:
    """A model that is in memory already; it is not moved."""
    if device is not None and not are_on(held.model.parameters(), device):
        raise InputError(f"{held.spec} is in memory, on {held.device}. Move it to {device} before the call.")
    return held


def _loaded(text: str, request: Request) -> LoadedModel:
    """The model that a spec names, on the CPU."""
    seed = request.seed
    require_transformers(f"Loading {text!r}")
    with quiet_transformers():
        if text.startswith("init:"):
            model, kind, notes = _initialised(text.removeprefix("init:"), request)
            return loaded_model(model, text, "init", input_kind=kind, seed=seed, notes=notes)
        if is_named(text):
            held = named_object(text)
            if not isinstance(held, torch.nn.Module):
                raise LoadError(f"{text} is {kind_of(held)}; expected a torch module, or a function that returns one.")
            return loaded_model(unwrapped(held), text, "memory")
        refuse_web_server(text)
        if is_remote(text) and not text.startswith("hub:"):
            raise LoadError(f"{text} is not on this machine. Read it block by block with --offload (offload=True).")
        path = path_of(text, "model", _SPECS)
        if text and not text.startswith("hub:") and path.exists():
            return _from_weights(_folder_or_gguf(path, request), text, "folder", seed)
    if not text.startswith("hub:") and not is_hub_id(text):
        raise LoadError(
            f"There is no file or folder {text!r}, and it is not a hub id (NAME or OWNER/NAME) either. For a "
            "random initialisation write init:NAME; `rankscope ls presets` lists the names."
        )
    name, revision = hub_id(text) if text.startswith("hub:") else (text, None)
    if revision and request.revision not in (None, revision):
        raise LoadError(f"{text!r} names the revision {revision!r}, and revision={request.revision!r} another one.")
    return _from_weights(
        weights_from_hub(name, replace(request, revision=revision or request.revision)), text, "hub", seed
    )


def need_module(model: object, what: str) -> torch.nn.Module:
    """``model`` without wrappers, if it is a module in memory.

    Raises:
        InputError: it is something else.
    """
    if isinstance(model, torch.nn.Module):
        return unwrapped(model)
    if isinstance(model, (str, Path)):
        advice = f"load it first: rankscope.load({str(model)[:80]!r}).model"
    else:
        advice = f"pass the module itself{_what_to_do(model)}"
    raise InputError(f"{what} needs a module in memory and got {kind_of(model)}; {advice}.")


def _what_to_do(spec: object) -> str:
    """What to do with something that is not a model but belongs to one, as the end of a sentence."""
    if isinstance(spec, type):
        return ". Pass an instance of it"
    if hasattr(spec, "model_type") and hasattr(spec, "to_dict"):
        return ". For a configuration: AutoModel.from_config(config), or save it and pass 'init:FOLDER'"
    if hasattr(spec, "convert_ids_to_tokens"):
        return ". For a tokenizer: pass the model, and this one as Inputs(tokenizer=...)"
    if isinstance(spec, LoadedModel):
        return ", its .model"
    if "state dict" in kind_of(spec):
        return ". Weights alone do not say how they are used: build the module, load_state_dict, and pass the module"
    return ""


def transformers_config(model: torch.nn.Module) -> Any | None:
    """The configuration of a transformers model; None for any other module."""
    kind = hf_model_class()
    return model.config if kind is not None and isinstance(model, kind) else None


def _folder_or_gguf(path: Path, request: Request) -> PretrainedWeights:
    if path.is_dir():
        return weights_from_folder(path, request)
    if path.suffix == ".gguf":
        return weights_from_folder(path.parent, request, gguf=path.name)
    if path.suffix == ".json":
        raise LoadError(f"{path} is a configuration without weights. Pass 'init:{path}' to initialise it at random.")
    if path.suffix == ".py":
        raise LoadError(what_a_file_holds(path))
    raise LoadError(f"{path} is a file, but not a .gguf one. Pass the folder that holds config.json and the weights.")


def _initialised(name: str, request: Request) -> tuple[torch.nn.Module, InputKind | None, tuple[str, ...]]:
    """A random initialisation: drawn in float32 from the seed, then rounded, so that dtypes share their weights."""
    if request.trust_remote_code:
        return _drawn(name, request)
    with no_requests(f"init:{name}"):
        return _drawn(name, request)


def _drawn(name: str, request: Request) -> tuple[torch.nn.Module, InputKind | None, tuple[str, ...]]:
    config, class_name, kind = _config_to_initialise(name, request)
    refuse_unaffordable(config, lambda small: _build(small, class_name, request, torch.float32), torch.float32)
    wanted = request.dtype or torch.float32
    model = _build(config, class_name, request, torch.float32)
    if wanted is not torch.float32:
        rounded = _build(config, class_name, request, wanted)
        rounded.load_state_dict(model.state_dict())
        for parameter in rounded.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(wanted)
        model = rounded
    if request.spread is not None:
        model = distributed(model, request.spread)
    return model.eval(), kind, ()


def _config_to_initialise(name: str, request: Request) -> tuple[Any, str, InputKind | None]:
    if name in PRESETS:
        from transformers import AutoConfig

        entry = preset(name)
        config = AutoConfig.for_model(entry.model_type, **entry.config)
        return config, request.model_class or entry.model_class, entry.input_kind if not request.model_class else None
    path = path_of(name, "model", _SPECS)
    if not path.exists():
        if "/" in name or name.endswith(".json") or name.startswith((".", "~")):
            raise LoadError(
                f"There is no config.json or folder {name!r} to initialise. Check the path, or name a preset "
                "(`rankscope ls presets`)."
            )
        preset(name)
    path = path / "config.json" if path.is_dir() else path
    if request.trust_remote_code:
        from transformers import AutoConfig

        return (
            AutoConfig.from_pretrained(str(path.parent), trust_remote_code=True),
            request.model_class or "AutoModel",
            None,
        )
    return config_from_json(path, request.model_class), request.model_class or "AutoModel", None


def _build(config: Any, class_name: str, request: Request, dtype: torch.dtype) -> torch.nn.Module:
    chosen = model_class_named(class_name)
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]), default_dtype(dtype):
        torch.default_generator.manual_seed(request.seed)
        try:
            if class_name.startswith("AutoModel"):
                model = chosen.from_config(config, trust_remote_code=request.trust_remote_code)
            else:
                model = chosen(config)
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise LoadError(f"{class_name} could not be built from its configuration: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise LoadError(f"{class_name} built a {type(model).__name__}, not a torch module.")
    return model


def _from_weights(found: PretrainedWeights, spec: str, origin: Origin, seed: int) -> LoadedModel:
    drawn = seed if found.notes else None
    return loaded_model(
        found.model, spec, origin, tokenizer=found.tokenizer, revision=found.revision, seed=drawn, notes=found.notes
    )


def loaded_model(
    model: torch.nn.Module,
    spec: str,
    origin: Origin,
    *,
    tokenizer: Any | None = None,
    input_kind: InputKind | None = None,
    revision: str | None = None,
    seed: int | None = None,
    notes: tuple[str, ...] = (),
) -> LoadedModel:
    """A model with the facts that every result records about it."""
    config = transformers_config(model)
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if config is not None and origin != "memory" and floating:
        _make_runnable(model, config, floating[0].dtype)
        note_dtype(model, floating[0].dtype)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        input_kind=input_kind or _input_kind(model, config),
        spec=spec,
        origin=origin,
        revision=revision,
        config_hash=None if config is None else config_hash(config),
        seed=seed,
        dtype=str(floating[0].dtype).removeprefix("torch.") if floating else "none",
        device=devices_of(model.parameters()),
        attn_implementation=None if config is None else config._attn_implementation,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=notes,
    )


def _make_runnable(model: torch.nn.Module, config: Any, dtype: torch.dtype) -> None:
    """The fused product over experts has no float64 kernel; a few models run in float32 only."""
    if dtype is not torch.float32 and config.model_type in _ONLY_FLOAT32:
        raise LoadError(
            f"transformers' {config.model_type} makes float32 constants on its way and runs in no other dtype. "
            "Load it in float32; measures accumulate in float64 all the same."
        )
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):  # not before transformers 5
        model.set_experts_implementation("eager")  # type: ignore[operator]


def _input_kind(model: torch.nn.Module, config: Any | None) -> InputKind:
    if config is None:
        return "tensors"
    main = str(model.main_input_name)
    if main == "pixel_values":
        return "image"
    if main in ("input_values", "input_features"):
        return "audio"
    return "text-to-text" if config.is_encoder_decoder else "text"


def load_initialised_twin(loaded: LoadedModel, *, seed: int) -> LoadedModel:
    """A random initialisation of the class and configuration of ``loaded``, in its dtype and on its device.

    Raises:
        LoadError: the module is not from transformers, so it is not known how to build it.
    """
    config = loaded.config
    if config is None:
        raise LoadError(
            f"{loaded.spec} is not a transformers model, so a random initialisation of it cannot be built. "
            "Build it yourself and pass that."
        )
    first = next(loaded.model.parameters())
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        twin = type(loaded.model)(copy.deepcopy(config))
    if is_loaded_double(loaded.model):
        note_dtype(twin, first.dtype)
    return load(twin.to(dtype=first.dtype, device=first.device).eval())
