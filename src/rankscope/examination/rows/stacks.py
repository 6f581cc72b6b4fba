"""Stacks in which tokens become alike, or grow; attention that picks one key, or none."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rankscope.examination import source
from rankscope.examination.experiments.changes import in_blocks
from rankscope.examination.experiments.weights import attention_softmax
from rankscope.examination.findings import FileEdit
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Decoder, Layer, Program, classes, decoder, ids, stack
from rankscope.examination.spec import Finding, row

PADDING = frozenset({"padding_attended", "padding_alone_seen"})
"""Padded tokens are left out of the relative residual, so that it means the same if others see them."""
RESIDUAL = "how much tokens differ after the last block (relative residual)"
ENTROPY = "relative entropy of attention, mean over heads (0 one-hot, 1 uniform)"


def _pattern(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class _Bare(Layer):
    """A block without skip connections."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x))
        out: Tensor = self.mlp(self.norm2(x))
        return out


@row(
    reads=("skips_missing",),
    order=30,
    despite=PADDING,
    bad=lambda: stack([_Bare(causal=False) for _ in range(6)]),
    good=lambda: stack([Layer(causal=False) for _ in range(6)]),
)
def no_skips(x: Examination, missing: Outcome) -> Finding:
    """Blocks without skip connections."""
    bare, after = missing["names"], missing["after"]
    kind = type(dict(x.blocks)[bare[0]])
    change, edits = in_blocks(x, bare, source.with_skips)
    return Finding(
        "no_skips",
        f"{len(bare)} of {len(x.blocks)} blocks ({_pattern(bare)}) "
        + (
            "lack a skip connection: what enters them is not in what leaves them, and tokens become alike."
            if missing["some"]
            else "have no skip connection: what leaves them is only what they compute, and tokens become alike."
        ),
        change
        or f"In the forward of {kind.__name__}: return x + f(x) instead of f(x), around attention and around the MLP",
        tried=bool(change),
        measured=RESIDUAL,
        before=missing["curve"][-1],
        after=after[-1],
        intervention="with skips added",
        where=_pattern(bare),
        curves=(tuple(missing["curve"]), tuple(after)),
        edits=edits,
    )


@row(
    reads=("skips_weak",),
    order=31,
    needs={"structure"},
    despite=PADDING,
    bad=lambda: stack([Layer(gain=0.2, causal=False) for _ in range(8)]),
    good=lambda: stack([Layer(causal=False) for _ in range(8)]),
)
def weak_skips(x: Examination, weak: Outcome) -> Finding:
    """Skips with a gain below one half."""
    gain, count, after = weak["gain"], weak["count"], weak["after"]
    change, edits = in_blocks(x, [name for name, _ in x.blocks], lambda place, _: source.with_whole_skips(place))
    return Finding(
        "weak_skips",
        f"The skips carry {gain:.2g} of the stream in {weak['weak']} of {count} blocks: after {count} blocks "
        f"{abs(gain) ** (2 * count):.1g} of it is left, and tokens become alike.",
        change or f"Add the stream with gain 1 (x + f(x) instead of {gain:.2g} * x + f(x)); scale the branch f instead",
        tried=bool(change),
        measured=RESIDUAL,
        before=weak["curve"][-1],
        after=after[-1],
        intervention="with gain 1",
        curves=(tuple(weak["curve"]), tuple(after)),
        edits=edits,
    )


def _layers(depth: int, copied: bool, post: bool = False) -> list[nn.Module]:
    first = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=not post)
    made = [copy.deepcopy(first) for _ in range(depth)]
    for one in made if not copied else ():
        for module in one.modules():
            if isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()
            elif isinstance(module, nn.Linear):
                module.reset_parameters()
    return list(made)


