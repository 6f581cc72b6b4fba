"""A program that uses a rankscope of which one extension was deleted; started by ``test_extensions.py``.

    python without_one.py SITE EXTENSION [SITE EXTENSION ...]

Each pair runs in a process of its own, forked after torch and transformers were imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import warnings


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of a command line."""
    from rankscope.cli.app import main

    out = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(list(words))
        except SystemExit as stopped:
            code = stopped.code
    return int(code or 0), out.getvalue()  # type: ignore[call-overload]


def use(gone: str) -> None:
    """Commands, verbs and a gauge of the core; names of the deleted extension are answered."""
    import torch

    import rankscope
    from rankscope.extensions import OURS, installed

    lost = {name for name, one in installed().items() if one.extension is None}
    assert gone in lost, lost
    code, text = command("--help")
    assert code == 0, text
    assert f"{gone} (is not installed)" in " ".join(text.split()), text
    listed = json.loads(command("ls", "extensions", "--json")[1])["entries"]
    assert {entry["name"] for entry in listed if not entry["usable"]} == lost

    small = ("--sequences", "1", "--tokens", "8", "--quiet")
    for verb in ("measure", "ablate", "exact"):
        code, text = command(verb, "init:tiny-bert", *small)
        assert code == 0, text
    code, text = command("doctor", "init:tiny-bert")
    assert code == 0, text

    loaded = rankscope.load("init:tiny-bert")
    gauge = rankscope.Gauge(loaded.model, {"input_ids": torch.arange(16).reshape(2, 8)}, schedule=1, strict=True)
    reading = gauge.step(0)
    gauge.close()
    assert reading is not None
    assert reading.scalars

    commands = {"graph", "predict", "bound", "decompose", "sweep", "query"}
    for extension in lost:
        for name in OURS[extension]:
            if name in commands:
                code, text = command(name)
                assert code == 2, text
                assert f"`{name}` comes with the extension {extension}, which" in " ".join(text.split()), text
            if name.isidentifier() and name not in ("offload", "theorems"):
                assert not hasattr(rankscope, name)
    if gone == "offload":
        code, text = command("measure", "init:tiny-bert", "--offload", *small)
        assert "`offload` comes with the extension offload" in " ".join(text.split()), text
    assert not any(module.startswith(f"rankscope.ext.{gone}.") for module in sys.modules)


def main() -> None:
    """Use each site in turn, and print the names of the extensions that can be deleted."""
    import torch  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    pairs = list(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    for site, gone in pairs:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("error", UserWarning)
                sys.path.insert(0, site)
                import rankscope

                assert str(rankscope.__file__).startswith(site), rankscope.__file__
                use(gone)
            except BaseException:  # noqa: BLE001 the parent says which extension it was
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(gone, "works" if status == 0 else "FAILED")


if __name__ == "__main__":
    main()
