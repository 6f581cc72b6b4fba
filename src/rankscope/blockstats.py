# Copyright The rankscope developers. Licensed under the Apache License, Version 2.0; you may not use this file except
# in compliance with the License, http://www.apache.org/licenses/LICENSE-2.0. It is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
r"""Statistics of the residual stream after every block of a large training, in one file that needs only torch.

Import it, or copy it into your repository::

    stats = blockstats.attach(model.layers, width)  # before the model is compiled
    for step, batch in enumerate(loader):
        stats.count(step % 10 == 0)  # off until it is switched on
        loss(model(batch)).backward(); optimizer.step(); optimizer.zero_grad()
        if step % 100 == 0:
            logger.log(stats.flush(), step)  # {"relative_residual/0": 0.97, ...}; then all sums start at zero

**The algebra.** A group is one sequence, or ``window`` consecutive tokens of one. For the n tokens x of a group::

    m = mean of x        within = sum |x - m|^2        (in float32, two passes: nothing cancels)

Each block keeps sums in float64 on its device, a vector as wide as the stream, and the largest magnitude::

    tokens += n    groups += 1    within += within    means += n |m|^2    written += sum |x - before|^2
    vector += n m    not_finite += 1 for a microbatch with inf or nan, which adds nothing else

All add up over groups, microbatches and ranks, the largest magnitude by maximum. Because q = within + means is the sum
of all squared norms, whatever the groups are, the sums over all ranks give::

    relative_residual = sqrt(within / q)                            differences between the tokens of a group
    between_groups    = sqrt((means - |vector|^2 / tokens) / q)     differences between the means of groups
    stream_rms        = sqrt(q / (tokens * width))                  size of an entry of the stream
    relative_write    = sqrt(written / q)                           what the block adds, relative to the stream

These four, ``group_tokens`` and ``largest`` do not change if k ranks hold the same tokens (tensor parallelism);
``tokens``, ``not_finite`` and the counts of notes are then k times as large.

**Counted once.** A forward counts if counting is on, the block is in training mode, and no backward is running: within
a backward, a forward is an activation checkpoint that is computed again. A custom operator asks when it runs, not when
it is traced, so switching does not recompile; on a captured CUDA graph, a tensor on the device decides.

**Not kept.** The sums are not buffers: DDP broadcasts these, checkpoints store them. A killed run loses what it counted
since its last flush; resumed, it starts at zero and counts nothing twice.
"""

# No `from __future__ import annotations`: older torch takes the schema of an operator from annotations, not their text.
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Stream = Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[Tensor, ...]]
SUMS = ("tokens", "groups", "within", "means", "written", "not_finite")
_OPERATORS = __name__.replace(".", "_")  # a copy of this file registers operators of its own
_counting: set[int] = set()  # addresses of open gates: the host must not read a tensor on a device to know


def _counts(x: Tensor, gate: Tensor) -> bool:
    """Whether this forward counts. A CUDA graph gets the kernels in any case: there the value of the gate decides."""
    if torch._C._current_graph_task_id() != -1:  # a backward is running
        return False
    return gate.data_ptr() in _counting or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _squares(x: Tensor, wide: torch.dtype) -> Tensor:
    """Sum of squares: float32 lengths of tokens, added in float64. A float32 sum of everything is off by 1e-4."""
    lengths = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.square(torch.linalg.vector_norm(lengths, dtype=wide))


