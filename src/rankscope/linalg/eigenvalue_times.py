"""Where the eigenvalues of an accelerator's Gram matrices are computed faster: there, or on the CPU, copies included.

Batched symmetric eigenvalues on CUDA were up to a hundred times slower than on the host in some releases of torch.
``rankscope selftest --device`` measures both and keeps the answer in the cache folder, by name of the device and
release of torch. Without an answer they are computed on the device. The choice changes the last digits only.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope._files import cache_folder, read_regular
from rankscope.linalg.precision import device_name

_FILE = "eigenvalues.json"
_MOST_BYTES = 1 << 20
STACK, SIDE = 8, 128
_ROUNDS = 5


@dataclass(frozen=True)
class EigenvalueTimes:
    """Seconds for :data:`STACK` matrices of side :data:`SIDE`; medians."""

    device: float
    host: float

    @property
    def is_faster_on_host(self) -> bool:
        """By any margin: the results are equally good."""
        return self.host < self.device


def measured(device: torch.device) -> EigenvalueTimes:
    """Compute eigenvalues both ways, in turn."""
    X = torch.randn(STACK, SIDE, 2 * SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = (X @ X.mT).to(device)
    there, here = [], []
    for _ in range(_ROUNDS + 1):  # the first round loads libraries
        there.append(_seconds(gram, on_host=False))
        here.append(_seconds(gram, on_host=True))
    return EigenvalueTimes(statistics.median(there[1:]), statistics.median(here[1:]))


def remember(device: torch.device, times: EigenvalueTimes) -> None:
    """Use the faster way from now on, in this process and in later ones.

    Raises:
        OSError: the cache folder cannot be written.
    """
    kept = {**_kept(), _key(device): "host" if times.is_faster_on_host else "device"}
    path = cache_folder() / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    is_faster_on_host.cache_clear()


@functools.cache
def is_faster_on_host(device: torch.device) -> bool:
    """Whether ``selftest`` found so on this machine."""
    return _kept().get(_key(device)) == "host"


def _seconds(gram: Tensor, *, on_host: bool) -> float:
    start = time.perf_counter()
    values = torch.linalg.eigvalsh(gram.cpu()).to(gram.device) if on_host else torch.linalg.eigvalsh(gram)
    values.cpu()  # waits for the device
    return time.perf_counter() - start


def _key(device: torch.device) -> str:
    return f"{device.type}, {device_name(device)}, torch {torch.__version__}"


def _kept() -> dict[str, str]:
    path = cache_folder() / _FILE
    try:
        kept = json.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} cannot be read ({error}). Run `rankscope selftest --device` again.", stacklevel=2)
        return {}
    return kept if isinstance(kept, dict) else {}
