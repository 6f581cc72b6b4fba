"""Fetch axe-core, the accessibility checker that the browser tests run, into the cache; never into the repository."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from rankscope._files import cache_folder

VERSION = "4.14.0"
INTEGRITY = "sha512-9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ=="
MEMBER = "package/axe.min.js"


def axe_file() -> Path:
    """Where the script lies once it was fetched."""
    return cache_folder() / f"axe-core-{VERSION}" / "axe.min.js"


def main() -> int:
    """Fetch it with npm, check its digest, keep the one file; 0 if it is there afterwards."""
    target = axe_file()
    if target.is_file():
        print(f"axe-core {VERSION}: {target}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", f"axe-core@{VERSION}", "--silent", "--pack-destination", scratch]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            print("axe-core needs npm, which is not installed.", file=sys.stderr)
            return 1
        archives = list(Path(scratch).glob("axe-core-*.tgz"))
        if done.returncode != 0 or not archives:
            print(f"npm could not fetch axe-core: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return 1
        content = archives[0].read_bytes()
        digest = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode("ascii")
        if digest != INTEGRITY:
            print(f"axe-core has digest {digest}, expected {INTEGRITY}. It was not opened.", file=sys.stderr)
            return 1
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(member.read())
    print(f"axe-core {VERSION}: {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
