"""What is fuzzed: every place that reads something a stranger wrote.

A target takes bytes and a folder. It may return, or raise a :class:`RankscopeError`; anything else is a finding.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from rankscope.runs.plain_json import seal
from tests.fuzz.loading_targets import LOADING_TARGETS
from tests.fuzz.target import Target


def text_of(data: bytes) -> str:
    """Bytes as a command line would carry them."""
    return data.decode("utf-8", "surrogateescape")


@cache
def saved_run() -> tuple[bytes, bytes]:
    """Sidecar and rows of a small run."""
    import tempfile

    from tests.runs.builders import make_run, profile

    with tempfile.TemporaryDirectory() as folder:
        table = profile({"relative_residual": [0.9, 0.5], "stable_rank": [3.0, 2.0]}).table()
        home = Path(make_run(table, model="m", verdict="No collapse: none.").save(folder))
        (rows,) = home.glob("*.parquet")
        facts = json.loads((home / "run.json").read_bytes())
        del facts["seal"]  # put back after a case was changed, or its checksum would hide everything behind it
        return json.dumps(facts).encode(), rows.read_bytes()


def _sidecar(data: bytes, folder: Path) -> None:
    from rankscope.runs.run import load_run

    rows = saved_run()[1]
    name = json.loads(saved_run()[0])["table"]["file"]
    (folder / "run.json").write_bytes(seal(data))
    (folder / name).write_bytes(rows)
    run = load_run(folder)
    assert str(run)
    json.dumps(run.to_json())


def _rows(data: bytes, folder: Path) -> None:
    from rankscope.runs.run import load_run

    facts = json.loads(saved_run()[0])
    facts["table"]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "run.json").write_bytes(seal(json.dumps(facts).encode()))
    (folder / facts["table"]["file"]).write_bytes(data)
    assert str(load_run(folder))


def _record_seeds() -> tuple[bytes, ...]:
    from tests.reporting.runs import training

    lines = [{"rankscope_gauge": 1, "model": "m"}, *(one.to_json() for one in training().readings)]
    return ("\n".join(json.dumps(line) for line in lines)[:20_000].encode(),)


def _record(data: bytes, folder: Path) -> None:
    from rankscope.monitor.record import read_record
    from rankscope.reporting.page.gauge_chapter import training_chapter

    (folder / "readings-00000.jsonl").write_bytes(b"\n".join(map(seal, data.split(b"\n"))))
    record = read_record(folder)
    record.table()
    training_chapter(record)


BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 99, "architectures": ["BertModel"]}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
         "num_key_value_heads": 2, "intermediate_size": 64, "rope_parameters": {"rope_theta": 1e4}}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}


def _configs() -> tuple[bytes, ...]:
    return tuple(json.dumps(config).encode() for config in (BERT, LLAMA, GPT2))


def _config(data: bytes, folder: Path) -> None:
    from rankscope.models.loading.config import config_from_json

    (folder / "config.json").write_bytes(data)
    config_from_json(folder / "config.json", None)


def _design(data: bytes, folder: Path) -> None:
    from rankscope.ext.theory.designs import design_of

    (folder / "config.json").write_bytes(data)
    design_of(folder / "config.json")


def _weights_seeds() -> tuple[bytes, ...]:
    header = {"encoder.layer.0.attention.self.query.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    return (len(text).to_bytes(8, "little") + text + bytes(16),)


def _stored(data: bytes, folder: Path) -> None:
    from rankscope.models.weight_files.folders import LocalFolder, stored_tensors

    (folder / "config.json").write_text(json.dumps(BERT))
    (folder / "model.safetensors").write_bytes(data)
    for tensor in stored_tensors(LocalFolder(folder)).values():
        assert tensor.nbytes <= len(data)


def _index_seeds() -> tuple[bytes, ...]:
    return (json.dumps({"metadata": {"total_size": 16}, "weight_map": {"a.weight": "model-1.safetensors"}}).encode(),)


def _index(data: bytes, folder: Path) -> None:
    from rankscope.models.weight_files.folders import LocalFolder, stored_tensors

    (folder / "config.json").write_text(json.dumps(BERT))
    (folder / "model-1.safetensors").write_bytes(_weights_seeds()[0])
    (folder / "model.safetensors.index.json").write_bytes(data)
    stored_tensors(LocalFolder(folder))


def _npy(matrix: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, matrix)
    return stream.getvalue()


def _npy_seeds() -> tuple[bytes, ...]:
    return _npy(np.tri(4)), _npy(np.eye(3, dtype=bool))


def _npz_seeds() -> tuple[bytes, ...]:
    import scipy.sparse

    stream, plain = io.BytesIO(), io.BytesIO()
    scipy.sparse.save_npz(stream, scipy.sparse.csr_matrix(np.tri(4)))
    np.savez(plain, matrix=np.tri(4))
    return stream.getvalue(), plain.getvalue()


def graph_reader(suffix: str) -> Callable[[bytes, Path], None]:
    """Reads a mask's graph from a file that ends so."""

    def read(data: bytes, folder: Path) -> None:
        from rankscope.masks._graph_file import read_graph

        (folder / f"graph{suffix}").write_bytes(data)
        read_graph(str(folder / f"graph{suffix}"))

    return read