@row(
    reads=("layers_cloned",),
    order=31,
    despite=PADDING,
    bad=lambda: stack(_layers(24, copied=True, post=True)),
    good=lambda: stack(_layers(3, copied=False)),
)
def cloned_layers(x: Examination, cloned: Outcome) -> Finding:
    """Layers that begin with the same weights."""
    before, after, both = cloned["curve"][-1], cloned["after"][-1], cloned["both"]
    name = type(x.blocks[0][1]).__name__
    if not cloned["matters"]:
        return Finding(
            "cloned_layers",
            f"{cloned['count']} layers begin with the same weights, as nn.TransformerEncoder makes them; at this depth "
            "it makes little difference.",
            kind="harmless",
            measured=RESIDUAL,
            before=before,
            after=after,
            intervention="with an initialisation of its own for each layer",
        )
    change = "Give each layer an initialisation of its own before training: call reset_parameters() of its modules"
    if both > 1.5 * after:
        change += f". Also pass `norm_first=True` to `nn.{name}`, which raises it further, to {both:.2g}"
    return Finding(
        "cloned_layers",
        f"{cloned['count']} of {len(x.blocks)} layers ({name}) begin with exactly the same weights: they are copies of "
        "one layer (nn.TransformerEncoder and copy.deepcopy make them so).",
        change,
        measured=RESIDUAL,
        before=before,
        after=after,
        intervention="with an initialisation of its own for each layer",
        where=x.blocks[0][0].rpartition(".")[0],
        curves=(tuple(cloned["curve"]), tuple(cloned["after"])),
    )


@row(
    reads=("norms_after_sums",),
    order=32,
    needs={"structure"},
    despite=PADDING,
    bad=lambda: stack(_layers(48, copied=False, post=True)),
    good=lambda: stack(_layers(48, copied=False)),
)
def deep_post_norm(x: Examination, after_sums: Outcome) -> Finding:
    """A stack too deep for norms after its sums."""
    assert x.stack is not None
    after = after_sums["after"]
    edits: tuple[FileEdit, ...] = ()
    kind = type(x.blocks[0][1]).__name__
    change, tried = f"Pass `norm_first=True` to `nn.{kind}`", True
    if not after_sums["own"]:
        change, edits = in_blocks(x, [name for name, _ in x.blocks], source.with_norms_first)
        tried = bool(change)
        change = change or f"In {kind}: x = x + f(norm(x)) instead of x = norm(x + f(x))"
        change += " (pre-norm), with one norm after the last block"
    return Finding(
        "deep_post_norm",
        f"{x.stack.depth} post-norm blocks: each halves the signal from the blocks before it.",
        change,
        tried=tried,
        measured=RESIDUAL,
        before=after_sums["curve"][-1],
        after=after[-1],
        intervention="with the norms before the branches",
        curves=(tuple(after_sums["curve"]), tuple(after)),
        edits=edits,
    )


