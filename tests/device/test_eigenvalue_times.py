"""``selftest --device`` times eigenvalues on the device and on the processor, and the faster way is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankscope import selftest
from rankscope.linalg import eigenvalue_times, spectrum
from rankscope.linalg.eigenvalue_times import EigenvalueTimes
from rankscope.verbs._spec import verbs_in_order
from rankscope.verbs.selftest import parity
from tests.device.simulated import SimulatedDevice


def solved_on(gram: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], torch.Tensor]:
    """Where eigenvalues are computed, and what they are."""
    real, seen = torch.linalg.eigvalsh, []

    def watched(matrices: torch.Tensor) -> torch.Tensor:
        seen.append(matrices.device.type)
        return real(matrices)

    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "eigvalsh", watched)
        values = spectrum.gram_eigenvalues(gram)
    return seen, values


@pytest.mark.parametrize(("times", "expected"), [((2.0, 1.0), {"cpu"}), ((1.0, 2.0), {"sim"})])
def test_the_faster_way_is_used_also_by_a_later_process(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], expected: set[str]
) -> None:
    place = torch.device("sim")
    X = torch.randn(3, 6, 9, dtype=torch.float64)
    gram = X @ X.mT
    assert set(solved_on(gram.to(place), monkeypatch)[0]) == {"sim"}
    eigenvalue_times.remember(place, EigenvalueTimes(*times))
    for _ in range(2):
        seen, values = solved_on(gram.to(place), monkeypatch)
        assert set(seen) == expected
        assert values.device.type == "sim"
        torch.testing.assert_close(values.cpu(), torch.linalg.eigvalsh(gram).flip(-1), rtol=1e-12, atol=1e-12)
        eigenvalue_times.is_faster_on_host.cache_clear()  # as in a new process


def test_another_release_of_torch_is_timed_again(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    eigenvalue_times.remember(torch.device("sim"), EigenvalueTimes(2.0, 1.0))
    assert eigenvalue_times.is_faster_on_host(torch.device("sim"))
    eigenvalue_times.is_faster_on_host.cache_clear()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert not eigenvalue_times.is_faster_on_host(torch.device("sim"))


def test_a_file_that_is_not_ours_is_named_and_not_used(device: SimulatedDevice, kept_times: Path) -> None:
    (kept_times / "eigenvalues.json").write_text("{")
    with pytest.warns(UserWarning, match=r"eigenvalues\.json cannot be read"):
        assert not eigenvalue_times.is_faster_on_host(torch.device("sim"))


def test_selftest_measures_prints_and_keeps_it(
    device: SimulatedDevice, kept_times: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "verbs_in_order", lambda: [verb for verb in verbs_in_order() if verb.name == "bound"])
    result = selftest("sim")
    assert result.passed
    assert result.eigenvalue_times.device > 0 < result.eigenvalue_times.host
    chosen = "processor" if result.eigenvalue_times.is_faster_on_host else "device"
    assert f"computed on the {chosen}" in str(result)
    assert (kept_times / "eigenvalues.json").is_file()
    assert result.to_json()["eigenvalue_times"]["device"] == result.eigenvalue_times.device
    assert selftest("cpu").eigenvalue_times is None
