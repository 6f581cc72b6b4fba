"""A process that has paid for the imports and forks one child per request: each child is the command line, for real.

Reads one JSON object per line. ``{"words": [...], ...}`` starts a child and answers with its process id;
``{"wait": PID}`` answers with how it ended, as a shell would count it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

USED = (
    "pyarrow.parquet",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "rankscope.cli.app",
    "rankscope.monitor",
    "rankscope.reporting.terminal",
    "rankscope.ext.sweeps.plan",
    "rankscope.ext.sweeps.running",
    "rankscope.verbs.ablate.run",
    "rankscope.verbs.measure.run",
)
"""What the commands import lazily."""


def child(request: dict[str, Any]) -> NoReturn:
    """Become the command that is asked for."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    code = 1
    sys.dont_write_bytecode = True  # where no file may grow, Python leaves cut-off bytecode for everybody after it
    try:
        from tests.faults import injecting

        sys.argv = ["rankscope", *request["words"]]
        if request["fault"]:
            getattr(injecting, request["fault"])(**request["options"])
        if request["words"]:
            from rankscope.cli.app import main

            signal.signal(signal.SIGINT, signal.default_int_handler)
            main(request["words"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in USED:  # no tensor is computed here, so that no thread is started before a fork
        importlib.import_module(name)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            child(request)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    serve()
