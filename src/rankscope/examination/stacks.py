"""Stacks in which tokens become alike, or grow: skips, norms, initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from rankscope._citations import Cite
from rankscope.examination import _source
from rankscope.examination._examination import Examination
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import cloned, shuffled
from rankscope.linalg.update import skip_gain
from rankscope.remedies import applied
from rankscope.stream.viewing import undisturbed, with_proven_cuts
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation

LOW = 0.15
"""Relative residual after the last block below which tokens count as alike."""
BETTER = 2.0
"""Factor by which an intervention has to raise it."""
KEPT = 0.5
"""Gain below which a skip loses most of the stream in a few blocks."""
CARRIED = 0.2
"""Cosine of the change of a token and the change of what a block returns for it, below which no skip leads around."""
PADDING = frozenset({"padding_attended"})
"""Padded tokens are left out of the relative residual, so that it means the same if others see them."""
RESIDUAL = "how much tokens differ after the last block (relative residual)"


def _fell(x: Examination) -> bool:
    """Whether tokens are alike after the last block and were not when they entered."""
    return bool(x.curve) and x.last < LOW and not x.entry < 2 * LOW


@cause(
    proof="the input of each block is added to its output",
    change="x = x + f(x)",
    order=30,
    cites=(Cite("dong2021attention", "thm. 2.2"),),
    despite=PADDING,
)
def no_skips(x: Examination) -> Iterator[Finding]:
    """Blocks without skip connections."""
    if not _fell(x) or len(x.blocks) < 2:
        return
    bare, some = _without_skips(x)
    if 2 * len(bare) <= len(x.blocks):
        return
    after = x.residuals(x.block_states(add_input=bare))
    if not after or not after[-1] > max(BETTER * x.last, LOW / 2):
        return
    kind = type(dict(x.blocks)[bare[0]])
    change = _edited(x, bare, _source.with_skips)
    yield Finding(
        "no_skips",
        f"{len(bare)} of {len(x.blocks)} blocks ({_pattern(bare)}) "
        + (
            "lack a skip connection: what enters them is not in what leaves them, and tokens become alike."
            if some
            else "have no skip connection: what leaves them is only what they compute, and tokens become alike."
        ),
        change
        or f"In the forward of {kind.__name__}: return x + f(x) instead of f(x), around attention and around the MLP",
        tried=bool(change),
        measured=RESIDUAL,
        before=x.last,
        after=after[-1],
        intervention="with skips added",
        where=_pattern(bare),
        curves=(tuple(x.curve), tuple(after)),
    )


def _without_skips(x: Examination) -> tuple[list[str], bool]:
    """Blocks around which no skip leads, and whether some have a sum inside, around a part of them.

    Blocks with fewer skips than attention and an MLP need, or with sums that are no known skips, are given another
    input: a skip around the whole block turns what it returns into the direction of the change.
    """
    if x.stack is None:
        return [name for name, _ in x.blocks], False
    plans = {call.module_name: [len(plan.skips) for plan in call.blocks] for call in x.stack.calls}
    if not x.stack.carries and not any(0 < count < 2 for counts in plans.values() for count in counts):
        return [name for name, counts in plans.items() if not any(counts)], False
    return [name for name, along in x.carried().items() if along < CARRIED], True


def _edited(
    x: Examination, names: list[str], edit: Callable[[_source.SourcePlace, nn.Module], list[_source.Edit]]
) -> str:
    """An edit of the blocks' forward as a sentence, if tokens stay apart with it; empty otherwise."""
    named = dict(x.blocks)
    block = named[names[0]]
    place = _source.place_of(type(block).forward) if x.edits else None
    if place is None or any(type(named[name]) is not type(block) for name in names):
        return ""

    def helps() -> bool:
        after = x.residuals(x.block_states())
        return bool(after) and after[-1] > max(BETTER * x.last, LOW / 2)

    return _source.tried(place, edit(place, block), helps)


