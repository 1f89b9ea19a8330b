"""A worker, one subscription, and its customer: `python -m examples.subscription --help`."""

from __future__ import annotations

import argparse

from examples.subscription.workflow import STEPS, Subscription, subscription
from examples.workers import worker_beside
from fencepost import Client, EventKind, RunHandle


def main() -> None:
    """Let a customer subscribe, upgrade after a quarter of the months, and cancel in the last one."""
    parser = argparse.ArgumentParser(description="Run one subscription; needs a server (make dev).")
    parser.add_argument("--address", default="127.0.0.1:7654", help="the server's gRPC, host:port")
    parser.add_argument("--months", type=int, default=12, help="in which month the customer cancels")
    parser.add_argument("--month", type=float, default=0.5, help="how many seconds a month has")
    options = parser.parse_args()
    with worker_beside(options.address, [subscription], STEPS), Client(options.address) as client:
        first = client.start_run("subscription", Subscription("Ada", "basic", month=options.month))
        month, run_id = 0, first.run_id
        while run_id:
            for event in client.watch_run(run_id):
                if event.kind is EventKind.STEP_COMPLETED:
                    month += 1
                    live(first, month, options.months)
            run_id = event.next_run_id
        print(first.result())


def live(subscribed: RunHandle, month: int, months: int) -> None:
    """What the customer does in a month. Signals and queries by the first run's id reach the one that goes on."""
    print(f"month {month:2}: {subscribed.query('subscription')}")
    if month == max(1, months // 4):
        subscribed.signal("upgrade", "family")
    if month == months:
        subscribed.signal("cancel")


if __name__ == "__main__":
    main()
