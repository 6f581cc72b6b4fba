"""Verbs on a local folder, with attempts to connect to a network or to look up a name refused and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

INPUTS: dict[str, Any] = {"sequences": 1, "tokens": 8}
_BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
HOSTILE: dict[str, dict[str, Any]] = {
    "detr": {"model_type": "detr", "use_timm_backbone": False, "backbone": "owner/name", "backbone_config": None},
    "zoedepth": {"model_type": "zoedepth", "backbone": "owner/name", "backbone_config": None},
    "upernet": {"model_type": "upernet", "backbone": "owner/name", "use_timm_backbone": False},
    "mask2former": {"model_type": "mask2former", "backbone": "owner/name", "use_timm_backbone": False},
    "rt_detr": {"model_type": "rt_detr", "backbone": "owner/name", "use_timm_backbone": False},
    "dpt": {"model_type": "dpt", "backbone": "owner/name", "is_hybrid": False},
    "depth_anything": {"model_type": "depth_anything", "backbone": "owner/name"},
    "vitmatte": {"model_type": "vitmatte", "backbone": "owner/name"},
    "timm_wrapper": {"model_type": "timm_wrapper", "architecture": "hf-hub:owner/name"},
    "timm_backbone": {"model_type": "timm_backbone", "backbone": "hf-hub:owner/name", "use_pretrained_backbone": True},
    "bert with a kernel": {**_BERT, "x": [{"attn_implementation": "owner/name"}]},
    "bert with experts": {**_BERT, "experts_implementation": "owner/name"},
    "bert with code": {**_BERT, "auto_map": {"AutoModel": "owner/name--evil.Evil"}},
}
"""Configurations that name another repository."""


@contextmanager
def refusing_connections(tried: list[str]) -> Iterator[None]:
    """Refuse every connection to a network and every look-up of a name, and note it."""
    import socket

    def refuse(*words: Any, **more: Any) -> Any:
        tried.append(repr(words[-1] if words else more)[:200])
        raise OSError("no connections here")

    saved = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
    looking_up, creating = socket.getaddrinfo, socket.create_connection
    try:
        for name in saved:
            setattr(socket.socket, name, refuse)
        socket.getaddrinfo = socket.create_connection = refuse
        yield
    finally:
        for name, value in saved.items():
            setattr(socket.socket, name, value)
        socket.getaddrinfo, socket.create_connection = looking_up, creating


def verbs() -> dict[str, Callable[[str], object]]:
    """Verbs that read a model in different ways, on small inputs."""
    import rankscope as rs

    return {
        "measure": lambda spec: rs.measure(spec, rs.Inputs(**INPUTS)),
        "measure --offload": lambda spec: rs.measure(rs.Model(spec, offload=True), rs.Inputs(**INPUTS)),
        "exact": lambda spec: rs.exact(spec, rs.Inputs(**INPUTS)),
    }


def attempts(spec: str) -> dict[str, Any]:
    """The attempts to connect of each verb, and how each ended."""
    tried: list[str] = []
    ended: dict[str, str] = {}
    with refusing_connections(tried):
        for name, act in verbs().items():
            before = len(tried)
            try:
                act(spec)
                ended[name] = "answered"
            except Exception as error:  # noqa: BLE001  (only connections matter here)
                ended[name] = type(error).__name__
            if len(tried) > before:
                ended[name] += f", tried {tried[before:]}"
    return {"tried": tried, "ended": ended}
