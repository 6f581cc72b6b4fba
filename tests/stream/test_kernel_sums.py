"""What the fused kernel tells, and what each head has mixed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.pass_graph.record import GraphRecorder
from rankscope.stream import tracer
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import log_sums_in, trace
from rankscope.stream.viewing import undisturbed, view_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_log_sums_are_those_of_the_scores_and_the_output_stays(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 20, 8, dtype=dtype) for _ in range(3))
    with torch.no_grad(), GraphRecorder(keeps=True) as told:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    scores = q.double() @ k.double().mT / 8**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    log_sums = log_sums_in(told.graph)
    assert log_sums is not None
    # In half precision the kernel's exponentials are shorter, still far finer than the format.
    close = 1e-3 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(log_sums.double(), scores.logsumexp(-1), rtol=close, atol=close)


def test_two_kernels_in_one_call_tell_nothing() -> None:
    q = torch.randn(1, 1, 4, 8)
    with torch.no_grad(), GraphRecorder(keeps=True) as told:
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(2 * q, q, q)
    assert log_sums_in(told.graph) is None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_tracer_hands_them_on_and_shows_what_is_mixed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_WORTH_ENTRIES", 1)
    loaded = load(f"init:tiny-{family}")
    prepared = prepare_inputs(loaded, None, sequences=2, tokens=12, batch=2, tokens_policy="content", seed=0)
    seen: dict[str, object] = {}
    with undisturbed(loaded.model):
        view = view_of(loaded.model, prepared[0])
        chosen = SiteSelection.parse(["attention.probs@0", "attention.mixed@0"])
        with trace(view, chosen, lambda ref, value: seen.__setitem__(ref.site, value)):
            prepared[0].run(loaded.model)
    call, mixed = seen["attention.probs"], seen["attention.mixed"]
    assert isinstance(call, AttentionCall)
    assert isinstance(mixed, torch.Tensor)
    assert call.log_sums is not None or family == "llama", "grouped heads have no fused kernel in torch 2.6"
    assert call.value is not None
    values = call.value.repeat_interleave(mixed.shape[1] // call.value.shape[1], dim=1)
    torch.testing.assert_close(mixed, call.probs() @ values, rtol=1e-4, atol=1e-6)
