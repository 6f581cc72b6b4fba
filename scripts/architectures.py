"""Measure every transformer that other libraries can build at tiny size, and check each number without rankscope.

::

    python -m scripts.architectures parts.jsonl                     # all libraries that are installed; resumes
    python -m scripts.architectures parts.jsonl --library timm      # one of them
    python -m scripts.architectures parts.jsonl --show timm:vit_tiny_patch16_224
    python -m scripts.architectures parts.jsonl --write             # docs/data/architectures.json and its tables

Needs transformers, timm, diffusers, x-transformers and litgpt beside rankscope; run it with ``HF_HUB_OFFLINE=1``.
Nothing about a model is declared. Each runs in a process of its own with a time limit. The outcomes:

- *measured*: hidden states kept by forward hooks on the blocks that were found give the same relative residual after
  every block, in ten lines of NumPy, to a relative difference of :data:`TOLERANCE`; and the number of blocks is one
  that the configuration names;
- *refused*: an error of rankscope's own. If its message suggests a declaration, the model is measured again with it
  and checked in the same way; a number that is wrong then counts as wrong;
- *wrong*: another number, or another number of blocks;
- *raw*: any other exception.

Models without attention or another token mixer that a library lists beside its transformers are counted separately.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripts.architecture_models import BATCH, BUILD, NAMES, Built, NotBuilt, declare_vision_operators
from torch import Tensor, nn

import rankscope as rs
from rankscope.models.view import BlockCall
from rankscope.stream.viewing import known_view

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "architectures.json"
TOLERANCE = 1e-6
SECONDS = 90
"""Processor time for one model, about 2 of which are usual."""
MODULES = {"transformers": "transformers", "timm": "timm", "diffusers": "diffusers", "litgpt": "litgpt"} | {
    "x-transformers": "x_transformers"
}
MIXERS = re.compile(
    r"Att|Mixer|Mamba|SSM|Rwkv|RWKV|Fourier|Mixing|GatedDelta|ShortConv|Pooling|Lstm|LSTM|Spatial|Hyena|Retention",
    re.ASCII,
)
WARM = {"transformers": "bert"}
KINDS = ("measured", "refused", "wrong", "raw", "late", "no mixer", "not built")


def outcome(library: str, name: str) -> dict[str, Any]:
    """Build one model, measure it, and check the numbers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        built = BUILD[library](name)
    except NotBuilt as error:
        return {"kind": "not built", "detail": _short(str(error))}
    model = built.model
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "structure": structure(model)}
    if not any(MIXERS.search(type(module).__name__) for module in model.modules()):
        facts["mixer"] = False
    found = measured(built, {})
    suggested = declaration(found.get("message", ""))
    if suggested:
        found["declared"] = {"as": repr(suggested), **measured(built, suggested)}
        if found["declared"]["kind"] in ("wrong", "raw"):
            found |= {key: found["declared"][key] for key in ("kind", "detail")}
    return {**facts, **found}


def declaration(message: str) -> dict[str, Any]:
    """What a refusal suggests to declare, if it suggests something that was seen in the model."""
    stream = re.search(r"agrees with stream=rankscope\.Stream\(([^)]*)\)", message)
    if stream:
        call = ast.parse(f"f({stream[1]})", mode="eval").body
        assert isinstance(call, ast.Call)
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return {"stream": rs.Stream(*map(ast.literal_eval, call.args), **words)}
    blocks = re.search(r"(?:agrees with|Name the blocks of one:) blocks='([^']*)'", message)
    return {"blocks": blocks[1]} if blocks else {}


