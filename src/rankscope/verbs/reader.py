"""Reduces the tensors seen at sites to rows of numbers; every measuring verb passes such a reader to the tracer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.attention_scores import AttentionScores
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.blockwise_attention import BlockwiseAttention
from rankscope.linalg.precision import float_floor, format_of
from rankscope.linalg.queries import Queries
from rankscope.linalg.routing import Routing
from rankscope.linalg.tokens import Spectra, Tokens
from rankscope.linalg.update import Update
from rankscope.metrics import SIDES, MetricSpec, MetricValues, View, evaluate, is_left_out
from rankscope.models.inputs import Batch, TokensPolicy
from rankscope.runs.rows import RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, side_shown
from rankscope.stream.tracer import Observed, Unreadable
from rankscope.verbs.pending import PendingReadings

DENSE_BYTES = 1 << 29
"""By default, if the probabilities of one block would take more memory than this, they are computed in tiles."""

STREAM_METRICS = frozenset({"relative_residual", "mean_cosine", "stable_rank", "effective_rank"})
"""Token metrics that are also measured over the streams of a token."""
STATE_METRICS = frozenset({"stable_rank", "effective_rank", "participation_ratio", "energy_rank_99"})
"""Token metrics that are also measured of a recurrent state: ranks of a matrix whose rows are no tokens."""
_CODES = {status: code for code, status in enumerate(Status)}


def mean_over_tokens(reading: MetricValues, sequences: int, keep: Tensor | None) -> MetricValues:
    """One value per sequence from one per token: the mean over the tokens that count for which it is defined.

    A sequence with a token that is not finite is not finite; it is at the float floor if all its tokens are, and
    undefined if no token has a value.
    """
    values, codes = (part.reshape(len(part), sequences, -1) for part in (reading.values, reading.statuses))
    valid = torch.ones_like(codes, dtype=torch.bool) if keep is None else keep.expand_as(codes)
    known = valid & values.isfinite()
    count = known.sum(-1)
    mean = values.where(known, 0.0).sum(-1) / count
    statuses = torch.full_like(count, _CODES[Status.OK], dtype=codes.dtype)
    statuses[((codes == _CODES[Status.FLOOR]) | ~known).all(-1)] = _CODES[Status.FLOOR]
    statuses[count == 0] = _CODES[Status.UNDEFINED]
    broken = (valid & (codes == _CODES[Status.NOT_FINITE])).any(-1)
    statuses[broken] = _CODES[Status.NOT_FINITE]
    return MetricValues(mean.masked_fill(broken, torch.nan), statuses)


class SiteReader:
    """Observes sites and writes one row per metric, site, layer and sequence; stores no activations.

    The values stay on their device until the pass is over, so that the host waits for the device once per pass: they
    are copied when the next batch starts, or when somebody reads the rows or :attr:`lengths`.

    Args:
        metrics: the metrics; each is measured at the sites that show its side.
        policy: which tokens to measure.
        writer: collects the rows.
        at: values of the writer's further columns, for every row.
        attention: ``"dense"`` or ``"blockwise"`` for attention probabilities; None chooses by size.
        computed_in: format in which the values were computed, if they are stored in a finer one; it sets the floor.
        spectra: ``"exact"`` or ``"estimated"``; None chooses by size.
    """

    def __init__(
        self,
        metrics: Sequence[MetricSpec],
        policy: TokensPolicy,
        writer: RowWriter,
        at: Mapping[str, str | int | None] | None = None,
        attention: str | None = None,
        computed_in: torch.dtype | None = None,
        spectra: Spectra | None = "exact",
    ) -> None:
        self._attention = attention
        self._computed_in = computed_in
        self._spectra = spectra
        self._of_side = {side: [spec for spec in metrics if spec.side == side] for side in SIDES}
        self._policy = policy
        self._writer = writer
        self._at = at
        self._batch: Batch | None = None
        self._keeps: dict[tuple[int, int, torch.device], Tensor | None] = {}
        self._pending = PendingReadings()
        self._lengths: dict[str | None, dict[int, int]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.shapes: set[tuple[int, int]] = set()
        self.in_parts: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.routers: dict[tuple[str | None, int], tuple[int, int]] = {}
        self.not_estimated: set[str] = set()

    def start(self, batch: Batch) -> None:
        """Announce the batch of the next forward pass."""
        self.finish()
        self._batch = batch
        self._keeps.clear()

    def later(self, tensors: Sequence[Tensor], deliver: Callable[..., None]) -> None:
        """Have ``deliver`` called with these small tensors on the CPU after the pass; all are copied at once."""
        self._announce()
        self._pending.add(tensors, deliver)

    def finish(self) -> None:
        """The pass is over: copy what was read to the CPU."""
        self._writer.settle()

    def _announce(self) -> None:
        if not self._pending:
            self._writer.add_later(self._pending.settle)

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        """Reduce what a site shows at once."""
        specs = self._of_side.get(side_shown(ref.site))
        if not specs:
            return
        if isinstance(seen, Unreadable):
            self.refused.setdefault(str(ref), seen.why)
        elif isinstance(seen, AttentionCall):
            self._read_attention(ref, specs, seen)
        elif isinstance(seen, tuple):
            self._read_several(ref, specs, seen)
        elif ref.site.endswith(".mixed"):
            self._read_heads(ref, specs, seen)
        elif ref.site.endswith(".state"):
            self._read_state(ref, specs, seen)
        elif ref.site.startswith("streams."):
            self._read_streams(ref, specs, seen)
        else:
            self._read_tokens(ref, specs, seen)

    @property
    def lengths(self) -> dict[str | None, dict[int, int]]:
        """By stack: the number of tokens that count in each sequence."""
        self.finish()
        return self._lengths

    @property
    def first_sequence(self) -> int:
        """Number of the first sequence of the current forward pass."""
        assert self._batch is not None
        return self._batch.first_sequence

    def valid(self, x: Tensor) -> Tensor | None:
        """Which tokens of a stream are measured; None for all."""
        return self._keep(x.shape[0], x.shape[1], x.device)

    def note(self, ref: SiteRef, x: Tensor) -> None:
        """Remember dtype, shape and lengths of an observed tensor."""
        self.dtypes.add(self._format(x.dtype, x.device))
        self.shapes.add((x.shape[1], x.shape[2]))
        self._note_lengths(ref.stack, x)

    def seen(self) -> dict[str, Any]:
        """Dtypes, shapes, lengths and what could not be measured, as JSON, for a reader in another process."""
        lengths = [[stack, sequence, count] for stack, own in self.lengths.items() for sequence, count in own.items()]
        return {
            "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes),
            "shapes": sorted(self.shapes),
            "lengths": lengths,
            "in_parts": self.in_parts,
            "refused": self.refused,
            "routers": [[*place, *sizes] for place, sizes in self.routers.items()],
            "not_estimated": sorted(self.not_estimated),
        }

    def notes(self) -> list[str]:
        """Notes about what was observed but not measured."""
        notes = []
        for why in dict.fromkeys(self.refused.values()):
            places = [site for site, reason in self.refused.items() if reason == why]
            more = f" and {len(places) - 2} more" if len(places) > 2 else ""
            notes.append(f"not measured at {', '.join(places[:2])}{more}: {why}")
        if self.not_estimated:
            notes.append(
                f"not estimated at this size, and left out: {', '.join(sorted(self.not_estimated))}; spectra='exact' "
                "(--spectra exact) computes them"
            )
        if self.in_parts:
            where = ", ".join(self.in_parts)
            why = next(iter(self.in_parts.values()))
            notes.append(f"attention among parts of the tokens (windows) is not measured: {where} ({why})")
        return notes

    def learn(self, seen: Mapping[str, Any]) -> None:
        """Merge what another reader has seen."""
        self.dtypes |= {getattr(torch, name) for name in seen["dtypes"]}
        self.shapes |= {(tokens, dim) for tokens, dim in seen["shapes"]}
        for stack, sequence, count in seen["lengths"]:
            self.lengths.setdefault(stack, {})[sequence] = count
        self.in_parts |= seen.get("in_parts", {})
        self.refused |= seen.get("refused", {})
        self.not_estimated |= set(seen.get("not_estimated", ()))
        self.routers |= {(stack, layer): (experts, k) for stack, layer, experts, k in seen.get("routers", ())}

    def _read_tokens(self, ref: SiteRef, specs: list[MetricSpec], x: Tensor) -> None:
        self.note(ref, x)
        view = Tokens(x, self.valid(x), spectra=self._spectra)
        self.not_estimated |= {spec.name for spec in specs if is_left_out(spec, view)}
        specs = [spec for spec in specs if not is_left_out(spec, view)]
        self._write(ref, specs, view, self._floor(x.dtype, x.device), head_axis=False)

    def _format(self, stored: torch.dtype, device: torch.device) -> torch.dtype:
        """The coarser of the format values are stored in and the one they were computed in."""
        stored = format_of(stored, device)
        if self._computed_in is None or torch.finfo(stored).eps >= torch.finfo(self._computed_in).eps:
            return stored
        return self._computed_in

    def _floor(self, stored: torch.dtype, device: torch.device) -> float:
        return float_floor(self._format(stored, device))

    def _read_several(self, ref: SiteRef, specs: list[MetricSpec], seen: tuple[Tensor, ...]) -> None:
        """A site that shows several tensors, each ``batch tokens ...``."""
        first = seen[0]
        keep = self.valid(first)
        try:
            make: Callable[..., View] = SIDES[side_shown(ref.site)].view
            if ref.site == "block.update":
                make = Update.between
            view = make(*seen, keep)
        except InputError as error:
            self.refused.setdefault(str(ref), str(error))
            return
        if isinstance(view, Routing):
            self.routers[ref.stack, ref.layer] = view.experts, seen[1].shape[-1]
        self._write(ref, specs, view, self._floor(first.dtype, first.device), head_axis=False)

    def _read_streams(
        self, ref: SiteRef, specs: list[MetricSpec], x: Float[Tensor, "batch tokens streams dim"]
    ) -> None:
        """Metrics of the streams of each token, as if they were its tokens; one row per sequence, the mean."""
        specs = [spec for spec in specs if spec.name in STREAM_METRICS]
        if specs:
            reading = evaluate(specs, Tokens(x.flatten(0, 1)), self._floor(x.dtype, x.device))
            mean = mean_over_tokens(reading, x.shape[0], self.valid(x))
            self.later((mean.values, mean.statuses), self._rows(ref, specs, head_axis=False))

    def _read_state(self, ref: SiteRef, specs: list[MetricSpec], x: Float[Tensor, "batch heads rows columns"]) -> None:
        assert self._batch is not None
        specs = [spec for spec in specs if spec.name in STATE_METRICS]
        mask = self._batch.inputs.get("attention_mask")
        if isinstance(mask, Tensor) and bool((mask == 0).any()):
            self.refused.setdefault(
                str(ref), "a state after padding is not that of the text: pass sequences of one length"
            )
        elif specs:
            self._write(ref, specs, Tokens(x), float_floor(x.dtype), head_axis=True)

    def _is_in_parts(self, ref: SiteRef, rows: int, queries: int) -> bool:
        """Whether attention runs within parts of a sequence, so that there is not one matrix per sequence."""
        assert self._batch is not None
        if rows == self._batch.sequences:
            return False
        why = f"{rows} matrices of {queries} queries per head for {self._batch.sequences} sequences"
        self.in_parts.setdefault(str(ref), why)
        return True

    def _read_heads(self, ref: SiteRef, specs: list[MetricSpec], x: Float[Tensor, "batch heads tokens dim"]) -> None:
        if self._is_in_parts(ref, x.shape[0], x.shape[2]):
            return
        keep = self._keep(x.shape[0], x.shape[2], x.device)
        per_head = None if keep is None else keep.unsqueeze(1).expand(x.shape[:-1])
        self._write(ref, specs, Tokens(x, per_head), self._floor(x.dtype, x.device), head_axis=True)

    def _read_attention(self, ref: SiteRef, specs: list[MetricSpec], call: AttentionCall) -> None:
        if self._is_in_parts(ref, call.sequences, call.lengths[0]):
            return
        side = side_shown(ref.site)
        if side in ("scores", "queries"):
            (self._read_scores if side == "scores" else self._read_queries)(ref, specs, call)
            return
        # Probabilities that the model computes itself, or that surgery edits, are there as a whole.
        possible = call.weights is None and call.edit is None
        if self._attention == "blockwise" and not possible:
            why = "surgery edits its probabilities" if call.edit is not None else "it computes all probabilities itself"
            raise InputError(
                f"attention_algorithm='blockwise' needs the queries and keys of a fused kernel, but here {why}. Load "
                "the model with attn_implementation='sdpa', without such surgery, or leave attention_algorithm out."
            )
        by_rows = self._attention == "blockwise" or (self._attention is None and call.probs_bytes > DENSE_BYTES)
        view: AttentionView
        if possible and by_rows:
            assert call.query is not None
            assert call.key is not None
            view = BlockwiseAttention(
                call.query,
                call.key,
                mask=call.mask,
                is_causal=call.is_causal,
                scale=call.scale,
                keep=self._keep(call.query.shape[0], call.query.shape[2], call.query.device),
            )
            dtype = view.dtype
            if left := [spec.name for spec in specs if spec.needs == "spectrum"]:
                size = f"{call.probs_bytes / 2**20:,.0f} MiB"
                why = f"{', '.join(left)} needs all probabilities of the block, {size}: attention_algorithm='dense' "
                self.refused.setdefault(str(ref), f"{why}(--attention-algorithm dense) holds them")
                specs = [spec for spec in specs if spec.needs != "spectrum"]
                if not specs:
                    return
        else:
            probs = call.probs()
            valid = self._keep(probs.shape[0], probs.shape[-2], probs.device)
            view, dtype = AttentionMatrix(probs, call.support(), valid), probs.dtype
        self._write(ref, specs, view, self._floor(dtype, view.count.device), head_axis=True)

    def _read_scores(self, ref: SiteRef, specs: list[MetricSpec], call: AttentionCall) -> None:
        try:
            rows = call.largest_scores()
        except InputError as error:
            self.refused.setdefault(str(ref), str(error))
            return
        keep = self._keep(rows.shape[0], rows.shape[2], rows.device)
        self._write(ref, specs, AttentionScores(rows, keep), self._floor(rows.dtype, rows.device), head_axis=True)

    def _read_queries(self, ref: SiteRef, specs: list[MetricSpec], call: AttentionCall) -> None:
        if call.query is None or call.key is None:
            why = "the model computes attention itself, and its queries and keys are not seen. Load it with "
            self.refused.setdefault(str(ref), f"{why}attn_implementation='sdpa'.")
            return
        keep = self._keep(call.query.shape[0], call.query.shape[2], call.query.device)
        view, floor = Queries(call.query, call.key, keep), self._floor(call.query.dtype, call.query.device)
        self._write(ref, specs, view, floor, head_axis=True)

    def _write(self, ref: SiteRef, specs: list[MetricSpec], view: View, floor: float, *, head_axis: bool) -> None:
        self._announce()
        self._pending.evaluate(specs, view, floor, self._rows(ref, specs, head_axis=head_axis))

    def _rows(self, ref: SiteRef, specs: list[MetricSpec], *, head_axis: bool) -> Callable[..., None]:
        """A function that writes the values and statuses of these metrics, of the current batch."""
        first_sequence = self.first_sequence

        def add(values: Tensor, statuses: Tensor) -> None:
            for spec, value, status in zip(specs, values.numpy(), statuses.numpy(), strict=True):
                self._writer.add(
                    metric=spec.name,
                    site=ref.site,
                    stack=ref.stack,
                    layer=ref.layer,
                    first_sequence=first_sequence,
                    values=value,
                    statuses=status,
                    head_axis=head_axis,
                    at=self._at,
                )

        return add

    def _keep(self, sequences: int, tokens: int, device: torch.device) -> Tensor | None:
        """Which tokens are measured at a site; moved to each device once per batch."""
        shape = sequences, tokens, device
        if shape not in self._keeps:
            self._keeps[shape] = self._kept_tokens(*shape)
        return self._keeps[shape]

    def _kept_tokens(self, sequences: int, tokens: int, device: torch.device) -> Tensor | None:
        """Which tokens are measured; a stream longer than its input was padded by the model itself."""
        assert self._batch is not None
        keep = self._batch.keep
        if keep is None:
            if self._policy != "no-first":
                return None
            keep = torch.ones(sequences, tokens, dtype=torch.bool, device=device)
            keep[:, 0] = False
            return keep
        if keep.shape[0] != sequences or keep.shape[1] > tokens:
            raise InputError(
                f"The inputs mark padding among {keep.shape[0]} sequences of {keep.shape[1]} tokens, but the model has "
                f"{sequences} x {tokens} tokens at this site, so padding cannot be left out. Pass "
                "sequences of one length, without padding and with tokens_policy='content'."
            )
        return torch.nn.functional.pad(keep.to(device, non_blocking=True), (0, tokens - keep.shape[1]), value=False)

    def _note_lengths(self, stack: str | None, x: Tensor) -> None:
        lengths, first = self._lengths.setdefault(stack, {}), self.first_sequence
        if first in lengths:
            return
        keep = self.valid(x)
        lengths |= dict.fromkeys(range(first, first + x.shape[0]), x.shape[1])
        if keep is not None:
            self.later([keep.sum(-1)], lambda counts: lengths.update(enumerate(counts.tolist(), first)))
