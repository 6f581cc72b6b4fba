from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.linalg import LinAlgError

from rankscope.errors import UnsupportedOperationError
from rankscope.linalg import spectrum
from rankscope.linalg.tokens import Tokens


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(20, 6), (6, 20), (9, 9)])
def test_singular_values(shape: tuple[int, int]) -> None:
    x = gaussian(*shape) + 2.0
    view = Tokens(x)
    torch.testing.assert_close(view.singular_values[0] * view.scale, torch.linalg.svdvals(x), rtol=1e-12, atol=1e-13)
    centred = torch.linalg.svdvals(x - x.mean(0))
    torch.testing.assert_close(view.centred_singular_values[0] * view.scale, centred, rtol=1e-12, atol=1e-13)


def test_the_direction_lost_to_the_mean_is_zero_to_the_last_bit() -> None:
    assert Tokens(gaussian(5, 9).float()).centred_singular_values[0, -1] == 0.0


def test_float64_input_keeps_what_a_gram_matrix_loses() -> None:
    """Singular values 1, 1e-5 and 1e-10: the last is below what squares of float64 can hold."""
    true = torch.tensor([1.0, 1e-5, 1e-10], dtype=torch.float64)
    x = torch.linalg.qr(gaussian(8, 3)).Q * true @ torch.linalg.qr(gaussian(3, 3)).Q
    view = Tokens(x)
    torch.testing.assert_close(view.singular_values[0] * view.scale, true, rtol=0, atol=1e-15)
    from_gram = spectrum.gram_eigenvalues((x.mT @ x).unsqueeze(0)).sqrt()
    assert abs(from_gram[0, 2] - true[2]) > 1e-11


def test_a_failed_svd_leaves_the_gram_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: torch.Tensor) -> torch.Tensor:
        raise LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svdvals", failing)
    x = torch.diag(torch.tensor([1.0, 1e-4], dtype=torch.float64))
    torch.testing.assert_close(Tokens(x).singular_values[0], torch.tensor([1.0, 1e-4]).double(), rtol=1e-6, atol=0)


def test_one_bad_sequence_does_not_spoil_the_batch() -> None:
    x = gaussian(3, 6, 4)
    clean = Tokens(x).singular_values
    x[1, 2, 3] = torch.nan
    got = Tokens(x)
    torch.testing.assert_close(got.singular_values[[0, 2]], clean[[0, 2]], rtol=1e-14, atol=0)
    assert got.finite.tolist() == [True, False, True]


def corruptions(side: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Wrong answers of a solver, each different from the spectrum by at least 1e-6 of the largest value."""

    def changed(place: int, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(values: torch.Tensor) -> torch.Tensor:
            values = values.clone()
            values[..., place] *= factor
            return values

        return change

    def exchanged(values: torch.Tensor) -> torch.Tensor:
        # The trace is kept, the sum of squares is not.
        values = values.clone()
        moved = 0.25 * values[..., -1]
        values[..., -1] -= moved
        values[..., 0] += moved
        return values

    return [
        changed(side - 1, 1.0 + 1e-6),
        changed(side - 1, 0.0),
        changed(side - 1, torch.nan),
        changed(side - 2, -1.0),
        exchanged,
        torch.zeros_like,
        lambda values: values.roll(1, 0) if len(values) > 1 else values * 2,
        lambda values: values.sqrt(),
        lambda values: values.float().double() * (1 + 1e-6),
        lambda values: values.mean(-1, keepdim=True).repeat(1, values.shape[-1]),
    ]


def test_corrupted_eigenvalues_are_caught_and_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 Gram matrices, near collapse and far from it, of which a solver returns something else."""
    real, drawn, caught = torch.linalg.eigvalsh, torch.Generator().manual_seed(3), 0
    for side in (2, 5, 16, 64, 128):
        for number, corrupt in enumerate(corruptions(side)):
            x = torch.randn(10, side, 40, generator=drawn, dtype=torch.float64)
            x = x * 10.0 ** torch.linspace(-6, 6, 10, dtype=torch.float64)[:, None, None]
            x = x.mean(-2, keepdim=True) + x * 10.0**-number if number % 2 else x
            gram = x @ x.mT
            true = real(gram).flip(-1).clamp_min(0)
            monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m, c=corrupt: c(real(m)) if m.dim() == 3 else real(m))
            with pytest.warns(RuntimeWarning, match=r"10 matrices of side"):
                found = spectrum.gram_eigenvalues(gram)
            monkeypatch.setattr(torch.linalg, "eigvalsh", real)
            torch.testing.assert_close(found, true, rtol=0, atol=1e-13 * float(true.max()))
            caught += len(gram)
    assert caught == 500


def test_a_solver_that_is_always_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: torch.ones(m.shape[:-1]).double())
    monkeypatch.setattr(torch.linalg, "svdvals", lambda m: torch.ones(m.shape[:-1]).double())
    with pytest.warns(RuntimeWarning), pytest.raises(UnsupportedOperationError, match="selftest"):
        spectrum.gram_eigenvalues(torch.diag(torch.tensor([1.0, 4.0]).double()).unsqueeze(0))
