"""Programs made by chance, lived through a real server and real workers that are killed, end as their histories say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from fencepost.v1 import run_pb2
from tests.determinism.facts import Facts, facts_of
from tests.determinism.living import QUICK, Life, Lived
from tests.determinism.outcomes import Expected
from tests.determinism.programs import Node
from tests.determinism.replaying import write
from tests.fixtures.processes import Process
from tests.fixtures.servers import StartServerProcess

PROGRAMS = int(os.environ.get("DETERMINISM_PROGRAMS", "40"))
FIRST = int(os.environ.get("DETERMINISM_FIRST", "0"))


async def test_runs_that_outlive_their_workers_and_servers_come_to_what_their_histories_say(
    server_process: StartServerProcess, python_process: Callable[..., Process], dsn: str, tmp_path: Path
) -> None:
    server = server_process(dsn, **QUICK)

    def start_worker(address: str, cache: str) -> Process:
        return python_process("-m", "tests.determinism.worker_program", address, cache)

    life = Life(server, start_worker, Random(FIRST))
    lived = await life.live(range(FIRST, FIRST + PROGRAMS))
    states: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for each in lived:
        states[run_pb2.RunState.Name(each.run.state)] += 1
        kinds.update(event.WhichOneof("kind") or "" for event in each.events)
    for each in lived:
        write(tmp_path, each.run.run_id, each.events)
        (tmp_path / f"{each.run.run_id}.run").write_bytes(each.run.SerializeToString())
    for each in lived:
        check(each)
    print(states, kinds, life.kills)


def check(lived: Lived) -> None:
    """Compare a run with what is expected of it."""
    output = lived.run.output if lived.run.state == run_pb2.RUN_STATE_COMPLETED else None
    facts = facts_of(lived.run.run_id, lived.events, output)
    expected = Expected(lived.program, facts)
    where = f"seed {lived.program.seed}, run {facts.run_id}"
    check_what_was_asked(lived, facts, expected, where)
    check_end(lived, facts, expected, where)


def check_what_was_asked(lived: Lived, facts: Facts, expected: Expected, where: str) -> None:
    """Every op of the history was to be asked for, with what it was given."""
    nodes: dict[int, Node] = {node.site: node for tree in lived.program.trees for node in tree.walk()}
    for site, given in facts.given.items():
        assert site in expected.begun, f"{where}: site {site} was to ask for nothing"
        assert given["last"] == expected.begun[site][1], f"{where}: site {site} was given {given}"
    for site, end in facts.steps.items():
        assert site in expected.begun, f"{where}: site {site} was to ask for nothing"
        if not end.code:
            assert end.output["last"] == expected.begun[site][1], f"{where}: site {site} ended with {end}"
            assert end.output["site"] == site
        elif nodes[site].kind != "child":
            # One that nobody waits for any more may be stopped.
            assert end.code in {f"REFUSED_{site}", "StepCancelled"}, where
    for patch in facts.patches:
        assert int(patch[1:]) in expected.begun, f"{where}: {patch}"
    for name, value in facts.attributes.items():
        assert value == str(expected.begun[int(name[1:])][1]), f"{where}: {name}"


def check_end(lived: Lived, facts: Facts, expected: Expected, where: str) -> None:
    """The run ended as it was to."""
    out = expected.out
    if facts.ending is not None and facts.ending[1] == "RUN_STATE_CANCELLED":
        # Also if the function had come to its end, and the server did not know yet.
        assert facts.end == "run_cancelled", where
        assert out.kind == "cancelled" or out.at != facts.ending[0], f"{where}: {out}"
    elif out.kind == "failure":
        assert (facts.end, facts.failure) == ("run_failed", out.value), f"{where}: {out}"
    else:
        assert out.kind == "value", f"{where}: {out}"
        if facts.input["part"] + 1 < len(lived.program.trees):
            assert facts.end == "run_continued", f"{where}: {out}"
            assert facts.next_run_id == lived.run.next_run_id != ""
        else:
            assert facts.end == "run_completed", f"{where}: {out}"
            assert facts.output == {"value": out.value, "sum": expected.sum}, where
