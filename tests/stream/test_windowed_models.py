"""Vision models with attention in windows: every block against a plain forward hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs


def transformers_swin(kind: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return getattr(transformers, f"{kind}Model")(config), {"pixel_values": images(32)}


def timm_model(name: str, size: int, **options: Any) -> tuple[nn.Module, Any]:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, pretrained=False, img_size=size, **options), images(size)


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


SMALL: Mapping[str, Any] = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "patch_size": 2}
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "Swin": lambda: transformers_swin("Swin"),
    "Swinv2": lambda: transformers_swin("Swinv2"),
    "timm Swin": lambda: timm_model("swin_tiny_patch4_window7_224", 32, **SMALL),
    # In the last stage one window is the whole image, with as many tokens as the first has in one row.
    "timm Swinv2": lambda: timm_model(
        "swinv2_tiny_window8_256", 32, **SMALL | {"depths": (2, 1, 1), "num_heads": (2, 4, 4)}
    ),
    "timm MaxViT": lambda: timm_model("maxvit_pico_rw_256", 64),
}


def residuals(x: Tensor) -> list[float]:
    """Of (batch, tokens, channels) or (batch, height, width, channels): distance from the mean token, over the norm."""
    rows = x.detach().double().flatten(1, -2)
    return ((rows - rows.mean(1, keepdim=True)).norm(dim=(1, 2)) / rows.norm(dim=(1, 2))).tolist()


def outputs_of(modules: list[nn.Module], model: nn.Module, given: Any) -> list[Tensor]:
    """What each of these modules returns in one pass, in the order in which they run."""
    states: list[Tensor] = []
    handles = [module.register_forward_hook(lambda m, a, out: states.append(_tensor(out))) for module in modules]
    with torch.no_grad():
        model(**given) if isinstance(given, dict) else model(given)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "MaxViT" in n else ()) for n in MODELS])
def test_windows_are_no_sequences(name: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name]()
    model.eval()
    run = rs.measure(model, given, metrics=["relative_residual"], sites=["block.out"])
    rows = run.select(metric="relative_residual", site="block.out").to_pylist()
    report = rs.doctor(model, given)
    ours: dict[tuple[str | None, int, int], float] = {
        (row["stack"], row["layer"], row["sequence"]): row["value"] for row in rows
    }
    theirs: dict[tuple[str | None, int, int], float] = {}
    for stack in report.stacks:
        modules = [module for name, module in model.named_modules() if _is_block(name, stack.blocks)]
        assert len(modules) == stack.depth > 1
        states = outputs_of(modules, model, given)
        assert len({state.flatten(1, -2).shape[1:] for state in states}) > 1, "stages differ in tokens and width"
        for layer, state in enumerate(states):
            assert state.shape[0] == 2
            name_in_rows = stack.name if len(report.stacks) > 1 else None
            theirs |= {(name_in_rows, layer, number): value for number, value in enumerate(residuals(state))}
    assert ours.keys() == theirs.keys()
    for place, value in theirs.items():
        assert abs(ours[place] - value) <= 1e-9 * value, place


def _is_block(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", part) for part, w in zip(parts, wanted, strict=True))


def _tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]
