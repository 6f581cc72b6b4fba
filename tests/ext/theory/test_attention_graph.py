"""Which tokens reach all, against breadth-first search on plain lists."""

from __future__ import annotations

import pytest
import torch

from rankscope.ext.theory.attention_graph import attention_graph, least_edge


def eccentricities(edges: torch.Tensor) -> list[int | None]:
    """Layers in which each token reaches all, by breadth-first search; None where it does not."""
    n = edges.shape[0]
    found: list[int | None] = []
    for source in range(n):
        distance = {source: 0}
        frontier = [source]
        while frontier:
            reached = [i for j in frontier for i in range(n) if bool(edges[i, j]) and i not in distance]
            for i in reached:
                distance.setdefault(i, distance[next(j for j in frontier if bool(edges[i, j]))] + 1)
            frontier = list(dict.fromkeys(reached))
        found.append(max(distance.values()) if len(distance) == n else None)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_against_breadth_first_search(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = 2 + seed % 7
    edges = (torch.rand(n, n, generator=generator) < 0.35) | torch.eye(n, dtype=torch.bool)
    expected = eccentricities(edges)
    known = [e for e in expected if e is not None]
    found = attention_graph(edges)
    assert found.has_centre == bool(known)
    assert found.strongly_connected == (len(known) == n)


def test_an_edge_on_which_one_head_underflows_counts_with_attention_zero() -> None:
    P = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.7, 0.3], [1.0, 0.0]]], dtype=torch.float64)
    least, edges = least_edge(P)
    assert least == 0.0
    assert bool(edges.all())
    least, edges = least_edge(P[:1])
    assert least == 0.5
    assert edges.tolist() == [[True, False], [True, True]]
