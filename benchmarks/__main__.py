"""The command line: `python -m benchmarks [BENCHMARK ...] [options]`.

Prints tables and, as the last line of standard output, one JSON object; notes on the progress go to standard error.
Several are measured one after the other, and go on if one fails; their objects are in one, under `results`.
Exit codes: 0 measured, 1 something failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import (
    backlog,
    code,
    fanout,
    history,
    idle,
    latency,
    local,
    longtx,
    payload,
    servers,
    sql,
    streams,
    submit,
    throughput,
    timers,
    undo,
)
from benchmarks.peers import bench as peers
from benchmarks.plan import PROFILES, Plan
from benchmarks.report import Report
from benchmarks.stage import BenchmarkFailed, Stage, running_postgres
from fencepost_server.config import ConfigError, load

Benchmark = Callable[[Stage, Plan], Awaitable[Report]]

BENCHMARKS: Mapping[str, Benchmark] = {
    "throughput": throughput.measure,
    "local": local.measure,
    "latency": latency.measure,
    "submit": submit.measure,
    "backlog": backlog.measure,
    "history": history.measure,
    "fanout": fanout.measure,
    "timers": timers.measure,
    "longtx": longtx.measure,
    "payload": payload.measure,
    "streams": streams.measure,
    "idle": idle.measure,
    "servers": servers.measure,
    "sql": sql.measure,
    "undo": undo.measure,
    "code": code.measure,
}
"""By name; a benchmark is given a stage with a database server and measures on it as much as the plan says."""

ALL, PEERS = "all", "peers"
"""Every one of them in turn; and the comparison with others, which needs packages from the network."""


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """What a command line asks for; a wrong one ends the process with 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Fencepost on this machine.")
    parser.add_argument(
        "benchmarks",
        nargs="*",
        type=_name,
        metavar="BENCHMARK",
        help=f"{', '.join([*BENCHMARKS, PEERS])}; {ALL}: each in turn but {PEERS} (default: throughput)",
    )
    parser.add_argument("--profile", default="full", choices=sorted(PROFILES), help="how much (default: %(default)s)")
    parser.add_argument("--runs", type=_number, help="runs of a round")
    parser.add_argument("--rounds", type=_number, help="rounds; figures are their medians")
    parser.add_argument("--workers", type=_numbers, metavar="N[,N...]", help="worker processes of `throughput`")
    parser.add_argument("--servers", type=_numbers, metavar="N[,N...]", help="servers of `servers`; the first one is 1")
    parser.add_argument("--slots", type=_number, help="steps that all workers hold at a time together")
    parser.add_argument("--idle-seconds", type=_number, help="how long `idle` watches, each time")
    parser.add_argument(
        "--peers-folder", type=Path, metavar="DIR", help="where `peers` sets them up, and leaves them for the next time"
    )
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


def _name(text: str) -> str:
    if text not in {*BENCHMARKS, ALL, PEERS}:
        raise argparse.ArgumentTypeError(f"there is no benchmark {text}")
    return text


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(word) for word in text.split(","))


def _plan(arguments: argparse.Namespace) -> Plan:
    """The profile, with what was asked for in its place."""
    given = {
        name: getattr(arguments, name) for name in ("runs", "rounds", "workers", "servers", "slots", "idle_seconds")
    }
    return replace(PROFILES[arguments.profile], **{name: value for name, value in given.items() if value is not None})


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


async def _measure(benchmarks: Mapping[str, Benchmark], plan: Plan, settings: Mapping[str, str]) -> dict[str, Any]:
    """Measure and show one after the other; returns the result of each, which is an error for one that failed."""
    task = asyncio.current_task()
    assert task is not None  # it is run by a Runner
    # SIGTERM ends the benchmark as SIGINT does: by a cancellation, so that everything is taken down.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results: dict[str, Any] = {}
    with running_postgres() as postgres:
        for name, benchmark in benchmarks.items():
            try:
                async with Stage(settings, postgres) as stage:
                    report = await benchmark(stage, plan)
            except BenchmarkFailed as error:
                print(f"python -m benchmarks: {name}: {error}", file=sys.stderr, flush=True)
                results[name] = {"benchmark": name, "error": str(error)}
            else:
                report.show()
                results[name] = report.result
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Measure what ``words`` (default: the process's arguments) say and print it."""
    arguments = parsed(words)
    try:
        settings = _settings(arguments.settings)
    except ConfigError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    known: Mapping[str, Benchmark] = {**BENCHMARKS, PEERS: partial(peers.measure, folder=arguments.peers_folder)}
    asked = arguments.benchmarks or ["throughput"]
    names = [name for word in asked for name in (BENCHMARKS if word == ALL else [word])]
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(_measure({name: known[name] for name in names}, _plan(arguments), settings))
    except BenchmarkFailed as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("python -m benchmarks: interrupted", file=sys.stderr)
        return 130
    line = json.dumps({"benchmark": " ".join(asked), "results": results} if len(names) > 1 else results[names[0]])
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
