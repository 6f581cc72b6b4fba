"""What a stranger tries first and gets wrong: each ends in a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankscope as rs
from rankscope.errors import RankscopeError

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(48).reshape(4, 12) + 5


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(encoder().parameters(), 1e-2)


@pytest.fixture(scope="module")
def runs() -> dict[str, rs.Run]:
    given = ("init:tiny-bert", {"input_ids": IDS})
    return {"measure": rs.measure(*given), "exact": rs.exact(*given), "ablate": rs.ablate(*given)}


GUESSES: dict[str, tuple[Callable[[], Any], str]] = {
    # The model.
    "measure()": (lambda: rs.measure(), "missing a required argument: 'model'"),
    "measure(nn.TransformerEncoder, x)": (lambda: rs.measure(nn.TransformerEncoder, X), "Pass an instance of it"),
    "measure(model.state_dict(), x)": (lambda: rs.measure(encoder().state_dict(), X), "build the module"),
    "measure('bert-base-uncased')": (lambda: rs.measure("bert-base-uncased"), "Pass a local folder, or init:NAME"),
    "measure('tiny-bert')": (lambda: rs.measure("tiny-bert"), "or 'init:tiny-bert'"),
    "measure('init:bert')": (lambda: rs.measure("init:bert"), "Did you mean 'tiny-bert'"),
    "measure('init:tiny_bert')": (lambda: rs.measure("init:tiny_bert"), "Did you mean 'tiny-bert'"),
    "measure('init:gpt5')": (lambda: rs.measure("init:gpt5"), "Did you mean 'gpt2'"),
    "measure('./nowhere')": (lambda: rs.measure("./nowhere"), "There is no file or folder './nowhere'"),
    "measure('model.pt')": (lambda: rs.measure("model.pt"), "Pass the folder that holds config.json"),
    "measure(5, x)": (lambda: rs.measure(5, X), "model is an int; expected a module"),
    "measure(None, x)": (lambda: rs.measure(None, X), "expected a module"),
    "measure(convolutions)": (lambda: rs.measure(convolutions(), torch.randn(2, 3, 9, 9)), "rankscope.judge"),
    "remedy(convolutions)": (lambda: rs.remedy(convolutions(), torch.randn(2, 3, 9, 9)), "rankscope.judge"),
    "load('gpt2')": (lambda: rs.load("gpt2"), "or 'init:gpt2'"),
    "Model(blocks='layer')": (lambda: rs.measure(rs.Model(encoder(), blocks="layer"), X), "'layers.*'"),
    "Model(device='gpu')": (lambda: rs.Model("init:tiny-bert", device="gpu").loaded, "gpu"),
    "Model(dtype='half')": (lambda: rs.Model("init:tiny-bert", dtype="halb").loaded, "float16"),
    # The inputs.
    "measure(module)": (lambda: rs.measure(encoder()), "Pass a tensor"),
    "ablate(module)": (lambda: rs.ablate(encoder()), "Pass a tensor"),
    "doctor(module)": (lambda: rs.doctor(encoder()), "Pass a tensor"),
    "measure(module, 'text')": (lambda: rs.measure(encoder(), "hello world"), "how it reads text is unknown"),
    "measure(module, array)": (lambda: rs.measure(encoder(), X.numpy()), "torch.as_tensor(inputs)"),
    "measure(module, lists)": (lambda: rs.measure(encoder(), X.tolist()), "torch.as_tensor(inputs)"),
    "measure(module, loader)": (lambda: rs.measure(encoder(), DataLoader(X, batch_size=2)), "next(iter(inputs))"),
    "measure(module, dataset)": (lambda: rs.measure(encoder(), TensorDataset(X)), "next(iter(DataLoader(inputs"),
    "measure(module, (x, y))": (lambda: rs.measure(encoder(), (X, torch.zeros(4).long())), "pass the inputs alone"),
    "measure(module, other width)": (lambda: rs.measure(encoder(), X[..., :15]), "cannot run on these inputs"),
    "measure(module, no sequences)": (lambda: rs.measure(encoder(), X[:0]), "a batch axis that is not empty"),
    "measure(bert, floats)": (lambda: rs.measure("init:tiny-bert", torch.rand(4, 12)), "cannot run on these inputs"),
    "measure(bert, large ids)": (lambda: rs.measure("init:tiny-bert", IDS * 10**6), "The largest id is 28,000,000"),
    "measure(bert, long)": (lambda: rs.measure("init:tiny-bert", torch.ones(1, 600).long()), "512 (embeddings.pos"),
    "measure(bert, 'nothing.txt')": (lambda: rs.measure("init:tiny-bert", "nothing.txt"), "there is no such file"),
    "measure(bert, Path)": (lambda: rs.measure("init:tiny-bert", Path("nothing.txt")), "nothing.txt"),
    "measure(bert, [])": (lambda: rs.measure("init:tiny-bert", []), "pass at least one"),
    "Inputs(tokens=0)": (lambda: rs.Inputs(X, tokens=0), "a whole number, 1 or more"),
    "Inputs(sequences='2')": (lambda: rs.Inputs(X, sequences="2"), "a whole number"),  # type: ignore[arg-type]
    "Inputs(axes='BTD')": (lambda: rs.Inputs(X, axes="BTD"), "batch tokens"),  # type: ignore[arg-type]
    "Stream('b t d')": (lambda: rs.Stream("b t d"), "is not one of batch, tokens, dim"),
    "Stream('batch seq dim')": (lambda: rs.Stream("batch seq dim"), "is not one of batch, tokens, dim"),
    # What is measured.
    "metrics=['entropy']": (lambda: rs.measure(encoder(), X, metrics=["entropy"]), "'attention_entropy'"),
    "metrics='rank'": (lambda: rs.measure(encoder(), X, metrics="rank"), "'stable_rank'"),
    "metrics=['cosine']": (lambda: rs.measure(encoder(), X, metrics=["cosine"]), "'mean_cosine'"),
    "METRICS['rank']": (lambda: rs.METRICS["rank"], "Did you mean"),
    "sites=['mlp']": (lambda: rs.measure(encoder(), X, sites=["mlp"]), "'mlp.out'"),
    "sites=['layer']": (lambda: rs.measure(encoder(), X, sites=["layer"]), "site"),
    "measure(layers=3)": (lambda: rs.measure(encoder(), X, layers=3), "a field of rankscope.Surgery"),
    "measure(skip=0)": (lambda: rs.measure(encoder(), X, skip=0), "a field of rankscope.Surgery"),
    "measure(tokens=32)": (lambda: rs.measure(encoder(), X, tokens=32), "a field of rankscope.Inputs"),
    "measure(device='cuda')": (lambda: rs.measure("init:tiny-bert", device="cuda"), "a field of rankscope.Model"),
    "measure(n_layers=3)": (lambda: rs.measure(encoder(), X, n_layers=3), "n_layers"),
    "surgery={'skips': 0}": (lambda: rs.measure(encoder(), X, {"skips": 0}), "Did you mean 'skip'"),
    "surgery='no skip'": (lambda: rs.measure(encoder(), X, "no skip"), "a dictionary of its fields such as"),
    "Surgery(mlp='remove')": (lambda: rs.Surgery(mlp="remove"), "expected 'keep' or 'drop'"),  # type: ignore[arg-type]
    "Surgery(mlp=False)": (lambda: rs.Surgery(mlp=False), "expected 'keep' or 'drop'"),  # type: ignore[arg-type]
    "Surgery(norm='none')": (lambda: rs.Surgery(norm="none"), "norm='none'"),  # type: ignore[arg-type]
    "Surgery(skip='off')": (lambda: rs.Surgery(skip="off"), "skip='off'"),  # type: ignore[arg-type]
    "Surgery(mask='casual')": (lambda: rs.measure(encoder(), X, {"mask": "casual"}), "Did you mean 'causal'"),
    "ablate(variants=['no_mlp'])": (lambda: rs.ablate(encoder(), X, variants=["no_mlp"]), "'+mlp'"),
    "operate(module) unseen": (lambda: rs.operate(encoder(), {"skip": 0}).__enter__(), "Pass inputs="),
    # Other commands.
    "doctor(loss='mse')": (lambda: rs.doctor(encoder(), X, loss="mse"), "FILE.py:NAME"),
    "doctor(optimizer=1)": (lambda: rs.doctor(encoder(), X, optimizer=1), "expected a torch.optim.Optimizer"),
    "judge(5)": (lambda: rs.judge(5), "expected an array"),
    "judge((N, d))": (lambda: rs.judge(torch.randn(64, 16)), "layout='batch dim'"),
    "judge(list of lists)": (lambda: rs.judge([[1.0, 2.0], [3.0, 4.0]]), "layout='batch tokens dim'"),
    "judge(ids)": (lambda: rs.judge(IDS), "hidden states are float64, float32"),
    "predict()": (lambda: rs.predict(), "missing a required argument: 'design'"),
    "predict('bert')": (lambda: rs.predict("bert"), "Did you mean 'tiny-bert'"),
    "predict(module)": (lambda: rs.predict(encoder()), "model.config.save_pretrained"),
    "Design(width=100, heads=3)": (lambda: rs.Design(depth=2, width=100, heads=3), "head_dim=33"),
    "Design(mask='causl')": (lambda: rs.Design(depth=2, width=32, heads=2, mask="causl"), "'causal'"),
    "decompose(module, x)": (lambda: rs.decompose(encoder(), X), "measure, ablate, exact and doctor need neither"),
    "bound(module, x)": (lambda: rs.bound(encoder(), X), "measure, ablate, exact and doctor need neither"),
    "load_run('nowhere')": (lambda: rs.load_run("nowhere"), "Give a folder or address written with save or --out"),
    "compare('a', 'b')": (lambda: rs.compare("a", "b"), "There is no run in a"),
    "report('nowhere', 'x.html')": (lambda: rs.report("nowhere", "x.html"), "nowhere"),
    # Training.
    "watch(model)": (lambda: rs.watch(encoder()), "pass it, or several in a list"),
    "watch(optimizer, model)": (lambda: rs.watch(sgd(), encoder()), "watch(model, optimizer)"),  # type: ignore[arg-type]
    "watch(model, parameters)": (lambda: rs.watch(encoder(), encoder().parameters()), "not a torch.optim.Optimizer"),
    "watch(loader, optimizer)": (lambda: rs.watch(DataLoader(X), sgd()), "watch() knows the trainers"),
    "Gauge(alarms=['collapse'])": (lambda: rs.Gauge(encoder(), X, alarms=["collapse"]), "'token_collapse'"),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_a_wrong_guess_is_told_what_to_do(guess: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"garbage")
    call, told = GUESSES[guess]
    with pytest.raises(RankscopeError) as error:
        call()
    message = str(error.value)
    assert told in message, message
    assert 20 < len(message) < 700
    assert "\n" not in message


TRAIN = """
import torch
class Classifier(torch.nn.Linear):
    pass
