"""A worker, one run, and what the manager does: `python -m examples.onboarding --help`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from examples.onboarding.office import office
from examples.onboarding.workflow import UNDO, Answer, Hire, Onboarded, onboarding
from examples.workers import worker_beside
from fencepost import Client, EventKind, RunHandle, RunNotCompleted

MANAGER = ("yes", "no", "silent", "cancels")


def main() -> None:
    """Let one colleague come, and print the run's history as it is written."""
    parser = argparse.ArgumentParser(description="Onboard one colleague; needs a server (make dev).")
    parser.add_argument("--address", default="127.0.0.1:7654", help="the server's gRPC, host:port")
    parser.add_argument("--name", default="Ada", help="who comes")
    parser.add_argument("--manager", choices=MANAGER, default="yes", help="what the manager does after two reminders")
    parser.add_argument("--day", type=float, default=1.0, help="how many seconds a day has")
    parser.add_argument("--office", type=Path, default=Path(tempfile.gettempdir()) / "fencepost-onboarding.sqlite")
    options = parser.parse_args()
    office.open(options.office)
    with worker_beside(options.address, [onboarding], UNDO), Client(options.address) as client:
        run = client.start_run("onboarding", Hire(options.name, "Grace", options.day))
        print(f"run {run.run_id}")
        follow(run, options.manager)
        try:
            print(run.result(type=Onboarded))
        except RunNotCompleted as ended:
            print(f"{ended.state.value}: {ended.failure.message}")
    print(f"done for {options.name}: {', '.join(office.deeds(run.run_id, options.name))}")


def follow(run: RunHandle, manager: str) -> None:
    """Print events to the last one; after two reminders the manager does what was chosen."""
    waited = 0
    for event in run.events():
        print(f"{event.seq:3} {event.kind.value} {event.node_id or event.signal_name}".rstrip())
        waited += event.kind is EventKind.TIMER_FIRED
        if waited == 2 and event.kind is EventKind.TIMER_FIRED:
            print(f"    its query progress says {run.query('progress')}; the manager: {manager}")
            if manager in {"yes", "no"}:
                run.signal("approval", Answer(manager == "yes", by="Grace"))
            elif manager == "cancels":
                run.cancel("hired by mistake")


if __name__ == "__main__":
    main()
