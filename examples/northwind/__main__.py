"""The demo: ``python -m examples.northwind``, or ``make demo``.

Sets the stage: a folder, a PostgreSQL in it, a server, the ledger. Then the story (demo.py) is told, and all of it is
ended and removed, however the story ends. Exits with 0 only if every order and every amount is right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psycopg

from examples.northwind import books
from examples.northwind.dataset import Dataset, load
from examples.northwind.demo import DemoFailed, Outcome, Stage, tell
from examples.northwind.processes import ProcessEnded, Processes
from examples.northwind.reconciliation import table
from fencepost import Client, FencepostError
from fencepost_server.embedded import EmbeddedFailed, EmbeddedPostgres

START_TIMEOUT = 60.0
DIFFERENCES_SHOWN = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="demo", description="Real orders, some of them undone, and a killed worker.")
    parser.add_argument("--orders", type=int, metavar="N", help="take only the first N orders")
    parser.add_argument("--keep", action="store_true", help="keep the data, and say where it is")
    options = parser.parse_args()
    if options.orders is not None and options.orders < 1:
        parser.error("--orders must be 1 or more")
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    try:
        return _demo(load(options.orders), keep=options.keep)
    except KeyboardInterrupt:
        print("demo: interrupted; everything has been ended", file=sys.stderr)
        return 130
    except (DemoFailed, ProcessEnded, EmbeddedFailed, FencepostError, psycopg.Error) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the first one is enough: let everything be ended and removed now
    raise KeyboardInterrupt


def _demo(dataset: Dataset, *, keep: bool) -> int:
    print(f"Northwind: {len(dataset.orders)} orders, each from validate to notify, or undone.")
    print("Starting PostgreSQL and a Fencepost server ...", flush=True)
    with (
        _folder(keep=keep) as folder,
        EmbeddedPostgres(folder / "data") as postgres,
        Processes(folder) as processes,
    ):
        address = _start_server(postgres.dsn, processes)
        ledger_dsn = books.create(postgres.dsn, dataset)
        with Client(address) as client, psycopg.connect(ledger_dsn, autocommit=True) as ledger:
            outcome = tell(Stage(address, client, ledger_dsn, ledger, processes), dataset)
    return _report(dataset, outcome)


def _start_server(dsn: str, processes: Processes) -> str:
    """Start `fencepost serve` on a free port; return its address."""
    database = ("--migrate", "--dsn", dsn, "--listen-dsn", dsn)
    ports = ("--grpc-port", "0", "--http-port", "0", "--log-format", "json")
    server = processes.start("server", "fencepost_server.cli", "serve", *database, *ports)
    ready = json.loads(server.wait_for_line('{"event": "serving"', START_TIMEOUT))
    return f"127.0.0.1:{ready['grpc_port']}"


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """A new folder for data and logs, removed at the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="northwind-"))
    # PostgreSQL never runs as root. If root runs the demo, it runs as a user who has to get through to its data.
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        if keep:
            print(f"The data is kept in {folder}; look at it with: fencepost dev --data-dir {folder / 'data'}")
        else:
            shutil.rmtree(folder)


def _report(dataset: Dataset, outcome: Outcome) -> int:
    """Say what came out; the last line sums it up. Return the exit code."""
    result = outcome.reconciliation
    print(
        f"Of the attempts, {outcome.repeated_attempts} came after their effect and were given the first answer, and "
        f"{outcome.stale_attempts} had lost their lease and were refused."
    )
    for line in table(result):
        print(line)
    for difference in result.differences[:DIFFERENCES_SHOWN]:
        print(f"DIFFERENCE: {difference}")
    if more := len(result.differences[DIFFERENCES_SHOWN:]):
        print(f"DIFFERENCE: and {more} more")
    found = result.found
    print(
        f"demo: {found.completed} completed, {found.undone} undone of {len(dataset.orders)} orders, "
        f"net {found.kept:.4f} kept, {found.refunded:.4f} refunded, "
        f"{result.lost} lost, {result.repeated} repeated effects, {found.steps} steps in {outcome.seconds:.1f} s"
    )
    return 1 if result.differences else 0


if __name__ == "__main__":
    sys.exit(main())
