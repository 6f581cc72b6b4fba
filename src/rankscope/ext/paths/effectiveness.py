"""Path effectiveness: how well paths of one length alone solve a task.

There are two definitions: in the theorem, the attention matrices are those of the whole network (``"frozen"``); in the
experiment published with it, they are recomputed from what the path itself carries (``"recomputed"``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankscope._citations import Cite
from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.lengths import length_sums, lengths_of_interest
from rankscope.ext.paths.network import FrozenNetwork
from rankscope.ext.paths.single import Path, follow, sample_paths
from rankscope.models.inputs import Batch
from rankscope.models.view import Label, ModelView, Stack
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.mode import AttentionPlace, Handler, Perform, StreamMode

CITES = (Cite("dong2021attention", "sec. 4.2"),)
Meaning = Literal["frozen", "recomputed"]
Classify = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Effectiveness:
    """Accuracy of the task head on the paths of one length.

    Attributes:
        length: length of the paths; None for the whole network.
        paths: how many were drawn; None for all of them.
        meaning: whether attention was frozen or recomputed.
        accuracy: share of correct labels, for each repeat.
    """

    length: int | None
    paths: int | None
    meaning: Meaning
    accuracy: tuple[float, ...]


def path_effectiveness(
    view: ModelView,
    config: Any,
    data: Sequence[tuple[Batch, Tensor]],
    classify: Classify,
    *,
    lengths: Collection[int] | None = None,
    paths: int | None = None,
    meaning: Meaning = "frozen",
    repeats: int = 5,
    mlp: Literal["keep", "drop"] = "drop",
    seed: int = 0,
) -> list[Effectiveness]:
    """Accuracy of the whole network, then with paths of each length alone.

    Args:
        view: a model with one stack, and its structure.
        config: configuration of the model, for its head weights.
        data: batches with labels, (batch, tokens) for one label per token or (batch,) for one per sequence.
        classify: the task head, from the final stream (batch, tokens, dim) to class scores, classes last.
        lengths: None for all.
        paths: how many random paths are averaged, the same ones for every batch; None uses the exact sum of all
            paths of the length, which is only possible with frozen attention.
        meaning: ``"frozen"`` (theorem 2.1) or ``"recomputed"`` (the published experiment).
        repeats: number of samples of ``paths`` paths each.
        mlp: whether MLPs run along a recomputed path. Frozen paths from the embedding never pass through one.
        seed: seed of the samples.

    Raises:
        InputError: recomputed attention without a number of paths.
    """
    if meaning == "recomputed" and paths is None:
        raise InputError("meaning='recomputed': there are too many paths to run each; say how many with paths=.")
    networks = [_only_stack(freeze_network(view, config, batch)) for batch, _ in data]
    depth = len(networks[0].attention)
    whole = accuracy(((classify(n.out), labels) for n, (_, labels) in zip(networks, data, strict=True)))
    readings = [Effectiveness(None, None, "frozen", (whole,))]
    for length in lengths_of_interest(depth, lengths):
        scores: tuple[float, ...]
        if paths is None:
            sums = [length_sums(network).by_length[length] for network in networks]
            scores = (accuracy(((classify(s), labels) for s, (_, labels) in zip(sums, data, strict=True))),)
        else:
            drawn = [sample_paths(networks[0], length, paths, seed=seed + r).paths for r in range(repeats)]
            scores = tuple(_accuracy_along(view, networks, data, classify, chosen, meaning, mlp) for chosen in drawn)
        readings.append(Effectiveness(length, paths, meaning, scores))
    return readings


def _accuracy_along(
    view: ModelView,
    networks: Sequence[FrozenNetwork],
    data: Sequence[tuple[Batch, Tensor]],
    classify: Classify,
    paths: Sequence[Path],
    meaning: Meaning,
    mlp: Literal["keep", "drop"],
) -> float:
    streams: list[Tensor] = []
    for network, (batch, _) in zip(networks, data, strict=True):
        if meaning == "frozen":
            streams.append(follow(network, paths).mean(dim=0))
        else:
            streams.append(torch.stack([run_along(view, batch, path, mlp=mlp) for path in paths]).mean(dim=0))
    return accuracy(((classify(s), labels) for s, (_, labels) in zip(streams, data, strict=True)))


def accuracy(scored: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of labels with the largest score; labels below zero do not count."""
    right = total = 0
    for scores, labels in scored:
        counts = labels >= 0
        right += int(((scores.argmax(dim=-1) == labels) & counts).sum())
        total += int(counts.sum())
    return right / total


def run_along(view: ModelView, batch: Batch, path: Path, *, mlp: Literal["keep", "drop"] = "drop") -> Tensor:
    """The final stream of the model run along one path: in each layer, one head without the skip, or the skip alone.

    Attention and norms are recomputed from what the path carries; biases of the layers on the path are kept.

    Raises:
        UnsupportedConfigError: attention and MLP are added at once, so a path cannot use only one of them.
    """
    if len(view.stacks) != 1 or len(path) != view.depth:
        raise InputError(f"A path of {len(path)} entries for {view.depth} blocks in {len(view.stacks)} stacks.")
    alone = _PathAlone(path, drops_mlp=mlp == "drop")
    with torch.no_grad(), StreamMode(view, alone).active():
        batch.run(view.model)
    assert alone.last is not None
    return alone.last


class _PathAlone(Handler):
    """Reduces every layer to the part on the path; ``last`` is what is left at the end."""

    reads_attention = True

    def __init__(self, path: Path, *, drops_mlp: bool) -> None:
        self._path, self._drops_mlp = path, drops_mlp
        self.last: Tensor | None = None

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        """Skip a layer, or go through it without its skip."""
        if label == "both" or call.joins or call.is_joined:
            raise UnsupportedConfigError(f"{call.ref('both.out')}: attention and MLP are added at once.")
        if label == "attention":
            return stream.clone() if self._path[call.layer] is None else branch.clone()
        if label == "mlp" and self._drops_mlp:
            return stream.clone()
        return super().add(call, label, stream, branch, perform)

    def attention(self, place: AttentionPlace) -> Any:
        """Keep only the head on the path, in the output of a kernel or in the probabilities of a softmax."""
        out, *rest = place.run() if place.kind == "flex" else (place.run(),)
        head, gate = self._path[place.ref.layer], out.new_zeros(out.shape[1])
        if head is not None:
            gate[head] = 1.0
        out = out * gate[:, None, None]
        return (out, *rest) if rest else out

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        """The last block's output, unless a norm follows."""
        self.last = call.canonical(left)

    def final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        """The norm after the last block."""
        self.last = stack.stream.canonical(out)
        return out


def _only_stack(networks: Mapping[str | None, FrozenNetwork]) -> FrozenNetwork:
    if len(networks) != 1:
        raise InputError(f"This model has the stacks {', '.join(map(str, networks))}; effectiveness needs one.")
    return next(iter(networks.values()))
