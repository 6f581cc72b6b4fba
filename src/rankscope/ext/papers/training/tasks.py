"""Small tasks as data: sequences and a label per token, each a pure function of a seed.

Sizes and rules are those of Dong, Cordonnier and Loukas (2021), sec. 4.2 and 4.3. The paper's 500 sentences are not
available; ``memory_task`` draws substitutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankscope._citations import Cite

CITES = (Cite("dong2021attention", "sec. 4.2"), Cite("dong2021attention", "sec. 4.3"))
IGNORED = -100
"""The label of padding."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs of a model and the expected answers.

    Attributes:
        inputs: keyword arguments of the model's forward, sequences along the first axis.
        labels: class per token (below zero: does not count), or numbers per token in a regression.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, rows: Tensor | slice) -> Examples:
        """Some of the sequences, cut to the longest of them if there is an attention mask."""
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        labels = self.labels[rows]
        mask = inputs.get("attention_mask")
        if mask is None:
            return Examples(inputs, labels)
        longest = int(mask.sum(dim=1).max())
        cut = {name: value[:, :longest].contiguous() for name, value in inputs.items()}
        return Examples(cut, labels[:, :longest].contiguous())


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """What a small network learns.

    Attributes:
        name: of the task.
        seed: determines the data.
        train: training examples.
        held: held-out examples; for memorisation the training examples.
        classes: answers per token; 0 for a regression.
        tokens: length of the longest sequence.
        vocabulary: number of ids; 0 if tokens are points of the plane.
        positions: whether the model gets position embeddings.
    """

    name: str
    seed: int
    train: Examples
    held: Examples
    classes: int
    tokens: int
    vocabulary: int
    positions: bool


def sort_task(
    seed: int = 0, *, train: int = 1000, held: int = 200, length: int = 8, symbols: int = 10, fresh: bool = False
) -> TrainingTask:
    """Sort a sequence: at each position, answer the symbol at that position of the sorted sequence.

    Args:
        seed: of the data.
        train: training sequences.
        held: held-out sequences.
        length: of a sequence; symbols may repeat.
        symbols: number of symbols.
        fresh: draw held-out sequences until none of them is a training sequence.

    Example:
        >>> task = sort_task(3, train=2, held=1)
        >>> bool((task.train.inputs["input_ids"].sort(dim=1).values == task.train.labels).all())
        True
    """
    generator = np.random.default_rng([seed, 1])
    ids = generator.integers(0, symbols, size=(train + held, length))
    if fresh:
        seen = {row.tobytes() for row in ids[:train]}
        for number in range(train, train + held):
            while ids[number].tobytes() in seen:
                ids[number] = generator.integers(0, symbols, size=length)
    whole = _by_ids(ids, np.sort(ids, axis=1))
    return TrainingTask(
        "sort", seed, whole.take(slice(train)), whole.take(slice(train, None)), symbols, length, symbols, positions=True
    )


def hull_task(seed: int = 0, *, train: int = 10_000, held: int = 300, points: int = 10) -> TrainingTask:
    """Say of each point of a cloud whether it is a corner of the cloud's convex hull.

    Points are uniform in [0, 10] x [0, 10]; each cloud is then shifted as a whole by N(0, 3.3^2) in both directions.
    """
    generator = np.random.default_rng([seed, 2])
    clouds = generator.uniform(0.0, 10.0, size=(train + held, points, 2))
    clouds += generator.normal(0.0, 3.3, size=(train + held, 1, 2))
    whole = Examples({"points": torch.from_numpy(clouds).float()}, torch.from_numpy(on_hull(clouds).astype(np.int64)))
    return TrainingTask(
        "hull", seed, whole.take(slice(train)), whole.take(slice(train, None)), 2, points, 0, positions=False
    )


