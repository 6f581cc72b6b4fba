"""Ten further reports, written after the causes and looked at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.exam.reports.parts import Case, LanguageModel, next_token, text
from benchmarks.exam.reports.patterns import Pattern, seeded
from benchmarks.exam.reports.printed import written

FURTHER: list[Pattern] = []


def leak(case: Case) -> float:
    """How much the last token changes the output at the others."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs.clone()
        ids[:, -1] = (ids[:, -1] + 1) % 40
        after = case.model(ids)
    return float((before - after)[:, :-1].abs().max())


def padding(case: Case) -> float:
    """How much padding changes the output at other tokens."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs["ids"].clone()
        ids[:, 12:] = (ids[:, 12:] + 1) % 40
        after = case.model(ids, case.inputs["mask"])
    return float((before - after)[:, :12].abs().max())


def others(case: Case) -> float:
    """How much one sequence changes the output of the others."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs.clone()
        ids[1] = (ids[1] + 1) % 40
        after = case.model(ids)
    return float((before - after)[2:].abs().max())


def rows(case: Case) -> float:
    """Distance of the sums of attention from one: with values that are all one, the first block has to add ones."""
    model = copy.deepcopy(case.model)
    block = model.blocks[0]
    with torch.no_grad():
        x = model.embed(case.inputs) + model.place[: case.inputs.shape[1]]
        block.v.weight.zero_()
        block.v.bias.fill_(1.0)
        block.mlp[2].weight.zero_()
        block.mlp[2].bias.zero_()
        return float((block(x) - x - 1).abs().max())


def small(value: float) -> bool:
    """Whether a leak is gone."""
    return value < 1e-4


MASK = "            scores = scores.masked_fill(causal, -1e9)\n"
WRONG: dict[str, tuple[tuple[str, str], ...]] = {
    "mask not in place": (("scores = scores.masked_fill(keep", "scores.masked_fill(keep"),),
    "no mask": ((MASK, "            pass\n"),),
    "reversed": (("masked_fill(causal, -1e9)", "masked_fill(causal.T, -1e9)"),),
    "over batch": (("softmax(-1)", "softmax(0)"),),
    "over queries": (("softmax(-1)", "softmax(1)"),),
    "two softmaxes": (("softmax(-1)\n", "softmax(-1)\n        probs = probs.softmax(-1)\n"),),
    "mask after": (
        (MASK, "            pass\n"),
        ("softmax(-1)\n", "softmax(-1)\n        probs = probs.masked_fill(causal, 0.0)\n"),
    ),
}
"""Lines of ``Mixing.forward`` that are written wrongly."""


def _add(number: str, thread: str, words: str, codes: set[str], wrong: str, symptom: Callable[[Case], float]) -> None:
    call = "padded()" if wrong == "mask not in place" else "language()"
    edits = [("Mixing.forward", old, new) for old, new in WRONG[wrong]]
    FURTHER.append(
        Pattern(
            number,
            thread,
            words,
            frozenset(codes),
            lambda: written(call, *edits),
            lambda: written(call),
            symptom,
            small,
        )
    )


_add("F1", "opendilab/DI-engine#333", "the padding mask has no effect: masked_fill is not in place",
     {"padding_attended"}, "mask not in place", padding)  # fmt: skip
_add("F2", "huggingface/transformers#48745", "the loss of a causal language model falls to zero on random tokens",
     {"causal_mask"}, "no mask", leak)  # fmt: skip
_add("F3", "pytorch/pytorch#28272", "generate_square_subsequent_mask is reversed", {"causal_mask"}, "reversed", leak)
_add("F4", "PetrochukM/PyTorch-NLP#2", "softmax runs over the batch: weights are always 1 for one sequence",
     {"sequences_mix"}, "over batch", others)  # fmt: skip
_add("F5", "labmlai/annotated_deep_learning_paper_implementations#146", "softmax over queries in an einsum",
     {"softmax_axis"}, "over queries", rows)  # fmt: skip
_add("F6", "zyy-2001/DisKT#6", "a second softmax gives later positions a probability", {"causal_mask"},
     "two softmaxes", leak)  # fmt: skip
_add("F7", "huggingface/pytorch-image-models#2236", "the mask is applied after the softmax: rows do not sum to one",
     {"softmax_axis", "mask_after_softmax"}, "mask after", rows)  # fmt: skip


def floor(case: Case) -> float:
    """The smallest loss that the output can have: probabilities cannot be far apart."""
    assert case.labels is not None
    with torch.no_grad():
        is_probability = float((case.call().sum(-1) - 1).abs().max()) < 1e-4
    best = F.one_hot(case.labels, 40).float()
    return float(next_token(best if is_probability else 50 * best, case.labels))


FURTHER.append(
    Pattern(
        "F8",
        "bkitano/llama-from-scratch#5",
        "softmax before cross_entropy",
        frozenset({"double_softmax"}),
        lambda: written(
            "Case(Predictor(), *text(), next_token)",
            ("Predictor.forward", "return self.inner(ids)", "return self.inner(ids).softmax(-1)"),
        ),
        lambda: written("Case(Predictor(), *text(), next_token)"),
        floor,
        lambda value: value < 0.1,
    )
)


def _score_used(case: Case) -> float:
    gradient = torch.autograd.grad(case.call().square().sum(), case.model.body.score.weight)[0]
    return float(gradient.abs().max())


FURTHER.append(
    Pattern(
        "F9",
        "DEEP-PolyU/KEQA_WSDM19#2",
        "all weights of the attention are 1.0",
        frozenset({"dead_branch", "softmax_over_one"}),
        lambda: written("pooled()", ("Pooling.forward", "softmax(1)", "softmax(-1)")),
        lambda: written("pooled()"),
        _score_used,
        lambda value: value > 1e-6,
    )
)


@seeded
def masked(*, hidden: bool) -> Case:
    ids, _ = text()
    given = ids.clone()
    if hidden:
        given[:, ::3] = 39
    return Case(LanguageModel(depth=2, causal=False), given, ids, next_token)


FURTHER.append(
    Pattern(
        "F10",
        "lucidrains/muse-maskgit-pytorch#11",
        "the loss falls to zero: the ids are fed instead of the masked ones",
        frozenset({"labels_are_inputs"}),
        lambda: masked(hidden=False),
        lambda: masked(hidden=True),
        lambda case: float((case.inputs == case.labels).float().mean()),
        lambda value: value < 0.9,
    )
)
