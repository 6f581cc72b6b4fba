"""The state of recurrent blocks against recurrences written by hand, and models whose state cannot be seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError
from rankscope.models.inputs import Batch
from rankscope.stream import SiteSelection, trace, view_of

RANKS = ["effective_rank", "stable_rank"]


def convolved(conv: nn.Conv1d, x: Tensor) -> Tensor:
    return F.silu(conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def mamba(mixer: nn.Module, x: Tensor) -> Tensor:
    """One matrix of channels by state size per sequence. The kernel rounds B and its input to float32."""
    inner = convolved(mixer.conv1d, mixer.in_proj(x).chunk(2, -1)[0])
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, _ = mixer.x_proj(inner).split(sizes, -1)
    dt, A, inner, B = F.softplus(mixer.dt_proj(dt)), -mixer.A_log.float().exp(), inner.float(), B.float()
    state = x.new_zeros(len(x), inner.shape[-1], mixer.ssm_state_size)
    for t in range(x.shape[1]):
        state = (dt[:, t, :, None] * A).exp() * state + dt[:, t, :, None] * inner[:, t, :, None] * B[:, t, None]
    return state.unsqueeze(1)


def mamba2(mixer: nn.Module, x: Tensor) -> Tensor:
    """One matrix of head size by state size per head; heads of one group share B."""
    _, inner, dt = mixer.in_proj(x).split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], -1)
    groups = mixer.n_groups * mixer.ssm_state_size
    inner, B, _ = convolved(mixer.conv1d, inner).split([mixer.intermediate_size, groups, groups], -1)
    B = B.unflatten(-1, (mixer.n_groups, -1)).repeat_interleave(mixer.num_heads // mixer.n_groups, 2)
    inner, dt, A = inner.unflatten(-1, (mixer.num_heads, -1)), F.softplus(dt + mixer.dt_bias), -mixer.A_log.exp()
    state = x.new_zeros(len(x), mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    for t in range(x.shape[1]):
        write = (dt[:, t, :, None] * inner[:, t])[..., None] * B[:, t, :, None]
        state = (dt[:, t] * A).exp()[..., None, None] * state + write
    return state


def delta_rule(mixer: nn.Module, x: Tensor) -> Tensor:
    """Qwen3-Next: the state forgets, then each token replaces what it reads at its key."""
    mixed, ba = mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
    query, key, value, _, b, a = mixer.fix_query_key_value_ordering(mixed, ba)
    flat = torch.cat([part.flatten(2) for part in (query, key, value)], -1)
    _, key, value = convolved(mixer.conv1d, flat).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    key = key.unflatten(-1, (mixer.num_k_heads, -1)).repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, 2)
    key = key * (key.square().sum(-1, keepdim=True) + 1e-6).rsqrt()  # with the kernel's own epsilon
    value = value.unflatten(-1, (mixer.num_v_heads, -1))
    beta, decay = b.sigmoid(), (-mixer.A_log.exp() * F.softplus(a + mixer.dt_bias)).exp()
    state = x.new_zeros(len(x), mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state
        read = (state * key[:, t, ..., None]).sum(-2)
        state = state + key[:, t, ..., None] * (beta[:, t, :, None] * (value[:, t] - read))[..., None, :]
    return state


# The kernels of Mamba-2 and Qwen3-Next compute in float32 whatever the model's format.
BY_HAND = {
    "mamba": (mamba, "mixer", torch.float64, 1e-10),
    "mamba2": (mamba2, "mixer", torch.float64, 2e-5),
    "qwen3-next": (delta_rule, "linear_attn", torch.float32, 2e-5),
}


@pytest.mark.parametrize("preset", BY_HAND)
def test_a_state_is_that_of_the_recurrence(preset: str) -> None:
    by_hand, name, dtype, digits = BY_HAND[preset]
    model = rs.load(f"init:tiny-{preset}").model.to(dtype).eval()
    ids = torch.randint(5, 95, (3, 11), generator=torch.Generator().manual_seed(0))
    mixers = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]
    read: list[Tensor] = []
    for mixer in mixers:
        mixer.register_forward_pre_hook(
            lambda _, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    seen: dict[int, Tensor] = {}
    batch = Batch({"input_ids": ids, "use_cache": False}, None, 0, 3)
    with torch.no_grad():
        bare, view = batch.run(model)[0], view_of(model, batch)
        read.clear()
        selection = SiteSelection.parse(["attention.state"])
        with trace(view, selection, lambda ref, state: seen.update({ref.layer: state.clone()})):
            traced = batch.run(model)[0]
        want = [by_hand(mixer, x) for mixer, x in zip(mixers, read, strict=True)]
    assert torch.equal(bare, traced), "a cache changes no output"
    assert len(seen) == len(mixers)
    for state, expected in zip(seen.values(), want, strict=True):
        assert (state - expected).norm() <= digits * expected.norm()


def test_ranks_of_the_state_and_a_model_without_one() -> None:
    run = rs.measure(
        "init:tiny-jamba",
        rs.Inputs(sequences=2, tokens=12),
        metrics=[*RANKS, "relative_residual"],
        sites=["attention.state", "block.out"],
    )
    table = run.to_frame()
    states = table[table.site == "attention.state"]
    assert set(states.layer) == {0, 2}, "the others are attention"
    assert set(states.metric) == set(RANKS), "rows of a state are not tokens"
    assert states["head"].notna().all()
    with pytest.raises(InputError, match="RwkvModel keeps no recurrent state in transformers' cache"):
        rs.measure("init:tiny-rwkv", rs.Inputs(sequences=1, tokens=8), metrics=RANKS, sites=["attention.state"])
    with pytest.raises(InputError, match=r"a cache of its own \(MiniMaxCache\)"):
        rs.measure("init:tiny-minimax", rs.Inputs(sequences=1, tokens=8), metrics=RANKS, sites=["attention.state"])
    model = rs.load("init:tiny-mamba").model
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    padded = {"input_ids": torch.full((2, 9), 7), "attention_mask": mask}
    with pytest.raises(InputError, match="a state after padding is not that of the text"):
        rs.measure(model, padded, metrics=RANKS, sites=["attention.state"])
