"""Write ``constraints/ci-hashed.txt``: everything CI installs, with the SHA-256 of every file offered for it.

The versions are those of ``constraints/ci.txt``, the packages those that the extras ``test-all`` and ``docs`` lead to
in the environment this runs in. Run it there (`./dev pin`, needs pip-tools and a registry) after a version was changed.

Hashes are those of source archives and of wheels for CPython 3.11 on any platform. Of torch only the build for
processors is listed, where the machine this runs on has one at hand: the other build bears the same version and brings
gigabytes for accelerators. So the file is to be installed without looking for dependencies (``--no-deps``);
``pip check`` afterwards tells whether something is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints" / "ci.txt"
HASHED = ROOT / "constraints" / "ci-hashed.txt"
OWN = "rankscope"
HEAD = """\
# Everything CI installs, by SHA-256: source archives and wheels for CPython 3.11 of any platform; of torch only the
# build for processors. Written by `./dev pin` from constraints/ci.txt; do not edit.
"""


def pins() -> dict[str, str]:
    """Names and versions in ``constraints/ci.txt``."""
    lines = (line.strip() for line in PINS.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def own_requirements(extras: frozenset[str]) -> list[Requirement]:
    """What pyproject.toml asks for; an editable install may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    return [Requirement(line) for line in lines]


def requirements(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What an installed package asks for here."""
    try:
        needs = [Requirement(line) for line in distribution(name).requires or []]
    except PackageNotFoundError:
        raise SystemExit(f"{name} is not installed here. Run `./dev setup` first.") from None
    contexts = [{"extra": extra} for extra in (extras or {""})]
    return [need for need in needs if need.marker is None or any(need.marker.evaluate(one) for one in contexts)]


def installed(extras: set[str]) -> set[str]:
    """Names of all packages that rankscope with these extras leads to, as far as they are installed here."""
    found: set[str] = set()
    waiting = [(OWN, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        found.add(name)
        needs = own_requirements(wanted) if name == OWN else requirements(name, wanted)
        waiting.extend((canonicalize_name(need.name), frozenset(need.extras)) for need in needs)
    return found - {OWN}


def hashes(repository: Any, name: str, version: str) -> list[str]:
    """The SHA-256 of every file that fits, as the registry tells; files that lie here are read."""
    found = set()
    for link in links(repository, name, version):
        if link.hash_name == "sha256":
            found.add(link.hash)
        elif link.is_file:
            found.add(hashlib.sha256(Path(link.file_path).read_bytes()).hexdigest())
    if not found:
        raise SystemExit(f"The registry gives no hash for {name}=={version}.")
    return sorted(found)


def links(repository: Any, name: str, version: str) -> list[Any]:
    """Files of this version; where one build bears a label (torch's ``+cpu``), those of that build alone."""
    candidates = repository.finder.find_all_candidates(name)
    same = [one for one in candidates if str(one.version).partition("+")[0] == version and fits(one.link.filename)]
    labelled = [one.link for one in same if "+" in str(one.version)]
    return labelled or [one.link for one in same]


def fits(filename: str) -> bool:
    """Whether a file is a source archive, or a wheel that CPython 3.11 takes on some platform."""
    if not filename.endswith(".whl"):
        return True
    for tag in parse_wheel_filename(filename)[3]:
        version = re.fullmatch(r"(cp|py)3(\d*)", tag.interpreter)
        if version is None:
            continue
        minor = int(version[2] or 0)
        if tag.interpreter == "cp311" or (minor <= 11 and (version[1] == "py" or tag.abi == "abi3")):
            return True
    return False


def written(lines: dict[str, list[str]], versions: dict[str, str]) -> str:
    """The text of a requirements file."""
    blocks = []
    for name in sorted(lines):
        checks = "".join(f" \\\n    --hash=sha256:{one}" for one in lines[name])
        blocks.append(f"{name}=={versions[name]}{checks}\n")
    return HEAD + "".join(blocks)


def main() -> int:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    versions, names = pins(), installed({"test-all", "docs"})
    if unknown := sorted(names - set(versions)):
        raise SystemExit(f"Not pinned in {PINS.name}: {', '.join(unknown)}")
    from piptools.repositories import PyPIRepository

    repository = PyPIRepository([], cache_dir=str(Path.home() / ".cache" / "pip-tools"))
    with repository.allow_all_wheels(), ThreadPoolExecutor(8) as pool:
        ordered = sorted(names)
        found = dict(
            zip(ordered, pool.map(lambda name: hashes(repository, name, versions[name]), ordered), strict=True)
        )
    HASHED.write_text(written(found, versions))
    print(f"{HASHED.relative_to(ROOT)}: {len(found)} packages, {sum(map(len, found.values()))} hashes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
