"""Fixtures of what Fencepost runs on and beside: those of the fault tests, and replicas and poolers."""

from __future__ import annotations

from tests.environments.released import released, unpacked
from tests.faults.conftest import scene, sink, worker_process
from tests.fixtures.replicas import memory, new_replica, pair

__all__ = ["memory", "new_replica", "pair", "released", "scene", "sink", "unpacked", "worker_process"]
