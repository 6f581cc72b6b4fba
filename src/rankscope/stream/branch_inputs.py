"""Finds the tensor that a branch reads: what enters its first matrix products.

Module boundaries do not tell: BERT's MLP is two modules, of which the second also adds the skip, and a norm may be
written out by hand. So the operations of the block are recorded. Tensors made from the stream are *sources* until a
matrix product reads one. A branch that goes back to one source has read that tensor. A branch of several has no single
input, and is refused (RWKV: two mixtures of each token with the previous one).
"""

from __future__ import annotations

from torch import Tensor

from rankscope.models.wrapping import hidden
from rankscope.pass_graph.ir import Value, way_back
from rankscope.pass_graph.record import GraphRecorder

_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "matmul", "_grouped_mm", "_scaled_mm",
     "convolution", "_convolution", "mkldnn_convolution"}
)  # fmt: skip
_SAME_ROWS = frozenset(
    {"_to_copy", "clone", "copy", "index", "index_select", "gather", "repeat", "cat", "stack", "constant_pad_nd",
     "_unsafe_view", "_reshape_alias", "permute_copy", "shared memory"}
)  # fmt: skip
"""Operations that copy whole tokens, in another order or format: the copy counts as the tensor it was made from."""


class BranchInputs(GraphRecorder):  # type: ignore[no-untyped-call]
    """Follows one block while it is active. It keeps the sources, a few tensors of the size of the stream."""

    def __init__(self) -> None:
        super().__init__(keeps=True)
        self._is_read: dict[Value, bool] = {}
        """For every value made from the stream, whether a product was on the way."""

    def begin(self, stream: Tensor) -> None:
        """The stream as it enters the block, or after a branch was added: what follows is made from it alone."""
        with hidden():
            self.forget()
            self._is_read = {self.value_of(stream): False}
            self.value_of(stream)  # keeps its content

    def keeps_content(self, value: Value) -> bool:
        """Only sources are kept."""
        node = value.node
        if value not in self._is_read and node is not None and value.dtype.is_floating_point | value.dtype.is_complex:
            known = [self._is_read[one] for one in node.inputs if one in self._is_read]
            if known:
                self._is_read[value] = node.name in _PRODUCTS or node.is_foreign or any(known)
        return self._is_read.get(value) is False

    def read_by(self, branch: Tensor, stream: Tensor) -> Tensor | str:
        """What the branch that is added to ``stream`` has read, or why that cannot be told."""
        with hidden():
            added, carried = self.value_of(branch), self.value_of(stream)
        if self._is_read.get(carried) is not False:
            return "the stream it is added to was not followed, or went through a matrix product itself"
        if not self._is_read.get(added):
            return "what it adds was not followed back to a matrix product of the stream"
        read = way_back([added], lambda value: self._made_from(value) if self._is_read[value] else ())
        sources = {self._source(value) for value in read if not self._is_read[value]}
        if len(sources) > 1:
            return f"it reads {len(sources)} different tensors, and not one"
        (source,) = sources
        if source.shape != branch.shape:
            shapes = f"{tuple(source.shape)} and {tuple(branch.shape)}"
            return f"its input and its output have different shapes, {shapes}"
        assert source.content is not None
        return source.content

    def _made_from(self, value: Value) -> list[Value]:
        """The values from which an operation made this one, as far as they were made from the stream."""
        node = value.node
        return [] if node is None else [one for one in node.inputs if one in self._is_read]

    def _source(self, value: Value) -> Value:
        """The value of which this is a view or a copy."""
        given, node = self._made_from(value), value.node
        if node is None or len(given) != 1 or given[0] is value:
            return value
        is_view = node.operator is not None and node.operator.is_view
        return self._source(given[0]) if is_view or node.name in _SAME_ROWS else value
