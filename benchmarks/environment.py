"""What the figures were measured on and with: they mean little without."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("fencepost", "fencepost-server", "grpcio", "protobuf", "psycopg", "uvloop")


def hardware() -> dict[str, Any]:
    """Processors, memory, system."""
    return {
        "processor": _processor(),
        "processors": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(postgres: str) -> dict[str, str]:
    """Of everything that is on the path of a step. ``postgres`` is the server's."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "postgres": postgres, **packages}


def _processor() -> str:
    """The name that the kernel has for it; platform's is often empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
