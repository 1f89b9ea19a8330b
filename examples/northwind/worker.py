"""The process that runs the steps: `python -m examples.northwind.worker --help`."""

from __future__ import annotations

import argparse
import logging

from examples.northwind.steps import HANDLERS, ledger
from fencepost import Worker

SLOTS = 10  # steps that one worker process runs at a time


def main() -> None:
    """Run steps until SIGTERM or SIGINT; those under way are finished first."""
    parser = argparse.ArgumentParser(description="Run the steps of Northwind's orders until stopped.")
    parser.add_argument("--address", default="127.0.0.1:7654", help="the server's gRPC, host:port")
    parser.add_argument("--ledger", required=True, metavar="DSN", help="the database that steps work on")
    parser.add_argument("--name", default="worker", help="shown wherever this worker is mentioned")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with ledger.connected(options.ledger, worker=options.name, connections=SLOTS):
        Worker(options.address, HANDLERS, slots=SLOTS, name=options.name).run()


if __name__ == "__main__":
    main()
