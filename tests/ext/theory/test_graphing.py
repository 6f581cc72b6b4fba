"""``rs.graph`` and ``rankscope graph``: the table of masks, files, lengths that no dense matrix allows."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest

import rankscope
from rankscope.errors import RankscopeError
from rankscope.masks import MASKS, parse_mask


@pytest.mark.parametrize(
    ("mask", "tokens", "late", "digits", "transient"),
    [
        ("causal", 32, 0.5, 1e-12, (1, 8)),
        ("causal_window(4)", 32, 0.5, 1e-12, (14, 28)),
        ("window(3)", 32, 0.97864, 5e-6, (0, 0)),
    ],
)
def test_table_of_masks(mask: str, tokens: int, late: float, digits: float, transient: tuple[int, int]) -> None:
    """The late factors of the spectral law, and a transient where the mask looks one way."""
    found = rankscope.graph(mask, tokens)
    assert found.lambda_2 == pytest.approx(late, abs=digits)
    assert found.transient is not None
    assert transient[0] <= found.transient <= transient[1]


@pytest.mark.parametrize("tokens", [2, 77, 5_000])
def test_causal_at_any_length(tokens: int) -> None:
    found = rankscope.graph("causal", tokens)
    assert found.lambda_2 is not None
    assert abs(found.lambda_2 - 0.5) < 1e-12
    assert (found.centres, found.first_centres, found.radius, found.diameter) == (1, (0,), 1, None)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_mask_has_a_graph(name: str) -> None:
    mask = parse_mask(MASKS[name].example)
    tokens = 4 if name == "adjacency" else 24
    found = rankscope.graph(mask, tokens)
    sees = mask.dense(tokens).numpy()
    assert found.edges == sees.sum()
    P = sees / sees.sum(1, keepdims=True)
    assert found.lambda_2 == pytest.approx(np.sort(np.abs(np.linalg.eigvals(P)))[-2], abs=1e-7)
    json.dumps(found.to_json(), allow_nan=False)


def test_a_graph_file_has_its_own_length(tmp_path: Path) -> None:
    path = tmp_path / "ring.npy"
    np.save(path, np.eye(6) + np.eye(6, k=1) + np.eye(6, k=-5))
    found = rankscope.graph(path)
    assert (found.tokens, found.radius, found.diameter, found.strongly_connected) == (6, 5, 5, True)
    assert found.lambda_2 == pytest.approx(np.cos(np.pi / 6), rel=1e-12)


def test_a_number_that_is_not_known_is_a_range_with_a_reason() -> None:
    found = rankscope.graph("causal_window(8)", 8192)
    assert found.layers_to_agreement is None
    lower, upper = found.ranges["layers_to_1e-3"]
    assert upper is None
    assert lower is not None
    assert "not reached" in found.statuses["layers_to_1e-3"]
    assert "or more" in str(found)
    assert lower < 2117, "2117 layers, simulated without a limit on the work"


def test_the_reason_is_given_where_nothing_agrees() -> None:
    found = rankscope.graph("adjacency('1100/1100/0011/0011')", 4)
    assert (found.centres, found.radius, found.lambda_2, found.layers_to_agreement) == (0, None, 1.0, None)
    assert "never agree" in found.verdict


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        ("causal", 1),
        ("causal", True),
        ("causal", None),
        ("~window(3)", 4),
        ("caus", 8),
        ("~causal", 50_000),
        ("no.npy", None),
    ],
)
def test_refusals_say_what_to_do(mask: str, tokens: int | None) -> None:
    with pytest.raises(RankscopeError, match=r"[Ee]xpected|Give|Unite|Did you mean|Intersect"):
        rankscope.graph(mask, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["window(4)", "window(3) | random_sparse(3) | global_tokens(2)", "window(128)"])
def test_long_sequences_answer_in_time(mask: str) -> None:
    """65,536 tokens in less than 30 s of one core and 4 GiB."""
    started = time.process_time()
    found = rankscope.graph(mask, 65_536)
    assert time.process_time() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20
    assert found.lambda_2 is not None
    assert found.radius is not None or found.ranges["radius"][1] - found.ranges["radius"][0] <= 1
    assert found.diameter is not None or found.ranges["diameter"][1] - found.ranges["diameter"][0] <= 1
