"""Pools every sequence to one vector after each block, and measures how the vectors of different inputs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.linalg import tiles
from rankscope.linalg.numbered_vectors import NumberedVectors
from rankscope.linalg.precision import float64_home, float_floor, format_of
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, MetricSpec, evaluate
from rankscope.models.inputs import Batch
from rankscope.runs.rows import BETWEEN_INPUTS, ENTRY, RowWriter
from rankscope.stream.sites import SiteRef
from rankscope.stream.tracer import Observed
from rankscope.verbs.reader import SiteReader

SITE, ENTRY_SITE = "block.out", "block.in"
"""Sequences are pooled at the first, and where the stream enters block 0 at the second."""
BEFORE = -1
"""Number of the block that stands for the entry of block 0."""
BASELINE = "relative_residual"
"""The metric that is also computed there: how much the inputs differ before the model does anything to them."""
INPUT_METRICS = ("alpha_req", "uniformity")
"""Measured between inputs in addition to the default metrics of tokens."""
MOST_BYTES = 1 << 30
"""Memory for the vectors of all blocks."""

_CODE = {status: code for code, status in enumerate(Status)}


@dataclass(frozen=True)
class Pooling:
    """How a sequence becomes one vector: ``"mean"``, ``"first"`` or ``"last"`` of the tokens that count."""

    how: str

    @property
    def site(self) -> str:
        """The site its values are reported at."""
        return BETWEEN_INPUTS + self.how

    @property
    def entry_site(self) -> str:
        """The site of the values before the first block."""
        return self.site + ENTRY

    def __str__(self) -> str:
        return self.how

    def pooled(self, x: Float[Tensor, "batch tokens dim"], keep: Bool[Tensor, "batch tokens"] | None) -> Tensor:
        """One float64 vector per sequence; arbitrary for a sequence without tokens that count."""
        keep = None if keep is None else keep.to(x.device)
        if self.how == "mean":
            return _mean(x, keep)
        if keep is None:
            place = torch.full((len(x),), 0 if self.how == "first" else x.shape[1] - 1, device=x.device)
        else:
            rank = keep.cumsum(1)
            place = (rank == (rank[:, -1:] if self.how == "last" else 1)).to(torch.int8).argmax(1)
        vectors = x[torch.arange(len(x), device=x.device), place].detach()
        return vectors.to(float64_home(x)).double()


def _mean(x: Tensor, keep: Tensor | None) -> Tensor:
    home = float64_home(x)
    total = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float64, device=home)
    for rows in tiles.strips(x.shape[1], x.shape[0] * x.shape[2], x.device):
        piece = x.detach()[:, rows].to(home).double()
        if keep is not None:
            piece = piece.masked_fill(~keep[:, rows, None].to(home), 0.0)  # padding may be NaN
        total += piece.sum(1)
    count = x.shape[1] if keep is None else keep.sum(1, keepdim=True).to(home)
    return total / count


def parse_poolings(words: str | Sequence[str] | None) -> tuple[Pooling, ...]:
    """Read ``"mean"``, ``"first"`` and ``"last"``; none for ``"none"``.

    Example:
        >>> [pooling.site for pooling in parse_poolings(["mean", "last"])]
        ['inputs.mean', 'inputs.last']
    """
    words = [words] if isinstance(words, str) else list(words or ())
    if words == ["none"]:
        return ()
    for word in words:
        if word not in ("mean", "first", "last"):
            raise InputError(f"between_inputs={word!r} is not known. Expected 'mean', 'first', 'last' or 'none'.")
    return tuple(map(Pooling, dict.fromkeys(words)))


Place = tuple[str | None, int, Pooling]


class InputsReader:
    """Pools every sequence, and writes one row per metric, block and pooling.

    The rows have sequence 0, because there is one value for all inputs. A batch counts once it is finished
    (:meth:`commit`), so that an interrupt leaves whole batches.

    Args:
        reader: knows the batch and which tokens count.
        poolings: how to pool.
        specs: the metrics, all of tokens.
        inputs: number of inputs.
        blocks: number of blocks that share the memory.
        classes: the class of each input; None if unknown.
    """

    def __init__(
        self,
        reader: SiteReader,
        poolings: Sequence[Pooling],
        specs: Sequence[MetricSpec],
        *,
        inputs: int,
        blocks: int,
        classes: Sequence[int] | None = None,
    ) -> None:
        self._reader, self._poolings, self._specs = reader, tuple(poolings), tuple(specs)
        self._baseline = tuple(spec for spec in self._specs if spec.name == BASELINE)
        self._inputs = inputs
        self._classes = classes
        self._apart: dict[str, dict[str, dict[str, float]]] = {}
        self._bytes_per_place = MOST_BYTES // max(1, (blocks + 1) * len(self._poolings))
        self._places: dict[Place, NumberedVectors] = {}
        self._floors: dict[Place, float] = {}
        self._pending: dict[Place, tuple[Tensor, list[bool]]] = {}
        self._batch: Batch | None = None

    def start(self, batch: Batch) -> None:
        """Announce the batch of the next forward pass."""
        self._batch = batch
        self._pending.clear()

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        """Pool what is observed after a block, or before the first."""
        is_entry = ref.site == ENTRY_SITE and ref.layer == 0 and self._baseline
        if not (ref.site == SITE or is_entry) or not isinstance(seen, Tensor):
            return
        keep = self._reader.valid(seen)
        # A class token is the same in all inputs when it enters: the mean of the tokens then tells how inputs differ.
        poolings = dict.fromkeys((*self._poolings, Pooling("mean"))) if is_entry else self._poolings
        for pooling in poolings:
            place = (ref.stack, BEFORE if is_entry else ref.layer, pooling)
            read = (pooling.pooled(seen, keep), *(() if keep is None else (keep.any(1),)))
            self._reader.later(read, partial(self._take, place))
            self._floors[place] = max(self._floors.get(place, 0.0), float_floor(format_of(seen.dtype, seen.device)))

    def commit(self, writer: RowWriter) -> None:
        """Count the batch; a block all of whose inputs have been seen is written, and its vectors are dropped."""
        assert self._batch is not None
        self._reader.finish()
        for place, (vectors, present) in self._pending.items():
            if place not in self._places:
                self._places[place] = NumberedVectors(self._inputs, self._bytes_per_place)
            self._places[place].add(self._batch.first_sequence, vectors, present)
        self._pending.clear()
        self._write(writer, [place for place, vectors in self._places.items() if vectors.is_complete])

    def finish(self, writer: RowWriter) -> None:
        """Write what is left: what several processes read together, or what an interrupt left."""
        self._write(writer, list(self._places))

    def _take(self, place: Place, vectors: Tensor, present: Tensor | None = None) -> None:
        self._pending[place] = vectors, [True] * len(vectors) if present is None else present.tolist()

    def seen(self) -> dict[str, Any]:
        """The vectors seen so far, as JSON, for a reader in another process."""
        places = [
            [stack, layer, str(pooling), self._floors[stack, layer, pooling], vectors.to_json()]
            for (stack, layer, pooling), vectors in self._places.items()
        ]
        return {"places": places}

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Add what another reader has seen; a second time changes nothing."""
        for stack, layer, word, floor, vectors in seen["places"]:
            place = (stack, layer, parse_poolings(word)[0])
            self._floors[place] = max(self._floors.get(place, 0.0), floor)
            self._places.setdefault(place, NumberedVectors(self._inputs, self._bytes_per_place)).learn(vectors)

    def classes(self) -> dict[str, Any]:
        """How many classes there are, and by pooling, stack and block how far the two closest are apart."""
        return {} if not self._apart or not self._classes else {"count": len(set(self._classes)), "apart": self._apart}

    def _write(self, writer: RowWriter, places: Sequence[Place]) -> None:
        for place in places:
            stack, layer, pooling = place
            if self._classes is not None and layer != BEFORE and self._places[place].is_exact:
                gap = class_gap(self._places[place].sample(), self._classes)
                self._apart.setdefault(pooling.site, {}).setdefault(stack or "", {})[str(layer)] = gap
            specs, site = (self._specs, pooling.site) if layer != BEFORE else (self._baseline, pooling.entry_site)
            vectors = self._places.pop(place)
            reading = evaluate(specs, Tokens(vectors.sample()), self._floors[place])
            statuses = reading.statuses.numpy().copy()
            if not vectors.is_exact:
                statuses[statuses == _CODE[Status.OK]] = _CODE[Status.ESTIMATE]
            for spec, value, status in zip(specs, reading.values.numpy(), statuses, strict=True):
                writer.add(
                    metric=spec.name,
                    site=site,
                    stack=stack,
                    layer=max(layer, 0),
                    first_sequence=0,
                    values=value.reshape(1),
                    statuses=status.reshape(1),
                    head_axis=False,
                )