class _Added(nn.Module):
    """A block that adds a map of what it takes, with or without a norm before it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.map = norm, nn.Linear(32, 32)
        nn.init.normal_(self.map.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.map(self.norm(x))
        return out


@row(
    reads=("stream_grows",),
    order=34,
    bad=lambda: stack([_Added(nn.Identity()) for _ in range(8)]),
    good=lambda: stack([_Added(nn.LayerNorm(32)) for _ in range(8)]),
)
def exploding_stream(x: Examination, grows: Outcome) -> Finding:
    """A stream that grows by a factor per block."""
    growth, sizes, after = grows["growth"], grows["sizes"], grows["after"]
    return Finding(
        "exploding_stream",
        f"The stream grows by a factor of {growth ** (1 / (len(sizes) - 1)):.2g} per block: the branches add more than "
        "there is, and nothing normalises what they read.",
        "Initialise the last matrix of each branch smaller, by 1 / sqrt(2 * depth), or put a norm before each branch",
        measured="size of the stream after the last block, over that after the first",
        before=growth,
        after=after[-1],
        intervention="with these matrices scaled down",
        curves=(tuple(sizes), tuple(after)),
    )


def _scaled(x: Examination, experiment: str, width: int) -> tuple[str, tuple[FileEdit, ...]]:
    softmax = attention_softmax(x)
    return x.edited(experiment, softmax, source.scaled_once(softmax, width))


def _sharp(fault: str, size: float) -> Program:
    """A decoder whose queries and keys are larger than usual."""
    program = decoder(fault)
    model = program.model
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.qkv.weight.mul_(size)  # type: ignore[union-attr, operator]
    return program


@row(
    reads=("attention_one_hot",),
    order=35,
    needs={"structure"},
    bad=lambda: _sharp("sharp", 4.0),
    good=lambda: _sharp("", 1.0),
)
def saturated_attention(x: Examination, one_hot: Outcome) -> Finding:
    """Attention that is one-hot in most heads."""
    width, largest = one_hot["width"], one_hot["largest"]
    if width is not None:
        change, edits = _scaled(x, "attention_one_hot", width)
        return Finding(
            "saturated_attention",
            f"The scores of attention are not divided by sqrt(width of a head): they reach {largest:.0f}, and the "
            "softmax picks one key.",
            change or f"Divide the product of queries and keys by the square root of {width}",
            tried=bool(change),
            measured=ENTROPY,
            before=one_hot["before"],
            after=one_hot["after"],
            intervention=f"with scores divided by sqrt({width})",
            edits=edits,
        )
    return Finding(
        "saturated_attention",
        f"Attention picks a single key in nearly every row: scores reach {largest:.0f}. Its gradient vanishes, and "
        "small changes of the weights flip it.",
        "Normalise queries and keys before their product (qk-norm)",
        measured=ENTROPY,
        before=one_hot["before"],
        after=one_hot["after"],
        intervention=f"with scores divided by {max(largest / 4, 1.0):.3g}",
    )


@row(reads=("attention_flat",), order=36, needs={"structure"}, bad=lambda: _sharp("flat", 0.4), good=decoder)
def doubled_scale(x: Examination, flat: Outcome) -> Finding:
    """Attention that is uniform whatever queries and keys say."""
    width, power = flat["width"], flat["power"]
    words = {1.5: "1 / width**2", 1.0: "1 / width**1.5", 0.5: "1 / width"}[power]
    change, edits = _scaled(x, "attention_flat", width)
    return Finding(
        "doubled_scale",
        f"Attention is uniform to {flat['before']:.1g}: the scores are too small by a factor of about "
        f"{width**power:.0f}, as with a scale of {words} instead of 1 / sqrt(width) for heads {width} wide.",
        change
        or f"Scale the scores once, by 1 / sqrt({width}) (F.scaled_dot_product_attention and nn.MultiheadAttention "
        "scale by themselves)",
        tried=bool(change),
        measured="standard deviation of the scores of a row",
        before=flat["before"],
        after=flat["after"],
        intervention=f"with scores multiplied by {width**power:.0f}",
        edits=edits,
    )


class _Broadcast(nn.Module):
    """A series that is added to every channel alike, or projected."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.enter, self.place = nn.Linear(1, 32), nn.Parameter(torch.randn(12, 32))
        self.layers, self.head = nn.ModuleList(Layer(causal=False) for _ in range(3)), nn.Linear(32, 3)
        self.projected = projected

    def forward(self, x: Tensor) -> Tensor:
        x = (self.enter(x) if self.projected else x) + self.place
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


def _series(projected: bool) -> Program:
    """Series of numbers with a class each."""
    return Program(_Broadcast(projected), torch.randn(12, 12, 1), classes())


@row(
    reads=("one_direction",), order=10, needs={"structure"}, bad=lambda: _series(False), good=lambda: _series(True)
)  # fmt: skip
def input_in_one_direction(x: Examination, direction: Outcome) -> Finding:
    """An input that is added to every channel alike, which norms remove."""
    return Finding(
        "input_in_one_direction",
        "The input adds the same number to every channel (it is broadcast over the width), and LayerNorm subtracts "
        "exactly that: the blocks see the positions and hardly the input.",
        "Project the input to the width of the model with nn.Linear, before positions are added",
        measured="share of the difference between inputs that a LayerNorm removes",
        before=direction["share"] ** 2,
    )


class _Dead(Classifier):
    def __init__(self, bias: float) -> None:
        super().__init__()
        self.act = nn.ReLU()
        nn.init.constant_(self.mix.bias, bias)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.mix(self.embed(ids))).mean(1))
        return out


@row(
    reads=("lost_in_part",),
    order=40,
    bad=lambda: Program(_Dead(-50.0), ids(), classes()),
    good=lambda: Program(_Dead(0.0), ids(), classes()),
)
def lost_in_module(x: Examination, lost: Outcome) -> Finding:
    """A module behind which all inputs are alike."""
    call, suspect = lost["call"], lost["suspect"]
    dead = call.output is not None and not bool(call.output.any())
    how = (
        f"all its outputs are 0 (its inputs are at most {float(call.given.max()):.3g})"
        if dead and call.given is not None
        else "its output is the same for every input"
    )
    return Finding(
        "lost_in_module",
        f"The input is lost in {call.name} ({type(call.module).__name__}): {how}. The weights of {suspect.name} are "
        "the reason.",
        f"Look at how the weights and the bias of {suspect.name} came to be what they are",
        measured="how much the outputs of different inputs differ, relative to their size",
        before=lost["before"],
        after=lost["after"],
        intervention=f"with new weights for {suspect.name}",
        where=suspect.name or "",
    )
