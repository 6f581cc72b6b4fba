"""The runs: what is trained on what, what goes wrong from which step on, and what an alarm should say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ONSET = 80
Objective = Literal["next", "masked", "images", "siamese", "contrast"]

TOKENS_ALARMS = ("token_collapse", "input_collapse", "vanishing_qk_gradients")
CHANGED = "sudden_change"
REBUILT = "model_changed"


@dataclass(frozen=True)
class Declared:
    """One kind of run.

    Attributes:
        name: its name.
        fault: what goes wrong, a key of ``training.FAULTS``; None in a healthy run.
        sets_in: the first step at which it does.
        right: alarms that recognise it.
        components: causes that are right; empty if no single component is the cause, so that "not found" is right.
        kind: what the fault affects: the representation, the numbers or the data.
        family: of the model, for ``nets.build``.
        objective: what it learns.
        layers: number of blocks.
        rate: learning rate.
        warmup: steps over which it rises.
        batch: sequences per step.
        options: further names that ``training`` knows.
    """

    name: str
    fault: str | None = None
    sets_in: int = ONSET
    right: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    kind: Literal["representation", "numbers", "data"] = "representation"
    family: str = "pre"
    objective: Objective = "next"
    layers: int = 4
    rate: float = 1e-3
    warmup: int = 20
    batch: int = 8
    options: frozenset[str] = frozenset()


_ATTENTION, _SKIP, _RATE = ("attention",), ("skip",), ("rate",)
_COLLAPSE = (*TOKENS_ALARMS, CHANGED, REBUILT)

FAULTY: tuple[Declared, ...] = (
    Declared("post-norm, high rate", "none", 0, TOKENS_ALARMS, _RATE, family="post", layers=8, rate=1e-2, warmup=0),
    Declared("post-norm masked, high rate", "none", 0, TOKENS_ALARMS, _RATE, family="post-mlm", objective="masked",
             layers=8, rate=1e-2, warmup=0),
    Declared("post-norm, 16 layers", "none", 0, TOKENS_ALARMS, family="post", layers=16, warmup=0),
    Declared("scores grow from the start", "sharper", 0, ("entropy_collapse",), _ATTENTION),
    Declared("scores grow", "sharper, faster", ONSET, ("entropy_collapse", CHANGED), _ATTENTION, family="pre-mlm",
             objective="masked"),
    Declared("skips removed", "no skip", ONSET, _COLLAPSE, _SKIP),
    Declared("skips removed, post-norm", "no skip", ONSET, _COLLAPSE, _SKIP, family="post-mlm", objective="masked",
             rate=5e-4, warmup=40),
    Declared("skips halved", "half skip", ONSET, _COLLAPSE, _SKIP),
    Declared("skips halved, post-norm", "half skip", ONSET, _COLLAPSE, _SKIP, family="post-mlm", objective="masked",
             rate=5e-4, warmup=40),
    Declared("branches scaled down", "small branch", ONSET, (CHANGED,), ("branches",)),
    Declared("uniform attention", "uniform", ONSET, (*_COLLAPSE,), _ATTENTION),
    Declared("causal mask lost", "mask", ONSET, (CHANGED, REBUILT), _ATTENTION),
    Declared("one block reset", "reset block", ONSET, _COLLAPSE, ("attention", "mlp", "weights")),
    Declared("siamese, no stop-gradient", "none", 0, ("input_collapse", "token_collapse"), ("objective",),
             family="post-mlm", objective="siamese", layers=2, rate=5e-2, warmup=0, batch=32,
             options=frozenset({"sgd", "no stop"})),
    Declared("weight decay too high", "decay", ONSET, (*_COLLAPSE, "channel_domination"), ("weights",)),
    Declared("rate drifts up", "rate", ONSET, (*_COLLAPSE, "entropy_collapse", "sink_domination", "update_growth"),
             _RATE),
    Declared("stream overflows float16", "overflow", ONSET, ("not_finite",), ("activations",), kind="numbers",
             options=frozenset({"half"})),
    Declared("gradients overflow float16", "gradient overflow", ONSET, ("not_finite", "not_finite_gradients"),
             ("weights", "gradients"), kind="numbers"),
    Declared("identical sequences", "identical", ONSET, ("repeated_sequences",), ("data",), kind="data"),
    Declared("padding only", "padding", ONSET, ("padding_only",), ("data",), kind="data", family="pre-mlm",
             objective="masked", options=frozenset({"lengths"})),
    Declared("padding mask inverted", "inverted", ONSET, ("data_shift", "padding_only"), ("data",), kind="data",
             family="pre-mlm", objective="masked", options=frozenset({"lengths"})),
    Declared("other tokens", "permuted", ONSET, ("data_shift",), ("data",), kind="data"),
)  # fmt: skip

HEALTHY: tuple[Declared, ...] = (
    Declared("pre-norm"),
    Declared("pre-norm, 8 layers", layers=8),
    Declared("pre-norm, dropout", options=frozenset({"dropout"})),
    Declared("pre-norm, batch of one", batch=1, rate=3e-4),
    Declared("pre-norm, momentum", rate=0.05, options=frozenset({"sgd"})),
    Declared("pre-norm, bfloat16", options=frozenset({"bfloat16"})),
    Declared("pre-norm, rate drops by ten", options=frozenset({"drop"})),
    Declared("pre-norm, cyclic rate", options=frozenset({"cyclic"})),
    Declared("pre-norm, lower half frozen", options=frozenset({"frozen"})),
    Declared("pre-norm, skipped steps", options=frozenset({"scaler"})),
    Declared("pre-norm masked, lengths differ", family="pre-mlm", objective="masked", options=frozenset({"lengths"})),
    Declared("two kinds of text in turn", options=frozenset({"domains"})),
    Declared("every sequence twice", options=frozenset({"twice"})),
    Declared("post-norm, warm-up", family="post", rate=1e-3, warmup=40),
    Declared("post-norm, 8 layers, warm-up", family="post", layers=8, rate=5e-4, warmup=40),
    Declared("post-norm masked, warm-up", family="post-mlm", objective="masked", rate=1e-3, warmup=40),
    Declared("long warm-up", warmup=160),
    Declared("GPT-2", family="gpt2"),
    Declared("Llama", family="llama"),
    Declared("BERT, warm-up", family="bert", objective="masked", rate=5e-4, warmup=40),
    Declared("ViT", family="vit", objective="images", batch=16),
    Declared("MiniLM, fine-tuned", family="minilm", objective="contrast", rate=3e-5),
    Declared("adapters", rate=3e-3, options=frozenset({"adapters"})),
    Declared("contrastive", family="pre-mlm", objective="contrast", layers=2, batch=16),
    Declared("siamese, stop-gradient", family="post-mlm", objective="siamese", layers=2, rate=5e-2, warmup=0, batch=32,
             options=frozenset({"sgd"})),
)  # fmt: skip

RUNS = {run.name: run for run in (*FAULTY, *HEALTHY)}
assert len(RUNS) == len(FAULTY) + len(HEALTHY)