def on_hull(clouds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each point is a corner of its cloud's convex hull: (clouds, points).

    A point is one exactly if all others lie within an open half plane through it, that is if the directions to them
    leave a gap of more than a half turn. Exact for points in general position.

    Example:
        >>> on_hull(np.array([[[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]]])).tolist()
        [[True, True, True, False]]
    """
    count = clouds.shape[1]
    is_on_hull = np.empty(clouds.shape[:2], dtype=np.bool_)
    for point in range(count):
        others = np.delete(clouds, point, axis=1) - clouds[:, point, None]
        angles = np.sort(np.arctan2(others[..., 1], others[..., 0]), axis=1)
        gaps = np.diff(angles, axis=1, append=angles[:, :1] + 2 * math.pi)
        is_on_hull[:, point] = gaps.max(axis=1) > math.pi
    return is_on_hull


def memory_task(
    seed: int = 0, *, sentences: int = 500, longest: int = 128, mean: float = 24.0, vocabulary: int = 5000
) -> TrainingTask:
    r"""Learn by heart one random bit for each token of some sentences; judged on the same sentences.

    Lengths come from a log-normal law (about ``mean`` tokens, at least 3, at most ``longest``), tokens from Zipf's law
    :math:`p(r)\propto 1/(r+2.7)`, so that, as in real text, frequent tokens repeat within a sentence. Without positions
    a model gives such repeated tokens the same answer. Id 0 is padding.
    """
    generator = np.random.default_rng([seed, 3])
    drawn = generator.lognormal(math.log(mean) - 0.125, 0.5, size=sentences)
    lengths = np.clip(np.rint(drawn), 3, longest).astype(np.int64)
    width = int(lengths.max())
    law = 1.0 / (np.arange(1, vocabulary) + 2.7)
    ids = generator.choice(np.arange(1, vocabulary), size=(sentences, width), p=law / law.sum())
    labels = generator.integers(0, 2, size=(sentences, width))
    mask = np.arange(width) < lengths[:, None]
    whole = _by_ids(np.where(mask, ids, 0), np.where(mask, labels, IGNORED), mask)
    return TrainingTask("memory", seed, whole, whole, 2, width, vocabulary, positions=False)


def circle_task(seed: int = 0, *, angles: int = 1000, radius: float = 0.3) -> TrainingTask:
    """Two opposing points on a circle; answer the pair one step of a full turn in ``angles`` further on.

    The data are all angles, independent of the seed.
    """
    turn = 2 * math.pi * torch.arange(angles + 1, dtype=torch.float64) / angles
    one = radius * torch.stack([turn.cos(), turn.sin()], dim=-1)
    pair = torch.stack([one, -one], dim=1)
    whole = Examples({"points": pair[:-1]}, pair[1:])
    return TrainingTask("circle", seed, whole, whole, 0, 2, 0, positions=False)


def causal_sort_task(seed: int = 0, *, train: int = 1000, held: int = 200) -> TrainingTask:
    """Sort as a causal model can: read the sequence and a mark, then answer the sorted symbols one after the other.

    The tokens are the sequence, the mark, and all sorted symbols but the last; from the mark on, the answer to each
    token is the next sorted symbol.

    Example:
        >>> task = causal_sort_task(0, train=2, held=1)
        >>> task.tokens, int((task.train.labels[0] >= 0).sum())
        (16, 8)
    """
    task = sort_task(seed, train=train, held=held, fresh=True)

    def spoken(examples: Examples) -> Examples:
        ids, labels = examples.inputs["input_ids"], examples.labels
        mark = torch.full_like(ids[:, :1], task.vocabulary)
        told = torch.cat([ids, mark, labels[:, :-1]], dim=1)
        return Examples({"input_ids": told}, torch.cat([torch.full_like(labels, IGNORED), labels], dim=1))

    parts = spoken(task.train), spoken(task.held)
    return TrainingTask("causal sort", seed, *parts, task.classes, 2 * task.tokens, task.vocabulary + 1, positions=True)


def _by_ids(ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> Examples:
    inputs = {"input_ids": torch.from_numpy(ids)}
    if mask is not None:
        inputs["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    return Examples(inputs, torch.from_numpy(labels))
