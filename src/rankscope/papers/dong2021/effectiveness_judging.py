"""A trained network judged path length by path length, in both meanings of a path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rankscope.metrics.residual import relative_residual
from rankscope.models.view import ModelView
from rankscope.papers.training.fitting import as_batch, share_right
from rankscope.papers.training.keeping import Row
from rankscope.papers.training.networks import WITHOUT_MLP
from rankscope.papers.training.tasks import Examples
from rankscope.paths.capture import freeze_network
from rankscope.paths.effectiveness import accuracy, run_along
from rankscope.paths.lengths import length_sums
from rankscope.paths.network import FrozenNetwork
from rankscope.paths.single import Path, follow, sample_paths
from rankscope.surgery.operating import operating

ACCURACY, SIZE, RESIDUAL = "accuracy", "size_over_output", "relative_residual"
OFFSET = "frozen, offset set right"
DRAWS, REPEATS = (5, 20), 5
AT_ONCE, PART = 8, 300


def path_row(metric: str, value: float, of: str, *, layer: int = 0, paths: str = "", sequence: int = 0) -> Row:
    """One value; ``of`` says what was judged, ``paths`` how many of which length, ``sequence`` which repeat."""
    return {"metric": metric, "layer": layer, "value": value, "of": of, "paths": paths, "sequence": sequence}


def judge(model: nn.Module, view: ModelView, held: Examples, everything: Examples) -> list[Row]:
    """The whole network on ``everything``, and every path length on ``held``."""
    head = model.get_submodule("classifier")
    parts = [held.take(slice(start, start + PART)) for start in range(0, len(held), PART)]
    with operating(model, WITHOUT_MLP, view=view):
        networks = [_only(freeze_network(view, model.config, as_batch(part))) for part in parts]
        single = _only(freeze_network(view, model.config, as_batch(held.take(slice(1)))))
        whole = share_right(model, everything)
    rows = [path_row(ACCURACY, whole, "whole", paths="all")]
    sums = [length_sums(network, by_origin=True).sums["embedding"] for network in networks]
    rows += _sum_rows(head, networks, sums, [part.labels for part in parts])
    for length in range(len(networks[0].attention) + 1):
        rows += _size_rows(networks, [total[length] for total in sums], parts, length)
        draws = {
            (count, repeat): sample_paths(single, length, count, seed=1000 * repeat + count).paths
            for count in DRAWS
            for repeat in range(REPEATS)
        }
        rows += _drawn_rows(view, head, networks, parts, draws, length)
    return rows


def _sum_rows(
    head: nn.Module, networks: Sequence[FrozenNetwork], sums: Sequence[Tensor], labels: Sequence[Tensor]
) -> list[Row]:
    """The sums of all paths of each length, as they are and with offset and scale of their scores set right."""
    out = [head(network.out) for network in networks]
    rows = []
    for length in range(sums[0].shape[0]):
        scores = [head(total[length]) for total in sums]
        for of, shown in (("frozen", scores), (OFFSET, recentred(scores, out, labels))):
            right = accuracy(zip(shown, labels, strict=True))
            rows.append(path_row(ACCURACY, right, of, layer=length, paths="all"))
    return rows


def recentred(scores: Sequence[Tensor], like: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
    """Scores moved by one constant per class and scaled by one factor, to the mean and spread of other scores.

    A constant is what theorem 2.1 adds to its sum over paths; it says nothing about any token.
    """
    counted = [label >= 0 for label in labels]
    own, other = (
        torch.cat([part[keep] for part, keep in zip(parts, counted, strict=True)]).double() for parts in (scores, like)
    )
    factor = other.std(dim=0).mean() / own.std(dim=0).mean()
    return [(part.double() - own.mean(dim=0)) * factor + other.mean(dim=0) for part in scores]


def _drawn_rows(
    view: ModelView,
    head: nn.Module,
    networks: Sequence[FrozenNetwork],
    parts: Sequence[Examples],
    draws: Mapping[tuple[int, int], Sequence[Path]],
    length: int,
) -> list[Row]:
    """Both meanings on the same draws; every path is followed once. The head is affine, so scores are averaged."""
    paths = list(dict.fromkeys(path for drawn in draws.values() for path in drawn))
    number = {path: index for index, path in enumerate(paths)}
    rows = []
    for of in ("frozen", "recomputed"):
        scores = [
            torch.cat(list(_scores(of, view, head, network, part, paths)))
            for network, part in zip(networks, parts, strict=True)
        ]
        for (count, repeat), drawn in draws.items():
            chosen = torch.tensor([number[path] for path in drawn])
            right = accuracy(
                (score[chosen].mean(dim=0), part.labels) for score, part in zip(scores, parts, strict=True)
            )
            rows.append(path_row(ACCURACY, right, of, layer=length, paths=str(count), sequence=repeat))
    return rows


def _scores(
    of: str, view: ModelView, head: nn.Module, network: FrozenNetwork, part: Examples, paths: Sequence[Path]
) -> Iterator[Tensor]:
    """(paths, batch, tokens, classes), some paths at a time."""
    if of == "recomputed":
        batch = as_batch(part)
        yield from (head(run_along(view, batch, path))[None] for path in paths)
        return
    for start in range(0, len(paths), AT_ONCE):
        yield head(follow(network, paths[start : start + AT_ONCE]))


def _size_rows(
    networks: Sequence[FrozenNetwork], sums: Sequence[Tensor], parts: Sequence[Examples], length: int
) -> list[Row]:
    """Norm of the sum over the norm of the output, and the residual of the sum, both means over sequences."""
    sizes: list[float] = []
    residuals: list[float] = []
    for network, total, part in zip(networks, sums, parts, strict=True):
        mask = part.inputs.get("attention_mask")
        for row in range(len(part)):
            kept_tokens = slice(None) if mask is None else slice(int(mask[row].sum()))
            one_sum, out = total[row, kept_tokens].double(), network.out[row, kept_tokens].double()
            sizes.append(float(one_sum.norm() / out.norm()))
            residuals.append(float(relative_residual(one_sum)))
    return [
        path_row(SIZE, math.fsum(sizes) / len(sizes), "frozen", layer=length, paths="all"),
        path_row(RESIDUAL, math.fsum(residuals) / len(residuals), "frozen", layer=length, paths="all"),
    ]


def _only(networks: Mapping[str | None, FrozenNetwork]) -> FrozenNetwork:
    (network,) = networks.values()
    return network