def measured(built: Built, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model with what was declared of it, and check the numbers."""
    model = built.model
    before = [p.detach().clone() for p in model.parameters()]
    subject = rs.Model(model, **declared) if declared else model
    try:
        run = rs.measure(subject, built.inputs, metrics=["relative_residual"], sites=["block.out"])
    except rs.RankscopeError as error:
        return {"kind": "refused", "detail": reason(error, model), "message": str(error)[:600]}
    except Exception as error:  # noqa: BLE001 (a raw exception is a finding like any other)
        places = [
            f"{Path(p.filename).name}:{p.lineno} {p.name}" for p in traceback.extract_tb(error.__traceback__)[-4:]
        ]
        return {"kind": "raw", "detail": _short(f"{type(error).__name__}: {error} {places}")}
    if not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)):
        return {"kind": "wrong", "detail": "a weight was changed"}
    return checked(run, built if "blocks" not in declared else replace(built, layers=frozenset()))


def structure(model: nn.Module) -> str:
    """A word for the classes and places of its modules, numbers left out: models of the same word differ in sizes."""
    places = {(re.sub(r"\d+", "*", name), type(module).__name__) for name, module in model.named_modules()}
    return hashlib.sha256(repr(sorted(places)).encode()).hexdigest()[:12]


def checked(run: rs.Run, built: Built) -> dict[str, Any]:
    """Compare a run with hidden states that hooks keep, and with the configuration."""
    view = known_view(built.model)
    assert view is not None
    ours = residuals(run)
    found: dict[str, Any] = {"stacks": {str(s.name): [s.depth, s.layout] for s in view.stacks}}
    kept = hidden_states(built.model, built.inputs, {call.module_name for s in view.stacks for call in s.calls})
    taken: Counter[str] = Counter()
    compared = 0
    readings: set[str] = set()
    for stack in view.stacks:
        layer = 0
        for call in stack.calls:
            places = kept.get(call.module_name, [])
            number, taken[call.module_name] = taken[call.module_name], taken[call.module_name] + 1
            layer += len(call.blocks)
            if number >= len(places):
                return {**found, "kind": "wrong", "detail": f"{call.module_name} ran {len(places)} times"}
            if len(call.blocks) == 1:
                ends = {layer - 1: places[number]}
            else:
                first = layer - len(call.blocks)
                ends = {first + n: end for n, end in enumerate(inner_ends(built, call))}
            for at, end in ends.items():
                want = ours[str(stack.name), at]
                reading = agreeing(end, want, given_tokens(built.inputs))
                if reading is None:
                    hand = next(iter(by_hand(end)), ("nothing", np.array([])))
                    words = f"{call.module_name} {at}: {want.tolist()}, by hand {hand[1].tolist()} ({hand[0]})"
                    return {**found, "kind": "wrong", "detail": _short(words)}
                readings.add(reading)
                compared += len(want)
    depths = {stack.depth for stack in view.stacks} | {sum(stack.depth for stack in view.stacks)}
    found |= {"compared": compared, "readings": sorted(readings), "layers": sorted(built.layers)}
    if built.layers and not depths & built.layers:
        return {**found, "kind": "wrong", "detail": f"{sorted(depths)} blocks, configured {sorted(built.layers)}"}
    if not compared:
        return {**found, "kind": "measured", "detail": "blocks are not modules, so hooks cannot check them"}
    return {**found, "kind": "measured", "detail": ""}


def inner_ends(built: Built, call: BlockCall) -> list[tuple[list[Tensor], list[Tensor]]]:
    """What ends each block inside one module, as in x-transformers: its list ``layers`` holds norms, branch and sum.

    All blocks have the same number of these layers, unless the configuration names no number of blocks: then each has
    as many as sums were found. Empty for a module that is not built in this way.
    """
    name, blocks = call.module_name, len(call.blocks)
    layers = getattr(dict(built.model.named_modules())[name], "layers", None)
    if isinstance(layers, nn.ModuleList):  # what leads to the next stage is not part of the blocks of this one (LeViT)
        kinds = [type(layer).__name__ for layer in layers]
        layers = layers[: next((n for n, kind in enumerate(kinds) if "Subsample" in kind), len(layers))]
    if not isinstance(layers, nn.ModuleList) or (built.layers and len(layers) % blocks):
        return []
    each = [len(layers) // blocks if built.layers else len(plan.adds) for plan in call.blocks]
    ends: list[tuple[list[Tensor], list[Tensor]]] = []
    for last in (int(stop) - 1 for stop in np.cumsum(each)):
        inside = {n for n, _ in layers[last].named_modules(prefix=f"{name}.layers.{last}")}
        kept = hidden_states(built.model, built.inputs, inside)
        ends.append(([], [x for calls in kept.values() for _, returned in calls for x in returned][::-1]))
    return ends


def residuals(run: rs.Run) -> dict[tuple[str, int], np.ndarray]:
    """Relative residual after each block, one per sequence."""
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in run.table.to_pylist():
        if row["metric"] == "relative_residual" and row["site"] == "block.out":
            found[str(row["stack"] or None), row["layer"]][row["sequence"]] = row["value"]
    return {place: np.array([values[n] for n in sorted(values)]) for place, values in found.items()}


def hidden_states(model: nn.Module, inputs: Any, names: set[str]) -> dict[str, list[tuple[list[Tensor], list[Tensor]]]]:
    """What modules take and return in a plain forward pass, call by call."""
    kept: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = defaultdict(list)

    def keep(name: str) -> Any:
        def hook(_: nn.Module, given: Any, words: Any, returned: Any) -> None:
            kept[name].append((list(tensors([given, words])), list(tensors(returned))))

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(keep(name), with_kwargs=True) for name in names]
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    for handle in handles:
        handle.remove()
    return kept


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in what a module takes or returns, copied, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim >= 2:
            yield value.detach().clone()
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def given_tokens(inputs: Any) -> int | None:
    """How many tokens a model of text alone is given; it may add others, as Longformer does to fill its window."""
    text_alone = isinstance(inputs, Mapping) and set(inputs) <= {"input_ids", "use_cache"}
    return int(inputs["input_ids"].shape[1]) if text_alone else None


def by_hand(place: tuple[list[Tensor], list[Tensor]], own: int | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Relative residuals in plain NumPy: what a module returns, sequences first and channels last, is read first."""
    given, returned = place
    sums = [("input + output", a + b) for a in given[:1] for b in returned[:1] if a.shape == b.shape]
    whole = [(f"output {n}" if n else "output", x) for n, x in enumerate(returned)]
    pairs = (
        [("output 0 + output 1", returned[0] + returned[1])]
        if len(returned) > 1 and returned[0].shape == returned[1].shape
        else []
    )
    for words, x in [*whole, *sums, *pairs]:
        states = x.double().numpy()
        padded = own is not None and states.ndim == 3 and states.shape[0] == BATCH and states.shape[1] > own
        without = [(", without what the model pads", states[:, :own])] if padded else []
        for order, arranged in [*arrangements(states), *without]:
            centred = arranged - arranged.mean(1, keepdims=True)
            size = np.sqrt((arranged**2).sum((1, 2)))
            with np.errstate(all="ignore"):
                alone = arranged.shape[1] == 1  # one token has no residual
                yield f"{words}{order}", np.sqrt((centred**2).sum((1, 2))) / (np.nan if alone else size)


def arrangements(states: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """As (sequences, tokens, channels)."""
    if states.ndim >= 3 and states.shape[0] == BATCH:
        yield "", states.reshape(BATCH, -1, states.shape[-1])
        yield ", channels second", np.moveaxis(states, 1, -1).reshape(BATCH, -1, states.shape[1])
    if states.ndim == 4 and states.shape[0] == BATCH:
        yield ", streams side by side", states.reshape(BATCH, states.shape[1], -1)
    if states.ndim == 4 and states.shape[1] == BATCH != states.shape[0]:
        joined = np.moveaxis(states, 0, 2).reshape(BATCH, states.shape[2], -1)
        yield ", streams first, side by side", joined
    if states.ndim == 3 and states.shape[1] == BATCH:
        yield ", tokens first", np.moveaxis(states, 1, 0)
    if states.shape[0] % BATCH == 0 and states.shape[0] > BATCH:
        yield ", sequences and tokens in one axis", states.reshape(BATCH, -1, states.shape[-1])
    if states.ndim >= 3 and states.shape[0] == 1:
        yield ", sequences and tokens in one axis", states.reshape(1, -1, states.shape[-1])


def agreeing(place: tuple[list[Tensor], list[Tensor]], want: np.ndarray, own: int | None) -> str | None:
    """The first reading that gives these numbers."""
    for reading, hand in by_hand(place, own):
        if hand.shape == want.shape and np.allclose(want, hand, rtol=TOLERANCE, atol=1e-30, equal_nan=True):
            return reading
    return None


def reason(error: Exception, model: nn.Module) -> str:
    """Class and first sentence of a refusal, without the names and numbers of this model."""
    words = re.sub(r"^[\w.*]+: ", "", " ".join(str(error).split()))
    words = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", words)
    words = re.sub(r"(?<![\w.])[a-z_]\w*(\.\w+)+", "…", words)
    words = re.sub(r"\b[A-Z]\w*[a-z][A-Z]\w*", "…", words)
    words = re.sub(r"\(\d[^)]*\)|\d+(\.\d+)?", "N", words)
    return f"{type(error).__name__}: {re.split(r'(?<=[a-z…])[.;:] ', words)[0][:160]}"


def _short(words: str) -> str:
    return " ".join(words.split())[:400]


def in_a_process(library: str, name: str) -> dict[str, Any]:
    """The outcome for one model, in a forked process with limits on time and memory."""
    here, there = multiprocessing.Pipe(duplex=False)
    started = time.perf_counter()

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        warnings.simplefilter("ignore")
        began = time.process_time()
        try:
            found = outcome(library, name)
        except BaseException as error:  # noqa: BLE001 (of this script, or of the library)
            found = {
                "kind": "not built",
                "detail": _short(f"check failed: {type(error).__name__}: {error} {traceback.format_exc()[-300:]}"),
            }
        there.send({**found, "seconds": round(time.process_time() - began, 1)})

    process: Any = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    found: dict[str, Any] = {"kind": "late", "detail": f"not finished after {SECONDS} s of processor time"}
    with contextlib.suppress(EOFError):
        if here.poll(SECONDS * 20):
            found = here.recv()
    process.kill()
    process.join()
    return {"library": library, "name": name, **found, "wall": round(time.perf_counter() - started, 1)}


def read(parts: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of each model."""
    lines = parts.read_text(encoding="utf-8").splitlines() if parts.exists() else []
    rows = (json.loads(line) for line in lines if line.endswith("}"))
    return {(row["library"], row["name"]): row for row in rows}


def campaign(parts: Path, libraries: list[str], again: set[str]) -> None:
    """Every model that the file does not have yet, one line each."""
    done = read(parts)
    for library in libraries:
        if importlib.util.find_spec(MODULES[library]) is None:
            print(f"{library} is not installed")
            continue
        names = NAMES[library]()
        with contextlib.suppress(NotBuilt):
            outcome(library, WARM.get(library, names[0]))  # imports what the processes share
        for name in names:
            if (library, name) in done and done[library, name]["kind"] not in again:
                continue
            row = in_a_process(library, name)
            with parts.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if row["kind"] in ("wrong", "raw", "late"):
                print(f"{library}:{name}: {row['kind']}: {row['detail'][:300]}", flush=True)


def versions() -> dict[str, str]:
    """Of rankscope, the five libraries and torch."""
    found = {"python": platform.python_version()}
    for name in ("rankscope", "torch", *MODULES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def kind_of(row: dict[str, Any]) -> str:
    """The outcome; what has no token mixer is not counted as a transformer unless it was measured."""
    return "no mixer" if row.get("mixer") is False and row["kind"] == "refused" else row["kind"]


def write(parts: Path) -> int:
    """The counts, the reasons and every model by outcome."""
    rows = read(parts)
    by_library: dict[str, Counter[str]] = {library: Counter() for library in NAMES}
    reasons: Counter[str] = Counter()
    models: dict[str, dict[str, list[str]]] = {library: defaultdict(list) for library in NAMES}
    structures: dict[str, set[str]] = defaultdict(set)
    for (library, name), row in sorted(rows.items()):
        kind = kind_of(row)
        by_library[library][kind] += 1
        if kind == "refused" and row.get("declared", {}).get("kind") == "measured":
            by_library[library]["declared"] += 1
        models[library][kind].append(name)
        if kind == "refused":
            reasons[row["detail"]] += 1
        if kind in ("measured", "refused", "wrong", "raw"):
            structures[library].add(row["structure"])
    counted = sum(by_library[library][kind] for library in NAMES for kind in ("measured", "refused", "wrong", "raw"))
    record = {
        "date": date.today().isoformat(),
        "versions": versions(),
        "tolerance": TOLERANCE,
        "counted": counted,
        "distinct_structures": sum(map(len, structures.values())),
        "values_compared": sum(
            one.get("compared", 0) for row in rows.values() for one in (row, row.get("declared", {}))
        ),
        "libraries": {library: dict(counts) for library, counts in by_library.items()},
        "refusals": dict(reasons.most_common()),
        "models": {library: dict(kinds) for library, kinds in models.items()},
        "unchecked": [name for (_, name), row in rows.items() if "hooks cannot" in row["detail"]],
    }
    DATA.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    DATA.with_suffix(".inc").write_text(table(by_library), encoding="utf-8")
    lines = ["| refused because | models |", "|---|---:|"]
    lines += [f"| {words.replace('|', '/')} | {number} |" for words, number in reasons.most_common()]
    DATA.with_name("architectures_refused.inc").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(record["libraries"], indent=1), counted, record["distinct_structures"])
    return int(any(counts["wrong"] + counts["raw"] for counts in by_library.values()))


def table(by_library: Mapping[str, Counter[str]]) -> str:
    """A row per library."""
    shown = ("measured", "refused", "wrong", "raw")
    lines = [
        "| library | architectures | measured | refused | of these, measured as the message says | wrong "
        "| raw exception | not built here |",
        "|---" + "|---:" * 7 + "|",
    ]
    total: Counter[str] = Counter()
    for library, counts in by_library.items():
        total.update(counts)
        if counts:
            lines.append(_row(library, counts, shown))
    return "\n".join([*lines, _row("**all**", total, shown)]) + "\n"


def _row(words: str, counts: Counter[str], shown: tuple[str, ...]) -> str:
    counted = sum(counts[kind] for kind in shown)
    measured, refused, wrong, raw = (counts[kind] for kind in shown)
    cells = [counted, measured, refused, counts["declared"], wrong, raw, counts["not built"] + counts["late"]]
    return f"| {words} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, help="a line for each model; finished ones are not repeated")
    parser.add_argument("--library", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--again", nargs="*", choices=KINDS, default=(), help="repeat models with these outcomes")
    parser.add_argument("--show", metavar="LIBRARY:NAME", help="one model, in this process")
    parser.add_argument("--write", action="store_true", help="write docs/data/architectures.json")
    options = parser.parse_args()
    declare_vision_operators()
    if options.show:
        print(json.dumps(outcome(*options.show.split(":", 1)), indent=1))
        return 0
    if options.write:
        return write(options.parts)
    campaign(options.parts, options.library, set(options.again))
    return 0


if __name__ == "__main__":
    sys.exit(main())
