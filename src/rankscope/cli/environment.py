"""``rankscope env``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rankscope._version import __version__
from rankscope.cli.streams import print_json, results_console

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "hf": ("transformers", "safetensors"),
    "plot": ("matplotlib",),
    "frames": ("pandas",),
    "report": ("jinja2",),
    "gguf": ("gguf", "sentencepiece", "protobuf", "accelerate"),
    "torchmetrics": ("torchmetrics",),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "sweep": ("ray", "pydantic", "pyyaml", "duckdb"),
}


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")] = False,
) -> None:
    """What is installed here? Versions, extras and cores, for a bug report; contains no host or user name."""
    facts = describe_environment()
    if as_json:
        print_json(facts)
        return
    from rankscope.reporting.terminal import print_entries

    top = {name: facts[name] for name in ("rankscope", "python", "platform", "cores")}
    extras = {f"extra {name}": "installed" if there else "not installed" for name, there in facts["extras"].items()}
    rows = {**top, **facts["versions"], **extras}
    print_entries([{"what": str(name), "here": str(value)} for name, value in rows.items()], results_console())


def describe_environment() -> dict[str, Any]:
    """Facts about this installation, read from package metadata without importing the packages."""
    from rankscope.runs.provenance import SCHEMA, installed_versions

    optional = installed_versions([package for packages in EXTRAS.values() for package in packages])
    return {
        "schema": SCHEMA,
        "kind": "env",
        "rankscope": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}".strip(),
        "cores": os.cpu_count(),
        "versions": {name: version for name, version in installed_versions().items() if name != "rankscope"},
        "extras": {name: all(package in optional for package in packages) for name, packages in EXTRAS.items()},
    }
