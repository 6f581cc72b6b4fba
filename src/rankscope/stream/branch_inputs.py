"""Finds the tensor that a branch reads: what enters its first matrix products.

Module boundaries do not tell: BERT's MLP is two modules, of which the second also adds the skip, and a norm may be
written out by hand. So the block is followed operation by operation, below autograd, where nothing is hidden. Tensors
made from the stream are *sources* until a matrix product reads one; everything made from such a product is known by the
sources it was made of. A branch made of one source has read that tensor. A branch made of several has no single input,
and is refused (RWKV: two mixtures of each token with the previous one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef

from rankscope.pass_graph.kernel_mode import KernelMode
from rankscope.stream.frames import tensors_in

_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "_grouped_mm", "_scaled_mm",
     "convolution", "_convolution", "mkldnn_convolution"}
)  # fmt: skip
_SAME_ROWS = frozenset(
    {"_to_copy", "clone", "copy_", "index", "index_select", "gather", "repeat", "cat", "stack", "constant_pad_nd",
     "_unsafe_view", "_reshape_alias", "permute_copy"}
)  # fmt: skip
"""Operations that copy whole tokens, in another order or format: the copy counts as the tensor it was made from."""


@dataclass(eq=False)
class Source:
    """A tensor made from the stream without a matrix product; ``version`` changes if it is overwritten."""

    tensor: Tensor
    version: int | None


@dataclass(frozen=True)
class Origin:
    """Where the content of some memory comes from: itself a source, or made of the sources it ``read``."""

    source: Source | None
    read: frozenset[Source] = frozenset()

    @property
    def sources(self) -> frozenset[Source]:
        """All sources."""
        return self.read if self.source is None else self.read | {self.source}


class BranchInputs(KernelMode):  # type: ignore[no-untyped-call]
    """Follows one block while it is active. It keeps the sources, a few tensors of the size of the stream."""

    def __init__(self) -> None:
        super().__init__()
        # By memory and not by tensor: views share it, and an in-place write through one of them changes all.
        self._origins: dict[StorageWeakRef, Origin] = {}

    def begin(self, stream: Tensor) -> None:
        """The stream as it enters the block, or after a branch was added: what follows is made from it alone."""
        self._origins = {_memory(stream): _own(stream)}

    def read_by(self, branch: Tensor, stream: Tensor) -> Tensor | str:
        """What the branch that is added to ``stream`` has read, or why that cannot be told."""
        carried = self._origins.get(_memory(stream))
        if carried is None or carried.read:
            return "the stream it is added to was not followed, or went through a matrix product itself"
        origin = self._origins.get(_memory(branch))
        if origin is None or not origin.read:
            return "what it adds was not followed back to a matrix product of the stream"
        if len(origin.sources) > 1:
            return f"it reads {len(origin.sources)} different tensors, and not one"
        (source,) = origin.sources
        if source.version != _version(source.tensor):
            return "its input was overwritten before its output was added"
        if source.tensor.shape != branch.shape:
            shapes = f"{tuple(source.tensor.shape)} and {tuple(branch.shape)}"
            return f"its input and its output have different shapes, {shapes}"
        return source.tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_memory(tensor) for tensor in tensors_in((args, kwargs or {}), depth=3) if _is_content(tensor)}
        known = [self._origins[memory] for memory in given if memory in self._origins]
        out = func(*args, **(kwargs or {}))
        if known:
            made = [tensor for tensor in tensors_in(out) if _is_content(tensor)]
            if isinstance(func, HigherOrderOperator):
                read = frozenset[Source]().union(*(origin.sources for origin in known))
                self._origins |= {_memory(tensor): Origin(None, read) for tensor in made}
                return out
            # A view has the memory, and so the origin, of what it views; only a write changes that.
            self._follow(func, known, [t for t in made if func._schema.is_mutable or _memory(t) not in given])
        return out

    def _follow(self, func: Any, known: list[Origin], made: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        if name.endswith("_like") or name.startswith("new_"):
            return  # new memory has the shape of the stream and none of its values
        is_foreign = func.namespace not in ("aten", "prims", "prim")
        sources = frozenset[Source]().union(*(origin.sources for origin in known))
        for tensor in made:
            if name in _PRODUCTS or is_foreign or any(origin.read for origin in known):
                self._origins[_memory(tensor)] = Origin(None, sources)
            elif name in _SAME_ROWS and len(sources) == 1:
                self._origins[_memory(tensor)] = known[0]
            else:
                self._origins[_memory(tensor)] = _own(tensor)


def _own(tensor: Tensor) -> Origin:
    return Origin(Source(tensor, _version(tensor)))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_content(tensor: Tensor) -> bool:
    """Not indices and conditions: they choose tokens, and say nothing about their directions."""
    return tensor.is_floating_point() or tensor.is_complex()


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