@torch.library.custom_op(f"{_OPERATORS}::add", mutates_args=("totals", "largest"))
def _add(
    x: Tensor, before: Tensor, mask: Tensor | None, totals: Tensor, largest: Tensor, gate: Tensor, window: int
) -> None:
    """Add one microbatch, (..., tokens, width), to the sums of a block."""
    if not _counts(x, gate):
        return
    wide, work = totals.dtype, torch.promote_types(x.dtype, torch.float32)
    change = x.to(work) - before
    if mask is not None:  # padding may hold anything, nan included
        x, change = x.where(mask[..., None], 0), change.where(mask[..., None], 0)
    groups = x.reshape(*x.shape[:-2], -1, window or x.shape[-2], x.shape[-1])
    kept = None if mask is None else mask.reshape(groups.shape[:-1])
    sizes = groups.new_full(groups.shape[:-2], groups.shape[-2], dtype=wide) if kept is None else kept.sum(-1).to(wide)
    mean = groups.sum(-2, keepdim=True, dtype=work) / sizes.clamp_min(1).to(work)[..., None, None]
    centred = groups - mean if kept is None else (groups - mean).where(kept[..., None], 0)
    mean = mean.squeeze(-2).to(wide)
    vectors = mean * sizes[..., None]
    sums = [sizes.sum(), (sizes > 0).sum(), _squares(centred, wide), (vectors * mean).sum(), _squares(change, wide)]
    row = torch.cat((torch.stack(sums), gate.new_zeros(1), vectors.flatten(0, -2).sum(0)))
    finite = row.sum().isfinite()
    row = row.where(finite, 0)
    row[len(sums)] = ~finite
    totals.addcmul_(row, gate)
    top = torch.linalg.vector_norm(x, torch.inf).to(wide)
    torch.maximum(largest, top.where(finite, 0) * gate, out=largest)


@torch.library.custom_op(f"{_OPERATORS}::note", mutates_args=("held",))
def _note(x: Tensor, held: Tensor, gate: Tensor) -> None:
    """Add counts, or keep the largest entry if `held` has no dimension."""
    if not _counts(x, gate):
        return
    if held.ndim:
        held.addcmul_(x.reshape(-1, *held.shape).sum(0).to(held.dtype), gate)
    else:
        top = x.amax().to(held.dtype).nan_to_num(torch.inf, torch.inf, -torch.inf)
        torch.maximum(held, top.where(gate > 0, -torch.inf), out=held)


_add.register_fake(lambda *tensors: None)
_note.register_fake(lambda *tensors: None)


def _ignored(*tensors: Tensor) -> None:
    """What the copy of a block has in place of a tap or a note."""


class _Counter:
    """Whatever counts does not count for a copy of the model, such as an average of its weights."""

    def __reduce__(self) -> tuple[Any, ...]:
        warnings.warn("blockstats: the copy of a block does not count; attach() to it if it should.", stacklevel=2)
        return functools.partial, (_ignored,)


class NoteCounter(_Counter):
    """What a model hands in itself: counts that add up, such as the load of each expert, or a largest value."""

    def __init__(self, size: int, gate: Tensor) -> None:
        self.gate = gate
        self.held = gate.new_zeros(size) if size else gate.new_full((), -torch.inf)

    def __call__(self, x: Tensor) -> None:
        """Add counts, (..., size), or keep the largest entry of a tensor of any shape."""
        _note(x.detach(), self.held, self.gate)


class Tap(_Counter):
    """The sums of one block."""

    def __init__(self, width: int, window: int, stream: Stream, gate: Tensor) -> None:
        self.width, self.window, self.stream, self.gate = width, window, stream, gate
        self.totals, self.largest = gate.new_zeros(len(SUMS) + width), gate.new_zeros(())

    def __call__(self, x: Tensor, before: Tensor, mask: Tensor | None = None) -> None:
        """Add the stream after and before a block, (..., tokens, width), of those tokens where the mask is True."""
        placements = getattr(x, "placements", ())  # of a DTensor, of which this rank counts what it holds
        if any(place.is_partial() for place in placements):
            raise ValueError("blockstats: the stream is a partial sum over ranks here; read it after the reduction.")
        if not self.window and any(place.is_shard(x.ndim - 2) for place in placements):
            raise ValueError("blockstats: ranks hold parts of each sequence; give a window that divides a part.")
        x, before = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (x, before))
        # A window that does not divide the tokens would mix groups of two sizes.
        fits = x.shape == before.shape and x.shape[-1] == self.width and not (self.window and x.shape[-2] % self.window)
        if not fits or (mask is not None and mask.shape != x.shape[:-1]):
            got = [tuple(tensor.shape) for tensor in (x, before, mask) if tensor is not None]
            raise ValueError(f"blockstats: width {self.width} and window {self.window} do not fit {got}.")
        _add(x.detach(), before.detach(), mask, self.totals, self.largest, self.gate, self.window)


