"""What a gauge costs a training: steps with and without one, taking turns, so that a slow machine is slow for both.

Run ``python -m benchmarks.monitor_overhead`` for a BERT-base-size training (hours on two cores), ``--small`` to try it,
``--kinds default --batch 2 64`` for one schedule and a smaller batch. Trainings of the same model advance side by side,
a few steps each in turn: bare, with the default schedule, and with ``every=1``. The ratio of their wall times is
printed and, with ``--out``, written as JSON.

``--ratios`` takes a few minutes instead: the time of one warm reading over that of a training step on the
same batch, and of a watched step without a reading over a bare one; a BERT of base size (8 x 128 tokens) and a GPT-2
of 4 blocks of width 64 (8 x 64), one step of each in turn, medians; ``--threads`` sets how many threads torch uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rankscope.monitor import Gauge
from rankscope.monitor.schedules import Schedule, as_schedule
from rankscope.monitor.watch import watch

SIZES: dict[str, dict[str, int]] = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "small": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY = 1000


class Training:
    """One training that can be advanced by a few steps.

    Args:
        size: of the model.
        batch: sequences and tokens of a training batch; the probe has the same number of tokens.
        schedule: of the gauge, None for a bare training.
        probe: sequences of the probe.
    """

    def __init__(self, size: str, batch: tuple[int, int], schedule: str | int | None, probe: int) -> None:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        self._model = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES[size])).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batches = _batches(batch)
        self._clock = SteppedClock(as_schedule(schedule)) if schedule is not None else None
        given = {"input_ids": next(_batches((probe, batch[1])))}
        self._gauge = None if self._clock is None else Gauge(self._model, given, schedule=self._clock, strict=True)
        self._step = 0
        self.readings = 0
        self.chunks: list[float] = []

    @property
    def seconds(self) -> float:
        """Wall time of all steps so far."""
        return sum(self.chunks)

    def advance(self, steps: int) -> None:
        """Take a few steps, timed."""
        started = time.perf_counter()
        if self._clock is not None:
            self._clock.resume(started)
        for _ in range(steps):
            ids = next(self._batches)
            self._model(input_ids=ids, labels=ids).loss.backward()
            if self._gauge is not None:
                self._gauge.after_backward(self._step)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._gauge is not None:
                self.readings += self._gauge.step(self._step) is not None
            self._step += 1
        ended = time.perf_counter()
        if self._clock is not None:
            self._clock.pause(ended)
        self.chunks.append(ended - started)


class SteppedClock:
    """A schedule whose clock stands still while the other trainings have their turn."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._before, self._resumed = 0.0, 0.0

    @property
    def by_clock(self) -> bool:
        return self._schedule.by_clock

    def resume(self, now: float) -> None:
        self._resumed = now

    def pause(self, now: float) -> None:
        self._before += now - self._resumed

    def wants(self, step: int, now: float) -> bool:
        return self._schedule.wants(step, self._before + time.perf_counter() - self._resumed)

    def was_read(self, step: int, seconds: float) -> None:
        self._schedule.was_read(step, seconds)

    def notice(self, step: int, name: str, value: float) -> None:
        self._schedule.notice(step, name, value)


def _batches(shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(5, VOCABULARY, shape, generator=generator)


class Ratios:
    """A model of which a training step, a reading, and a watched step without a reading are timed in turn.

    Args:
        make: builds the model.
        batch: sequences and tokens of a batch; the probe has the same shape.
    """

    def __init__(self, make: Callable[[], Any], batch: tuple[int, int]) -> None:
        self._batches = _batches(batch)
        self._models = [make().train() for _ in range(3)]
        self._optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in self._models]
        given = {"input_ids": next(self._batches)}
        self._gauge = Gauge(self._models[1], given, schedule=1, strict=True)
        self._between = watch(self._models[2], self._optimizers[2], probe=given, schedule=10**9, strict=True)

    def turn(self, step: int) -> dict[str, float]:
        """Seconds of a bare step, of a reading after such a step, and of a watched step without a reading."""
        ids = next(self._batches)
        bare = self._timed(lambda: self._train(0, ids))
        self._backward(1, ids)
        reading = self._timed(lambda: self._gauge.after_backward(step))
        loss = self._finish(1)
        reading += self._timed(lambda: self._gauge.step(step, loss=loss, batch={"input_ids": ids}))
        return {"step": bare, "reading": reading, "between": self._timed(lambda: self._train(2, ids))}

    def _backward(self, number: int, ids: torch.Tensor) -> None:
        self._loss = self._models[number](input_ids=ids, labels=ids).loss
        self._loss.backward()

    def _finish(self, number: int) -> float:
        self._optimizers[number].step()
        self._optimizers[number].zero_grad()
        return float(self._loss.detach())

    def _train(self, number: int, ids: torch.Tensor) -> None:
        self._backward(number, ids)
        self._finish(number)

    @staticmethod
    def _timed(act: Callable[[], object]) -> float:
        started = time.perf_counter()
        act()
        return time.perf_counter() - started


