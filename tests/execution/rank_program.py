"""Measurements by several real processes. Run as a program: ``rank_program.py FOLDER``.

Each rank writes what it got, or the error it met, to a JSON file in ``FOLDER/SCENARIO``.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import rankscope as rs
import tests.tiny_presets  # noqa: F401 it adds presets
from rankscope.errors import RankscopeError
from rankscope.execution.ranks import RankObserver
from rankscope.execution.rendezvous import Rendezvous, rendezvous
from rankscope.execution.support import Parallel
from rankscope.linalg import numbered_vectors
from rankscope.models.loading import load
from tests.execution.rank_models import fully_sharded, own_model, tensor_parallel
from tests.flat_calls import flat
from tests.forked import Scenario, run_scenarios

SIZE: dict[str, Any] = {"sequences": 5, "tokens": 12, "batch": 2}
"""Three batches, the last one short: fewer than four ranks, and not a multiple of two."""
FAMILIES = ("tiny-llama", "tiny-gpt2", "tiny-bert")
CUT_UP = ("tiny-llama", "tiny-olmo2", "tiny-phi3", "tiny-qwen3-moe")
"""Heads dealt out, heads gathered before the softmax (two kinds), experts."""


def told(run: Any) -> dict[str, Any]:
    """A run as JSON, without when, where and how long."""
    found: dict[str, Any] = run.to_json()
    for name in ("created", "wall_seconds", "command", "git", "model", "origin"):
        found["provenance"].pop(name)
    return found


def error_of(act: Callable[[], object]) -> dict[str, str]:
    try:
        act()
    except Exception as error:  # noqa: BLE001  (whatever a rank meets is told)
        return {"kind": type(error).__name__, "message": str(error), "cause": type(error.__cause__).__name__}
    return {"kind": "none", "message": ""}


def alone(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What one process says, of everything that several are asked."""
    found: dict[str, Any] = {}
    for family in dict.fromkeys((*FAMILIES, *CUT_UP)):
        found[family] = told(rs.measure(f"init:{family}", rs.Inputs(**SIZE), null=True, similarity=True))
    for family in CUT_UP:
        found[f"{family} float64"] = told(rs.measure(rs.Model(f"init:{family}", dtype="float64"), rs.Inputs(**SIZE)))
    found["own"] = told(rs.measure(own_model(), rs.Inputs(own_inputs(), batch=2)))
    found["many"] = many()
    return found


def many(**options: Any) -> dict[str, Any]:
    """So many inputs that a sample of their vectors is kept."""
    inputs = torch.randn(40, 7, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for name in ("ALWAYS_STORED", "LARGEST_STORED"):
        setattr(numbered_vectors, name, 4)
    return told(flat(rs.measure, own_model(), inputs, batch=3, **options))


def own_inputs() -> torch.Tensor:
    return torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def data(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {
        family: told(
            rs.measure(rs.Model(f"init:{family}", parallel="data"), rs.Inputs(**SIZE), null=True, similarity=True)
        )
        for family in FAMILIES
    }
    return {**found, "many": many(parallel="data")}


def fsdp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Modules the caller sharded, the same loaded in parts, and what is left of the former."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        model = fully_sharded(load(f"init:{family}").model)
        before = weights(model)
        found[family] = told(rs.measure(model, rs.Inputs(**SIZE), null=True, similarity=True))
        kinds = sorted({type(parameter).__name__ for parameter in model.parameters()})
        found[f"{family} after"] = {"same": weights(model) == before, "kinds": kinds}
        loaded = load(f"init:{family}", spread="fsdp")
        sharded = [name for name, module in loaded.model.named_modules() if "FSDP" in type(module).__name__]
        found[f"{family} loaded"] = told(rs.measure(loaded.model, rs.Inputs(**SIZE), null=True, similarity=True))
        found[f"{family} sharded"] = sharded
    return found


def weights(model: nn.Module) -> str:
    local = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[operator]
    return hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in local)).hexdigest()


