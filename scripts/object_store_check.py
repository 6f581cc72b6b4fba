"""Read a model from an S3-compatible server on this machine, and compare it bit by bit with the local folder.

    pip install s3fs 'moto[server]'
    python scripts/object_store_check.py            # writes docs/data/object_store.json

The server is that of moto, in a process of its own. Checked: measure and bound give the rows of the local folder; a key
that does not exist, a bucket that does not exist and an object that changes between two reads end in errors.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "data" / "object_store.json"
SHAPE = {"sequences": 2, "tokens": 16}


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def uploaded(store: Any, folder: Path) -> None:
    """Put every file of the folder into the bucket."""
    store.mkdir("models")
    for path in folder.iterdir():
        store.put_file(str(path), f"models/tiny/{path.name}")


def error_of(act: Any) -> str:
    """The message of the error that ``act`` raises."""
    from rankscope.errors import RankscopeError

    try:
        act()
    except RankscopeError as error:
        return str(error)
    raise SystemExit("an error was expected")


def checked(folder: Path) -> dict[str, Any]:
    """All comparisons."""
    import s3fs

    import rankscope as rs
    from rankscope.models.weight_files.files import bytes_at
    from rankscope.models.weight_files.folders import model_folder, stored_tensors

    store = s3fs.S3FileSystem(use_listings_cache=False)
    uploaded(store, folder)
    local = rs.measure(folder, rs.Inputs(**SHAPE))
    run = rs.measure(rs.Model("s3://models/tiny", offload=True), rs.Inputs(**SHAPE))
    left, right = (one.table["value"].to_numpy().view(np.int64) for one in (run, local))
    bound, own = (rs.bound(place, weights_only=True) for place in ("s3://models/tiny", folder))
    shared = bound.extra["sentences"]
    entry = next(iter(stored_tensors(model_folder("s3://models/tiny")).values()))
    bytes_at(entry.file, entry.offset, 16)
    name = entry.file.name.removeprefix("s3://")
    store.pipe_file(name, bytes(entry.file.size))
    changed = error_of(lambda: bytes_at(entry.file, entry.offset, 16))
    return {
        "rows": int(local.table.num_rows),
        "rows_equal_bit_by_bit": bool(np.array_equal(left, right)),
        "offload": dict(run.extra["offload"]),
        "bound_equal": all(own.extra["sentences"][name] == said for name, said in shared.items()),
        "bound": dict(bound.extra["weights"]),
        "no_such_folder": error_of(lambda: model_folder("s3://models/absent")),
        "no_such_bucket": error_of(lambda: model_folder("s3://absent/model")),
        "changed": changed,
    }


def main() -> None:
    """Start the server, compare, write."""
    port = free_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        from rankscope.models.loading import load

        with tempfile.TemporaryDirectory() as place:
            load("init:tiny-llama", seed=3).model.save_pretrained(place, max_shard_size="40KB")
            found = {"date": date.today().isoformat(), **checked(Path(place))}
    finally:
        server.terminate()
        server.wait()
    OUT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
