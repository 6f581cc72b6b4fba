"""A model that a hub id names."""

from __future__ import annotations

from typing import Any

from rankscope._errors import LoadError
from rankscope.models.loading.config import refuse_remote_kernels
from rankscope.models.loading.pretrained import from_pretrained, refuse_too_large
from rankscope.models.loading.request import Request, Weights
from rankscope.models.loading.tokenizer import read_tokenizer


def weights_from_hub(name: str, request: Request) -> Weights:
    """The model a hub id names, safetensors only unless pickles were allowed."""
    import transformers

    where = {"revision": request.revision, "local_files_only": not hub_answers()}
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=request.trust_remote_code, **where)
    except (OSError, ValueError) as error:
        raise _hub_error(name, error) from error
    if not request.trust_remote_code:
        refuse_remote_kernels(config.to_dict(), name)
        refuse_too_large(config, request)
    arguments: dict[str, Any] = {"config": config, **where}
    if not request.allow_pickle:
        arguments["use_safetensors"] = True
    model, notes = from_pretrained(name, request, arguments)
    tokenizer, remark = read_tokenizer(name, where, trust_remote_code=request.trust_remote_code)
    return Weights(model, tokenizer, getattr(config, "_commit_hash", None), notes + remark)


def hub_answers() -> bool:
    """Whether a connection to the hub opens; without one only its local cache is looked at, and at once."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if "https" in getproxies():
        return True
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _hub_error(name: str, error: Exception) -> LoadError:
    from rankscope.models.presets import PRESETS

    advice = f"'init:{name}'" if name in PRESETS else "init:NAME for a random initialisation (rankscope ls presets)"
    return LoadError(
        f"{name!r} is no local folder, and the hub cannot be reached or does not have it "
        f"({str(error).splitlines()[0]}). Pass a local folder, or {advice}."
    )