def _mask_words(data: bytes, folder: Path) -> None:
    from rankscope.masks import parse_mask

    parse_mask(text_of(data))


def _condition(data: bytes, folder: Path) -> None:
    from rankscope.runs.conditions import parse_condition

    parse_condition(text_of(data))


def _sites(data: bytes, folder: Path) -> None:
    from rankscope.stream.sites import SiteSelection

    SiteSelection.parse(text_of(data).split(","))


def _text(data: bytes, folder: Path) -> None:
    from rankscope.models.inputs.rows import read_text

    (folder / "text.txt").write_bytes(data)
    read_text(folder / "text.txt")


def _plan_seeds() -> tuple[bytes, ...]:
    from rankscope.ext.sweeps.example import EXAMPLE_PLAN

    plain = "\n".join(line.partition("#")[0].rstrip() for line in EXAMPLE_PLAN.splitlines())
    return EXAMPLE_PLAN.encode(), plain.encode()


def _plan(data: bytes, folder: Path) -> None:
    from rankscope.ext.sweeps.plan import plan_of

    (folder / "plan.yaml").write_bytes(data)
    plan_of(folder / "plan.yaml")


_JSON = (b"null", b"true", b"-1", b"1e999", b"NaN", b"10000000000", b'"\\ud800"', b"[]", b"{}", b'"x"', b"0.5", b"[[[[")
_BERT_WORDS = (b'"hidden_size"', b'"num_hidden_layers"', b"1000000000", b'"auto_map"', b'"model_type"', b'"t5"',
               b'"mamba"', b'"gemma3"', b'"_attn_implementation"', b'"quantization_config"', b'"dtype"',
               b'"architectures"', b'"hidden_act"', b'"qwen2"', b'"num_labels"', b'"num_hidden_layers":1000000000',
               b'"num_labels":1000000000', b'"model_type":"qwen2"')  # fmt: skip

_MASK_SEEDS = (b"causal & window(4)", b"random_sparse(degree=3, seed=1) | ~sink(1)")
_MASK_WORDS = (b"(", b")", b"&", b"|", b"~", b"=", b"adjacency", b"10/11", b"1e9", b"99999999999", b"prefix")
_PLACES = (b"../", b"/etc/passwd", b"\\u0000", b".safetensors")
_SIGNS = (b"<", b">=", b"@", b"last", b"all", b"nan", b"-inf", b",", b"1_0")
_TEXT_SEEDS = ("plain text, ümläute and 漢字".encode(), b"\xff\xfea\x00b\x00")
_PLAN_WORDS = (b"&a", b"*a", b"!!python/object:os.system", b"---", b"{", b"[", b": ", b"seeds", b"variants")

# Cases of a campaign are dealt out by what one costs: a target that reads in a tenth of a millisecond gets a hundred
# times as many as one that loads a model.
TARGETS = {
    target.name: target
    for target in (
        Target("result-sidecar", lambda: (saved_run()[0],), _sidecar, _JSON, 0.15),
        Target("result-rows", lambda: (saved_run()[1],), _rows, weight=0.1),
        Target("gauge-record", _record_seeds, _record, (*_JSON, b"\n"), 0.03),
        Target("config", _configs, _config, (*_JSON, *_BERT_WORDS), 0.08),
        Target("design", _configs, _design, (*_JSON, *_BERT_WORDS), 0.4),
        Target("stream-header", _weights_seeds, _stored, (*_JSON, b'"F32"', b'"BF16"', b'"shape"'), 0.6),
        Target(
            "stream-index", _index_seeds, _index, (*_JSON, b"../", b"/etc/passwd", b"\\u0000", b".safetensors"), 0.6
        ),
        Target("mask-npy", _npy_seeds, graph_reader(".npy"), (b"'|O'",), 0.3),
        Target("mask-npz", _npz_seeds, graph_reader(".npz"), (b"PK\x03\x04", b"indices.npy"), 0.6),
        Target("mask-words", lambda: _MASK_SEEDS, _mask_words, _MASK_WORDS, 1.5),
        Target("condition", lambda: (b"any relative_residual@block.out@3,5 < 1e-3",), _condition, _SIGNS, 1.5),
        Target("sites", lambda: (b"block.out,attention.probs,mlp.sum@0,2", b"block.in@1"), _sites, (b"@", b",", b"-1")),
        Target("text", lambda: _TEXT_SEEDS, _text, (b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xed\xa0\x80")),
        Target("sweep-plan", _plan_seeds, _plan, _PLAN_WORDS, 0.04),
        *LOADING_TARGETS,
    )
}