def _pattern(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


@cause(
    proof="total = g stream + branch is solved for g at each sum, and the model runs with g = 1",
    change="a gain of 1 on the skip",
    order=31,
    needs={"structure"},
    despite=PADDING,
)
def weak_skips(x: Examination) -> Iterator[Finding]:
    """Skips with a gain below one half."""
    if not _fell(x) or x.view is None:
        return
    gains = _gains(x)
    weak = {place: gain for place, gain in gains.items() if abs(gain) < KEPT}
    if 2 * len(weak) <= len(gains) or not weak:
        return
    gain = sorted(weak.values())[len(weak) // 2]
    if gain == 0.0:
        return
    view = with_proven_cuts(x.view)
    with operating(x.model, Operation(attention_skip=1 / gain, mlp_skip=1 / gain), view=view):
        after = x.residuals(x.block_states())
    if after[-1] < max(BETTER * x.last, LOW / 2):
        return
    change = _edited(x, [name for name, _ in x.blocks], lambda place, _: _source.with_whole_skips(place))
    yield Finding(
        "weak_skips",
        f"The skips carry {gain:.2g} of the stream in {len(weak)} of {len(gains)} blocks: after {len(gains)} blocks "
        f"{abs(gain) ** (2 * len(gains)):.1g} of it is left, and tokens become alike.",
        change or f"Add the stream with gain 1 (x + f(x) instead of {gain:.2g} * x + f(x)); scale the branch f instead",
        tried=bool(change),
        measured=RESIDUAL,
        before=x.last,
        after=after[-1],
        intervention="with gain 1",
        curves=(tuple(x.curve), tuple(after)),
    )


def _gains(x: Examination) -> dict[int, float]:
    """Gain of the first skip of each block of the deepest stack."""
    from rankscope.stream.sites import SiteRef, SiteSelection
    from rankscope.stream.tracer import Observed, trace

    assert x.view is not None
    assert x.stack is not None
    name = x.stack.name
    stream: dict[int, Tensor] = {}
    branch: dict[int, Tensor] = {}
    gains: dict[int, float] = {}

    def see(ref: SiteRef, seen: Observed) -> None:
        if not isinstance(seen, Tensor) or ref.stack != name or ref.layer in gains:
            return
        if ref.site == "block.in":
            stream[ref.layer] = seen.detach().clone()
        elif ref.site.endswith(".out"):
            branch.setdefault(ref.layer, seen.detach().clone())
        elif ref.layer in stream and ref.layer in branch:
            gain = skip_gain(seen.detach(), branch[ref.layer], stream[ref.layer])
            if math.isfinite(gain):
                gains[ref.layer] = gain

    labels = ("attention", "mixer", "mlp", "both")
    sites = ("block.in", *(f"{label}.{end}" for label in labels for end in ("out", "sum")))
    x.forward_passes += 1
    with undisturbed(x.model), trace(x.view, SiteSelection.parse(sites), see):
        x.batch.run(x.model)
    return gains


@contextmanager
def _norms_first(x: Examination) -> Iterator[bool]:
    """Run torch's own layers with their norms first; False if the blocks are not such layers, or have them first.

    The class decides only which switch is turned: that of these two is part of their interface. What is claimed are the
    numbers before and after; other blocks are changed by a remedy.
    """
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layers = [block for _, block in x.blocks if isinstance(block, kinds) and not block.norm_first]
    if not layers or len(layers) < len(x.blocks):
        yield False
        return
    try:
        for layer in layers:
            layer.norm_first = True
        yield True
    finally:
        for layer in layers:
            layer.norm_first = False


@cause(
    proof="the weights are equal entry by entry; with the entries of each matrix in another order, tokens stay apart",
    change="an initialisation of its own for each layer",
    order=31,
    despite=PADDING,
)
def cloned_layers(x: Examination) -> Iterator[Finding]:
    """Layers that begin with the same weights."""
    same = cloned([block for _, block in x.blocks])
    if not same or not x.curve:
        return
    replaced = _own_weights(x, same)
    redrawn = x.residuals(x.block_states(replaced=replaced))
    after = redrawn[-1]
    name = type(x.blocks[0][1]).__name__
    owner = x.blocks[0][0].rpartition(".")[0]
    if after < BETTER * x.last:
        yield Finding(
            "cloned_layers",
            f"{len(same) + 1} layers begin with the same weights, as nn.TransformerEncoder makes them; at this depth "
            "it makes little difference.",
            kind="harmless",
            measured=RESIDUAL,
            before=x.last,
            after=after,
            intervention="with an initialisation of its own for each layer",
        )
        return
    change = "Give each layer an initialisation of its own before training: call reset_parameters() of its modules"
    with _norms_first(x) as possible:
        both = x.residuals(x.block_states(replaced=replaced))[-1] if possible else after
    if both > 1.5 * after:
        change += f". Also pass `norm_first=True` to `nn.{name}`, which raises it further, to {both:.2g}"
    yield Finding(
        "cloned_layers",
        f"{len(same) + 1} of {len(x.blocks)} layers ({name}) begin with exactly the same weights: they are copies of "
        "one layer (nn.TransformerEncoder and copy.deepcopy make them so).",
        change,
        measured=RESIDUAL,
        before=x.last,
        after=after,
        intervention="with an initialisation of its own for each layer",
        where=owner,
        curves=(tuple(x.curve), tuple(redrawn)),
    )


def _own_weights(x: Examination, same: list[int]) -> Mapping[str, Tensor]:
    replaced: dict[str, Tensor] = {}
    for number in same:
        name, block = x.blocks[number]
        for inner, parameter in block.named_parameters():
            if parameter.ndim >= 2:
                replaced[f"{name}.{inner}" if name else inner] = shuffled(parameter, number * 1009 + len(replaced))
    return replaced


@cause(
    proof="the same weights with the norms before the branches",
    change="norm_first=True",
    order=32,
    needs={"structure"},
    cites=(Cite("xiong2020layer"), Cite("dong2021attention", "thm. 2.2")),
    despite=PADDING,
)
def deep_post_norm(x: Examination) -> Iterator[Finding]:
    """A stack too deep for norms after its sums."""
    if not _fell(x) or x.stack is None or x.view is None:
        return
    post = sum(plan.post_norm for plan in x.stack.plans)
    if 2 * post < x.stack.depth:
        return
    with ExitStack() as opened:
        if opened.enter_context(_norms_first(x)):
            line, is_tried = f"Pass `norm_first=True` to `nn.{type(x.blocks[0][1]).__name__}`", True
        else:
            opened.enter_context(applied(x.model, "pre_norm", view=with_proven_cuts(x.view)))
            is_tried = False
            line = (
                f"In {type(x.blocks[0][1]).__name__}: x = x + f(norm(x)) instead of x = norm(x + f(x)) (pre-norm), "
                "with one norm after the last block"
            )
        moved = x.residuals(x.block_states())
    after = moved[-1]
    if after < max(BETTER * x.last, LOW / 2):
        return
    if not line.startswith("Pass"):
        written = _edited(x, [name for name, _ in x.blocks], _source.with_norms_first)
        line = f"{written} (pre-norm), with one norm after the last block" if written else line
        is_tried = bool(written)
    yield Finding(
        "deep_post_norm",
        f"{x.stack.depth} post-norm blocks: each halves the signal from the blocks before it.",
        line,
        tried=is_tried,
        measured=RESIDUAL,
        before=x.last,
        after=after,
        intervention="with the norms before the branches",
        curves=(tuple(x.curve), tuple(moved)),
    )


@cause(
    proof="the matrices that write to the stream are divided by the square root of twice the depth",
    change="initialise the last matrix of each branch with std / sqrt(2 depth), or add norms",
    order=34,
)
def exploding_stream(x: Examination) -> Iterator[Finding]:
    """A stream that grows by a factor per block."""
    sizes = [float(one.double().square().mean().sqrt()) for one in x.plain_states] if x.blocks else []
    if len(sizes) < 3 or not all(math.isfinite(size) and size > 0 for size in sizes):
        return
    growth = sizes[-1] / sizes[0]
    middle = sizes[len(sizes) // 2]
    # By a factor per block, not by steps: massive activations appear at once, sums of branches grow as a root.
    if growth < 100 or not (middle / sizes[0] > growth**0.25 and sizes[-1] / middle > growth**0.25):
        return
    factor = 1 / math.sqrt(2 * len(sizes))
    last = _last_matrices(x)
    if not last:
        return
    named = dict(x.model.named_parameters())
    after = [
        float(one.double().square().mean().sqrt())
        for one in x.block_states(replaced={name: named[name].detach() * factor for name in last})
    ]
    ratio = after[-1] / after[0]
    if ratio > growth / 10:
        return
    yield Finding(
        "exploding_stream",
        f"The stream grows by a factor of {growth ** (1 / (len(sizes) - 1)):.2g} per block: the branches add more than "
        "there is, and nothing normalises what they read.",
        "Initialise the last matrix of each branch smaller, by 1 / sqrt(2 * depth), or put a norm before each branch",
        measured="size of the stream after the last block, over that after the first",
        before=growth,
        after=ratio,
        intervention="with these matrices scaled down",
        curves=(tuple(size / sizes[0] for size in sizes), tuple(size / after[0] for size in after)),
    )


def _last_matrices(x: Examination) -> list[str]:
    """The weights of the last ``nn.Linear`` in each direct child of a block.

    A guess of what writes to the stream: if it is wrong, scaling them does not help, and nothing is claimed.
    """
    names = []
    for name, block in x.blocks:
        for child, part in block.named_children():
            linear = [(n, m) for n, m in part.named_modules() if isinstance(m, nn.Linear)]
            if linear:
                inner, _ = linear[-1]
                names.append(".".join(filter(None, (name, child, inner, "weight"))))
    return names
