"""The command line: ``python -m tests.faults.soak [--minutes N] [--seed S] [--every SECONDS] [--logs FOLDER]``.

Notes on the faults go to standard error, the table to standard output; the last line of that is one JSON object. Exit
codes: 0 all holds, 1 something does not, or the soak itself has failed (with a traceback), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.faults.soak.disk import LEFT_OUT, disk_full
from tests.faults.soak.plan import faults
from tests.faults.soak.report import Report
from tests.faults.soak.soaking import logs, soak
from tests.faults.soak.stage import WORKERS, stage

MINUTES = 4.0
EVERY = 5.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="how long there are faults (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="repeats the faults and the programs (default: %(default)s)"
    )
    parser.add_argument("--every", type=float, default=EVERY, help="seconds between faults (default: %(default)s)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the processes printed")
    arguments = parser.parse_args()
    if not (0 < arguments.minutes <= 24 * 60 and 1 <= arguments.every <= 600):
        parser.error("--minutes is up to 1440, --every from 1 to 600")
    return arguments


async def _soak(arguments: argparse.Namespace) -> Report:
    full = await disk_full(arguments.seed)
    report = await _main_stage(arguments)
    report.disk_full = LEFT_OUT
    if full is not None:
        report.findings += full.findings
        report.stories |= full.stories
        report.disk_full = f"{full.faults.total()} times, longest recovery {full.recoveries.longest:.2f} s"
    if arguments.logs is not None:
        for name, text in report.stories.items():
            (arguments.logs / name).write_text(text)
    return report


async def _main_stage(arguments: argparse.Namespace) -> Report:
    count = max(1, int(arguments.minutes * 60 / arguments.every))
    plan = faults(arguments.seed, count, len(WORKERS))
    async with stage() as played:
        try:
            return await soak(played, arguments.seed, plan, arguments.every)
        finally:
            if arguments.logs is not None:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for name, text in logs(played).items():
                    (arguments.logs / name).write_text(text)


def main() -> int:
    """Soak, and tell."""
    report = asyncio.run(_soak(_arguments()))
    for line in report.lines():
        sys.stdout.write(line + "\n")
    sys.stdout.write(report.as_json() + "\n")
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
