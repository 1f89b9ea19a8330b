"""A worker as a program that plays programs: ``python -m tests.determinism.worker_program TARGET CACHE``.

CACHE is how many runs it keeps in memory, or "replay" to forget each whenever it can.
"""

from __future__ import annotations

import json
import logging
import sys
import threading

from fencepost import Worker
from fencepost.testing.workers import make_worker
from tests.determinism import playing


def tell_connected(worker: Worker) -> None:
    if worker.wait_connected(60):
        sys.stdout.write(json.dumps({"event": "connected"}) + "\n")
        sys.stdout.flush()


def main(target: str, cache: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    options: dict[str, object] = {"slots": 20, "workflow_slots": 50, "drain_timeout": 30.0}
    options |= {"always_replay": True} if cache == "replay" else {"workflow_cache": int(cache)}
    workflows = [playing.program, playing.child]
    worker = make_worker(target, [playing.remote, playing.undone], workflows, options)
    threading.Thread(target=tell_connected, args=(worker,), daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
