"""Stacks in which tokens become alike, or grow; attention that picks one key, or none."""

from __future__ import annotations

from rankscope.examination import source
from rankscope.examination.experiments.changes import in_blocks
from rankscope.examination.experiments.weights import attention_softmax
from rankscope.examination.findings import CarriedOut
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER, DECODER, ENCODER, Script
from rankscope.examination.spec import Finding, finding, row

PADDING = frozenset({"padding_attended", "padding_alone_seen"})
"""Padded tokens are left out of the relative residual, so that it means the same if others see them."""
RESIDUAL = "how much tokens differ after the last block (relative residual)"
ENTROPY = "relative entropy of attention, mean over heads (0 one-hot, 1 uniform)"


def _pattern(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


@row(
    "skips_missing",
    order=30,
    despite=PADDING,
    good=ENCODER.but("range(2)", "range(6)"),
    fault=("x = x + self.attention", "x = self.attention", "return x + self.mlp", "return self.mlp"),
)
def no_skips(x: Examination, missing: Outcome) -> Finding:
    """Blocks without skip connections."""
    bare, after, before = missing["names"], missing["after"], missing["curve"]
    kind = type(dict(x.blocks)[bare[0]])
    return finding(
        f"{len(bare)} of {len(x.blocks)} blocks ({_pattern(bare)}) "
        + (
            "lack a skip connection: what enters them is not in what leaves them, and tokens become alike."
            if missing["some"]
            else "have no skip connection: what leaves them is only what they compute, and tokens become alike."
        ),
        f"In the forward of {kind.__name__}: return x + f(x) instead of f(x), around attention and around the MLP",
        in_blocks(x, bare, source.with_skips),
        evidence=(RESIDUAL, before[-1], after[-1], "with skips added"),
        where=_pattern(bare),
        curves=(tuple(before), tuple(after)),
    )


@row(
    "skips_weak",
    order=31,
    needs={"structure"},
    despite=PADDING,
    good=ENCODER.but("range(2)", "range(8)"),
    fault=("x = x + self.attention", "x = 0.2 * x + self.attention", "return x + self", "return 0.2 * x + self"),
)
def weak_skips(x: Examination, weak: Outcome) -> Finding:
    """Skips with a gain below one half."""
    gain, count, before, after = weak["gain"], weak["count"], weak["curve"], weak["after"]
    return finding(
        f"The skips carry {gain:.2g} of the stream in {weak['weak']} of {count} blocks: after {count} blocks "
        f"{abs(gain) ** (2 * count):.1g} of it is left, and tokens become alike.",
        f"Add the stream with gain 1 (x + f(x) instead of {gain:.2g} * x + f(x)); scale the branch f instead",
        in_blocks(x, [name for name, _ in x.blocks], lambda place, _: source.with_whole_skips(place)),
        evidence=(RESIDUAL, before[-1], after[-1], "with gain 1"),
        curves=(tuple(before), tuple(after)),
    )


def _layers(made: str) -> Script:
    """Layers of torch in the place of one's own."""
    return ENCODER.but(
        "from torch import nn\n", "from torch import nn\nfrom copy import deepcopy\n",
        "class Attention(nn.Module)",
        "def layer(norm_first):\n    return nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, "
        "norm_first=norm_first)\n\n\nclass Attention(nn.Module)",
        "nn.ModuleList(Layer() for _ in range(2))", f"nn.ModuleList({made})",
    )  # fmt: skip


@row(
    "layers_cloned",
    order=31,
    despite=PADDING,
    good=_layers("layer(False) for _ in range(24)"),
    fault=("layer(False) for _ in range(24)", "map(deepcopy, [layer(False)] * 24)"),
)
def cloned_layers(x: Examination, cloned: Outcome) -> Finding:
    """Layers that begin with the same weights."""
    before, after = cloned["curve"], cloned["after"]
    name, intervention = type(x.blocks[0][1]).__name__, "with an initialisation of its own for each layer"
    if not cloned["matters"]:
        return finding(
            f"{cloned['count']} layers begin with the same weights, as nn.TransformerEncoder makes them; at this depth "
            "it makes little difference.",
            kind="harmless",
            evidence=(RESIDUAL, before[-1], after[-1], intervention),
        )
    return finding(
        f"{cloned['count']} of {len(x.blocks)} layers ({name}) begin with exactly the same weights: they are copies of "
        "one layer (nn.TransformerEncoder and copy.deepcopy make them so).",
        "Give each layer an initialisation of its own before training: call reset_parameters() of its modules",
        evidence=(RESIDUAL, before[-1], after[-1], intervention),
        where=x.blocks[0][0].rpartition(".")[0],
        curves=(tuple(before), tuple(after)),
    )


@row(
    "norms_after_sums",
    order=32,
    needs={"structure"},
    despite=PADDING,
    good=_layers("layer(True) for _ in range(48)"),
    fault=("layer(True)", "layer(False)"),
)
def deep_post_norm(x: Examination, after_sums: Outcome) -> Finding:
    """A stack too deep for norms after its sums."""
    assert x.stack is not None
    before, after, kind = after_sums["curve"], after_sums["after"], type(x.blocks[0][1]).__name__
    made, why = CarriedOut(f"Pass `norm_first=True` to `nn.{kind}`"), ""
    hint, last = (
        f"In {kind}: x = x + f(norm(x)) instead of x = norm(x + f(x))",
        " (pre-norm), with one norm after the last block",
    )
    if not after_sums["own"]:
        made, why = in_blocks(x, [name for name, _ in x.blocks], source.with_norms_first), last
    return finding(
        f"{x.stack.depth} post-norm blocks: each halves the signal from the blocks before it.",
        hint + last,
        made,
        why=why,
        evidence=(RESIDUAL, before[-1], after[-1], "with the norms before the branches"),
        curves=(tuple(before), tuple(after)),
    )


@row(
    "stream_grows",
    order=34,
    good=ENCODER.but(
        "range(2)", "range(8)",
        "= Model()\n", "= Model()\nfor layer in model.layers:\n    nn.init.normal_(layer.mlp[2].weight)\n",
    ),
    fault=("return x + self.mlp(self.norm2(x))", "return x + self.mlp(x)"),
)  # fmt: skip
def exploding_stream(x: Examination, grows: Outcome) -> Finding:
    """A stream that grows by a factor per block."""
    growth, sizes, after = grows["growth"], grows["sizes"], grows["after"]
    return finding(
        f"The stream grows by a factor of {growth ** (1 / (len(sizes) - 1)):.2g} per block: the branches add more than "
        "there is, and nothing normalises what they read.",
        "Initialise the last matrix of each branch smaller, by 1 / sqrt(2 * depth), or put a norm before each branch",
        evidence=(
            "size of the stream after the last block, over that after the first",
            growth,
            after[-1],
            "with these matrices scaled down",
        ),
        curves=(tuple(sizes), tuple(after)),
    )


def _scaled(x: Examination, experiment: str, width: int) -> CarriedOut:
    softmax = attention_softmax(x)
    return x.edited(experiment, softmax, source.scaled_once, width)


_LARGER = "= Model()\nfor layer in model.layers:\n    layer.attention.qkv.weight.data *= {}\n"


@row(
    "attention_one_hot",
    order=35,
    needs={"structure"},
    good=DECODER.but("= Model()\n", _LARGER.format(4)),
    fault=("k.transpose(-1, -2) / 8**0.5", "k.transpose(-1, -2) * 8**0.75"),
)
def saturated_attention(x: Examination, one_hot: Outcome) -> Finding:
    """Attention that is one-hot in most heads."""
    width, largest = one_hot["width"], one_hot["largest"]
    measured = {"measured": ENTROPY, "before": one_hot["before"], "after": one_hot["after"]}
    if width is not None:
        return finding(
            f"The scores of attention are not divided by sqrt(width of a head): they reach {largest:.0f}, and the "
            "softmax picks one key.",
            f"Divide the product of queries and keys by the square root of {width}",
            _scaled(x, "attention_one_hot", width),
            intervention=f"with scores divided by sqrt({width})",
            **measured,
        )
    return finding(
        f"Attention picks a single key in nearly every row: scores reach {largest:.0f}. Its gradient vanishes, and "
        "small changes of the weights flip it.",
        "Normalise queries and keys before their product (qk-norm)",
        intervention=f"with scores divided by {max(largest / 4, 1.0):.3g}",
        **measured,
    )


@row(
    "attention_flat",
    order=36,
    needs={"structure"},
    good=DECODER.but("= Model()\n", _LARGER.format(0.3)),
    fault=("8**0.5", "8**2.0"),
)
def doubled_scale(x: Examination, flat: Outcome) -> Finding:
    """Attention that is uniform whatever queries and keys say."""
    width, power = flat["width"], flat["power"]
    words = {1.5: "1 / width**2", 1.0: "1 / width**1.5", 0.5: "1 / width"}[power]
    return finding(
        f"Attention is uniform to {flat['before']:.1g}: the scores are too small by a factor of about "
        f"{width**power:.0f}, as with a scale of {words} instead of 1 / sqrt(width) for heads {width} wide.",
        f"Scale the scores once, by 1 / sqrt({width}) (F.scaled_dot_product_attention and nn.MultiheadAttention scale "
        "by themselves)",
        _scaled(x, "attention_flat", width),
        evidence=(
            "standard deviation of the scores of a row",
            flat["before"],
            flat["after"],
            f"with scores multiplied by {width**power:.0f}",
        ),
    )


@row(
    "one_direction",
    order=10,
    needs={"structure"},
    good=ENCODER.but(
        "nn.Embedding(20, 32)", "nn.Linear(1, 32)",
        "text = torch.randint(1, 20, (12, 12))", "text = torch.randn(12, 12, 1)",
    ),
    fault=("self.embed(ids) + self.place", "ids + self.place"),
)  # fmt: skip
def input_in_one_direction(x: Examination, direction: Outcome) -> Finding:
    """An input that is added to every channel alike, which norms remove."""
    return finding(
        "The input adds the same number to every channel (it is broadcast over the width), and LayerNorm subtracts "
        "exactly that: the blocks see the positions and hardly the input.",
        "Project the input to the width of the model with nn.Linear, before positions are added",
        evidence=("share of the difference between inputs that a LayerNorm removes", direction["share"] ** 2),
    )


@row(
    "lost_in_part",
    order=40,
    good=CLASSIFIER.but(
        "x = x + self.mix(x).tanh()", "x = self.act(self.mix(x))", "= Model()\n", "= Model()\nmodel.act = nn.ReLU()\n"
    ),
    fault=("optimizer =", "nn.init.constant_(model.mix.bias, -50.0)\noptimizer ="),
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
    return finding(
        f"The input is lost in {call.name} ({type(call.module).__name__}): {how}. The weights of {suspect.name} are "
        "the reason.",
        f"Look at how the weights and the bias of {suspect.name} came to be what they are",
        evidence=(
            "how much the outputs of different inputs differ, relative to their size",
            lost["before"],
            lost["after"],
            f"with new weights for {suspect.name}",
        ),
        where=suspect.name or "",
    )
