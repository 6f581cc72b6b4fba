"""A verb is one declaration: signature, command line and plans agree with it, and a new one is found everywhere."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import rankscope
from rankscope._registry import Registry
from rankscope.cli.app import command_line, main
from rankscope.cli.examples import examples
from rankscope.errors import InputError
from rankscope.ext.sweeps.plan import PlanInputs, PlanVariant, options_in_plans
from rankscope.metrics import METRICS
from rankscope.monitor.alarms import ALARMS
from rankscope.options import INPUTS, OUT, SURGERY, SURGERY_FIELDS
from rankscope.remedies import REMEDIES
from rankscope.reporting.page.sections import sections_of
from rankscope.runs.run import Run
from rankscope.verbs._spec import VERBS, Verb, verbs_in_order

ALL = verbs_in_order()
NOUNS = ("model", "inputs", "surgery")
OTHERS_ONLY_IN_PYTHON = {
    "predict": {"changes"},  # its parts are options
    "graph": {"mask"},  # one in Python, several on the command line
}


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_the_signature_agrees_with_the_declaration(verb: Verb) -> None:
    parameters = dict(inspect.signature(verb.run()).parameters)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    nouns = [option.noun for option in verb.options if option.noun is not None]
    expected = [noun for noun in NOUNS if noun in nouns]
    assert list(parameters)[: len(expected)] == expected
    for noun in expected:
        del parameters[noun]
    for option in verb.options:
        if option.in_python and option.noun is None:
            parameter = parameters.pop(option.name)
            assert parameter.kind is parameter.KEYWORD_ONLY or not nouns
            if not option.is_argument:
                assert parameter.default == option.default, option.name
    assert set(parameters) <= {"progress"} | OTHERS_ONLY_IN_PYTHON.get(verb.name, set())


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_the_command_line_agrees_with_the_declaration(verb: Verb) -> None:
    command = typer.main.get_command(command_line()).commands[verb.name]  # type: ignore[attr-defined]
    declared = {option.name: option for option in (*verb.options, *verb.outputs)}
    assert [
        parameter.name for parameter in command.params if parameter.name not in ("help", "help_all", "explain")
    ] == list(declared)
    for parameter in command.params:
        option = declared.get(str(parameter.name))
        if option is not None and not (option.is_argument or option.several):
            assert parameter.default == option.default, option.name


@pytest.mark.parametrize("verb", [verb for verb in ALL if verb.in_plans], ids=lambda verb: verb.name)
def test_plans_agree_with_the_declaration(verb: Verb) -> None:
    fields = options_in_plans(verb).model_fields
    assert set(fields) - {"verb"} == {option.name for option in verb.options if option.in_plans}
    for name in set(fields) - {"verb"}:
        assert fields[name].default == verb.default(name)


def test_inputs_and_surgery_of_a_plan_are_the_declared_ones() -> None:
    declared = {"text" if option.name == "inputs" else option.name for option in INPUTS} - {
        "seed"
    }  # seeds: its own key
    assert set(PlanInputs.model_fields) - {"texts"} == declared
    surgery = {option.name for option in SURGERY}
    assert surgery <= set(PlanVariant.model_fields)
    assert set(PlanVariant.model_fields) - {"name"} <= {option.name for option in SURGERY_FIELDS}
    for option in SURGERY:
        if option.choices:
            assert set(option.choices) == set(PlanVariant.model_fields[option.name].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_a_run_can_be_saved_and_an_answer_cannot(verb: Verb) -> None:
    assert verb.makes_runs == (OUT in verb.outputs)
    assert verb.makes_runs or not (verb.in_plans or sections_of(verb.name))


def test_a_verb_is_exported_under_its_name() -> None:
    for verb in VERBS.values():
        assert verb.name in dir(rankscope)
        assert getattr(rankscope, verb.name) is verb.run()


def test_the_registry_imports_nothing_heavy() -> None:

    code = (
        "import sys\nfrom rankscope.verbs._spec import VERBS\nassert 'measure' in VERBS\n"
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'typer', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# What docs/adding.md shows, written where it says, and nothing else.

PAGE = Path(__file__).parents[2] / "docs/adding.md"


def code_of(section: str, after: str = "") -> str:
    """The first block of Python in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    body = text.partition(after)[2].partition("```python\n")[2].partition("```")[0] if after else text
    return body if after else text.partition("```python\n")[2].partition("```")[0]


