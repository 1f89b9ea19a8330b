"""Generates the Python side of the contract: proto/fencepost/v1/*.proto into worker_sdk/python/fencepost/v1.

The output (messages, gRPC stubs and their type stubs) is checked in, so that nobody needs a generator to
use Fencepost. It depends on nothing but the .proto files and the pinned generators; `--check` proves it by
generating into a temporary folder and comparing, and is part of `make lint`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = Path("fencepost/v1")
TARGET = ROOT / "worker_sdk" / "python"


def generate(target: Path) -> None:
    """Write the generated modules under ``target``/fencepost/v1.

    Raises CalledProcessError when protoc refuses the contract; it has said why on standard error.
    """
    # protoc finds the mypy plugins beside this interpreter, whatever PATH says.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    sources = sorted((PROTO / PACKAGE).glob("*.proto"))
    services = [path for path in sources if re.search(r"^service ", path.read_text("utf-8"), re.MULTILINE)]
    for kind, options, files in (
        ("python", "", sources),
        ("mypy", "quiet:", sources),
        ("grpc_python", "", services),
        ("mypy_grpc", "quiet:", services),
    ):
        names = [path.relative_to(PROTO).as_posix() for path in files]
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO}"]
        command = [*protoc, f"--{kind}_out={options}{target}", *names]
        subprocess.run(command, check=True, cwd=PROTO, env=environment)


def generated_files(target: Path) -> dict[str, bytes]:
    """Every generated file under ``target``, by name."""
    return {path.name: path.read_bytes() for path in (target / PACKAGE).glob("*_pb2*") if path.is_file()}


def differences(committed: dict[str, bytes], fresh: dict[str, bytes]) -> list[str]:
    """One line for each file that is missing, left over or different."""
    lines = [f"{name}: missing" for name in sorted(fresh.keys() - committed.keys())]
    lines += [f"{name}: left over" for name in sorted(committed.keys() - fresh.keys())]
    lines += [f"{name}: differs" for name in sorted(fresh.keys() & committed.keys()) if fresh[name] != committed[name]]
    return lines


def main() -> int:
    """Generate, or with ``--check`` compare: then the exit code is 1 if the checked-in code is stale."""
    parser = argparse.ArgumentParser(description="Generate the Python code of the contract.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail if the checked-in code is out of date"
    )
    check: bool = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh_root = Path(folder)
        generate(fresh_root)
        fresh = generated_files(fresh_root)
    stale = differences(generated_files(TARGET), fresh)
    if check:
        for line in stale:
            print(f"{TARGET.relative_to(ROOT) / PACKAGE}/{line}", file=sys.stderr)
        if stale:
            print("Generated code is out of date: run `make gen` and commit the result.", file=sys.stderr)
        return 1 if stale else 0
    for name in generated_files(TARGET).keys() - fresh.keys():
        (TARGET / PACKAGE / name).unlink()
    for name, content in fresh.items():
        (TARGET / PACKAGE / name).write_bytes(content)
    print(f"{len(fresh)} files in {TARGET.relative_to(ROOT) / PACKAGE}, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
