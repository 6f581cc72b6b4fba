r"""Measures how each block mixes the residual streams of a token, without knowing how the model writes it down.

In a block with several streams per token, :math:`x'_k = \sum_j H_{kj}x_j + \text{what branches write}`. The matrix H
acts on the streams and leaves channels alone; everything else (attention, MLP, the maps that compute H from the
tokens) acts on the channels. This difference is used to measure H in one forward pass of the model's own code:

- Each stream j enters the recorded block displaced, in a random direction :math:`r_j` over the channels, and the block
  is replayed operation by operation.
- A tensor whose displacement is a combination of :math:`r_1, ..., r_n` along its channels is still a mixture of
  streams. If a function returns anything else, it acted on the channels: the tensor is put back, which holds branches
  and computed coefficients fixed at their values. A norm module always counts as acting on channels.
- The displacement of stream k at the end of the block is :math:`\sum_j H_{kj}r_j`, from which H is read, for every
  token.

A second replay scales the displacements by a random number per token. H has to be the same; if it is not, the block
carries the streams of one token to another, and there is no mixing matrix per token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import UnsupportedConfigError
from rankscope.linalg.precision import as_float64, float64_home
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import hidden, without_fastpath
from rankscope.pass_graph.ir import Call, Node, Value
from rankscope.pass_graph.replay import CannotReplayError, SharedMemory, content_of, result_of
from rankscope.stream.block_recorder import BlockRecorder
from rankscope.stream.operators import MOVES
from rankscope.stream.passes import Pass

_ROUNDINGS = 32
"""Roundings of the largest displacement by which a mixture of streams may differ from a combination of directions."""
_SUMS_WITH_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addcmul", "lerp"})
_LEAST_SPARE = 4
"""Channels needed beyond one per stream, so that no combination of directions fits an arbitrary displacement."""
_SIZE = 64
"""Size of the displacements relative to the stream: rounding errors are those of what they are added to."""


def mixing_matrices(
    view: ModelView, stack: Stack, batch: Batch
) -> dict[int, Float[Tensor, "batch tokens streams streams"]]:
    """The matrix by which each block mixes the streams of each token, in float64, by block.

    ``H[b, t, k, j]`` is the weight of stream j before the block in stream k after it. If blocks are modules that only
    write to streams, the streams that enter the first one are not seen, and it has no entry.

    Raises:
        UnsupportedConfigError: a block has no such matrix, or none that can be measured.
    """
    return _checked(view, stack, batch)[0]


def adds_only(view: ModelView, stack: Stack, batch: Batch) -> bool:
    """Whether every block passes each stream on as it is, and adds to it what branches write."""
    try:
        matrices, tolerance = _checked(view, stack, batch)
    except UnsupportedConfigError:
        return False
    return all(float((H - torch.eye(H.shape[-1]).to(H)).abs().max()) <= tolerance for H in matrices.values())


def _checked(view: ModelView, stack: Stack, batch: Batch) -> tuple[dict[int, Tensor], float]:
    """The matrices, and how much rounding may change an entry of them."""
    mixing = _Mixing(stack, batch.sequences)
    mixing.run(view, batch)
    tolerance = 2 * _ROUNDINGS * torch.finfo(mixing.plain.directions.dtype).eps
    for layer, (matrix, again) in mixing.matrices.items():
        _check(stack, layer, matrix, again, tolerance)
    return {layer: matrix for layer, (matrix, _) in mixing.matrices.items()}, tolerance


def _check(stack: Stack, layer: int, found: Tensor, again: Tensor, tolerance: float) -> None:
    where = f"Block {layer} ({stack.calls[layer].module_name})"
    size = float(found.abs().max())
    if not size > 0 or not bool(torch.isfinite(found).all()):
        raise UnsupportedConfigError(
            f"{where} returns streams that are not linear mixtures of those that entered it (after a norm of "
            "all of them, for example), or that are not finite: there is no mixing matrix."
        )
    lost = [k for k in range(found.shape[-2]) if not bool(found[..., k, :].any())]
    if lost:
        raise UnsupportedConfigError(
            f"{where} returns stream {lost[0]} without any of the streams that entered it: it is replaced or goes "
            "through a norm, and there is no mixing matrix."
        )
    if float((found - again).abs().max()) > tolerance * size:
        raise UnsupportedConfigError(
            f"{where} carries streams from one token to another, so there is no mixing matrix per token."
        )


class _Directions:
    """One direction per stream, orthonormal, times a factor per token that is 1 unless ``per_token``."""

    def __init__(self, stack: Stack, *, per_token: bool = False) -> None:
        self.stack = stack
        self._generator = torch.Generator().manual_seed(1 if per_token else 0)
        self._per_token = per_token
        self._factors: Tensor | None = None
        self._scale = 1.0
        self.directions = torch.empty(0)

    def like(self, x: Tensor, sequences: int) -> Tensor:
        """The displacement of streams ``x``, which lie as the stack declares."""
        batch, tokens, streams, dim = self.stack.stream.apart(x, sequences).shape
        if dim < streams + _LEAST_SPARE:
            raise UnsupportedConfigError(
                f"{streams} streams of {dim} channels are too narrow to measure how they are mixed; "
                f"{streams + _LEAST_SPARE} channels are needed."
            )
        if self.directions.shape != (streams, dim):
            drawn = torch.randn(dim, streams, generator=self._generator, dtype=torch.float64)
            self.directions = torch.linalg.qr(drawn).Q.T.to(x.dtype).to(x.device)
        if self._factors is None or self._factors.shape != (batch, tokens):
            drawn = torch.rand(batch, tokens, generator=self._generator, dtype=torch.float64)
            self._factors = (0.5 + drawn if self._per_token else torch.ones_like(drawn)).to(float64_home(x))
        self._scale = _SIZE * dim**0.5 * (float(x.abs().max()) or 1.0)
        moved = self._scale * self._factors[..., None, None].to(x.dtype).to(x.device) * self.directions
        return self.stack.stream.from_apart(moved, x.shape, sequences)

    def read(self, moved: Tensor, sequences: int) -> Tensor:
        """The weights of the directions in the displacement of streams, per token."""
        assert self._factors is not None
        apart = as_float64(self.stack.stream.apart(moved, sequences)) / self._scale
        return apart @ as_float64(self.directions).T / self._factors[..., None, None]

    def is_mixture(self, moved: Tensor, size: float) -> bool:
        """Whether a displacement is a combination of the directions along one of its axes.

        ``size`` is that of the displacements it was computed from, to which its rounding is relative.
        """
        limit = _ROUNDINGS * torch.finfo(moved.dtype).eps * max(size, float(moved.abs().max()))
        directions = self.directions.to(moved.dtype)
        for axis in reversed(range(moved.dim())):
            if moved.shape[axis] == directions.shape[-1]:
                along = moved.movedim(axis, -1)
                if float((along - along @ directions.T @ directions).abs().max()) <= limit:
                    return True
        return False


class _Mixing(BlockRecorder):  # type: ignore[no-untyped-call]
    """Records one pass, block by block, and reads the matrices when a block ends.

    Modules that only write to streams are not blocks themselves: a block is what runs between the ends of two of them.

    Attributes:
        plain: the directions in which streams are displaced.
        matrices: for each block, the matrix with these, and with displacements that differ between tokens.
    """

    def __init__(self, stack: Stack, sequences: int) -> None:
        only_writes = stack.stream.takes == "branch"
        super().__init__([] if only_writes else [stack])
        self.plain = _Directions(stack)
        self.matrices: dict[int, tuple[Tensor, Tensor]] = {}
        self._per_token = _Directions(stack, per_token=True)
        self._stack, self._sequences = stack, sequences
        self._start: Value | None = None
        self._normed: set[Value] = set()
        self._writers = [call.module_name for call in stack.calls] if only_writes else []
        self._written = 0

    def run(self, view: ModelView, batch: Batch) -> None:
        """Run the model once."""
        with without_fastpath():
            try:
                with Pass(self._sequences, sums=self._stack.sums, recorder=self).on(view.model):
                    batch.run(view.model)
            except CannotReplayError as error:
                raise UnsupportedConfigError(
                    f"{type(view.model).__name__} cannot be replayed in parts, so how its streams are mixed cannot be "
                    f"measured: {' '.join(str(error).split())[:200]}"
                ) from error

    def begun(self, call: Call, stack: Stack, number: int) -> None:
        """The streams begin."""
        self._normed.clear()
        self._start = call.taken

    def ended(self, call: Call, stack: Stack, number: int) -> None:
        """Read the matrices of a block."""
        assert call.returned is not None
        self.matrices[number] = self._matrix(call.returned, self.plain), self._matrix(call.returned, self._per_token)

    def leave(self, returned: Tensor | None, product_of: Tensor | None = None, output: object = None) -> None:
        """Note what norms return, and where modules write to streams."""
        call = self.call
        super().leave(returned)
        assert call is not None
        # With equal gains, a norm looks like a number per token; with others, it acts on channels. Always the latter.
        if call.normalises and call.returned is not None:
            self._normed.add(call.returned)
        if call.name in self._writers and returned is not None:
            with hidden():
                if self._start is not None:
                    self.ended(call, self._stack, self._written)
                self.forget()
                self.keeps, self._start = True, self.value_of(returned)
            self._written += 1

    def _matrix(self, end: Value, directions: _Directions) -> Tensor:
        assert self._start is not None
        nodes = self.graph.nodes
        moved = {self._start: directions.like(content_of(self._start, {}), self._sequences)}
        # What leaves the function in which it was computed, and so may be tested.
        made_by = {value: node.function for node in nodes for value in node.outputs}
        leaves = {
            value for node in nodes for value in node.inputs
            if node.function is None or made_by.get(value) is not node.function
        }  # fmt: skip
        for node in nodes:
            if moved.keys().isdisjoint(node.inputs) or not self._normed.isdisjoint(node.outputs):
                continue
            # One call that adds a product to a stream is tested term by term, or the stream would be dropped with it.
            terms = [node.inputs[:1], node.inputs[1:]] if node.name in _SUMS_WITH_PRODUCTS else [node.inputs]
            for term in terms:
                given = {value: moved[value] for value in term if value in moved}
                size = max((float(one.abs().max()) for one in given.values()), default=0.0)
                displaced = {value: content_of(value, {}) + one for value, one in given.items()}
                for value, result in zip(node.outputs, result_of(node, displaced) if given else (), strict=False):
                    if result is None or not result.is_floating_point() or result.is_meta:
                        continue
                    change = result - content_of(value, {})
                    if _moves(node) or value not in leaves | {end} or directions.is_mixture(change, size):
                        moved[value] = moved[value] + change if value in moved else change
        final = moved.get(end, torch.zeros_like(content_of(end, {})))
        return directions.read(final, self._sequences)


def _moves(node: Node) -> bool:
    """Whether an operation copies entries and computes nothing."""
    return isinstance(node.run, SharedMemory) or (node.function is not None and node.function.func in MOVES)
