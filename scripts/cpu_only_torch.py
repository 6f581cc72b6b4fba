"""Installs one version of torch without the gigabytes of accelerator libraries its wheel asks for.

python scripts/cpu_only_torch.py [2.6.0] [-c CONSTRAINTS]

Where the index has a CPU build, pip takes that or this script has nothing to do. Where it has only the build for CUDA,
the wheel is installed without the packages of the accelerator, and each shared library that torch links to and does
not find is replaced by a stand-in whose every function answers "no device" (error 100 of the CUDA runtime). The code
that runs on the processor is the wheel's own, untouched. For tests only: needs Linux, `cc` and `readelf`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

ACCELERATOR = re.compile(r"Requires-Dist: (nvidia|cuda|triton)", re.IGNORECASE)
OF_AN_ACCELERATOR = re.compile(r"^(cu|nccl|nv)")
GIVES_TEXT = re.compile(r"String|ErrorName|ncclGetLastError")
NO_DEVICE = 100


def pip(*arguments: str) -> None:
    """Pip of this interpreter; an error of it is ours."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *arguments], check=True)


def forget_the_accelerator() -> None:
    """Takes its packages out of what the installed torch asks for, or pip would fetch them with the next package."""
    (path,) = Path(sysconfig.get_path("purelib")).glob("torch-*.dist-info/METADATA")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not ACCELERATOR.match(line)), encoding="utf-8")


def needed(library: Path) -> set[str]:
    """Names of the shared libraries that this one asks the loader for."""
    table = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", table))


def versions_of(library: Path) -> dict[str, str]:
    """Which library must define each version of symbols that this one uses."""
    table = subprocess.run(["readelf", "-V", "-W", library], capture_output=True, text=True, check=True).stdout
    owners, file = {}, ""
    for word, name in re.findall(r"(File|Name): (\S+)", table.partition("Version needs section")[2]):
        if word == "File":
            file = name
        else:
            owners[name] = file
    return owners


def asked_for(library: Path) -> set[tuple[str, str]]:
    """Symbols that the library uses and does not hold: name, and the version it must carry ('' for none)."""
    table = subprocess.run(["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True).stdout
    words = (line.split() for line in table.splitlines())
    symbols = (row[7].partition("@") for row in words if len(row) > 7 and row[6] == "UND")
    return {(name, version) for name, _, version in symbols}


def write_stand_in(path: Path, symbols: set[tuple[str, str]]) -> None:
    """One library of functions that all answer "no device", each with the version it is asked for."""
    body = {True: 'const char *{0}(void) {{ return "no device"; }}', False: "long {0}(void) {{ return {1}; }}"}
    lines = [body[bool(GIVES_TEXT.search(name))].format(name, NO_DEVICE) for name, _ in sorted(symbols)]
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in sorted(symbols):
        groups[version].append(f"{name};")
    script = [f"{version} {{ global: {' '.join(names)} }};" for version, names in groups.items() if version]
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder) / "stand_in.c", Path(folder) / "versions"
        source.write_text("\n".join(lines) + "\n")
        versions.write_text("\n".join(script) + "\n")
        options = [f"-Wl,--version-script={versions}"] if script else []
        command = ["cc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}", *options]
        subprocess.run([*command, "-o", str(path), str(source)], check=True)


def complete(folder: Path) -> list[str]:
    """Writes a stand-in for each library of an accelerator that torch links to and that is not there."""
    libraries = sorted(folder.glob("*.so*"))
    system = ("libc.", "libm.", "libdl.", "librt.", "libpthread.", "libgcc_s.", "libstdc++.", "ld-linux")
    missing = {name for path in libraries for name in needed(path) if not name.startswith(system)}
    missing -= {path.name for path in libraries}
    symbols: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in libraries:
        owners = versions_of(path)
        for name, version in asked_for(path):
            if version or OF_AN_ACCELERATOR.match(name):
                symbols[owners[version] if version else ""].add((name, version))
    for name in missing:
        # A symbol without a version may be in any library that carries none, so each of those holds them all.
        write_stand_in(folder / name, symbols.get(name, symbols[""]))
    return sorted(missing)


def main() -> None:
    """Installs, completes, and imports once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="version of torch, as in 2.6.0; the newest if none is given")
    parser.add_argument("-c", "--constraints", action="append", default=[], help="constraints file for pip")
    chosen = parser.parse_args()
    limits = [word for path in chosen.constraints for word in ("-c", path)]
    torch = f"torch=={chosen.version}" if chosen.version else "torch"
    pip("--no-deps", torch)
    forget_the_accelerator()
    pip(*limits, torch)
    replaced = complete(Path(sysconfig.get_path("platlib")) / "torch" / "lib")
    check = "import torch; assert not torch.cuda.is_available(); print(torch.__version__, torch.ones(3).sum().item())"
    subprocess.run([sys.executable, "-c", check], check=True)
    print(f"{torch}: {len(replaced)} libraries replaced by stand-ins: {' '.join(replaced) or 'none'}")


if __name__ == "__main__":
    main()
