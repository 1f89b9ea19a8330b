"""The worker process: `python -m benchmarks.worker ADDRESS NAME`.

An ordinary worker of the Python SDK with ten steps that add one to a number. So that rounds can be told apart it
connects when it is told to, by lines of JSON on standard input, and answers by lines of JSON on standard output:

| command | answer |
|---|---|
| `{"do": "work", "slots": 400, "timed": false, "code": 0, "cache": 1}` | `{"event": "working"}` once it is connected |
| `{"do": "stats"}` | `{"event": "stats", "completed": …, "failed": …, "lost": …, "first_step_time": …}` |
| `{"do": "stop"}` | the same as `stopped`, when everything is finished and the stream is closed |

``first_step_time`` is by the system's clock, as the database's times are, in seconds; null before the first step.
Timed, each run's last step tells `{"event": "run", "run": 7, "entered": [ten monotonic times in seconds]}`: when each
of its steps was entered. That clock is the same in all processes; the number of a run is `run` of its input.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import uvloop

from benchmarks.code_workflows import WORKFLOWS, first_step
from benchmarks.plan import STEPS
from benchmarks.workflow import ITEM, REFUSE, UNDO, UNDONE, handler_name
from fencepost import PermanentError, Step, Undo, Worker, step, undo

CONNECT_TIMEOUT = 30.0


def say(event: str, **values: Any) -> None:
    """Print one line for the benchmark."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def plain_steps(began: list[float]) -> list[Step[..., Any]]:
    """Steps that do nothing but count; the first that is entered leaves its time in ``began``."""

    async def add(value: dict[str, Any]) -> dict[str, Any]:
        if not began:
            began.append(time.time())
        return {**value, "n": value["n"] + 1}

    return [step(handler_name(index))(add) for index in range(STEPS)]


def timed_steps() -> list[Step[..., Any]]:
    """The same, which note when they are entered."""
    entered: defaultdict[int, list[float]] = defaultdict(list)

    async def add(value: dict[str, int]) -> dict[str, int]:
        entered[value["run"]].append(time.monotonic())
        if value["n"] == STEPS - 1:
            say("run", run=value["run"], entered=entered.pop(value["run"]))
        return {**value, "n": value["n"] + 1}

    return [step(handler_name(index))(add) for index in range(STEPS)]


def other_steps() -> list[Step[..., Any] | Undo[..., Any]]:
    """What the benchmarks `undo` and `fanout` need beside."""

    async def same(value: Any) -> Any:
        return value

    async def refuse(_value: Any) -> Any:
        raise PermanentError("the benchmark asks for it")

    async def take_back(_value: Any, _output: Any) -> None:
        return None

    return [step(UNDONE)(same), step(ITEM)(same), step(REFUSE)(refuse), undo(UNDO)(take_back)]


class Shift:
    """One time of working, from "work" to "stop"."""

    def __init__(self, address: str, name: str, command: dict[str, Any]) -> None:
        self._began: list[float] = []
        if command["code"]:  # code runs alone
            first_step.clear()
            self._began = first_step
            self._worker = Worker(
                address, [], workflows=WORKFLOWS, slots=command["slots"], name=name, workflow_slots=command["code"],
                workflow_cache=command["cache"], loop_factory=uvloop.new_event_loop,
            )  # fmt: skip
        else:
            steps = [*(timed_steps() if command["timed"] else plain_steps(self._began)), *other_steps()]
            self._worker = Worker(address, steps, slots=command["slots"], name=name, loop_factory=uvloop.new_event_loop)
        # The main thread reads commands, where a worker's would only wait.
        self._thread = threading.Thread(target=self._worker.run, name="worker", daemon=True)
        self._thread.start()
        if not self._worker.wait_connected(CONNECT_TIMEOUT):
            raise TimeoutError(f"no server took the worker within {CONNECT_TIMEOUT:g} s")

    def stats(self) -> dict[str, Any]:
        """What a benchmark wants to know."""
        stats = self._worker.stats()
        return {
            "completed": stats.completed,
            "failed": stats.failed,
            "lost": stats.lost,
            "first_step_time": self._began[0] if self._began else None,
        }

    def stop(self) -> None:
        """Finish and disconnect."""
        self._worker.stop()
        self._thread.join()


def main(address: str, name: str) -> None:
    """Do what standard input says, until it ends."""
    # As docs/python.md tells of a busy worker, and as the server does.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    say("ready")
    shift: Shift | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "work":
            shift = Shift(address, name, command)
            say("working")
        elif shift is None:
            raise ValueError(f"{command['do']} before work")
        elif command["do"] == "stats":
            say("stats", **shift.stats())
        else:
            shift.stop()
            say("stopped", **shift.stats())


if __name__ == "__main__":
    main(*sys.argv[1:])