@pytest.fixture
def contributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Registry[Any], str], Path]]:
    """A folder that counts as part of a package from now on, in this process and in those it starts."""
    restored: list[tuple[Registry[Any], dict[str, Any]]] = []
    known = set(sys.modules)

    def begin(registry: Registry[Any], package: str) -> Path:
        home = tmp_path / "contributed"
        home.mkdir()
        module = importlib.import_module(package)
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(home)])
        restored.append((registry, dict(registry)))
        monkeypatch.setattr(registry, "_loaded", False)  # look into the package again, as a new process does
        startup = f"import {package}\n{package}.__path__.append({str(home)!r})\n"
        (tmp_path / "sitecustomize.py").write_text(startup, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return home

    yield begin
    for registry, entries in restored:
        registry._entries.clear()
        registry._entries.update(entries)
    for name in set(sys.modules) - known:
        if "contributed" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run(*words: str) -> None:
    sys.argv = ["rankscope", *words]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert not left.value.code


def test_a_new_metric_is_found_everywhere(
    contributed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope"])
    (contributed(METRICS, "rankscope.metrics") / "nuclear_rank.py").write_text(code_of("A metric"), encoding="utf-8")
    run("ls", "metrics")
    assert "nuclear_rank" in capsys.readouterr().out
    run("measure", "init:tiny-bert", "--sequences", "1", "--tokens", "8", "--metrics", "nuclear_rank", "--json")
    values = [row["value"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert all(1 <= value <= 8 for value in values)
    assert "nuclear_rank" in docs_lines("generated", "MetricsTable", arguments=["tokens"])


SHARED = code_of("A metric").partition("@token_metric")[0]
"""The imports with which the page begins."""


@pytest.mark.slow
def test_a_new_metric_of_queries_and_keys_is_one_file_and_a_line(contributed: Any, tmp_path: Path) -> None:
    home = contributed(METRICS, "rankscope.metrics")
    (home / "query_key_ratio.py").write_text(SHARED + code_of("A metric", after="### A metric of queries and keys"))
    small = rankscope.Inputs(sequences=2, tokens=8)
    run = rankscope.measure("init:tiny-llama", small, metrics=["query_key_ratio"])
    assert run.table.num_rows == 2 * 3 * 4, "sequences, blocks, heads"
    assert set(run.table["status"].to_pylist()) == {"ok"}
    model = rankscope.load("init:tiny-llama").model
    ids = {"input_ids": torch.randint(5, 90, (8, 8))}
    with rankscope.Gauge(model, ids, schedule=1, metrics=["query_key_ratio"], strict=True) as gauge:
        assert "rankscope/query_key_ratio/mean" in gauge.step(0).scalars
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match="attn_implementation='sdpa'"):
        rankscope.measure(model, ids, metrics=["query_key_ratio"])
    # The contract tests, with the one line that the page names.
    line = re.search(r'here `("query_key_ratio": [^`]+)`', PAGE.read_text(encoding="utf-8"))[1]
    shutil.copytree(PAGE.parents[1] / "tests/reference", tmp_path / "tests/reference")
    definitions = tmp_path / "tests/reference/sides.py"
    before, begins, after = definitions.read_text().partition('    "router_entropy": lambda')
    definitions.write_text(f"{before}    {line},\n{begins}{after}")
    contracts = shutil.copy(PAGE.parents[1] / "tests/contracts/test_sides.py", tmp_path / "test_sides.py")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(contracts)]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_new_alarm_is_raised_at_its_threshold(contributed: Any) -> None:
    home = contributed(ALARMS, "rankscope.monitor.alarms")
    (home / "stretched_queries.py").write_text(code_of("An alarm"))
    model = rankscope.load("init:tiny-llama").model
    ids = {"input_ids": torch.randint(5, 90, (8, 8))}
    watched = {"metrics": ["query_key_bound"], "alarms": ["stretched_queries"]}
    raised = []
    with rankscope.Gauge(model, ids, schedule=1, strict=True, actions=(), **watched) as gauge:
        for step in range(4):
            for layer in model.layers:
                layer.self_attn.q_proj.weight.data.mul_(1e7 if step == 2 else 1.001)
            raised += [(step, alarm.name, alarm.component) for alarm in gauge.step(step).alarms]
    assert raised == [(2, "stretched_queries", "attention")]


def test_blocks_that_take_a_dictionary_are_measured_as_by_hand() -> None:
    page: dict[str, Any] = {}
    exec(SHARED + code_of("A block that takes a dictionary"), page)
    net, x, states = page["net"].double(), page["x"].double(), []
    for block in net.blocks:
        block.register_forward_hook(lambda module, given, out: states.append(out["x"].detach()))
    with torch.no_grad():
        net(x)
    by_hand = [float(((s - s.mean(1, keepdim=True)).norm(dim=(1, 2)) / s.norm(dim=(1, 2))).mean()) for s in states]
    found = rankscope.measure(net, x, metrics=["relative_residual"], sites=["block.out"]).curve("relative_residual")
    assert list(found.mean) == pytest.approx(by_hand, rel=1e-12)


def test_a_new_remedy_is_found_everywhere(
    contributed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope"])
    (contributed(REMEDIES, "rankscope.remedies") / "small_branches.py").write_text(
        code_of("A remedy"), encoding="utf-8"
    )
    run("ls", "remedies")
    assert "small_branches" in capsys.readouterr().out
    small = ("--sequences", "1", "--tokens", "8")
    run("remedy", "init:tiny-bert", *small, "--remedies", "small_branches", "--json")
    assert "small_branches" in {entry["name"] for entry in json.loads(capsys.readouterr().out)["remedies"]}
    assert "small_branches" in docs_lines("statements", "RegistryTable", arguments=["remedies"])


@pytest.mark.slow
def test_a_new_verb_is_found_everywhere(
    contributed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope"])
    monkeypatch.chdir(tmp_path)
    loudness = "loudness"
    folder = contributed(VERBS, "rankscope.verbs") / loudness
    folder.mkdir()
    for name in ("__init__.py", "run.py"):
        (folder / name).write_text(code_of("A verb", after=f"`{name}`"), encoding="utf-8")
    # --help, its own help with options and examples, and the table of the docs, which lists the same commands
    run("--help")
    assert "How loud is this model?" in capsys.readouterr().out
    run(loudness, "--help-all")
    shown = capsys.readouterr().out
    assert "--tokens-policy" in shown
    assert "--louder" in shown
    assert f"rankscope {examples()[loudness][0]}" in shown
    assert "How loud is this model?" in docs_lines("statements", "CommandsTable", up=lambda: "")
    # the command, its answer as text, JSON and figure, and the Python function of the same name
    run(loudness, "init:tiny-bert", "--sequences", "2", "--tokens", "8", "--out", "run", "--figure", "figure.svg")
    assert "Loud: " in capsys.readouterr().out
    assert Path("figure.svg").is_file()
    run(loudness, "init:tiny-bert", "--sequences", "2", "--tokens", "8", "--json")
    assert json.loads(capsys.readouterr().out)["kind"] == loudness
    called = rankscope.loudness("init:tiny-bert", rankscope.Inputs(sequences=2, tokens=8))
    assert isinstance(called, Run)
    assert called.table.equals(rankscope.load_run("run").table)
    # report
    page = rankscope.report("run", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "How loud is this model?" in page
    assert "Loud: " in page
    # sweep and query, with an option and a column of its own
    plan = {
        "models": ["init:tiny-bert"],
        "verbs": [{loudness: {"louder": 2.0}}],
        "inputs": {"sequences": 1, "tokens": 8},
    }
    assert rankscope.sweep(plan, tmp_path / "sweep", serial=True).counts["done"] == 1
    found = rankscope.query(tmp_path / "sweep", "SELECT DISTINCT verb, ear FROM rows ORDER BY ALL").to_pylist()
    assert found == [{"verb": loudness, "ear": "left"}]


def docs_lines(module: str, directive: str, **attributes: Any) -> str:
    """What a directive of the documentation writes."""
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(PAGE.parent / "_ext"))
    try:
        made = getattr(importlib.import_module(module), directive)
    finally:
        del sys.path[0]
    table = object.__new__(made)
    for name, value in attributes.items():
        setattr(table, name, value)
    return "\n".join(table.lines())
