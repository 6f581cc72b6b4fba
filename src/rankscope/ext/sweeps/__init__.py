"""Sweeps: one plan over many models, checkpoints and seeds, its storage, and questions to the result."""

from __future__ import annotations

from rankscope.extensions import Extension

EXTENSION = Extension(
    name="sweeps",
    summary="sweep and query: many models, checkpoints and seeds in one data set.",
    adds={"command": ("rankscope.ext.sweeps.commands",)},
    names={"sweep": "rankscope.ext.sweeps.running", "query": "rankscope.ext.sweeps.querying"},
)
