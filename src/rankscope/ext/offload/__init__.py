"""Offload: models larger than memory or on a server, read block by block and by range."""

from __future__ import annotations

from rankscope.extensions import Extension


def _execution() -> None:
    from rankscope.ext.offload import execution  # noqa: F401 registers it


EXTENSION = Extension(
    name="offload",
    summary="offload=True and weights on a server: block by block, by range.",
    adds={"execution": _execution},
)
