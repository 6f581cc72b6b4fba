"""Trained networks restricted to paths of one length: the accuracy each length reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.dong2021_paths.show import AS_PUBLISHED, OFFSET
from rankscope.ext.papers.measuring.parts import RowRecorder, WorkPart, finished_run, measured_parts
from rankscope.ext.papers.training.baselines import guesses
from rankscope.ext.papers.training.fitting import TrainingPlan, as_batch, fit, share_right
from rankscope.ext.papers.training.networks import WITHOUT_MLP, encoder_for
from rankscope.ext.papers.training.tasks import Examples, TrainingTask, hull_task, memory_task, sort_task
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.effectiveness import accuracy, run_along
from rankscope.ext.paths.lengths import length_sums
from rankscope.ext.paths.network import FrozenNetwork
from rankscope.ext.paths.single import Path, follow, sample_paths
from rankscope.metrics.residual import relative_residual
from rankscope.models.view import ModelView
from rankscope.runs.provenance import Provenance
from rankscope.runs.run import Run
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.verbs.origin import floor_of

COORDINATES = ("of", "paths", "seed")
DRAWS, REPEATS = (5, 20), 5
AT_ONCE, PART = 8, 300
"""Paths followed, and sequences evaluated, at once."""


@dataclass(frozen=True)
class PathsCase:
    """One task with its network and how it is trained.

    Attributes:
        make: the task from a seed.
        layers: number of blocks.
        heads: per block.
        width: of the residual stream.
        plan: of the training.
        seeds: networks trained, each on its own data.
        judged: sequences on which paths are evaluated; None for all held-out ones.
        published: the paper's own training, run once for comparison; None if it would take too long.
    """

    make: Callable[[int], TrainingTask]
    layers: int
    heads: int
    width: int
    plan: TrainingPlan
    seeds: int
    judged: int | None = None
    published: TrainingPlan | None = None

    def facts(self) -> dict[str, Any]:
        """What the text says about a case, in JSON types."""
        task = self.make(0)
        own = {name: getattr(self, name) for name in ("layers", "heads", "width", "judged")}
        return {**own, "train": len(task.train), "held": len(task.held), "plan": asdict(self.plan)}


_SORT = TrainingPlan(steps=65 * 34, batch=30, rate=1e-5, warmup=0.0, falls=False, clip=math.inf)
"""65 epochs of 1000 sequences in batches of 30."""
CASES: Mapping[str, PathsCase] = MappingProxyType(
    {
        "sort": PathsCase(sort_task, 6, 2, 48, TrainingPlan(steps=500, batch=100, rate=1e-3), 6, None, _SORT),
        "hull": PathsCase(hull_task, 6, 3, 84, TrainingPlan(steps=300, batch=100, rate=1e-3), 3),
        "memory": PathsCase(memory_task, 6, 2, 250, TrainingPlan(steps=250, batch=16, rate=1e-3), 3, judged=50),
    }
)
_FEW: dict[str, Any] = {"layers": 3, "heads": 2, "width": 16, "seeds": 2}
SMALL: Mapping[str, PathsCase] = MappingProxyType(
    {
        "sort": PathsCase(lambda s: sort_task(s, train=60, held=20), plan=TrainingPlan(steps=30, batch=20), **_FEW),
        "hull": PathsCase(lambda s: hull_task(s, train=60, held=20), plan=TrainingPlan(steps=20, batch=20), **_FEW),
        "memory": PathsCase(
            lambda s: memory_task(s, sentences=12, vocabulary=40, mean=8), plan=TrainingPlan(steps=20, batch=6), **_FEW
        ),
    }
)


def measure(settings: Settings) -> Run:
    """One task: several networks, each evaluated by path length."""
    name = settings.name.removeprefix("dong2021-paths-")
    case = (SMALL if settings.small else CASES)[name]
    facts = {"task": name, "small": settings.small, **case.facts()}
    parts = [
        WorkPart(f"paths-{name}-{seed}", {**facts, "seed": seed, "version": 2}, partial(measure_one, case, seed))
        for seed in range(settings.seeds or case.seeds)
    ]
    writer = measured_parts(settings, COORDINATES, parts)
    task = case.make(0)
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width)
    provenance = Provenance(
        model=f"BertForTokenClassification trained on {name}",
        origin="trained",
        seed=0,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        weights_dtype="float32",
        arithmetic_dtype="float32",
        sequences=len(task.held) if case.judged is None else case.judged,
        operations=(WITHOUT_MLP.describe(),),
    )
    return finished_run(settings, writer, provenance, floor_of({torch.float32}), **facts)


def measure_one(case: PathsCase, seed: int, rows: RowRecorder) -> None:
    """Train one network and judge its paths."""
    task, rows = case.make(seed), rows.under(seed=seed)
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width, seed=seed)
    done = fit(model, task, case.plan, seed=seed, operation=WITHOUT_MLP)
    held = task.held if case.judged is None else task.held.take(slice(case.judged))
    rows.add("final_loss", done.final_loss, "final", of="whole", paths="")
    for name, value in guesses(task.held, positions=task.positions).items():
        rows.add("accuracy", value, "final", of=name, paths="")
    with undisturbed(model):
        judge_paths(model, view_of(model, as_batch(held.take(slice(2)))), held, task.held, rows)
    if case.published is not None and seed == 0:
        rows.add("accuracy", _as_published(case, case.published, task), "final", of=AS_PUBLISHED, paths="all")


def _as_published(case: PathsCase, plan: TrainingPlan, task: TrainingTask) -> float:
    model = encoder_for(task, layers=case.layers, heads=case.heads, width=case.width)
    fit(model, task, plan, operation=WITHOUT_MLP)
    with operating(model, WITHOUT_MLP, inputs=as_batch(task.held.take(slice(2))).inputs):
        return share_right(model, task.held)


def judge_paths(model: nn.Module, view: ModelView, held: Examples, everything: Examples, rows: RowRecorder) -> None:
    """The whole network on ``everything``, and every path length on ``held``.

    The column ``of`` says what is judged, ``paths`` how many paths, ``layer`` their length, ``sequence`` the repeat.
    """
    head = model.get_submodule("classifier")
    parts = [held.take(slice(start, start + PART)) for start in range(0, len(held), PART)]
    labels = [part.labels for part in parts]
    with operating(model, WITHOUT_MLP, view=view):
        (*networks, single) = (
            next(iter(freeze_network(view, model.config, as_batch(part)).values()))
            for part in (*parts, held.take(slice(1)))
        )
        whole = share_right(model, everything)
    rows.add("accuracy", whole, "final", of="whole", paths="all")
    sums = [length_sums(network, by_origin=True).sums["embedding"] for network in networks]
    out = [head(network.out) for network in networks]
    for length in range(sums[0].shape[0]):
        scores = [head(total[length]) for total in sums]
        for of, shown in (("frozen", scores), (OFFSET, recentred(scores, out, labels))):
            right = accuracy(zip(shown, labels, strict=True))
            rows.add("accuracy", right, "final", layer=length, of=of, paths="all")
    for length in range(len(networks[0].attention) + 1):
        _add_sizes(networks, [total[length] for total in sums], parts, length, rows.under(of="frozen", paths="all"))
        draws = {
            (count, repeat): sample_paths(single, length, count, seed=1000 * repeat + count).paths
            for count in DRAWS
            for repeat in range(REPEATS)
        }
        _add_drawn(view, head, networks, parts, draws, length, rows)


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


def _add_drawn(
    view: ModelView,
    head: nn.Module,
    networks: Sequence[FrozenNetwork],
    parts: Sequence[Examples],
    draws: Mapping[tuple[int, int], Sequence[Path]],
    length: int,
    rows: RowRecorder,
) -> None:
    """Both meanings on the same draws; every path is followed once. The head is affine, so scores are averaged."""
    paths = list(dict.fromkeys(path for drawn in draws.values() for path in drawn))
    number = {path: index for index, path in enumerate(paths)}
    for of in ("frozen", "recomputed"):
        scores = [
            torch.cat(list(_scores(of, view, head, network, part, paths)))
            for network, part in zip(networks, parts, strict=True)
        ]
        for (count, repeat), drawn in draws.items():
            chosen = torch.tensor([number[path] for path in drawn])
            means = ((score[chosen].mean(dim=0), part.labels) for score, part in zip(scores, parts, strict=True))
            rows.add("accuracy", accuracy(means), "final", layer=length, sequence=repeat, of=of, paths=str(count))


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


def _add_sizes(
    networks: Sequence[FrozenNetwork], sums: Sequence[Tensor], parts: Sequence[Examples], length: int, rows: RowRecorder
) -> None:
    """Norm of the sum over the norm of the output, and the residual of the sum, both means over sequences."""
    sizes: list[float] = []
    residuals: list[float] = []
    for network, total, part in zip(networks, sums, parts, strict=True):
        mask = part.inputs.get("attention_mask")
        for row in range(len(part)):
            tokens = slice(None) if mask is None else slice(int(mask[row].sum()))
            one_sum, out = total[row, tokens].double(), network.out[row, tokens].double()
            sizes.append(float(one_sum.norm() / out.norm()))
            residuals.append(float(relative_residual(one_sum)))
    rows.add("size_over_output", math.fsum(sizes) / len(sizes), "final", layer=length)
    rows.add("relative_residual", math.fsum(residuals) / len(residuals), "final", layer=length)
