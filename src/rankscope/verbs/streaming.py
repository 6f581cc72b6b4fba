"""Verbs on a model larger than memory: all batches go through a block before the next one's weights are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope._errors import InputError, UnsupportedConfigError
from rankscope.models.inputs import Prepared
from rankscope.models.loading import LoadedModel
from rankscope.models.stream import Stream, stream_of
from rankscope.runs.rows import Piece, RowWriter, rows_from_bytes, rows_to_bytes
from rankscope.shards.budget import parse_size
from rankscope.shards.planning import plan_walk
from rankscope.shards.skeleton import Skeleton, open_skeleton
from rankscope.shards.walking import Stage, Terms, Walk
from rankscope.verbs.likeness import LikenessReader
from rankscope.verbs.reader import SiteReader


@dataclass
class Streaming:
    """A model that is read as it runs.

    Attributes:
        source: the model without its weights.
        terms: memory and folder the user allowed.
        walked: the way through its blocks, once it was planned.
    """

    source: Skeleton
    terms: Terms
    walked: Walk | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model and the facts about it."""
        return self.source.loaded

    def walk(
        self,
        prepared: Prepared,
        options: tuple[Any, ...],
        *,
        blocks: str | Sequence[str] | None,
        stream: Stream | None = None,
        lanes: int = 1,
        widened: bool = False,
    ) -> Walk:
        """Plan the way; ``options`` are what decides the values besides the model and its inputs."""
        named = {"options": [str(option) for option in options], "dtype": self.loaded.dtype, "blocks": blocks}
        if stream is not None:
            named["stream"] = str(stream)
        self.walked = plan_walk(
            self.source, prepared, self.terms, options=named, blocks=blocks, stream=stream, lanes=lanes, widened=widened
        )
        return self.walked


def streaming_of(
    model: str | Path | nn.Module,
    offload: bool,
    memory: int | str | None,
    work: str | Path | None,
    *,
    dtype: torch.dtype | str | None,
    parallel: str | None = None,
) -> Streaming | None:
    """The model without its weights; None where it is to be loaded whole.

    Raises:
        InputError: arguments that do not go together.
    """
    if not offload:
        if memory is not None or work is not None:
            raise InputError("memory and work go with offload: without it the model is loaded whole. Add offload=True.")
        return None
    if isinstance(model, nn.Module):
        raise InputError(
            f"offload reads weights from a local folder as it goes; {type(model).__name__} is in memory already. Leave "
            "offload out, or pass the folder."
        )
    if parallel is not None:
        raise InputError(
            f"offload works in one process, and parallel={parallel!r} was asked for. Leave one of them out."
        )
    if memory is not None:
        parse_size(memory)
    return Streaming(open_skeleton(model, dtype=dtype), Terms(memory, work))


def declared_or_offloaded(stream: Stream | str | bool | None, offload: bool) -> tuple[Stream | None, bool]:
    """What ``stream`` and ``offload`` ask for; ``stream=True`` is how ``offload=True`` was spelled before.

    Raises:
        InputError: ``stream`` is neither a declaration nor a truth value.
    """
    if not isinstance(stream, bool):
        return stream_of(stream), offload
    warnings.warn(
        f"stream={stream} is now offload={stream}; stream= declares where the residual stream is.",
        DeprecationWarning,
        stacklevel=3,
    )
    return None, offload or stream


def need_weights(model: nn.Module, verb: str) -> None:
    """Make sure that all weights of a loaded model can be looked at.

    Raises:
        UnsupportedConfigError: some are elsewhere until their module runs.
    """
    away = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if away is not None:
        raise UnsupportedConfigError(
            f"{verb} computes with the weights themselves, and {away} is offloaded (device_map). Pass the folder with "
            "offload=True instead, which has one block at a time in memory; measure and ablate take the model as it is."
        )


class RowProgress:
    """Rows, and what the readers behind them have seen, block by block.

    Args:
        writer: collects the rows.
        reader: has seen formats, shapes and lengths.
        likeness: keeps cosines, where these were asked for.
        rest: JSON a verb has to keep besides, read anew after each block.
        learn: takes that in again.
    """

    def __init__(
        self,
        writer: RowWriter,
        reader: SiteReader,
        likeness: LikenessReader | None = None,
        *,
        rest: Callable[[], Any] = lambda: None,
        learn: Callable[[Any], None] = lambda rest: None,
    ) -> None:
        self._writer, self._reader, self._likeness = writer, reader, likeness
        self._rest, self._learn = rest, learn
        self._kept = 0

    def added(self) -> bytes:
        """The rows of the block that just ended."""
        new, self._kept = self._writer.pieces[self._kept :], len(self._writer.pieces)
        similar = None if self._likeness is None else self._likeness.stored()
        return rows_to_bytes(new, {"seen": self._reader.seen(), "similarity": similar, "rest": self._rest()})

    def restore(self, added: bytes) -> None:
        """Rows an earlier process has written."""
        pieces, remarks = rows_from_bytes(added)
        self._writer.replace((*self._writer.pieces, *pieces))
        self._kept = len(self._writer.pieces)
        self._reader.learn(remarks["seen"])
        self._learn(remarks["rest"])
        if self._likeness is not None:
            self._likeness.take_up(remarks["similarity"])


def each_stage(walk: Walk, progress: RowProgress, *, verb: str, shown: bool, final: bool = False) -> Iterator[Stage]:
    """The stages of a walk, with a progress bar over blocks."""
    with tqdm(total=walk.view.depth, desc=verb, unit="block", disable=not shown) as bar:
        for stage in walk.stages(progress, final=final):
            bar.update(stage.number - bar.n)
            yield stage
        bar.update(walk.view.depth - bar.n)


def arrange(writer: RowWriter, key: Callable[[Piece], Any]) -> None:
    """Put rows that came block by block in the order in which a model in memory gives them."""
    writer.replace(sorted(writer.pieces, key=key))


def described(streaming: Streaming | None) -> dict[str, Any]:
    """What a run says of having been streamed; nothing where it was not."""
    walk = None if streaming is None else streaming.walked
    if walk is None:
        return {}
    return {
        "offload": {
            "blocks_read": walk.tally["blocks_read"],
            "resumed_at": walk.tally["resumed_at"],
            "states_in_memory": walk.in_memory,
            "estimated_bytes": walk.need.total(in_memory=walk.in_memory),
        }
    }
