"""The vocabulary of sites at which a transformer is measured. This file does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rankscope.errors import InputError, UnknownNameError

SITES: Mapping[str, str] = {
    "block.in": "the residual stream as it enters a block",
    "attention.out": "what the attention branch adds to the stream",
    "attention.sum": "the stream right after the attention branch was added, before any post-norm",
    "cross_attention.out": "what the cross-attention branch of a decoder block adds",
    "cross_attention.sum": "the stream right after the cross-attention branch was added",
    "mixer.out": "what a token mixer that is not attention (state space, Fourier) adds",
    "mixer.sum": "the stream right after the mixer branch was added",
    "mlp.out": "what the MLP or mixture-of-experts branch adds",
    "mlp.sum": "the stream right after the MLP branch was added",
    "both.out": "what attention and MLP add together in a parallel block",
    "both.sum": "the stream right after both branches were added at once",
    "block.out": "the residual stream as it leaves a block, after any post-norm",
    "attention.probs": "the attention probabilities of each head",
    "cross_attention.probs": "the cross-attention probabilities of each head",
    "attention.scores": "the attention scores of each head as they enter the softmax",
    "cross_attention.scores": "the cross-attention scores of each head as they enter the softmax",
    "attention.queries": "the queries and keys of each head, after rotary positions and norms; fused kernels only",
    "cross_attention.queries": "the same of cross-attention, whose keys are those of the encoder",
    "attention.mixed": "the values as each head has mixed them, P V, before the output projection; fused kernels only",
    "cross_attention.mixed": "the same of cross-attention",
    "attention.state": "the state of linear attention or a state space after the last token, one matrix per head",
    "streams.in": "the residual streams of each token as they enter a block, if a token has several",
    "streams.out": "the residual streams of each token as they leave a block, if a token has several",
    "final": "the stream after the stack's final norm",
    "attention.update": "the stream, and what the attention branch adds to it",
    "cross_attention.update": "the stream, and what the cross-attention branch adds to it",
    "mixer.update": "the stream, and what a token mixer that is not attention adds to it",
    "mlp.update": "the stream, and what the MLP or mixture-of-experts branch adds to it",
    "both.update": "the stream, and what attention and MLP of a parallel block add to it at once",
    "mlp.branch": "what the MLP branch reads, after its norm, and what it adds to the stream",
    "mlp.router": "the router of a mixture of experts: its probabilities, and the experts each token was sent to",
    "block.update": "the stream as it enters a block, and as it leaves it, after any post-norm",
}

_SIDES: Mapping[str, str] = {"probs": "attention", "scores": "scores", "queries": "queries", "router": "router",
                             "update": "update", "branch": "branch"}  # fmt: skip
"""Last word of a site's name to the side of the metrics that read it; all other sites show tokens."""

ATTENTION_ENDS = ("probs", "scores", "queries")
"""Last words of the sites that show an attention call."""

POOLED_SITES: Mapping[str, str] = {
    "inputs.mean": "the inputs, each the mean of its tokens at block.out, compared with each other (--between-inputs)",
    "inputs.first": "the inputs, each its first token at block.out",
    "inputs.last": "the inputs, each its last token at block.out",
}
"""Sites of the comparison between inputs. They are made from ``block.out``, and are not selected like the others."""

DEFAULT_SITES = (
    "block.in@0",
    "block.out",
    "final",
    "attention.probs",
    "streams.in@0",
    "streams.out",
    "block.update",
    "mlp.router",
)


def side_shown(site: str) -> str:
    """The side of the metrics that can be measured at a site, a key of ``rankscope.metrics.SIDES``.

    Example:
        >>> side_shown("attention.probs"), side_shown("mlp.update"), side_shown("block.out")
        ('attention', 'update', 'tokens')
    """
    return _SIDES.get(site.rpartition(".")[2], "tokens")


def sites_of_sides(sides: Collection[str], words: Iterable[str]) -> list[str]:
    """Those of the words, such as ``"block.in@0"``, at whose sites metrics of these sides can be measured."""
    return [word for word in words if side_shown(word.partition("@")[0]) in sides]


@dataclass(frozen=True)
class SiteRef:
    """One site of one block of one stack."""

    stack: str | None
    layer: int
    site: str

    def __str__(self) -> str:
        prefix = f"{self.stack} " if self.stack else ""
        return f"{prefix}block {self.layer} {self.site}"


@dataclass(frozen=True)
class SiteSelection:
    """Which sites a run observes: maps site names to the selected layers, ``None`` for every layer.

    Example:
        >>> chosen = SiteSelection.parse(["block.in@0", "block.out"])
        >>> SiteRef(None, 3, "block.out") in chosen, SiteRef(None, 3, "block.in") in chosen
        (True, False)
    """

    layers: Mapping[str, frozenset[int] | None]

    @classmethod
    def parse(cls, words: Iterable[str]) -> SiteSelection:
        """Parse words such as ``block.out`` (every layer) or ``block.in@0,5`` (these layers)."""
        layers: dict[str, frozenset[int] | None] = {}
        for word in words:
            site, at, numbers = word.partition("@")
            if site in POOLED_SITES:
                raise InputError(
                    f"{site} compares inputs at block.out: pass between_inputs={site.partition('.')[2]!r} and leave "
                    "it out of sites."
                )
            if site not in SITES:
                raise UnknownNameError("site", site, SITES)
            if not at:
                layers[site] = None
                continue
            try:
                wanted = frozenset(int(n) for n in numbers.split(","))
            except ValueError:
                raise InputError(
                    f"{word!r} is not a site: after '@' come block numbers, as in 'block.in@0' or 'block.out@0,5,11'."
                ) from None
            previous = layers.get(site, frozenset())
            layers[site] = None if previous is None else previous | wanted
        return cls(layers)

    def __contains__(self, ref: object) -> bool:
        if not isinstance(ref, SiteRef) or ref.site not in self.layers:
            return False
        wanted = self.layers[ref.site]
        return wanted is None or ref.layer in wanted

    def wants(self, site: str) -> bool:
        """Whether any layer of this site is selected."""
        return site in self.layers

    @property
    def wants_attention(self) -> bool:
        """Whether attention calls are needed at all."""
        return any(site.rpartition(".")[2] in (*ATTENTION_ENDS, "mixed") for site in self.layers)
