"""The command line: `python -m benchmarks [BENCHMARK] [options]`.

Prints a table and, as the last line of standard output, one JSON object; notes on the progress go to standard
error. Exit codes: 0 measured, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks import code, engine, throughput
from benchmarks.plan import PROFILES, Plan
from benchmarks.report import Report
from benchmarks.stage import BenchmarkFailed, Stage
from fencepost_server.config import ConfigError, load

Benchmark = Callable[[Stage, Plan], Awaitable[Report]]

BENCHMARKS: Mapping[str, Benchmark] = {"throughput": throughput.measure, "engine": engine.measure, "code": code.measure}
"""By name; a benchmark is given a stage with a database and measures on it as much as the plan says."""


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Fencepost on this machine.")
    parser.add_argument("benchmark", nargs="?", default="throughput", choices=sorted(BENCHMARKS))
    parser.add_argument("--profile", default="full", choices=sorted(PROFILES), help="how much (default: %(default)s)")
    parser.add_argument("--runs", type=_number, help="runs of a round")
    parser.add_argument("--rounds", type=_number, help="rounds; figures are their medians")
    parser.add_argument("--workers", type=_number, help="worker processes")
    parser.add_argument("--slots", type=_number, help="steps that a worker holds at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object to a file as well")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="a setting of the server, such as lanes=4",
    )
    return parser.parse_args(words)


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _plan(arguments: argparse.Namespace) -> Plan:
    """The profile, with what was asked for in its place."""
    given = {name: getattr(arguments, name) for name in ("runs", "rounds", "workers", "slots")}
    plan = replace(PROFILES[arguments.profile], **{name: value for name, value in given.items() if value is not None})
    return replace(plan, latency_runs=min(plan.latency_runs, plan.runs))


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    """The server's settings as variables of its environment. Raises ConfigError for what it would refuse."""
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError([f"--set {pair}: NAME=VALUE is expected"])
        variables[f"FENCEPOST_{name.upper()}"] = value
    load(env=variables)
    return variables


async def _measure(benchmark: Benchmark, plan: Plan, settings: Mapping[str, str]) -> Report:
    task = asyncio.current_task()
    assert task is not None  # it is run by a Runner
    # SIGTERM ends the benchmark as SIGINT does: by a cancellation, so that everything is taken down.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Stage(settings) as stage:
        return await benchmark(stage, plan)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what ``words`` (default: the process's arguments) say and print it."""
    arguments = _arguments(words)
    try:
        settings = _settings(arguments.settings)
    except ConfigError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_measure(BENCHMARKS[arguments.benchmark], _plan(arguments), settings))
    except BenchmarkFailed as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("python -m benchmarks: interrupted", file=sys.stderr)
        return 130
    report.show()
    line = json.dumps(report.result)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
