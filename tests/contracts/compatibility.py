"""The compatibility table: what doctor finds in every family, as rows that are committed and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.verbs.doctor.checks import DoctorReport
from tests.own_models import GPT, InlineGPT, ids

TABLE = Path(__file__).parents[2] / "docs" / "data" / "compatibility.json"


def row(report: DoctorReport) -> dict[str, Any]:
    """The facts of a report that must not change unnoticed."""
    checks = {check.name: check for check in report.checks}
    return {
        "architecture": report.architecture,
        "stacks": [
            {
                "name": stack.name,
                "depth": stack.depth,
                "blocks": stack.blocks,
                "skips": sorted({" + ".join(skips) for skips in stack.skips}),
                "attention": [min(stack.attention), max(stack.attention)],
                "final_norm": stack.final_norm,
            }
            for stack in report.stacks
        ],
        "checks": {name: check.status for name, check in checks.items()},
        "refused": {name: check.detail for name, check in checks.items() if check.status in ("refused", "fail")},
    }


def _encoder(norm_first: bool, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=norm_first, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _x_transformers(kind: str) -> nn.Module:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    layers = {
        "x-transformers encoder": lambda: Encoder(dim=32, depth=3, heads=4),
        "x-transformers decoder": lambda: Decoder(
            dim=32, depth=3, heads=4, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True
        ),
        "x-transformers decoder, post-norm, fused attention": lambda: Decoder(
            dim=32, depth=3, heads=4, pre_norm=False, attn_flash=True
        ),
    }[kind]()
    return TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "hand-written GPT": (lambda: GPT("pre"), ids),
    "hand-written post-norm": (lambda: GPT("post"), ids),
    "hand-written parallel": (lambda: GPT("parallel"), ids),
    "hand-written without skips": (lambda: GPT("bare"), ids),
    "hand-written, blocks inline": (InlineGPT, lambda: torch.randn(2, 11, 32)),
    "torch.nn.TransformerEncoder, pre-norm": (lambda: _encoder(True), lambda: torch.randn(2, 11, 32)),
    "torch.nn.TransformerEncoder, post-norm": (lambda: _encoder(False), lambda: torch.randn(2, 11, 32)),
    "torch.nn.TransformerEncoder, tokens first": (lambda: _encoder(False, False), lambda: torch.randn(11, 2, 32)),
    **{
        name: ((lambda kind=name: _x_transformers(kind)), ids)
        for name in (
            "x-transformers encoder",
            "x-transformers decoder",
            "x-transformers decoder, post-norm, fused attention",
        )
    },
}


def committed() -> dict[str, Any]:
    """The table as it stands in the repository."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def commit(name: str, facts: dict[str, Any]) -> None:
    """Write one row of the table anew."""
    table = committed() | {name: facts}
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
