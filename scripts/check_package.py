"""Build the source archive, the wheel from it, install that into a fresh environment, and look at what arrived.

The environment sees the packages of the interpreter that runs this (torch is large), and rankscope itself comes from
the archive alone::

    python scripts/check_package.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = ("tests/", "docs/", "benchmarks/")
PROBE = """
import importlib.metadata, pathlib, sys, rankscope
from rankscope.models.inputs.text import sample_text
home = pathlib.Path(rankscope.__file__).resolve()
assert str(home).startswith(sys.prefix), f"rankscope comes from {home}, not from the archive"
assert importlib.metadata.version("rankscope") == rankscope.__version__
assert len(sample_text()) > 1000, "the sample text is missing"
assert (home.parent / "py.typed").is_file(), "py.typed is missing"
print(home)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """The source archive, and the wheel built from what it holds and nothing else."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder / "dist"))
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=source)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, sdist


def run(*words: str, cwd: Path = ROOT) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def data_files() -> set[str]:
    """Files of the package that are not Python, as they must be named in the wheel."""
    source = ROOT / "src"
    found = (p for p in (source / "rankscope").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(source)) for p in found if p.suffix not in (".py", ".pyc")}


def check_contents(wheel: Path, sdist: Path) -> None:
    """Every data file is in the wheel, nothing else is; the source archive holds the licence."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = data_files() - names
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    strange = [name for name in names if name.startswith(NOT_SHIPPED) or "__pycache__" in name]
    if strange:
        raise SystemExit(f"{wheel.name} holds {', '.join(sorted(strange)[:5])}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "pyproject.toml", "src/rankscope/__init__.py"):
        if name not in inside:
            raise SystemExit(f"{sdist.name} lacks {name}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e3:.0f} kB, {len(data_files())} of them data")
    print(f"{sdist.name}: {len(inside)} files, {sdist.stat().st_size / 1e3:.0f} kB")


def check_install(archive: Path, folder: Path) -> None:
    """Install without dependencies beside those of this interpreter; run the command and the code of the README."""
    venv.create(folder, with_pip=False, system_site_packages=False)
    python = folder / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q")
    run(*pip, "--no-deps", "--no-index", str(archive))
    # Dependencies are found behind what was installed, so that an editable rankscope is not taken instead.
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_dependencies.pth").write_text("\n".join(here) + "\n")
    print(f"{archive.name}: {run(str(python), '-c', PROBE, cwd=folder)}")
    version = run(str(folder / "bin" / "rankscope"), "--version", cwd=folder)
    measured = run(
        str(folder / "bin" / "rankscope"),
        *("measure", "init:tiny-bert", "--sequences", "1", "--tokens", "8", "--quiet"),
        cwd=folder,
    )
    print(f"{archive.name}: {version}; {measured[:60]}...")
    readme = ("tests/test_docs_examples.py", "-k", "the_readme_prints", "-p", "no:cacheprovider")
    print(f"{archive.name}: README: {run(str(python), '-m', 'pytest', '-q', *readme)}")


def main() -> None:
    """Build, look inside, install, run."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        check_contents(wheel, sdist)
        check_install(wheel, folder / "environment")


if __name__ == "__main__":
    main()
