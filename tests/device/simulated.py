"""Builds and registers the simulated device ``sim`` of ``simulated_device.cpp``, once per process.

The library is compiled once per version of torch and of the source, into the user's cache folder; a file lock lets
several processes share one build.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.linalg import to_host

SOURCE = Path(__file__).with_name("simulated_device.cpp")
_DEVICES = 2


@dataclass(frozen=True)
class Counts:
    """What the device did since the last :meth:`SimulatedDevice.reset`.

    Attributes:
        kernels: operators that ran on it; views are not counted.
        copies: copies from or to the host, or between two devices; reading one number is a copy.
        synchronisations: points where the host waited for it.
        by_name: all counters, e.g. ``"kernel:aten::mm"``, ``"sync:to_host"``, ``"bytes:to_device"``.
    """

    kernels: int
    copies: int
    synchronisations: int
    by_name: dict[str, int]


class SimulatedDevice:
    """The device ``sim`` with two indices; a device string wherever torch takes one.

    Attributes:
        is_available: what ``torch.accelerator.is_available()`` returns. Once registered, a device stays for the rest of
            the process; tests of training loops that choose an accelerator by themselves must not choose this one.
    """

    name = "sim"
    is_available = True

    def counts(self) -> Counts:
        """The counters since the last reset."""
        by_name = dict(sorted(torch.ops.simulated_device.counts().items()))
        total = {
            kind: sum(n for name, n in by_name.items() if name.startswith(kind))
            for kind in ("kernel:", "copy:", "sync:")
        }
        return Counts(total["kernel:"], total["copy:"], total["sync:"], by_name)

    def reset(self) -> None:
        """Set all counters to zero."""
        torch.ops.simulated_device.reset()

    @contextmanager
    def without_float64(self) -> Iterator[None]:
        """Refuse float64 tensors inside the block, as Apple's MPS does."""
        torch.ops.simulated_device.refuse_float64(True)
        try:
            yield
        finally:
            torch.ops.simulated_device.refuse_float64(False)

    @contextmanager
    def with_streams(self) -> Iterator[list[str]]:
        """Have streams inside the block, as CUDA: a copy of a side stream is made when its event is waited for.

        The list says when the host waited for an event (``"wait"``), and when a copy was started (``"copy"``).
        """
        module, done = getattr(torch, self.name), list[str]()
        fakes = {
            "Stream": partial(_Stream, done),
            "current_stream": lambda device=None: None,
            "stream": lambda stream: _Inside(stream),
        }
        for name, fake in fakes.items():
            setattr(module, name, fake)
        to_host._side_stream.cache_clear()
        try:
            yield done
        finally:
            to_host._side_stream.cache_clear()
            for name in fakes:
                delattr(module, name)

    def __str__(self) -> str:
        return self.name


class _Stream:
    """Copies that were asked for and not made yet."""

    def __init__(self, done: list[str], device: torch.device) -> None:
        self.done, self.copies, self.has_waited = done, list[Callable[[], object]](), False

    def wait_stream(self, other: object) -> None:
        self.has_waited = True

    def record_event(self) -> _Event:
        return _Event(self, len(self.copies))


@dataclass
class _Event:
    stream: _Stream
    number: int

    def synchronize(self) -> None:
        self.stream.done.append("wait")
        for place in range(self.number):
            self.stream.copies[place]()
            self.stream.copies[place] = lambda: None


class _Inside(TorchDispatchMode):
    """Puts copies off that do not block, and leaves another number where they will be."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.copy_.default or len(args) < 3 or not args[2]:
            return function(*args, **(kwargs or {}))
        assert self._stream.has_waited, "the copy may come before what it copies"
        target, source = args[:2]
        target.fill_(0xFF)
        self._stream.done.append("copy")
        self._stream.copies.append(lambda: target.copy_(source, non_blocking=True))
        self._stream.has_waited = False
        return target


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _build() -> Path:
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rankscope" / "simulated_device"
    library = cache / f"{key}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".tmp")
            command = [
                *(str(compiler()), "-shared", "-fPIC", "-O1", "-std=c++20", "-w"),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
                *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
                str(SOURCE),
                *(f"-L{folder}" for folder in cpp_extension.library_paths()),
                *("-lc10", "-ltorch_cpu", "-o", str(unfinished)),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
            if done.returncode:
                raise RuntimeError(f"The simulated device does not compile:\n{done.stderr[-4000:]}")
            unfinished.rename(library)
    return library


def _module(ops: types.ModuleType, registered: SimulatedDevice) -> types.ModuleType:
    """``torch.sim``: what torch looks up in the module of a device."""
    module = types.ModuleType("torch.sim")

    def index(device: object = None) -> int:
        if isinstance(device, int):
            return device
        found = torch.device(device).index if device is not None else None  # type: ignore[call-overload]
        return ops.current_device() if found is None else found

    module.is_available = lambda: registered.is_available
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: _DEVICES
    module.current_device = ops.current_device
    module.set_device = lambda device: ops.set_device(index(device))
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed = lambda seed: ops.manual_seed(ops.current_device(), seed)
    module.manual_seed_all = lambda seed: [ops.manual_seed(i, seed) for i in range(_DEVICES)]
    module.get_rng_state = lambda device=None: ops.get_rng_state(index(device))
    module.set_rng_state = lambda state, device=None: ops.set_rng_state(index(device), state)
    return module


@functools.cache
def simulated_device() -> SimulatedDevice:
    """The device; the first call in a process builds it if necessary and registers it."""
    torch.ops.load_library(str(_build()))
    torch.utils.rename_privateuse1_backend(SimulatedDevice.name)
    registered = SimulatedDevice()
    torch._register_device_module(registered.name, _module(torch.ops.simulated_device, registered))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return registered
