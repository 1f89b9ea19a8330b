"""The Pythons that histories are replayed on: this one, and what else the machine has.

Other versions need packages of their own. ``python -m tests.determinism.pythons FOLDER`` makes an environment in FOLDER
for each that is found (3.11 and newer; on the path, and what pyenv has), and prints what DETERMINISM_PYTHONS is to be
set to for the tests. Without that, the tests use those on the path that have the packages by chance.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SDK = ROOT / "worker_sdk" / "python"
_VERSIONS = tuple(f"3.{minor}" for minor in range(11, 16))
_IMPORT = "import fencepost, sys; sys.stdout.write(sys.version.split()[0])"


def environment(hash_seed: str) -> dict[str, str]:
    """What a process needs to find the SDK and these tests, whichever Python it is."""
    return {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{_SDK}"}


def usable() -> dict[str, str]:
    """The Pythons that can import the SDK, by version, one of each; this one first."""
    named = os.environ.get("DETERMINISM_PYTHONS", "").split(os.pathsep)
    found: dict[str, str] = {}
    for python in (sys.executable, *filter(None, named), *_on_path()):
        version = _said(python, _IMPORT)
        if version is not None:
            found.setdefault(version, python)
        else:
            assert python not in named, f"{python} can't import the SDK"
    return found


def _on_path() -> Iterator[str]:
    for version in _VERSIONS:
        python = shutil.which(f"python{version}")
        if python is not None:
            yield python


def _said(python: str, code: str) -> str | None:
    command = [python, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment("0"), check=False, capture_output=True, text=True, timeout=60
    )
    return done.stdout if done.returncode == 0 else None


def _of_pyenv() -> Iterator[str]:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob("versions/*/bin/python")))


def make(folder: Path) -> list[str]:
    """Make an environment for each version that is found. Raises CalledProcessError."""
    needed = tomllib.loads((_SDK / "pyproject.toml").read_text())["project"]["dependencies"]
    made: dict[str, str] = {}
    for python in (*_on_path(), *_of_pyenv()):
        version = _said(python, "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])")
        if version not in _VERSIONS or version in made:
            continue
        target = folder / version
        made[version] = str(target / "bin" / "python")
        subprocess.run([python, "-m", "venv", str(target)], check=True, timeout=300)
        install = [made[version], "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needed]
        subprocess.run(install, check=True, timeout=600)
    return list(made.values())


if __name__ == "__main__":
    sys.stdout.write(f"DETERMINISM_PYTHONS={os.pathsep.join(make(Path(sys.argv[1]).absolute()))}\n")