def class_gap(vectors: Float[Tensor, "rows dim"], classes: Sequence[int]) -> float:
    r"""Relative residual of the means of the two closest classes, :math:`|a-b| / \sqrt{2(|a|^2 + |b|^2)}`.

    **Exact**; 0 if two classes have the same mean, :math:`1/\sqrt2` if they are all orthogonal and of one length. NaN
    if there are fewer vectors than classes, or a single class.

    Example:
        >>> round(class_gap(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [0, 0, 1]), 12)
        0.707106781187
    """
    if len(classes) != len(vectors) or len(set(classes)) < 2:
        return float("nan")
    told = torch.tensor(classes)
    vectors = vectors.to("cpu", torch.float64)
    means = torch.stack([vectors[told == one].mean(0) for one in sorted(set(classes))])
    one, other = torch.triu_indices(len(means), len(means), 1)
    sizes = means.square().sum(-1)
    return float(((means[one] - means[other]).norm(dim=-1) / (2 * (sizes[one] + sizes[other])).sqrt()).min())


def metrics_between(specs: Sequence[MetricSpec], *, default: bool) -> tuple[MetricSpec, ...]:
    """The token metrics among ``specs``, and by default those for inputs."""
    further = [METRICS[name] for name in INPUT_METRICS] if default else []
    return tuple({spec.name: spec for spec in (*specs, *further) if spec.side == "tokens"}.values())
