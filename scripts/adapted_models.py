"""Every verb on adapted and quantised models made by the libraries themselves, compared with a plain twin.

The suite imitates their layouts, because they are not among its dependencies. Install them beside rankscope, somewhere
else than in your environment if you like, and run it after a new version of one of them::

    pip install --no-deps --target libraries peft torchao optimum-quanto bitsandbytes
    PYTHONPATH=libraries python scripts/adapted_models.py      # two minutes; writes docs/data/adapted_models.json

A library that is not installed is left out and named. A verb agrees if all its values equal those of the twin, whose
layers hold the merged or dequantised weights, to the rounding of float32 (relative 1e-3, absolute 1e-5, as in
``tests/models/test_wrapped.py``).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rankscope.errors import RankscopeError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.wrapped_models import VERBS, llama, with_layers  # noqa: E402

RECORD = ROOT / "docs" / "data" / "adapted_models.json"
Made = tuple[nn.Module, nn.Module | None]
"""A model, and the plain twin it must agree with; None if there is none."""


def adapted() -> Any:
    """LoRA on queries, values and one product of the MLP, with weights that are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def lora() -> Made:
    """Adapters beside the weights."""
    model = adapted()
    return model, copy.deepcopy(model).merge_and_unload()


def lora_merged() -> Made:
    """Adapters added to the weights, their layers still in place."""
    model = adapted()
    twin = copy.deepcopy(model).merge_and_unload()
    model.merge_adapter()
    return model, twin


def prompt_tuning() -> Made:
    """Learned tokens before those of the input."""
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(llama(), PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3)), None


def dequantised(model: nn.Module) -> nn.Module:
    """The plain model with the weights that the library itself dequantises."""
    twin = llama()
    for name, layer in model.named_modules():
        weight: Any = getattr(layer, "weight", None)
        if hasattr(weight, "dequantize") and type(weight) not in (torch.Tensor, nn.Parameter):
            twin.get_submodule(name).weight = nn.Parameter(weight.dequantize().detach())
    return twin


def torchao_weights() -> Made:
    """Weights in int8, in a tensor subclass."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model, Int8WeightOnlyConfig())
    return model, dequantised(model)


def torchao_inputs_too() -> Made:
    """Weights and inputs in int8."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = llama()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model, None


def quanto_weights() -> Made:
    """Weights in int8, in a tensor subclass and a layer of its own."""
    from optimum.quanto import freeze, qint8, quantize

    model = llama()
    quantize(model, weights=qint8)
    freeze(model)
    return model, dequantised(model)


def quanto_inputs_too() -> Made:
    """Weights and inputs in int8, with ranges of the inputs from one batch."""
    from optimum.quanto import Calibration, freeze, qint8, quantize

    model = llama()
    quantize(model, weights=qint8, activations=qint8)
    with torch.no_grad(), Calibration():
        model(torch.arange(16)[None])
    freeze(model)
    return model, None


def bitsandbytes_4bit() -> Made:
    """Weights in NF4, in a Parameter subclass and a layer of its own."""
    import bitsandbytes as bnb

    def packed(layer: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, torch.float32)
        made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        made.bias = layer.bias
        return made.to("cpu")

    model, twin = with_layers(llama(), packed), llama()
    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            whole = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            twin.get_submodule(name).weight = nn.Parameter(whole.to(torch.float32))
    return model, twin


def bitsandbytes_8bit() -> Made:
    """Weights and inputs in int8 (LLM.int8())."""
    import bitsandbytes as bnb

    def packed(layer: nn.Linear) -> nn.Module:
        made = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False
        )
        made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        made.bias = layer.bias
        return made.to("cpu")

    return with_layers(llama(), packed), None


KINDS: dict[str, tuple[str, Callable[[], Made]]] = {
    "LoRA, not merged": ("peft", lora),
    "LoRA, merged in place": ("peft", lora_merged),
    "prompt tuning": ("peft", prompt_tuning),
    "Int8WeightOnlyConfig": ("torchao", torchao_weights),
    "Int8DynamicActivationInt8WeightConfig": ("torchao", torchao_inputs_too),
    "qint8, frozen": ("optimum-quanto", quanto_weights),
    "qint8 weights and activations, frozen": ("optimum-quanto", quanto_inputs_too),
    "Linear4bit, NF4": ("bitsandbytes", bitsandbytes_4bit),
    "Linear8bitLt": ("bitsandbytes", bitsandbytes_8bit),
}


def values(run: Any) -> np.ndarray:
    """The values of a run, in the order of its rows."""
    return np.asarray(run.table["value"].to_numpy())


def outcome(verb: str, make: Callable[[], Made]) -> str:
    """Whether it ``agrees``, ``runs`` without a twin, or is refused, and why; any other error is raised."""
    model, twin = make()
    try:
        found = values(VERBS[verb](model))
    except RankscopeError as error:
        return f"refused: {error}"
    if twin is None:
        return "runs"
    np.testing.assert_allclose(found, values(VERBS[verb](twin)), rtol=1e-3, atol=1e-5)
    return "agrees"


def main() -> None:
    """Print and write what each verb does with each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    names = ("torch", "transformers", *dict.fromkeys(library for library, _ in KINDS.values()))
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} is not installed, and is left out")
    found: dict[str, dict[str, str]] = {}
    for kind, (library, make) in KINDS.items():
        if library in versions:
            found[f"{library}: {kind}"] = {verb: outcome(verb, make) for verb in VERBS}
            print(kind, json.dumps(found[f"{library}: {kind}"], indent=1), flush=True)
    record = {"date": datetime.date.today().isoformat(), "versions": versions, "found": found}
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
