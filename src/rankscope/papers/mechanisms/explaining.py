"""The most surprising rows, each with the experiment that explains it: one component changed, all else kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rankscope.papers.mechanisms.summing import AS_IT_IS, Line
from rankscope.papers.mechanisms.wording import end_words
from rankscope.views import number

Lines = Mapping[tuple[str, str], Line]


def explain(lines: Sequence[Line]) -> str:
    """One paragraph for every change that the run holds."""
    held = {(line.mechanism.name, line.change): line for line in lines}
    told = [tell(held) for (key, tell) in _TOLD.items() if key in held and (key[0], AS_IT_IS) in held]
    return "\n\n".join(told)


def _last(line: Line, variant: str) -> str:
    return end_words(line.ends.get(variant))


def _nystrom(held: Lines) -> str:
    own, without = held["nystrom", AS_IT_IS], held["nystrom", "no convolution"]
    told = (
        "**Explained: an approximation of softmax that does not collapse.** Nyströmformer approximates the complete "
        f"attention of BERT, and without skips it stands at {_last(own, 'cut')}"
    )
    if ("bert", AS_IT_IS) in held:
        told += f", where BERT is at {_last(held['bert', AS_IT_IS], 'cut')}"
    return told + (
        ". It is not the approximation: its heads also add a convolution of the values, which reads zeros beyond both "
        f"ends of the sequence, so that tokens near the ends differ from those inside: equal tokens leave at "
        f"{number(own.level['cut'])}. With the weights of that convolution set to 0, equal tokens stay equal, and "
        f"float64 reads {_last(without, 'cut')}: the tokens are equal up to rounding."
    )


def _sinks(held: Lines) -> str:
    own, without = held["sinks", AS_IT_IS], held["sinks", "no sinks"]
    return (
        "**Explained: softmax attention that leaves equal tokens unequal.** gpt-oss is causal softmax attention like "
        f"Llama, yet of order {own.order['cut']}: equal tokens leave it at {number(own.level['cut'])} without skips, "
        f"and at {number(own.level['pure'])} without norms and MLPs. The sink takes a share that depends on how many "
        "keys stand beside it, so a row of attention sums to less than one by an amount that depends on its position. "
        f"Without the sinks the order is {without.order['cut']}, equal tokens stay equal to rounding, and "
        f"attention alone ends at {_last(without, 'pure')} instead of {_last(own, 'pure')}."
    )


def _llama(held: Lines) -> str:
    own, raised = held["llama", AS_IT_IS], held["llama", "embeddings x 50"]
    told = (
        "**Explained: skips that hardly help.** The whole Llama, with skips, is among the models that lose most: "
        f"it ends at {_last(own, 'full')}, not far from {_last(own, 'cut')} with its skips cut"
    )
    if ("gpt2", AS_IT_IS) in held:
        told += f", while GPT-2, causal as well, keeps {_last(held['gpt2', AS_IT_IS], 'full')}"
    assert own.size is not None
    assert raised.size is not None
    return told + (
        ". Its embeddings are drawn with standard deviation 0.02, and the norm before a branch brings them to 1: "
        f"tokens leave the first block at a root mean square of {number(own.size[0])} and the last at "
        f"{number(own.size[1])}, so that most of what the stream holds came out of branches. With the embeddings 50 "
        f"times as large, and nothing else changed, tokens leave the first block at {number(raised.size[0])} and the "
        f"last at {number(raised.size[1])}, and the whole model ends at {_last(raised, 'full')}; without skips it ends "
        f"at {_last(raised, 'cut')}."
    )


def _bias(held: Lines) -> str:
    own, without = held["relative-bias", AS_IT_IS], held["relative-bias", "no bias"]
    return (
        "**Explained: complete attention of order 1.** The encoder of T5 sees all tokens, as BERT does, and yet is of "
        f"order {own.order['cut']}: {_last(own, 'cut')} after the last block. With its bias per distance set to 0 it "
        f"is of order {without.order['cut']} and ends at {_last(without, 'cut')}: the bias alone, small as it is "
        "drawn, makes the difference between doubly exponential and exponential."
    )


def _modernbert(held: Lines) -> str:
    own, without = held["modernbert", AS_IT_IS], held["modernbert", "no epsilon"]
    return (
        f"**Explained: tokens that vanish.** Without skips, ModernBERT is at {_last(own, 'cut')}: nothing is left to "
        "compare. Its weights are drawn so small that a block without its skip gives back tokens below the epsilon "
        "that its norms add to a variance; from there on a norm no longer restores their size, and a gated MLP, which "
        f"multiplies two small numbers, squares it. With an epsilon of 1e-60 the same network ends at "
        f"{_last(without, 'cut')}, with order {without.order['cut']}."
    )


_TOLD: Mapping[tuple[str, str], Callable[[Lines], str]] = {
    ("nystrom", "no convolution"): _nystrom,
    ("sinks", "no sinks"): _sinks,
    ("llama", "embeddings x 50"): _llama,
    ("relative-bias", "no bias"): _bias,
    ("modernbert", "no epsilon"): _modernbert,
}
