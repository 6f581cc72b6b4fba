"""The runs: what is trained on what, what goes wrong from which step on, and what an alarm should say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ONSET = 80
Objective = Literal[
    "next", "masked", "images", "siamese", "contrast", "pooled", "first", "copy", "series", "translate",
    "tags", "binary", "amount",
]  # fmt: skip

TOKENS_ALARMS = ("token_collapse", "input_collapse", "vanishing_qk_gradients")
RISES = "loss_rises"


@dataclass(frozen=True)
class Declared:
    """One kind of run.

    Attributes:
        name: its name.
        fault: what goes wrong, a key of ``training.FAULTS``; None in a healthy run.
        sets_in: the first step at which it does.
        right: alarms that recognise it.
        components: causes that are right; empty if no single component is the cause, so that "not found" is right.
        kind: what the fault affects: the representation, the numbers, the data, or only the loss.
        family: of the model, for ``nets.build``.
        objective: what it learns.
        layers: number of blocks.
        rate: learning rate.
        warmup: steps over which it rises.
        batch: sequences per step.
        options: further names that ``training`` knows.
        longer: factor on the number of steps of a size.
    """

    name: str
    fault: str | None = None
    sets_in: int = ONSET
    right: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    kind: Literal["representation", "numbers", "data", "loss"] = "representation"
    family: str = "pre"
    objective: Objective = "next"
    layers: int = 4
    rate: float = 1e-3
    warmup: int = 20
    batch: int = 8
    options: frozenset[str] = frozenset()
    longer: int = 1


_ATTENTION, _SKIP, _RATE = ("attention",), ("skip",), ("rate",)
_COLLAPSE = (*TOKENS_ALARMS, RISES)

FAULTY: tuple[Declared, ...] = (
    Declared("post-norm, high rate", "none", 0, TOKENS_ALARMS, _RATE, family="post", layers=8, rate=1e-2, warmup=0),
    Declared("post-norm masked, high rate", "none", 0, TOKENS_ALARMS, _RATE, family="post-mlm", objective="masked",
             layers=8, rate=1e-2, warmup=0),
    Declared("post-norm, 16 layers", "none", 0, TOKENS_ALARMS, family="post", layers=16, warmup=0),
    Declared("scores grow from the start", "sharper", 0, ("entropy_collapse",), _ATTENTION),
    Declared("scores grow", "sharper, faster", ONSET, ("entropy_collapse", RISES), _ATTENTION, family="pre-mlm",
             objective="masked"),
    Declared("skips removed", "no skip", ONSET, _COLLAPSE, _SKIP),
    Declared("skips removed, post-norm", "no skip", ONSET, _COLLAPSE, _SKIP, family="post-mlm", objective="masked",
             rate=5e-4, warmup=40),
    Declared("skips halved", "half skip", ONSET, _COLLAPSE, _SKIP),
    Declared("skips halved, post-norm", "half skip", ONSET, _COLLAPSE, _SKIP, family="post-mlm", objective="masked",
             rate=5e-4, warmup=40),
    Declared("branches scaled down", "small branch", ONSET, (RISES,), ("branches",)),
    Declared("uniform attention", "uniform", ONSET, (*_COLLAPSE,), _ATTENTION),
    Declared("causal mask lost", "mask", ONSET, (RISES,), _ATTENTION),
    Declared("one block reset", "reset block", ONSET, _COLLAPSE, ("attention", "mlp", "weights")),
    Declared("siamese, no stop-gradient", "none", 0, ("input_collapse", "token_collapse"), ("objective",),
             family="post-mlm", objective="siamese", layers=2, rate=5e-2, warmup=0, batch=32,
             options=frozenset({"sgd", "no stop"})),
    Declared("weight decay too high", "decay", ONSET, _COLLAPSE,
             ("weights", "optimizer")),
    Declared("rate drifts up", "rate", ONSET, (*_COLLAPSE, "entropy_collapse"),
             _RATE),
    Declared("stream overflows float16", "overflow", ONSET, ("not_finite",), ("activations",), kind="numbers",
             options=frozenset({"half"})),
    Declared("gradients overflow float16", "gradient overflow", ONSET, ("not_finite", "not_finite_gradients"),
             ("weights", "gradients"), kind="numbers"),
    Declared("identical sequences", "identical", ONSET, ("repeated_sequences",), ("data",), kind="data"),
    Declared("padding only", "padding", ONSET, ("padding_only",), ("data",), kind="data", family="pre-mlm",
             objective="masked", options=frozenset({"lengths"})),
    Declared("padding mask inverted", "inverted", ONSET, ("padding_only",), ("data",), kind="data",
             family="pre-mlm", objective="masked", options=frozenset({"lengths"})),
    Declared("other tokens", "permuted", ONSET, (RISES,), ("data",), kind="data"),
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

_ANY = (*_COLLAPSE, "entropy_collapse",
        "still_weights")  # fmt: skip
_OBJECTIVE, _DATA, _WEIGHTS, _STILL = ("objective",), ("data",), ("weights",), ("optimizer", "rate")

MORE_FAULTY: tuple[Declared, ...] = (
    Declared("rate 0.1", "none", 0, _ANY, _RATE, rate=0.1),
    Declared("rate times 100", "rate 100", ONSET, _ANY, _RATE),
    Declared("queries and keys at 100 times the rate", "fast queries", ONSET, _ANY, (*_RATE, *_ATTENTION)),
    Declared("sign of the loss flipped", "sign", ONSET, _ANY, _OBJECTIVE),
    Declared("auxiliary loss pulls tokens together", "together", ONSET, _ANY, _OBJECTIVE),
    Declared("labels shuffled", "shuffled labels", ONSET, _ANY, _OBJECTIVE, kind="loss"),
    Declared("95% unknown tokens", "unknown", ONSET, _ANY, _DATA, kind="data"),
    Declared("95% unknown tokens from the start", "unknown", 0, _ANY, _DATA, kind="data"),
    Declared("ids clamped in the model", "clamped", ONSET, _ANY, ("embedding",)),
    Declared("no skips from the start", "no skip", 0, _ANY, _SKIP, layers=8),
    Declared("optimizer of other parameters", "none", 0, _ANY, _STILL, options=frozenset({"wrong optimizer"})),
    Declared("rate of zero", "none", 0, _ANY, _STILL, rate=0.0),
    Declared("only the first token visible", "first key", ONSET, _ANY, _ATTENTION),
    Declared("only the first token visible from the start", "first key", 0, _ANY, _ATTENTION),
    Declared("half of the blocks initialised again", "reset half", ONSET, _ANY, _WEIGHTS),
    Declared("uniform attention from the start", "uniform", 0, _ANY, _ATTENTION),
)  # fmt: skip

MORE_HEALTHY: tuple[Declared, ...] = (
    Declared("classifier, mean of tokens", family="pre-mlm", objective="pooled", rate=2e-3, batch=16),
    Declared("classifier, first token", family="pre-mlm", objective="first", rate=2e-3, batch=16),
    Declared("rate from 1e-5 to 1e-3", options=frozenset({"low start"})),
    Declared("cosine restarts", rate=3e-3, options=frozenset({"cyclic"})),
    Declared("fine-tuned on reversed text", rate=3e-4, options=frozenset({"pretrained", "reversed"})),
    Declared("blocks unfrozen", options=frozenset({"unfreeze"})),
    Declared("curriculum of lengths", options=frozenset({"curriculum"})),
    Declared("memorises eight sequences", rate=3e-3, options=frozenset({"memorise"})),
    Declared("copies", objective="copy", rate=2e-3, batch=16),
    Declared("dropout 0.5", options=frozenset({"dropout 0.5"})),
    Declared("batch size grows", options=frozenset({"growing batch"})),
    Declared("small initial weights", options=frozenset({"small"})),
    Declared("high weight decay", options=frozenset({"decay 0.5"})),
    Declared("contrastive, four layers", family="pre-mlm", objective="contrast", layers=4, batch=16),
    Declared("ViT, no warm-up", family="vit", objective="images", batch=16, warmup=0),
    Declared("post-norm classifier", family="post-mlm", objective="pooled", batch=16, warmup=40),
)  # fmt: skip

THIRD_FAULTY: tuple[Declared, ...] = (
    Declared("gains of norms set to zero", "no gains", ONSET, _ANY, ("weights", "mlp", "attention", "branches")),
    Declared("embeddings scaled by 30", "large embedding", ONSET, _ANY, ("weights", "embedding")),
    Declared("embeddings set to their mean", "one embedding", ONSET, _ANY, ("embedding", "weights")),
    Declared("optimizer maximises", "maximise", ONSET, _ANY, _OBJECTIVE),
    Declared("each token sees itself only", "itself", ONSET, _ANY, _ATTENTION),
    Declared("constant labels", "constant labels", ONSET, _ANY, ("objective", "data"), kind="loss"),
    Declared("one sequence from the start", "identical", 0, ("repeated_sequences", *_ANY), _DATA, kind="data"),
    Declared("weights of one block times four", "times four", ONSET, _ANY, _WEIGHTS),
    Declared("head is NaN", "nan head", ONSET, ("not_finite",), ("weights", "loss"), kind="numbers"),
    Declared("rate 0.03, post-norm masked", "none", 0, _ANY, _RATE, family="post-mlm", objective="masked", rate=0.03,
             warmup=0),
    Declared("skips grow by 5% per step", "growing skip", ONSET, _ANY, _SKIP),
    Declared("blocks loaded in reverse", "reversed blocks", ONSET, _ANY, _WEIGHTS),
)  # fmt: skip

THIRD_HEALTHY: tuple[Declared, ...] = (
    Declared("rate falls to zero", options=frozenset({"to zero"})),
    Declared("batch of 32", batch=32),
    Declared("momentum, post-norm", family="post", rate=0.02, warmup=40, options=frozenset({"sgd"})),
    Declared("Llama, rate 3e-3", family="llama", rate=3e-3),
    Declared("GPT-2, dropout and lengths", family="gpt2", options=frozenset({"growing batch"})),
    Declared("masked, two kinds of text", family="pre-mlm", objective="masked", options=frozenset({"domains"})),
    Declared("copies, post-norm", family="post", objective="copy", batch=16, warmup=40),
    Declared("reversed text after pretraining, frozen half", rate=1e-3, options=frozenset({"pretrained", "reversed"})),
    Declared("classifier of small weights", family="pre-mlm", objective="first", batch=16,
             options=frozenset({"small"})),
    Declared("siamese, stop-gradient, wide batch", family="post-mlm", objective="siamese", layers=2, rate=3e-2,
             warmup=0, batch=48, options=frozenset({"sgd"})),
    Declared("adapters, rate 1e-2", rate=1e-2, options=frozenset({"adapters"})),
    Declared("BERT, no warm-up", family="bert", objective="masked", rate=3e-4, warmup=0),
)  # fmt: skip

LAST_FAULTY: tuple[Declared, ...] = (
    Declared("head initialised again", "new head", ONSET, _ANY, ("weights", "head")),
    Declared("gain of the final norm times 20", "large gain", ONSET, _ANY, ("weights", "norm")),
    Declared("positions set to zero", "no positions", ONSET, _ANY, ("weights", "embedding", "position")),
    Declared("rows of the embedding shifted by one", "shifted embedding", ONSET, _ANY, ("weights", "embedding")),
    Declared("embedding shrinks by 10% per step", "shrinking embedding", ONSET, _ANY, ("weights", "embedding")),
    Declared("first checkpoint loaded", "first checkpoint", ONSET, _ANY, _WEIGHTS),
    Declared("blocks begin with five times their weights", "five times", 0, _ANY,
             ("initialisation", "weights", "attention")),
    Declared("NaN in one row of the embedding", "nan row", ONSET, ("not_finite",), ("weights", "embedding"),
             kind="numbers"),
    Declared("infinite gain in a block", "infinite gain", ONSET, ("not_finite",), ("weights", "norm"), kind="numbers"),
    Declared("loss divides by zero", "zero count", ONSET, ("not_finite",), ("loss", "objective"), kind="numbers"),
    Declared("all labels ignored", "ignored labels", ONSET, ("padding_only", "not_finite"), _DATA, kind="data",
             family="pre-mlm", objective="masked"),
    Declared("half of the tokens random", "random tokens", ONSET, _ANY, _DATA, kind="data"),
    Declared("rate 0.05, GPT-2", "none", 0, _ANY, _RATE, family="gpt2", rate=0.05, warmup=0),
    Declared("momentum at rate 2, post-norm", "none", 0, _ANY, _RATE, family="post", rate=2.0, warmup=0,
             options=frozenset({"sgd"})),
    Declared("scores not divided", "four times the scores", ONSET, _ANY, _ATTENTION),
    Declared("MLPs return zero", "no mlp", ONSET, _ANY, ("mlp", "branches")),
    Declared("output of the embedding divided by 50", "small entry", ONSET, _ANY, ("embedding",)),
    Declared("lower blocks detached", "detached", ONSET, _ANY, ("gradients", "optimizer", "structure")),
    Declared("dropout of 0.95", "high dropout", ONSET, _ANY, ("dropout", "structure", "branches"), kind="loss",
             options=frozenset({"dropout"})),
    Declared("labels are the inputs", "labels are inputs", ONSET, _ANY, _OBJECTIVE, kind="loss"),
)  # fmt: skip

LAST_HEALTHY: tuple[Declared, ...] = (
    Declared("fine-tuned at a high rate", rate=2e-3, options=frozenset({"pretrained", "reversed"})),
    Declared("new head on a trained model", rate=1e-3, options=frozenset({"pretrained", "new head"})),
    Declared("tied embedding and head", options=frozenset({"tied", "small"})),
    Declared("small embedding that grows", rate=3e-3, options=frozenset({"small embedding"})),
    Declared("frozen embedding", options=frozenset({"frozen embedding"})),
    Declared("GPT-2, rate 3e-3", family="gpt2", rate=3e-3),
    Declared("one cycle to 5e-3", rate=5e-3, options=frozenset({"one cycle"})),
    Declared("RMSprop", options=frozenset({"rmsprop"})),
    Declared("ViT, rate 3e-3", family="vit", objective="images", rate=3e-3, batch=16),
    Declared("adapters on a trained model", rate=5e-3, options=frozenset({"pretrained", "reversed", "adapters"})),
)  # fmt: skip

FINAL_FAULTY: tuple[Declared, ...] = (
    Declared("epsilon of the norms is 10", "large epsilon", ONSET, _ANY, ("structure", "norm")),
    Declared("MLPs without their activation", "no activation", ONSET, _ANY, ("structure", "mlp", "branches")),
    Declared("output of attention times 8", "loud attention", ONSET, _ANY, ("attention", "branches")),
    Declared("weights in bfloat16 at rate 1e-5", "bfloat16 weights", 0, ("still_weights",), ("numbers",),
             kind="numbers", rate=1e-5, warmup=0),
    Declared("epsilon of Adam is 10", "slow Adam", ONSET, _ANY, _STILL),
    Declared("gradients are cleared before the step", "no gradients", ONSET, _ANY, ("optimizer", "gradients")),
    Declared("batch reshaped the wrong way", "reshaped", ONSET, _ANY, _DATA, kind="data"),
    Declared("three quarters of each sequence are padding", "mostly padding", ONSET,
             ("padding_only", *_ANY), _DATA, kind="data"),
    Declared("loss is a sum", "summed", ONSET, _ANY, _OBJECTIVE, kind="loss"),
    Declared("one weight becomes 1e4", "one weight", ONSET, _ANY, _WEIGHTS),
    Declared("every token at position 0", "one position", ONSET, _ANY, ("embedding", "structure")),
    Declared("softmax over the queries", "wrong axis", ONSET, _ANY, _ATTENTION),
    Declared("scores shrink by 5% per step", "flatter", ONSET, _ANY, _ATTENTION),
    Declared("rate 0.1, Llama", "none", 0, _ANY, _RATE, family="llama", rate=0.1, warmup=0),
    Declared("weight decay of the wrong sign", "negative decay", ONSET, _ANY, ("weights", "optimizer", "rate")),
    Declared("stream clipped at 1", "clipped", ONSET, _ANY, ("activations", "structure", "skip", "branches")),
    Declared("two blocks left out", "no blocks", ONSET, _ANY, ("structure", "skip", "branches", "attention", "mlp")),
    Declared("contrastive, no negatives", "none", 0, _ANY, _OBJECTIVE, family="pre-mlm", objective="contrast", layers=2,
             batch=16, rate=3e-3, warmup=0, options=frozenset({"no negatives"})),
    Declared("NaN in the gradient of one weight", "nan gradient", ONSET, ("not_finite", "not_finite_gradients"),
             ("gradients",), kind="numbers"),
    Declared("MLPs of another run", "other mlps", ONSET, _ANY, _WEIGHTS),
)  # fmt: skip

FINAL_HEALTHY: tuple[Declared, ...] = (
    Declared("Adagrad", rate=1e-2, options=frozenset({"adagrad"})),
    Declared("lookahead", options=frozenset({"lookahead"})),
    Declared("four batches per step", batch=4, options=frozenset({"accumulate"})),
    Declared("label smoothing", options=frozenset({"smoothing"})),
    Declared("dropout falls to zero", options=frozenset({"dropout", "less dropout"})),
    Declared("length drawn for each batch", options=frozenset({"random lengths"})),
    Declared("mixture drifts", options=frozenset({"drift"})),
    Declared("branches begin small", options=frozenset({"small branches"})),
    Declared("branches begin at zero", options=frozenset({"zero branches"})),
    Declared("half of the text is one character", options=frozenset({"one character"})),
    Declared("no positions", options=frozenset({"no positions"})),
    Declared("stochastic depth", options=frozenset({"stochastic depth"})),
    Declared("rate is warmed up again", options=frozenset({"rewarm"})),
    Declared("classifier, rare classes", family="pre-mlm", objective="pooled", batch=16,
             options=frozenset({"rare"})),
    Declared("noise on the embedding", options=frozenset({"noise"})),
    Declared("a fifth of the labels are wrong", family="post", warmup=40, options=frozenset({"noisy labels"})),
)  # fmt: skip

_PRETRAINED, _MIXED_UP = frozenset({"pretrained"}), _ANY

FRESH_FAULTY: tuple[Declared, ...] = (
    Declared("softmax before the cross-entropy", "softmax first", 0, _ANY, ("objective", "loss", "head"), kind="loss"),
    Declared("labels shifted twice", "shifted twice", 60, _ANY, ("objective", "data"), kind="loss", family="gpt2"),
    Declared("stream rounded with one scale per tensor", "rounded", ONSET, _ANY,
             ("activations", "numbers", "structure"), kind="numbers", rate=3e-4, options=_PRETRAINED),
    Declared("parameters converted after the optimizer was built", "new parameters", 0, _ANY,
             ("optimizer", "gradients")),
    Declared("averaged weights stay after each evaluation", "average stays", 0, _ANY, ("weights", "optimizer")),
    Declared("fused queries, keys and values split in the wrong order", "wrong split", 70, _ANY,
             ("weights", "attention"), rate=3e-4, options=_PRETRAINED),
    Declared("head tied to an embedding of another scale", "tied", ONSET, _ANY, ("weights", "head", "embedding")),
    Declared("adapters merged again and again", "merged again", 60, _ANY, ("weights", "attention", "adapters"),
             rate=5e-3, options=frozenset({"pretrained", "reversed", "adapters"})),
    Declared("every matrix begins constant", "constant", 0, _ANY, ("initialisation", "weights")),
    Declared("blocks begin as copies of one", "copies", 0, _ANY, ("initialisation", "weights"), family="post",
             layers=12, rate=5e-4, warmup=40),
    Declared("attention over the batch", "batch axis", 70, _ANY, ("attention", "structure"), rate=3e-4,
             options=_PRETRAINED),
    Declared("tokens shuffled in each sequence", "shuffled tokens", 90, _MIXED_UP, _DATA, kind="data", family="gpt2"),
    Declared("ids wrap at 16", "wrapped ids", 100, _MIXED_UP, _DATA, kind="data", family="post", warmup=40),
    Declared("spaces are lost", "no spaces", 60, _MIXED_UP, _DATA, kind="data", family="llama"),
    Declared("one batch at every step", "one batch", 70, ("repeated_sequences", *_MIXED_UP), _DATA, kind="data"),
    Declared("pixels from 0 to 255", "raw pixels", ONSET, _MIXED_UP, _DATA, kind="data", family="vit",
             objective="images", batch=16),
)  # fmt: skip

FRESH_HEALTHY: tuple[Declared, ...] = (
    Declared("GPT-NeoX, parallel branches", family="neox"),
    Declared("Mixtral, four experts", family="mixtral"),
    Declared("distance instead of positions", options=frozenset({"distance", "no positions"})),
    Declared("blocks learn in turn", options=frozenset({"in turn"})),
    Declared("distilled from a trained model", options=frozenset({"distilled"})),
    Declared("text and copies", batch=16, options=frozenset({"some copies"})),
    Declared("more and more characters hidden", family="post-mlm", objective="masked", warmup=40,
             options=frozenset({"more hidden"})),
    Declared("embeddings of length one", rate=2e-3, options=frozenset({"unit embedding"})),
    Declared("noise on the gradients", options=frozenset({"noisy gradients"})),
    Declared("counts, to a loss near zero", rate=3e-3, options=frozenset({"counts"})),
    Declared("ViT, contrast and brightness drawn", family="vit", objective="images", batch=16,
             options=frozenset({"jitter"})),
    Declared("trained model learns to classify", objective="pooled", rate=5e-4, batch=16, options=_PRETRAINED),
)  # fmt: skip

_EVERY = (*_MIXED_UP, "repeated_sequences", "padding_only", "not_finite", "not_finite_gradients",
          "gradient_underflow")  # fmt: skip
_TRAINED: dict[str, Any] = {"rate": 3e-4, "options": _PRETRAINED}

FIFTH_FAULTY: tuple[Declared, ...] = (
    Declared("second moments lost at each restart", "moments lost", 60, _EVERY, ("optimizer", "rate", "weights")),
    Declared("schedule counts micro-batches", "rate runs out", 0, _EVERY, _STILL),
    Declared("betas of Adam swapped", "swapped betas", 0, _EVERY, _STILL),
    Declared("clipped before the loss scale is removed", "clipped scaled", 0, _EVERY,
             ("gradients", *_STILL), rate=0.05, options=frozenset({"sgd"})),
    Declared("frozen as its own teacher", "own teacher", 30, _EVERY, ("gradients", "optimizer", "structure")),
    Declared("square matrices loaded transposed", "transposed", 60, _EVERY, ("weights", "attention"), **_TRAINED),
    Declared("gradients underflow float16", "underflow", 40, _EVERY, ("gradients", "numbers", "optimizer"),
             kind="numbers"),
    Declared("attention is added to itself", "doubled", 0, _EVERY, ("skip", "structure", "attention", "branches"),
             layers=8),
    Declared("rotary angles of the heads", "rotary of heads", 70, _EVERY, ("attention", "structure", "position"),
             family="llama", **_TRAINED),
    Declared("dropout of the embedding never ends", "embedding dropout", 50, _EVERY,
             ("embedding", "dropout", "structure")),
    Declared("keys and values of the first batch", "stale cache", 60, _EVERY, ("attention", "structure"), **_TRAINED),
    Declared("head reads the first block", "early head", 60, _EVERY, ("structure", "head", "branches"), **_TRAINED),
    Declared("sequences cut to a quarter", "truncated", 40, _EVERY, _DATA, kind="data"),
    Declared("loader returns to the first page", "first page", 60, _EVERY, _DATA, kind="data"),
    Declared("a space after each letter", "spaced", 60, _EVERY, _DATA, kind="data"),
    Declared("loss of the last token only", "last only", 60, _EVERY, ("objective", "loss", "data"), kind="loss"),
    Declared("entropy is rewarded twice as much as the labels", "uncertain", 60, _EVERY, ("objective", "loss"),
             kind="loss"),
)  # fmt: skip

FIFTH_HEALTHY: tuple[Declared, ...] = (
    Declared("rate falls by 0.7 per block towards the input", rate=2e-3, options=frozenset({"layerwise"})),
    Declared("weight normalisation", options=frozenset({"weight norm"})),
    Declared("spectral normalisation of the MLPs", options=frozenset({"spectral norm"})),
    Declared("sharpness-aware", options=frozenset({"sharpness"})),
    Declared("mean teacher", options=frozenset({"mean teacher"})),
    Declared("tokens dropped", options=frozenset({"tokens dropped"})),
    Declared("ViT, mixup", rate=2e-3, family="vit", objective="images", batch=16, options=frozenset({"mixup"})),
    Declared("weights rounded to 8 bits", options=frozenset({"rounded weights"})),
    Declared("signs of the gradients", rate=0.05, options=frozenset({"signs", "sgd"})),
    Declared("one block at every depth", options=frozenset({"one block"})),
    Declared("biases and gains of a trained model", rate=5e-3, options=frozenset({"biases", "pretrained", "reversed"})),
    Declared("queries and keys normalised", options=frozenset({"query norm"})),
    Declared("norms before and after the branches", options=frozenset({"branch norm"})),
    Declared("activations computed again", options=frozenset({"computed again"})),
    Declared("loss scale of 1024", options=frozenset({"loss scale"})),
    Declared("half of the weights pruned", options=frozenset({"pruned"})),
    Declared("each batch from one page", options=frozenset({"one page"})),
    Declared("every sequence begins with the same token", options=frozenset({"same first"})),
    Declared("fills in the middle", options=frozenset({"middle last"})),
    Declared("Adafactor", rate=0.05, options=frozenset({"adafactor"})),
)  # fmt: skip

_IMAGES: dict[str, Any] = {"kind": "data", "family": "vit", "objective": "images", "batch": 16}

SIXTH_FAULTY: tuple[Declared, ...] = (
    Declared("gradients are never cleared", "never cleared", 40, _EVERY, ("gradients", "optimizer")),
    Declared("rate of all but queries and keys divided by 100", "slow rest", 0, _EVERY, _STILL),
    # NovaSky-AI/SkyRL#852, nvidia-cosmos/cosmos-predict2.5#15
    Declared("both matrices of the adapters begin at zero", "zero adapters", 0, _EVERY,
             ("initialisation", "weights", "adapters", "gradients"), rate=5e-3,
             options=frozenset({"pretrained", "reversed", "adapters"})),
    Declared("attention missing from the checkpoint", "fresh attention", 0, _EVERY,
             ("weights", "attention", "initialisation"), **_TRAINED),
    Declared("keys and values of the other head", "other heads", 70, _EVERY, ("attention", "structure"), **_TRAINED),
    Declared("rotary frequencies are zero", "no frequencies", 50, _EVERY, ("attention", "structure", "position"),
             family="llama", **_TRAINED),
    Declared("distance added with the wrong sign", "distance reversed", 0, _EVERY,
             ("attention", "structure", "position"), options=frozenset({"distance", "no positions"})),
    Declared("causal mask in a classifier of the first token", "causal", 60, _EVERY, ("attention", "structure"),
             family="pre-mlm", objective="first", rate=2e-3, batch=16),
    Declared("weights stored in float8", "float8", 40, _EVERY, ("numbers", "weights", "optimizer"), kind="numbers"),
    Declared("dropout of the logits", "head dropout", 60, _EVERY, ("head", "dropout", "structure")),
    Declared("images turned, but not their labels", "turned", 60, _EVERY, ("data", "objective"), **_IMAGES),
    Declared("images sorted by class", "sorted", 0, _EVERY, _DATA, **_IMAGES),
    Declared("labels copied after the masking", "labels after masking", 60, _EVERY, ("data", "objective"), kind="data",
             family="post-mlm", objective="masked", warmup=40),
    Declared("decoder reads its labels", "unshifted", 50, _EVERY, ("data", "objective"), kind="data", family="t5",
             objective="translate", rate=5e-3),
    Declared("the year among the features", "year", 0, _EVERY, _DATA, kind="data", family="series", objective="series",
             batch=16),
    # huggingface/trl#6357, mlabonne/llm-course#33: padding and the end of a text share an id
    Declared("a frequent token is taken for padding", "spaces ignored", 60, _EVERY, ("objective", "loss", "data"),
             kind="loss"),
)  # fmt: skip

SIXTH_HEALTHY: tuple[Declared, ...] = (
    Declared("RAdam, no warm-up", rate=3e-3, warmup=0, options=frozenset({"radam"})),
    Declared("Lion", options=frozenset({"lion"})),
    Declared("Muon for the matrices, the rest fixed", rate=2e-2, options=frozenset({"muon"})),
    Declared("rate falls as one over the root of the step", rate=3e-3, options=frozenset({"inverse root"})),
    Declared("rate falls in the last quarter", rate=2e-3, options=frozenset({"decay at the end"})),
    Declared("batches of 32 and of 2 in turn", batch=32, options=frozenset({"small in turn"})),
    Declared("tanh instead of norms", options=frozenset({"dynamic tanh"})),
    Declared("DeepNorm, 12 layers", family="post", layers=12, options=frozenset({"deep norm"})),
    Declared("embedding of rank 8", options=frozenset({"factorised"})),
    Declared("head begins at zero", options=frozenset({"zero head"})),
    Declared("two documents in each sequence", options=frozenset({"packed"})),
    Declared("only the positions of a trained model learn", rate=3e-2,
             options=frozenset({"soft prompt", "pretrained", "reversed"})),
    Declared("two tasks in turn", options=frozenset({"two tasks"})),
    Declared("focal loss", options=frozenset({"focal"})),
    Declared("blocks frozen one after another", options=frozenset({"frozen in order"})),
    Declared("blocks switched on one after another", options=frozenset({"switched on"})),
    Declared("averaged weights are evaluated", options=frozenset({"averaged"})),
    Declared("two thirds of the batch are padding", family="pre-mlm", objective="masked", options=frozenset({"short"})),
    Declared("a thousand characters, many times", options=frozenset({"many epochs"})),
    Declared("ViT, random erasing", family="vit", objective="images", batch=16, options=frozenset({"erased"})),
    Declared("GPT-2, autocast", family="gpt2", options=frozenset({"autocast"})),
    Declared("T5, to another alphabet", family="t5", objective="translate", rate=5e-3),
    Declared("next value of a series", family="series", objective="series", batch=16),
    Declared("series with outliers", family="series", objective="series", batch=16, options=frozenset({"spikes"})),
)  # fmt: skip

# Stricter than _EVERY: an alarm that would be untrue of the fault does not count.
_STEPPED = (*_ANY, "not_finite", "not_finite_gradients", "gradient_underflow")
_ENCODER: dict[str, Any] = {"family": "pre-mlm", "batch": 16}

SEVENTH_FAULTY: tuple[Declared, ...] = (
    # pytorch/pytorch#41679, TransformerLensOrg/TransformerLens#81: the settings of AdamW given to Adam
    Declared("weight decay inside Adam", "coupled decay", 0, _STEPPED, ("optimizer", "weights")),
    # huggingface/transformers#29219, AnswerDotAI/ModernBERT#96: loss far too high after resize_token_embeddings
    Declared("new rows of the vocabulary too wide", "wide rows", 0, _ANY,
             ("initialisation", "weights", "embedding", "head"), **_TRAINED),
    # huggingface/transformers#29554, nyu-mll/jiant#714: gamma and beta; a loader by order takes beta first
    Declared("gains and biases of the norms swapped", "gains and biases", 0, _ANY,
             ("weights", "norm", "initialisation"), **_TRAINED),
    # common where an encoder of (tokens, batch) or of channels first is ported
    Declared("final norm over the tokens, their mean is classified", "over tokens", 0, _ANY, ("norm", "structure"),
             objective="pooled", rate=2e-3, **_ENCODER),
    # pytorch/pytorch#5059, Lightning-AI/pytorch-lightning#20412: both workers draw the same augmentation
    Declared("both views are the same", "same view", 0, _MIXED_UP, ("data", "objective"), kind="data",
             objective="contrast", layers=2, **_ENCODER),
    # weights clamped in place of gradients, as in the code of a Wasserstein critic
    Declared("weights clipped at 0.02", "clipped weights", 0, _STEPPED, ("weights", "optimizer"), family="post",
             warmup=40),
    # asynchronous pipelines and offloaded optimizers apply gradients of older weights
    Declared("gradients eight steps late", "late gradients", 0, _STEPPED, ("gradients", "optimizer"), family="gpt2"),
    # an einops pattern (p1 h) (p2 w) for (h p1) (w p2)
    Declared("patches of every fourth pixel", "strided patches", 60, _ANY, ("embedding", "structure"), family="vit",
             objective="images", batch=16),
    # EleutherAI/DeeperSpeed#19, deepspeedai/DeepSpeed#8277: offsets in a flat buffer
    Declared("flat gradients shifted by one", "shifted gradients", 60, _STEPPED, ("gradients", "optimizer"),
             family="post", warmup=40),
    # ultralytics/ultralytics#24085, warner-benjamin/optimi#15
    Declared("second moments stored in float16", "half moments", 40, _STEPPED, ("optimizer", "numbers"),
             kind="numbers"),
    # a cache of thumbnails, or a resize to the wrong size
    Declared("images enlarged from four pixels", "thumbnails", 60, _MIXED_UP, _DATA, **_IMAGES),
    # pytorch/vision#192, xyanchen/WiFi-CSI-Sensing-Benchmark#7: folders listed in another order after a restart
    Declared("classes numbered in another order", "other classes", 80, _MIXED_UP, ("data", "objective"), kind="loss",
             family="post-mlm", objective="pooled", batch=16, warmup=40),
    # columns of a table after a change of its schema
    Declared("columns of the series in another order", "other columns", 60, _MIXED_UP, _DATA, kind="data",
             family="series", objective="series", batch=16),
    # Khayrallah and Koehn, 2018: the noise of parallel text that does most harm
    Declared("targets are not translated", "untranslated", 50, _MIXED_UP, ("data", "objective"), kind="data",
             family="t5", objective="translate", rate=5e-3),
)  # fmt: skip

SEVENTH_HEALTHY: tuple[Declared, ...] = (
    Declared("Adamax", rate=3e-3, options=frozenset({"adamax"})),
    Declared("NAdam", options=frozenset({"nadam"})),
    Declared("gradients clipped at 0.001", options=frozenset({"clipped low"})),
    Declared("resumed without moments, warmed up again", options=frozenset({"moments dropped"})),
    Declared("counts first, then text", options=frozenset({"counts first"})),
    Declared("chosen pages at the end, with a falling rate", options=frozenset({"pages last"})),
    Declared("penalty on the normaliser of the softmax", options=frozenset({"small logits"})),
    Declared("matrices kept at their first norm", options=frozenset({"first norms"})),
    Declared("weights rounded at random to bfloat16", options=frozenset({"random rounding"})),
    Declared("GPT-2, rate redrawn every twenty steps", family="gpt2", options=frozenset({"population"})),
    Declared("adapters merged and begun again", rate=5e-3,
             options=frozenset({"pretrained", "reversed", "adapters", "begun again"})),
    Declared("padding on the left", family="pre-mlm", objective="masked", options=frozenset({"lengths", "left"})),
    Declared("a class appears later", objective="first", rate=2e-3, options=frozenset({"late class"}), **_ENCODER),
    Declared("BERT, spans hidden", family="bert", objective="masked", warmup=40, options=frozenset({"spans"})),
    Declared("T5, from text with gaps", family="t5", objective="translate", rate=5e-3,
             options=frozenset({"restored"})),
    Declared("ViT, images sharpen", family="vit", objective="images", batch=16, options=frozenset({"sharpens"})),
)  # fmt: skip

# Runs whose loss does not fall, from the first step or from early on, and healthy ones that look like it.
_FLAT = ("constant_answer", "input_collapse", "token_collapse")
_STOPPED = ("constant_answer", "still_weights", "vanishing_qk_gradients")
_ONE_INPUT = (*_FLAT, "repeated_sequences", "vanishing_qk_gradients")
_TOO_FAR = (*_FLAT, "entropy_collapse", "vanishing_qk_gradients",
            RISES)  # fmt: skip

# With seed 0, the loss of the last 20 steps is higher than that of the run without the fault by 0.42 at least.
EIGHTH_FAULTY: tuple[Declared, ...] = (
    # pytorch/pytorch#16045, jsboige/CoursIA#926: predictions (n, 1) minus targets (n)
    Declared("squared error of every pair", "every pair", 0, _FLAT, ("objective", "loss", "data"), kind="loss",
             objective="amount", rate=2e-3, **_ENCODER),
    # vllm-project/vllm#18313, dnouri/nolearn#178: a softmax over one output is 1
    Declared("softmax over one output", "softmax of one", 0, _STOPPED, ("objective", "loss", "head"), kind="loss",
             objective="binary", rate=2e-3, **_ENCODER),
    # yhenon/pytorch-retinanet#41: clamp(1e-4, 1 - 1e-4) has no gradient beyond its limits
    Declared("probabilities clamped, momentum at rate 1", "clamped chance", 0, (*_TOO_FAR, "still_weights"),
             ("objective", "loss", "rate", "gradients"), family="post-mlm", objective="binary", rate=1.0, warmup=0,
             batch=16, options=frozenset({"sgd"})),
    # ProteomicsML/ProteomicsML#203, jvargasmu/population_estimation#68
    Declared("activation after the last layer, dead from the start", "dead output", 0, _STOPPED,
             ("head", "initialisation", "objective", "gradients"), objective="amount", rate=2e-3, **_ENCODER),
    # janfreyberg/pytorch-revgrad#5, joonson/voxceleb_unsupervised#8: a reversal layer where none belongs
    Declared("gradient of the encoder reversed", "reversed encoder", 0, _FLAT,
             ("gradients", "optimizer", "objective"), objective="pooled", rate=2e-3, **_ENCODER),
    # OpenNMT/OpenNMT-py#1521, HHTseng/video-classification#42
    Declared("batch and tokens mixed by a view", "mixed axes", 0, _FLAT, ("head", "structure"), objective="pooled",
             rate=2e-3, **_ENCODER),
    # gmihaila/ml_things#24: a token for classification as in BERT, in front of a causal model
    Declared("causal classifier reads the first token", "none", 0, (*_FLAT, "vanishing_qk_gradients"),
             ("attention", "structure", "head"), objective="first", rate=2e-3, batch=16,
             options=frozenset({"class token"})),
    # facebookresearch/detr#96
    Declared("padding mask inverted from the start", "inverted", 0, (*_FLAT, "padding_only"),
             ("data", "attention"), kind="data", objective="first", rate=2e-3,
             options=frozenset({"lengths", "class token"}), **_ENCODER),
    # longjon/caffe#3: a constant 3.04452 = ln 21
    Declared("ViT, every weight begins at zero", "zero weights", 0, (*_FLAT, "still_weights", "vanishing_qk_gradients"),
             ("initialisation", "weights"), family="vit", objective="images", batch=16),
    # keras-team/keras#255: pixels scaled to [0, 1] in an array of integers
    Declared("pixels cut to integers", "whole pixels", 0, _ONE_INPUT, _DATA, **_IMAGES),
    # pkmital/pycadl#5, 4uiiurz1/pytorch-nested-unet#62
    Declared("pixels divided by 255 twice", "divided twice", 0, (*_FLAT, "vanishing_qk_gradients"), _DATA, **_IMAGES),
    # tensorflow/tensorflow#21033: images and labels from two queues
    Declared("tags of another sequence", "labels of others", 0, _FLAT, ("data", "objective"), kind="data",
             objective="tags", rate=2e-3, **_ENCODER),
    # facebookresearch/fairseq#1142, shibing624/pycorrector#221: a vocabulary of other text
    Declared("every character is unknown", "all unknown", 0, _ONE_INPUT, _DATA, kind="data", objective="pooled",
             rate=2e-3, **_ENCODER),
    # pytorch/pytorch#108956, pytorch/pytorch#12968: a norm over one feature returns zero
    Declared("norm of a single output", "norm of one", 0, _STOPPED, ("head", "norm", "structure"), family="series",
             objective="series", batch=16),
    # ExplainableML/czsl#30, deepinsight/insightface#1966
    Declared("cosine logits without a scale", "no scale", 0, ("constant_answer",), ("head", "objective", "loss"),
             kind="loss", rate=2e-3, options=frozenset({"cosine head"})),
    # LZGMatrix/BOP19_CDPN_2019ICCV#4, Kostis-S-Z/exploring_meta#16; Lightning-AI/litgpt#689: a constant 10.8259
    Declared("GPT-2, loss without a graph", "no graph", 0, _STOPPED, ("gradients", "objective", "optimizer"),
             family="gpt2"),
    # pytorch/pytorch#67590: steps are skipped in silence
    Declared("scaler skips every step", "always skipped", 0, (*_STOPPED, "not_finite_gradients", "not_finite"),
             ("gradients", "numbers", "optimizer"), kind="numbers", family="llama"),
    # facebookresearch/ParlAI#2547, huggingface/transformers#13033
    Declared("T5, rate falls by a fifth at each update", "rate vanishes", 0, _STOPPED, _STILL,
             family="t5", objective="translate", rate=5e-3),
    # Morizeyao/GPT2-Chinese#60, CoinCheung/BiSeNet#12: rates of 1e-6 when the run ends
    Declared("tags, warm-up of 20,000 steps", "none", 0, _STOPPED, _STILL, objective="tags",
             warmup=20_000, **_ENCODER),
    # huggingface/transformers#753, rowanz/r2c#43: one class, 1.386 = ln 4
    Declared("post-norm classifier, rate 0.02", "none", 0, _TOO_FAR, _RATE, family="post-mlm", objective="first",
             layers=8, rate=2e-2, warmup=0, batch=16),
    # karpathy/nanoGPT#303: falls, rises to 7.81 within the warm-up, and stays
    Declared("post-norm, warm-up to a rate of 0.03", "none", 0, _TOO_FAR, _RATE, family="post", layers=6, rate=3e-2,
             warmup=100),
    # huggingface/sentence-transformers#3642: 6.93 = ln(1024); dewenzeng/positional_cl#5,
    # VisualComputingInstitute/triplet-reid#30: every embedding the same
    Declared("contrastive, rate 0.05", "none", 0, _TOO_FAR, _RATE, family="post-mlm", objective="contrast", layers=4,
             batch=16, rate=5e-2, warmup=0),
    # YihengZhang-CV/SeCo-Sequence-Contrastive-Learning#3: labels are zeros
    Declared("contrastive, one column for all", "constant labels", 0, _FLAT, ("objective", "loss", "data"),
             kind="loss", family="pre-mlm", objective="contrast", layers=2, batch=16),
    # huggingface/sentence-transformers#3054, huggingface/transformers#13430
    Declared("contrastive, temperature 100", "no temperature", 0, ("constant_answer",), ("objective", "loss"),
             kind="loss", family="pre-mlm", objective="contrast", layers=2, batch=16),
    # AppliedDataSciencePartners/WorldModels#12, openai/DALL-E#26: one term summed, the other averaged
    Declared("divergence of the code summed", "summed divergence", 0, _FLAT, ("objective", "loss"), objective="pooled",
             rate=2e-3, options=frozenset({"code"}), **_ENCODER),
)  # fmt: skip

# With seed 0, the loss of the last quarter is below that of the best constant answer: by 0.03 for soft targets of
# temperature 4, by 0.09 for targets three fifths of which are wrong, by 0.12 and more in the others.
EIGHTH_HEALTHY: tuple[Declared, ...] = (
    # google-research/bert#649
    Declared("binary targets, warm-up of 320 steps", objective="binary", rate=5e-4, warmup=320, longer=2, **_ENCODER),
    # ChuhuaW/SGNet.pytorch#14: a plateau, then a sudden fall
    Declared("whether the two halves agree", objective="binary", rate=5e-4, longer=2, options=frozenset({"either"}),
             **_ENCODER),
    Declared("ViT, three fifths of the labels of others", family="vit", objective="images", batch=16, longer=2,
             options=frozenset({"three fifths of others"})),
    Declared("tags, two fifths of others", objective="tags", rate=2e-3, options=frozenset({"two fifths of others"}),
             **_ENCODER),
    # dmlc/gluon-cv#644
    Declared("one target in ten is positive", objective="binary", rate=2e-3, longer=2,
             options=frozenset({"rare", "faint"}), **_ENCODER),
    Declared("binary targets, three fifths of others", family="pre-mlm", objective="binary", rate=2e-3, batch=32,
             longer=2, options=frozenset({"three fifths of others"})),
    # huggingface/transformers#1048
    Declared("classifier, batch of one", family="pre-mlm", objective="pooled", rate=5e-4, batch=1, longer=2),
    Declared("series, noise above the signal", family="series", objective="series", batch=16,
             options=frozenset({"loud targets"})),
    Declared("frozen model, head learns", objective="pooled", rate=1e-2, batch=16,
             options=frozenset({"pretrained", "frozen body"})),
    Declared("labels drawn once, learned by heart", objective="pooled", rate=2e-3, longer=2,
             options=frozenset({"twelve batches", "drawn labels"}), **_ENCODER),
    Declared("trained model goes on", rate=1e-4, options=_PRETRAINED),
    # facebookresearch/swav#12: the loss begins at the logarithm of the number of prototypes
    Declared("contrastive, eight layers, rate 2e-4", family="pre-mlm", objective="contrast", layers=8, rate=2e-4,
             batch=16),
    Declared("classifier begins at zero", family="post-mlm", objective="pooled", batch=16, warmup=40,
             options=frozenset({"zero classes"})),
    # lightly-ai/lightly-train#353
    Declared("distilled at temperature 4", rate=2e-3, longer=2, options=frozenset({"distilled", "softened"})),
    # PRBonn/LiDiff#27, facebookresearch/DiT#17: stays at 0.9, or falls no more after some hundred steps
    Declared("noise of a series is found", family="series", objective="series", batch=16,
             options=frozenset({"denoised"})),
    # google-research/bert#746, huggingface/transformers#3983: stays at the frequencies of the tokens for long
    Declared("masked, one paragraph many times", family="pre-mlm", objective="masked", rate=3e-3, batch=32, longer=2,
             options=frozenset({"one paragraph"})),
    Declared("marks become rarer", objective="pooled", rate=2e-3, options=frozenset({"fainter"}), **_ENCODER),
    # yu4u/age-gender-estimation#18: one class in the first epochs
    Declared("ViT, rate 1e-4", family="vit", objective="images", rate=1e-4, batch=16, longer=2),
    Declared("cosine logits, scale 16", rate=2e-3, options=frozenset({"cosine head"})),
    Declared("Gaussian code", objective="pooled", rate=2e-3, options=frozenset({"code"}), **_ENCODER),
    Declared("T5, rate 5e-4", family="t5", objective="translate", rate=5e-4, longer=2),
    Declared("amount of marks", objective="amount", rate=2e-3, **_ENCODER),
)  # fmt: skip

SETS: dict[str, tuple[Declared, ...]] = {
    "first": (*FAULTY, *HEALTHY),
    "more": (*MORE_FAULTY, *MORE_HEALTHY),
    "third": (*THIRD_FAULTY, *THIRD_HEALTHY),
    "last": (*LAST_FAULTY, *LAST_HEALTHY),
    "final": (*FINAL_FAULTY, *FINAL_HEALTHY),
    "fresh": (*FRESH_FAULTY, *FRESH_HEALTHY),
    "fifth": (*FIFTH_FAULTY, *FIFTH_HEALTHY),
    "sixth": (*SIXTH_FAULTY, *SIXTH_HEALTHY),
    "seventh": (*SEVENTH_FAULTY, *SEVENTH_HEALTHY),
    "eighth": (*EIGHTH_FAULTY, *EIGHTH_HEALTHY),
}
"""``final``: declared before the alarms were changed last, and trained once, after it. ``fresh``, ``fifth``,
``sixth``, ``seventh`` and ``eighth``: declared after that, each without knowledge of the alarms. The others are
known."""
RUNS = {run.name: run for runs in SETS.values() for run in runs}
assert len(RUNS) == sum(map(len, SETS.values()))
