"""What statistics of long attention cost beside the fused kernel alone, in time and in memory.

Layer by layer the kernel runs alone, then again with everything taken of it (entropy, sink rate, rank-one distance,
s_1(CP) with its interval, and the residual of P V), on the same queries, keys and values::

    python -m benchmarks.long_context                                     # 32,768 tokens, 16 heads, 2 layers
    python -m benchmarks.long_context --tokens 4096 --heads 4 --repeats 3
    python -m benchmarks.long_context --tokens 2048 --against-dense       # equality with dense float64
    python -m benchmarks.long_context --tokens 3000 --walks               # how near few walks come to s_1(CP)
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.blockwise_attention import BlockwiseAttention
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, MetricValues, evaluate
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.tracer import watching_kernel
from rankscope.verbs.attention_choice import AttentionChoice

EVERY = [spec for spec in METRICS.values() if spec.side == "attention"]
RESIDUAL = [METRICS["relative_residual"]]


def layers(count: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, tokens, dim)
    drawn = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(3)] for _ in range(count)]
    return [(q, k, v) for q, k, v in drawn]


def measured(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> MetricValues:
    """The kernel as the tracer runs it, and the reader's work, with the one walk that 32,768 tokens get."""
    with watching_kernel(q, k) as told:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    call = AttentionCall(query=q, key=k, is_causal=causal, log_sums=None if told is None else told.log_sums)
    view, dtype = AttentionChoice("blockwise", passes=1).view(call, lambda *_: None, spectrum=True)
    evaluate(RESIDUAL, Tokens(out), float_floor(out.dtype))
    return evaluate(EVERY, view, float_floor(dtype))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(run: object) -> float:
    started = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - started


def against_dense(tokens: int, heads: int, causal: bool) -> None:
    ((q, k, _),) = layers(1, heads, tokens, 64, torch.float64)
    call = AttentionCall(query=q, key=k, is_causal=causal)
    want = evaluate(EVERY, AttentionMatrix(call.probs(), call.support()), 1e-15).values
    got = evaluate(EVERY, BlockwiseAttention(q, k, is_causal=causal, spectrum=True), 1e-15).values
    for spec, a, b in zip(EVERY, got, want, strict=True):
        print(f"{spec.name:32} largest relative difference {float(((a - b) / b).abs().max()):.1e}")


def walks(tokens: int) -> None:
    """Share of s_1(CP) that one, two and three walks find on random queries and keys, and the bound above it."""
    for spread in (0.3, 1.0, 3.0):
        for causal in (False, True):
            ((q, k, _),) = layers(1, 1, tokens, 64, torch.float32)
            views = [
                BlockwiseAttention(q * spread, k, is_causal=causal, spectrum=True, passes=count)
                for count in (None, 1, 2, 3)
            ]
            true, *found = (view.singular_values[0] for view in views)
            words = ", ".join(f"{one.lower / true.lower:.4f} (bound {one.upper / true.lower:.2f})" for one in found)
            print(
                f"scores' spread {spread}, {'causal' if causal else 'no mask'}, {true.passes} walks converge: {words}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against-dense", action="store_true")
    parser.add_argument("--walks", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    if args.against_dense:
        against_dense(args.tokens, args.heads, args.causal)
        return
    if args.walks:
        walks(args.tokens)
        return
    stack = layers(args.layers, args.heads, args.tokens, 64, torch.float32)
    for q, k, v in stack[:1]:
        measured(q[:, :1, :1024], k[:, :1, :1024], v[:, :1, :1024], args.causal)
    bare, full, before, extra = [], [], 0.0, 0.0
    for _ in range(args.repeats):
        alone = [
            seconds(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=args.causal))
            for q, k, v in stack
        ]
        before = before or peak()
        whole = [seconds(lambda q=q, k=k, v=v: measured(q, k, v, args.causal)) for q, k, v in stack]
        bare.append(sum(alone))
        full.append(sum(whole))
        extra = peak() - before
        print(
            f"kernel alone {bare[-1]:.2f} s, with statistics {full[-1]:.2f} s, ratio {full[-1] / bare[-1]:.2f}",
            flush=True,
        )
    ratio = statistics.median(b / a for a, b in zip(bare, full, strict=True))
    print(
        f"{args.layers} x {args.heads} heads x {args.tokens} tokens, {args.threads} threads: median ratio {ratio:.2f}"
    )
    print(f"extra peak memory {extra:.0f} MiB (the kernel's own peak is {before:.0f} MiB)")


if __name__ == "__main__":
    main()