def _first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    return value


def first_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[Tensor, ...]:
    """The default ``stream``: the first tensor of the output, and the first of the arguments."""
    return _first(output), _first(args or kwargs)


def _hook(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    # Found through the block: a bound method would be another constant, and another compilation, for each block.
    tap: Any = block._blockstats
    if block.training and isinstance(tap, Tap):
        tap(*tap.stream(args, kwargs, output))


def _release(block: nn.Module) -> None:
    """Remove the hook, also one that came with a copy of the block."""
    for number in [number for number, hook in block._forward_hooks.items() if hook is _hook]:
        del block._forward_hooks[number], block._forward_hooks_with_kwargs[number]
    block.__dict__.pop("_blockstats", None)


class BlockStats:
    """What :func:`attach` returns: taps and notes of the blocks that this rank holds, by number."""

    def __init__(self, taps: dict[int, Tap], total: int, width: int, gate: Tensor, notes: Mapping[str, int]) -> None:
        self.taps, self.total, self.width, self.gate, self.sizes = taps, total, width, gate, notes
        self.notes = {(i, name): NoteCounter(size, gate) for i in taps for name, size in notes.items()}
        self.blocks: list[nn.Module] = []
        self.count(False)

    def count(self, on: bool = True) -> None:
        """Switch counting on or off for the forwards that follow. It is off at first.

        Leave it off in the first step of a pipeline schedule, which runs each stage once on memory without values.
        """
        self.gate.fill_(float(on))
        (_counting.add if on else _counting.discard)(self.gate.data_ptr())

    def detach(self) -> None:
        """Remove the hooks, and stop counting."""
        self.count(False)
        for block in self.blocks:
            _release(block)

    def flush(self, group: Any = None) -> dict[str, float]:
        """Reduce over ranks with one SUM and one MAX, copy to the host once, and start at zero. Every rank calls it.

        Values are returned by ``name/block``; those of a note with several counts by ``name/block/number``.

        Args:
            group: process group with the ranks of all pipeline stages; None for all ranks, False for this one alone.

        Raises:
            RuntimeError: nothing was counted after a block, or for a note. All ranks raise it.
        """
        added = {name: size for name, size in self.sizes.items() if size}
        maxima = [name for name, size in self.sizes.items() if not size]
        # A row for each block of the model, zero for those that other ranks hold.
        table = self.gate.new_zeros(self.total, len(SUMS) + self.width + sum(added.values()))
        most = self.gate.new_full((self.total, 1 + len(maxima)), -torch.inf)
        for i, tap in self.taps.items():
            table[i] = torch.cat((tap.totals, *(self.notes[i, name].held for name in added)))
            most[i] = torch.stack((tap.largest, *(self.notes[i, name].held for name in maxima)))
            tap.totals.zero_()
            tap.largest.zero_()
        for note in self.notes.values():
            note.held.fill_(0.0 if note.held.ndim else -torch.inf)
        if group is not False and dist.is_available() and dist.is_initialized():
            dist.all_reduce(table, group=group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)

        tokens, groups, within, means, written, not_finite = table[:, : len(SUMS)].unbind(1)
        vector, loads = table[:, len(SUMS) :].tensor_split([self.width], 1)
        energy = within + means
        columns = {
            "relative_residual": (within / energy).sqrt(),
            "between_groups": ((means - vector.square().sum(1) / tokens).clamp_min(0) / energy).sqrt(),
            "stream_rms": (energy / (tokens * self.width)).sqrt(),
            "relative_write": (written / energy).sqrt(),
            "group_tokens": tokens / groups,
            "tokens": tokens,
            "not_finite": not_finite,
            **dict(zip(("largest", *maxima), most.unbind(1), strict=True)),
        }
        # A note that no rank has of a block is left out, a largest value or counts alike: -inf marks both.
        parts = [
            load.where(load.sum(1, keepdim=True) > 0, -torch.inf)
            for load in torch.split(loads, list(added.values()), 1)
        ]
        names = [
            *(f"{name}/{{}}" for name in columns),
            *(f"{name}/{{}}/{k}" for name in added for k in range(added[name])),
        ]
        host = torch.cat((torch.stack(list(columns.values()), 1), *parts), 1).tolist()  # the one copy to the host

        if silent := [i for i, row in enumerate(host) if row[5] == row[6] == 0]:
            raise RuntimeError(
                f"blockstats: nothing was counted after blocks {silent}. Counting was off; or they did not run in "
                "training mode; or the model ran compiled before attach(); or no rank has blocks of these numbers."
            )
        values: dict[str, float] = {}
        for i, row in enumerate(host):
            values |= {name.format(i): x for name, x in zip(names, row, strict=True) if x != -torch.inf}
        if missing := set(self.sizes) - {name.partition("/")[0] for name in values}:
            raise RuntimeError(f"blockstats: the model handed in nothing for {sorted(missing)}: see `notes`.")
        return values


def attach(
    blocks: Iterable[nn.Module] | Mapping[Any, nn.Module],
    width: int,
    *,
    total: int | None = None,
    window: int = 0,
    stream: Stream = first_tensors,
    hook: bool = True,
    notes: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
) -> BlockStats:
    """Prepare to count the stream after each block. Call it before the first compiled forward, then ``count()``.

    Args:
        blocks: the blocks in order; of a pipeline stage, a mapping from their numbers in the whole model.
        width: size of the last dimension of the stream.
        total: number of blocks in all pipeline stages; needed if ``blocks`` are some of them.
        window: tokens per group; 0 for whole sequences. For packed documents, and for sharded sequences, where it must
            divide the part of a rank.
        stream: returns the stream after and before a block, (..., tokens, width), and optionally a mask of tokens that
            count, from the arguments and the output of the block.
        hook: False if the model calls ``stats.taps[number](x, before, mask)`` itself.
        notes: how many counts the model hands in by ``stats.notes[number, name](tensor)``; 0 for a largest value.
        device: of the sums; by default that of the first parameter.

    Raises:
        ValueError: a block is given twice or counts already, or has a number beyond ``total``.
    """
    named = {int(i): block for i, block in (blocks if isinstance(blocks, Mapping) else dict(enumerate(blocks))).items()}
    total = max(named) + 1 if total is None else total
    if len(set(map(id, named.values()))) < len(named) or not all(0 <= i < total for i in named):
        raise ValueError(f"blockstats: blocks {list(named)} of {total}: one is given twice, or a number is too large.")
    device = torch.device(device or next((p.device for b in named.values() for p in b.parameters()), "cpu"))
    if device.type == "meta":
        raise ValueError("blockstats: the parameters are on meta; attach once they have values, or give `device`.")
    gate = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    stats = BlockStats({i: Tap(width, window, stream, gate) for i in named}, total, width, gate, notes or {})
    for i, block in named.items() if hook else ():
        if isinstance(block.__dict__.get("_blockstats"), Tap):
            raise ValueError(f"blockstats: block {i} counts already; detach() the first.")
        _release(block)  # a copied block came with the hook
        block.__dict__["_blockstats"] = stats.taps[i]
        block.register_forward_hook(_hook, with_kwargs=True)
        stats.blocks.append(block)
    return stats
