"""``device=``, and what a result says about the device and the arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError, LoadError
from rankscope.linalg.precision import as_float64, full_precision, has_float64, lowered_products
from rankscope.linalg.tokens import Tokens
from rankscope.models.loading.devices import moved_to, parse_device, seed_generators
from rankscope.monitor.isolation import same_random_state
from tests.device.simulated import SimulatedDevice
from tests.flat_calls import flat

SMALL = {"sequences": 1, "tokens": 8, "metrics": ["relative_residual"], "sites": ["block.out"]}
CPU = torch.device("cpu")


def test_a_device_by_name(device: SimulatedDevice) -> None:
    run = flat(rs.measure, "init:tiny-bert", device="sim:1", **SMALL)
    assert run.provenance.device == "sim:1"
    here = flat(rs.measure, "init:tiny-bert", **SMALL)
    assert here.provenance.device == "cpu"
    assert run.table["value"].to_pylist() == here.table["value"].to_pylist()
    assert device.counts().kernels > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:x", "'cuda:x' is not a device of torch. Write cpu, cuda"),
        ("gpu", "'gpu' is not a device of torch"),
        ("meta", "has no data"),
        ("mps", "'mps' is not available on this machine: .*. Leave device out"),
    ],
)
def test_a_device_that_does_not_exist(name: str, message: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(LoadError, match=message):
        parse_device(name)


def test_what_contradicts_a_device_is_refused(device: SimulatedDevice) -> None:
    with pytest.raises(InputError, match=r"BertModel is in memory, on cpu. Move it to sim:0 before the call"):
        flat(rs.measure, rs.load("init:tiny-bert").model, device="sim:0", **SMALL)
    with pytest.raises(InputError, match=r"each block on the processor\. Leave device out"):
        flat(rs.measure, "init:tiny-bert", device="sim", offload=True, **SMALL)


def test_no_float64_weights_where_there_is_no_float64(without_float64: SimulatedDevice) -> None:
    with pytest.raises(LoadError, match=r"sim has no float64\. Leave dtype out, or device"):
        rs.load("init:tiny-bert", dtype="float64", device="sim")
    assert not has_float64(torch.device("sim:0"))
    assert as_float64(torch.ones(2, device="sim")).device == CPU


def test_a_verb_in_float64_runs_on_the_processor_instead(without_float64: SimulatedDevice) -> None:
    model = rs.load("init:tiny-gpt2").model.to("sim")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    run = rs.bound(model, rs.Inputs(sequences=1, tokens=4))
    assert run.provenance.device == "cpu"
    assert any("sim:0 has no float64, in which bound computes" in note for note in run.notes)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_a_model_held_elsewhere_returns(device: SimulatedDevice) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("sim")
    model.append(model[0])  # a shared module, and with it tied weights
    originals = list(model.parameters())
    with moved_to(model, CPU):
        assert {p.device for p in model.parameters()} | {b.device for b in model.buffers()} == {CPU}
        assert model[2].weight is model[0].weight
    assert all(one is other for one, other in zip(model.parameters(), originals, strict=True))
    assert {b.device.type for b in model.buffers()} == {"sim"}


def test_autocast_sets_the_floor_and_not_the_metrics(device: SimulatedDevice) -> None:
    """Activations are computed in bfloat16 and stored in float32; the metrics are those of the stored tensors."""
    model = rs.load("init:tiny-bert").model.to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        run = flat(rs.measure, model, **{**SMALL, "metrics": ["relative_residual", "effective_rank"]})
    assert run.floor["dtype"] == "bfloat16"
    assert run.provenance.arithmetic_dtype == "bfloat16"
    X = torch.randn(2, 8, 16, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16), full_precision(X.device):
        assert (X @ X.mT).dtype == torch.float32


def test_lowered_products_are_named_and_kept_out_of_our_own() -> None:
    """On this kind of machine ``medium`` rounds factors to bfloat16, an error of 1e-2; TF32 does so on CUDA."""
    X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    exact = X.double() @ X.double()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        named = {place.type: lowered_products(place) for place in (CPU, torch.device("cuda"))}
        with full_precision(CPU):
            inside = X @ X
            assert lowered_products(CPU) is None
        assert {place.type: lowered_products(place) for place in (CPU, torch.device("cuda"))} == named
        assert torch.get_float32_matmul_precision() == "medium"
        run = flat(rs.measure, "init:tiny-bert", **SMALL)
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((inside - exact).abs().max()) < 1e-4
    assert lowered_products(CPU) is None
    if named["cpu"] is not None:  # torch 2.9 and later
        assert named == {"cpu": "bf16", "cuda": "tf32"}
        assert run.provenance.arithmetic_dtype == "float32 (products in bf16)"
        assert any("rounds the factors of float32 products to bf16" in note for note in run.notes)


def test_random_states_of_every_device_return(device: SimulatedDevice) -> None:
    torch.manual_seed(3)
    with same_random_state():
        first = [torch.rand(3, device=place).cpu() for place in ("cpu", "sim:0", "sim:1")]
    again = [torch.rand(3, device=place).cpu() for place in ("cpu", "sim:0", "sim:1")]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_every_device_in_use_is_seeded_and_no_other_is_asked(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> list[Tensor]:
        seed_generators(3)
        return [torch.rand(3, device=place).cpu() for place in ("cpu", "sim:0", "sim:1")]

    for module in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(
            module, "manual_seed_all", lambda seed: pytest.fail("a call for a device that is not there")
        )
    first = drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(), strict=True))
    monkeypatch.undo()
    torch.manual_seed(3)
    assert all(
        torch.equal(a, torch.rand(3, device=a_place).cpu())
        for a, a_place in zip(first, ("cpu", "sim:0", "sim:1"), strict=True)
    )


def test_a_mask_of_the_processor_with_tokens_of_a_device(device: SimulatedDevice) -> None:
    x, keep = torch.randn(2, 5, 3), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    assert torch.equal(Tokens(x.to("sim"), keep).mean.cpu(), Tokens(x, keep).mean)


def test_the_selftest_on_a_device(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope.verbs._spec import VERBS
    from rankscope.verbs.selftest import parity

    monkeypatch.setattr(parity, "verbs_in_order", lambda: [VERBS["measure"]])
    # Block by block, so that the products are those of the processor. In a batch of blocks they are rounded otherwise,
    # and repeated tokens have singular values of exactly zero, which a Gram matrix shows as 1e-8 of the largest.
    monkeypatch.setattr("rankscope.verbs.pending.WAITING_ENTRIES", 0)
    result = rs.selftest(device="sim")
    assert result.passed, str(result)
    (entry,) = result.verbs
    assert entry.verb == "measure"
    assert entry.difference < 1e-12
    assert "selftest on sim, torch" in str(result)
    assert result.to_json()["device"] == "sim"


def test_a_device_that_computes_wrongly_is_found(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankscope.verbs._spec import VERBS
    from rankscope.verbs.selftest import parity

    monkeypatch.setattr(parity, "verbs_in_order", lambda: [VERBS["measure"], VERBS["ablate"]])
    right = parity._run

    def wrong(verb: object, place: torch.device) -> object:
        if place.type == "sim" and verb is VERBS["ablate"]:
            raise RuntimeError("no kernel")
        return right(VERBS["ablate"] if place.type == "sim" else verb, place)  # type: ignore[arg-type]

    monkeypatch.setattr(parity, "_run", wrong)
    result = rs.selftest(device="sim")
    assert not result.passed
    assert result.differences == (
        "measure on sim: its rows differ from those of the processor",
        "ablate on sim: RuntimeError: no kernel",
    )


def test_weights_offloaded_to_the_processor_run_on_the_device(device: SimulatedDevice) -> None:
    accelerate = pytest.importorskip("accelerate")
    want = flat(rs.measure, "init:tiny-bert", **SMALL)
    model = accelerate.cpu_offload(rs.load("init:tiny-bert").model, execution_device=torch.device("sim:0"))
    device.reset()
    got = flat(rs.measure, model, **SMALL)
    assert device.counts().kernels > 0
    assert got.table["value"].to_pylist() == want.table["value"].to_pylist()