def ratios(turns: int, threads: int) -> dict[str, Any]:
    """Both models; the first three turns warm up."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    small = GPT2Config(
        vocab_size=VOCABULARY, n_layer=4, n_embd=64, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    kinds: dict[str, tuple[Callable[[], Any], tuple[int, int], int]] = {
        "BERT-base, 8 x 128": (
            lambda: BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZES["base"])), (8, 128), turns
        ),
        "GPT-2 of 4 blocks of width 64, 8 x 64": (lambda: GPT2LMHeadModel(small), (8, 64), 8 * turns),
    }  # fmt: skip
    found: dict[str, Any] = {"torch": torch.__version__}
    for name, (make, batch, count) in kinds.items():
        model = Ratios(make, batch)
        times = [model.turn(step) for step in range(count + 3)][3:]
        seconds = {key: [one[key] for one in times] for key in times[0]}
        step = statistics.median(seconds["step"])
        paired = [one["between"] / one["step"] for one in times]
        found[name] = {
            "turns": count,
            "step_seconds": round(step, 4),
            "reading_seconds": round(statistics.median(seconds["reading"]), 4),
            "reading_over_step": round(statistics.median(seconds["reading"]) / step, 3),
            "mean_reading_over_step": round(statistics.mean(seconds["reading"]) / statistics.mean(seconds["step"]), 3),
            "between_over_step": round(statistics.median(paired), 4),
        }
    return found


KINDS: dict[str, str | int | None] = {"bare": None, "default": "1%", "every=1": 1}


def compare(
    size: str, batch: tuple[int, int], steps: int, chunk: int, probe: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """Advance the trainings in turn and compare their times."""
    trainings = {name: Training(size, batch, KINDS[name], probe) for name in KINDS if name in ("bare", *kinds)}
    for done in range(0, steps, chunk):
        for training in trainings.values():
            training.advance(min(chunk, steps - done))
    bare = trainings["bare"]
    found: dict[str, Any] = {"size": size, "batch": batch, "steps": steps, "probe": probe, "torch": torch.__version__}
    for name, training in trainings.items():
        ratios = [mine / theirs for mine, theirs in zip(training.chunks, bare.chunks, strict=True)]
        found[name] = {
            "seconds": round(training.seconds, 2),
            "readings": training.readings,
            "ratio": round(training.seconds / bare.seconds, 4),
            "median_ratio_of_chunks": round(statistics.median(ratios), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps, to try it")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--chunk", type=int, default=5, help="steps of one training before the next has its turn")
    parser.add_argument("--probe", type=int, default=2, help="sequences of the probe")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("SEQUENCES", "TOKENS"), help="of a training step")
    parser.add_argument("--kinds", nargs="+", choices=[kind for kind in KINDS if kind != "bare"], default=list(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ratios", action="store_true", help="one reading over one step, and a watched step")
    parser.add_argument("--threads", type=int, default=1, help="with --ratios")
    parser.add_argument(
        "--turns", type=int, default=8, help="with --ratios: steps of BERT-base; GPT-2 has eight times as many"
    )
    options = parser.parse_args()
    if options.ratios:
        print(json.dumps(found := ratios(options.turns, options.threads), indent=1))
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    size, batch, steps = ("small", (8, 32), 60) if options.small else ("base", (8, 128), 500)
    batch = (options.batch[0], options.batch[1]) if options.batch else batch
    found = compare(size, batch, options.steps or steps, options.chunk, options.probe, options.kinds)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