def build_model():
    return Classifier(4, 4)
raise SystemExit("it was run")
"""


def test_a_file_of_python_is_listed_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with pytest.raises(RankscopeError, match=r"train\.py:build_model\. Found: Classifier, build_model\.$"):
        rs.doctor(str(tmp_path / "train.py"))


def test_a_module_of_a_file_needs_inputs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TRAIN.replace("raise", "#"))
    with pytest.raises(RankscopeError, match=r"Pass --inputs \S+own\.py:NAME, a batch"):
        rs.doctor(f"{tmp_path}/own.py:build_model")


@pytest.mark.parametrize(
    ("guess", "told"),
    [
        (lambda runs: runs["measure"].curve("residual"), "'relative_residual'"),
        (lambda runs: runs["measure"].curve("mu", "block"), "'block.out'"),
        (lambda runs: runs["measure"].curve("mu", variant="pure"), "variant"),
        (lambda runs: runs["ablate"].curve("relative_residual"), "Choose one, as in variant='pure'"),
        (lambda runs: rs.compare(runs["measure"], runs["exact"]), "give two runs of one verb"),
        (lambda runs: rs.compare(runs["measure"], runs["exact"]), "`rankscope exact` prints both"),
        (lambda runs: runs["measure"].plot(metrics="residual"), "'relative_residual'"),
        (lambda runs: runs["measure"].plot(ax=Figure().add_subplot()), "pass one metric"),
    ],
)
def test_a_wrong_question_to_a_run_is_told_what_to_ask(
    runs: dict[str, rs.Run], guess: Callable[[dict[str, rs.Run]], Any], told: str
) -> None:
    with pytest.raises(RankscopeError) as error:
        guess(runs)
    assert told in str(error.value)


@pytest.mark.parametrize("name", ["env", "ls"])
def test_a_command_that_is_no_function_says_what_to_type(name: str) -> None:
    with pytest.raises(AttributeError, match=f"`rankscope {name}"):
        getattr(rs, name)


@pytest.mark.parametrize(("word", "told"), [("monitor", "rs.watch(model, optimizer)"), ("masks", "`rankscope graph")])
def test_a_word_that_is_no_command_says_what_to_do(word: str, told: str) -> None:
    from typer.testing import CliRunner

    from rankscope.cli.app import app

    answer = CliRunner().invoke(app, [word])
    assert answer.exit_code == 2
    assert told in " ".join(answer.output.split())


def test_a_panel_is_drawn_into_axes_of_the_users_own(runs: dict[str, rs.Run]) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert runs["measure"].plot("relative_residual", ax=right) is figure
    assert right.lines
    assert not left.lines


@pytest.mark.parametrize(("name", "meant"), [("mesure", "measure"), ("Measure", "measure"), ("loadrun", "load_run")])
def test_a_misspelt_name_is_corrected(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"Did you mean '{meant}'"):
        getattr(rs, name)
