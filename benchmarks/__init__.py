"""Measures Fencepost on this machine: `python -m benchmarks throughput`. README.md tells what and how."""

from __future__ import annotations

import os

# Processes are started while clients are connected. They are other programs, which nothing of gRPC has to follow.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