def tensor(families: tuple[str, ...]) -> Scenario:
    def run(rank: int, world: int, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for family in families:
            found[family] = told(
                rs.measure(rs.Model(f"init:{family}", parallel="tensor"), rs.Inputs(**SIZE), null=True, similarity=True)
            )
            found[f"{family} float64"] = told(
                rs.measure(rs.Model(f"init:{family}", dtype="float64", parallel="tensor"), rs.Inputs(**SIZE)),
            )
        for activations in ("local", "distributed"):
            model = tensor_parallel(own_model(), distributed=activations == "distributed")
            found[f"own {activations}"] = told(rs.measure(model, rs.Inputs(own_inputs(), batch=2)))
        return found

    return run


def folder_in_parts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A saved model with as many key-value heads as ranks, each of which reads its own part."""
    import transformers

    place = folder / "model"
    if rank == 0:
        config = transformers.LlamaConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
        torch.manual_seed(0)
        transformers.LlamaModel(config).save_pretrained(place)
    dist.barrier()
    ways: tuple[Parallel, ...] = ("data", "fsdp", "tensor")
    return {way: told(rs.measure(rs.Model(place, parallel=way), rs.Inputs(**SIZE))) for way in ways} | {
        "alone": told(rs.measure(place, rs.Inputs(**SIZE)))
    }


def failing(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One rank alone goes wrong: while loading, while measuring, and with other inputs."""
    from rankscope.verbs.reader import SiteReader

    spec = "init:tiny-bert"
    found: dict[str, Any] = {}
    missing = "init:tiny-nothing" if rank == 1 else spec
    found["loading"] = error_of(lambda: rs.measure(rs.Model(missing, parallel="data"), rs.Inputs(**SIZE)))
    seed = {"seed": rank, "random_tokens": True}
    found["inputs"] = error_of(lambda: flat(rs.measure, spec, **SIZE, **seed, parallel="data"))
    sharded = fully_sharded(load(spec).model)
    read = SiteReader._read_tokens
    if rank == 1:
        SiteReader._read_tokens = _broken  # type: ignore[method-assign]
    found["data"] = error_of(lambda: rs.measure(rs.Model(spec, parallel="data"), rs.Inputs(**SIZE)))
    found["fsdp"] = error_of(lambda: rs.measure(sharded, rs.Inputs(**SIZE)))
    SiteReader._read_tokens = read  # type: ignore[method-assign]
    found["afterwards"] = told(rs.measure(sharded, rs.Inputs(**SIZE), null=True, similarity=True))
    return found


def late(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One rank alone goes wrong, and is slow to say so: the others are at their next forward pass by then."""
    from rankscope.verbs.reader import SiteReader

    spec = "init:tiny-llama"
    found: dict[str, Any] = {}
    ways: tuple[Parallel, ...] = ("fsdp", "tensor")
    sharded = fully_sharded(load(spec).model)
    read, settle = SiteReader._read_tokens, RankObserver.settle
    if rank == 1:
        SiteReader._read_tokens = _broken  # type: ignore[method-assign]
        RankObserver.settle = _slowly(settle)  # type: ignore[method-assign]
    for way in ways:
        found[way] = error_of(lambda way=way: rs.measure(rs.Model(spec, parallel=way), rs.Inputs(**SIZE)))  # type: ignore[misc]
    found["ablate"] = error_of(lambda: flat(rs.ablate, sharded, **{**ABLATED, "sequences": 4}))
    SiteReader._read_tokens, RankObserver.settle = read, settle  # type: ignore[method-assign]
    text = "no-such-folder/text.txt" if rank == 1 else None
    found["preparing"] = error_of(lambda: rs.measure(sharded, rs.Inputs(text, **SIZE)))
    own = fully_sharded(own_model())
    tensors = {"tensors": own_inputs()[: 5 - 3 * rank], "kinds": own_inputs() if rank == 0 else 7}
    for name, given in tensors.items():
        found[name] = error_of(lambda given=given: rs.measure(own, rs.Inputs(given, batch=2)))  # type: ignore[misc]
    found["batches"] = error_of(lambda: rs.measure(sharded, rs.Inputs(**{**SIZE, "sequences": 5 - 3 * rank})))
    found["afterwards"] = told(rs.measure(sharded, rs.Inputs(**SIZE), null=True, similarity=True))
    return found


def _slowly(settle: Callable[[RankObserver], None]) -> Callable[[RankObserver], None]:
    def run(watch: RankObserver) -> None:
        time.sleep(0.3)
        settle(watch)

    return run


def _broken(*seen: Any) -> None:
    raise ArithmeticError("a metric that a test broke")


def refused(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What is refused on every rank alike."""
    model = load("init:tiny-bert").model
    return {
        "unspread": error_of(lambda: rs.measure(rs.Model(model, parallel="fsdp"), rs.Inputs(**SIZE))),
        "spread": error_of(lambda: rs.measure(rs.Model(fully_sharded(model), parallel="tensor"), rs.Inputs(**SIZE))),
        "no plan": error_of(lambda: rs.measure(rs.Model("init:tiny-bert", parallel="tensor"), rs.Inputs(**SIZE))),
        "heads": error_of(lambda: rs.measure(rs.Model("init:tiny-llama", parallel="tensor"), rs.Inputs(**SIZE))),
        "word": error_of(lambda: rs.measure(rs.Model("init:tiny-bert", parallel="models"), rs.Inputs(**SIZE))),  # type: ignore[arg-type]
    }


def rendezvous_themselves(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Rendezvous themselves: much to hand in, one that leaves, one that says nothing."""
    found: dict[str, Any] = {}
    payload = bytes([rank]) * (20 * 2**20 + rank)
    with rendezvous() as together:
        got = together.gather(payload)
    found["sizes"] = [len(part) for part in got]
    found["whole"] = all(part == bytes([other]) * len(part) for other, part in enumerate(got))

    def leave() -> None:
        with rendezvous() as together:
            if rank == 1:
                raise KeyError("gone")
            together.gather(b"")

    found["left"] = error_of(leave)

    def leave_late() -> None:
        with rendezvous() as together:
            together.gather(b"")
            if rank == 1:
                raise ArithmeticError("lost")

    found["left late"] = error_of(leave_late)
    absent = Rendezvous(patience=5.0)
    found["absent"] = {} if rank == 1 else error_of(lambda: absent.gather(b""))
    try:
        with rendezvous() as together:
            if rank == 1:
                raise RankscopeError("refused")
            together.barrier()
    except RankscopeError as error:
        found["told"] = str(error)
    return found


ABLATED: dict[str, Any] = {**SIZE, "variants": ["pure", "+skip", "full"], "masks": ["own", "window(1)"]}


def ablated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    spec = "init:tiny-llama"
    ways: tuple[Parallel | None, ...] = ("data", "fsdp", "tensor") if world > 1 else (None,)
    found: dict[str, Any] = {str(way): told(flat(rs.ablate, spec, **ABLATED, parallel=way)) for way in ways}
    if world > 1:
        sharded = fully_sharded(load(spec).model)
        found["twin"] = error_of(lambda: flat(rs.ablate, sharded, **ABLATED, weights="both"))
    return found


VERBS: dict[str, Callable[..., Any]] = {
    "exact": partial(flat, rs.exact, "init:tiny-bert", sequences=3, tokens=6, skip=0.0, mlp="drop", norm="identity"),
    "bound": partial(flat, rs.bound, "init:tiny-gpt2", **SIZE),
    "decompose": partial(flat, rs.decompose, "init:tiny-gpt2", **SIZE, marginals=("heads", "layers"), origins=True),
    "decompose, at a layer": partial(flat, rs.decompose, "init:tiny-gpt2", **SIZE, at_layers=(1,)),
    "remedy": partial(flat, rs.remedy, "init:tiny-bert", **SIZE, remedies=["residual_scale", "centred_attention"]),
}
"""The verbs that deal out batches and do nothing else in parallel."""


def dealt_out(rank: int, world: int, folder: Path) -> dict[str, Any]:
    way: Parallel | None = "data" if world > 1 else None
    found = {name: told(verb(parallel=way)) for name, verb in VERBS.items()}
    if world > 1:
        sharded = fully_sharded(load("init:tiny-gpt2").model)
        for name, verb in {
            "exact": rs.exact,
            "bound": rs.bound,
            "decompose": rs.decompose,
            "remedy": rs.remedy,
        }.items():
            found[f"{name}, asked"] = error_of(lambda verb=verb: verb(rs.Model("init:tiny-gpt2", parallel="fsdp")))  # type: ignore[misc]
            found[f"{name}, found"] = error_of(lambda verb=verb: verb(sharded))  # type: ignore[misc]
            cut = tensor_parallel(own_model(), distributed=True)
            found[f"{name}, cut"] = error_of(lambda verb=verb, cut=cut: verb(cut, own_inputs()))  # type: ignore[misc]
    return found


SCENARIOS: dict[str, tuple[int, Scenario]] = {
    "alone": (1, alone),
    "ablated": (1, ablated),
    "ablated2": (2, ablated),
    "dealt1": (1, dealt_out),
    "dealt2": (2, dealt_out),
    "dealt4": (4, dealt_out),
    "data2": (2, data),
    "data4": (4, data),
    "fsdp2": (2, fsdp),
    "fsdp4": (4, fsdp),
    "tensor2": (2, tensor(CUT_UP)),
    "folder2": (2, folder_in_parts),
    "folder4": (4, folder_in_parts),
    "failing": (2, failing),
    "late": (2, late),
    "refused4": (4, refused),
    "rendezvous": (2, rendezvous_themselves),
}


def import_everything() -> None:
    """What the ranks would each import for themselves."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)
    for family in dict.fromkeys((*FAMILIES, *CUT_UP)):
        rs.measure(f"init:{family}", rs.Inputs(sequences=1, tokens=4))


if __name__ == "__main__":
    import_everything()
    run_scenarios(SCENARIOS, sys.argv[1:])
