"""Sweeps: one plan over many models, checkpoints and seeds, its storage, and questions to the result."""

from __future__ import annotations

from rankscope.extensions import Extension


def _commands() -> None:
    from rankscope.ext.sweeps import commands  # noqa: F401 registers sweep and query


def _sweep() -> object:
    from rankscope.ext.sweeps.running import sweep

    return sweep


def _query() -> object:
    from rankscope.ext.sweeps.querying import query

    return query


EXTENSION = Extension(
    name="sweeps",
    summary="sweep and query: many models, checkpoints and seeds in one data set.",
    adds={"command": _commands},
    names={"sweep": _sweep, "query": _query},
)
