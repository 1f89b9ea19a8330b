"""`fencepost signal|cancel|terminate|pause|resume|retry` against a server: one run, several, all that match."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost_server.cli import matching
from tests.cli.program import TIMEOUT, Program, run
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]
UNKNOWN_RUN = "00000000-0000-7000-8000-000000000000"
COMMANDS = ("signal", "cancel", "terminate", "pause", "resume", "retry")
STATES = run_pb2.RunState


def words(command: str) -> tuple[str, ...]:
    """A command, with the name that a signal needs."""
    return (command, "go") if command == "signal" else (command,)


async def start_runs(api: Api, n: int, **fields: Any) -> list[str]:
    await api.register(manifest(1, retry={"max_attempts": 1}))
    return [r.started.run_id for r in await api.start_many([api.start_request(**fields) for _ in range(n)])]


async def states(api: Api, run_ids: list[str]) -> list[str]:
    return [STATES.Name((await api.get(run_id)).state).removeprefix("RUN_STATE_") for run_id in run_ids]


# Which runs


def test_a_command_wants_to_know_which_runs_are_meant() -> None:
    for command in COMMANDS:
        result = run(*words(command))
        assert (result.code, result.out) == (2, "")
        assert "which runs?" in result.error
    for arguments, expected in (
        (("--workflow", "wf"), "filters are for --all-matching"),
        ((UNKNOWN_RUN, "--state", "running"), "filters are for --all-matching"),
        (("--all-matching", "--yes"), "--all-matching needs"),
        ((UNKNOWN_RUN, "--all-matching", "--workflow", "wf", "--yes"), "name runs, or say --all-matching"),
        (("--all-matching", "--workflow", "wf"), "say --yes"),
        (("--all-matching", "--state", "lost", "--yes"), "'lost' is none of PENDING, RUNNING"),
        (("--all-matching", "--attribute", "region", "--yes"), "'region' is not KEY=VALUE"),
        (("--all-matching", "--attribute", "=eu", "--yes"), "'=eu' is not KEY=VALUE"),
    ):
        result = run("pause", *arguments)
        assert (result.code, result.out) == (2, ""), arguments
        assert expected in " ".join(result.error.split()), arguments


def test_what_excludes_each_other_is_told() -> None:
    both = run("signal", "go", UNKNOWN_RUN, "--payload", "1", "--payload-file", "x")
    assert (both.code, "--payload and --payload-file exclude each other" in both.error) == (2, True)
    unreasonable = run("retry", UNKNOWN_RUN, "--skip-undo")
    assert (unreasonable.code, "--skip-undo needs --reason" in unreasonable.error) == (2, True)
    negative = run("cancel", UNKNOWN_RUN, "--grace", "-1")
    assert (negative.code, "--grace" in negative.error) == (2, True)


# One run, or several


async def test_a_run_is_given_a_signal_paused_resumed_and_cancelled(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    [run_id] = await start_runs(api, 1)
    signalled = await fencepost("signal", "go", run_id, "--payload", '{"a":  1.10}', "--request-id", "q")
    assert signalled.code == 0
    lines = [line.split() for line in signalled.out.splitlines()]
    assert lines == [["RUN", "STATE", "EVENT"], [run_id, "PENDING", "3"]]
    (tmp_path / "payload.json").write_text('"from a file"')
    await fencepost("signal", "go", run_id, "--payload-file", str(tmp_path / "payload.json"))
    assert (await fencepost("signal", "go", run_id, "--payload-file", "-", stdin="[]")).code == 0
    paused = await fencepost("pause", run_id, "--reason", "later", "--json")
    assert paused.documents == [{"run_id": run_id, "state": "PAUSED"}]
    assert (await fencepost("resume", run_id, "--reason", "now")).code == 0
    cancelled = await fencepost("cancel", run_id, "--reason", "ordered twice", "--grace", "2.5")
    assert cancelled.out.splitlines()[0].split() == ["RUN", "STATE"]
    await api.wait(run_id)
    events = await api.history(run_id)
    assert [e.signal_received.payload.json for e in events if e.HasField("signal_received")] == [
        '{"a":  1.10}',
        '"from a file"',
        "[]",
    ]
    assert [e.run_paused.reason for e in events if e.HasField("run_paused")] == ["later"]
    [ending] = [e.run_ending for e in events if e.HasField("run_ending")]
    assert ending.grace.ToTimedelta().total_seconds() == 2.5
    assert "ordered twice" in ending.failure.message


async def test_a_request_id_makes_a_signal_safe_to_repeat(fencepost: Program, api: Api) -> None:
    [run_id] = await start_runs(api, 1)
    for _ in range(2):
        repeated = await fencepost("signal", "go", run_id, "--request-id", "q", "--json")
        assert repeated.document == {"run_id": run_id, "state": "PENDING", "seq": 3}
    assert kinds(await api.history(run_id)).count("signal_received") == 1


async def test_a_failed_run_is_retried(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    [run_id] = await start_runs(api, 1)
    worker = await connect_worker(server.grpc_address)
    await worker.fail(await worker.task())
    await api.wait(run_id)
    assert (await fencepost("retry", run_id, "--reason", "mended", "--json")).document["state"] == "RUNNING"
    await worker.complete(await worker.task())
    assert await states(api, [run_id]) == ["COMPLETED"]


async def test_of_several_runs_those_that_refuse_are_told_and_the_others_are_done(fencepost: Program, api: Api) -> None:
    first, second = await start_runs(api, 2)
    await fencepost("terminate", first)
    result = await fencepost("pause", first, "-", UNKNOWN_RUN, "no-uuid", stdin=f"{second}\n{first} ")
    assert result.code == 1
    assert [line.split() for line in result.out.splitlines()] == [["RUN", "STATE"], [second, "PAUSED"]]
    told = [line for line in result.error.splitlines() if line.startswith("fencepost: ")]
    assert [line.split(":")[1].strip() for line in told] == [first, UNKNOWN_RUN, "no-uuid"]
    assert [line.split(":")[2].strip() for line in told] == ["ILLEGAL_TRANSITION", "RUN_NOT_FOUND", "INVALID_REQUEST"]
    as_json = await fencepost("pause", second, UNKNOWN_RUN, "--json")
    assert (as_json.code, as_json.err) == (1, "")
    assert as_json.documents[0] == {"run_id": second, "state": "PAUSED"}
    assert as_json.documents[1]["error"]["reason"] == "RUN_NOT_FOUND"


@pytest.mark.parametrize("command", [("cancel",), ("runs", "wait")])
async def test_bytes_on_standard_input_that_are_no_text_are_told_as_such(
    fencepost: Program, command: tuple[str, ...]
) -> None:
    process = await fencepost.start(*command, "-")
    out, err = await asyncio.wait_for(process.communicate(b"\xff\xfe\n"), TIMEOUT)
    assert (process.returncode, out) == (2, b"")
    assert b"standard input is not UTF-8 text (byte 0)" in err
    assert b"Traceback" not in err


async def test_a_payload_that_is_no_json_is_refused(fencepost: Program, api: Api) -> None:
    [run_id] = await start_runs(api, 1)
    result = await fencepost("signal", "go", run_id, "--payload", "{")
    assert result.code == 1
    assert f"{run_id}: INVALID_JSON: " in result.error


async def test_a_refused_payload_is_told_with_what_is_wrong_where(fencepost: Program, api: Api) -> None:
    schema = {"type": "object", "required": ["by"], "properties": {"who": {"type": "string"}}}
    nodes = [{"id": "approval", "wait_signal": "approve", "timeout": "7d", "output_schema": schema}]
    await api.register(json.dumps({"id": "wf", "compatibility_id": "1", "sequence": nodes}))
    run_id = (await api.start()).run_id
    result = await fencepost("signal", "approve", run_id, "--payload", '{"who":1}')
    assert (result.code, result.out) == (1, "")
    told, titles, *faults = result.error.splitlines()
    assert told.startswith(f"fencepost: {run_id}: INPUT_SCHEMA_MISMATCH: ")
    assert titles.split() == ["PATH", "FAULT"]
    assert any("required" in fault for fault in faults)
    assert any(fault.split()[0].endswith("who") for fault in faults)


def test_a_server_that_can_not_be_reached_is_told_once_and_not_for_each_run() -> None:
    many = [f"00000000-0000-7000-8000-{n:012}" for n in range(500)]
    address = ("--address", "127.0.0.1:1", "--timeout", "0.1")
    result = run("pause", "-", *address, stdin="\n".join(many))
    assert result.code == 1
    lines = result.error.splitlines()
    assert len(lines) < 100
    assert "no server answers at 127.0.0.1:1" in lines[-1]
    assert "runs were not asked" in lines[-1]


# All that match


async def test_all_runs_that_match_are_done_and_no_others(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, workflow_id="other"))
    mine = await start_runs(api, 3, user_id="ada", attributes={"region": "eu", "tier": "gold"})
    others = [
        (await api.start(user_id="ada", attributes={"region": "us"})).run_id,
        (await api.start(user_id="joan", attributes={"region": "eu"})).run_id,
        (await api.start("other", user_id="ada", attributes={"region": "eu"})).run_id,
    ]
    chosen = ("--workflow", "wf", "--user", "ada", "--attribute", "region=eu", "--attribute", "tier=gold")
    result = await fencepost("pause", "--all-matching", *chosen, "--yes")
    assert (result.code, result.out, result.err) == (0, "3 of 3 runs\n", "")
    assert await states(api, mine + others) == ["PAUSED"] * 3 + ["PENDING"] * 3
    again = await fencepost("pause", "--all-matching", *chosen, "--yes")
    assert (again.code, again.out) == (0, "0 of 0 runs\n"), "those that are paused are not meant"
    resumed = await fencepost("resume", "--all-matching", *chosen, "--yes", "--json")
    assert {document["run_id"] for document in resumed.documents} == set(mine)
    terminated = await fencepost("terminate", "--all-matching", "--user", "ada", "--state", "pending", "--yes")
    assert terminated.out == "5 of 5 runs\n"
    assert await states(api, [others[1]]) == ["PENDING"]


async def test_runs_that_have_ended_are_not_meant_by_a_cancel_of_all(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    run_ids = await start_runs(api, 3)
    worker = await connect_worker(server.grpc_address, capacity=1)
    task = await worker.task()
    await worker.goodbye()
    await worker.complete(task)
    result = await fencepost("cancel", "--all-matching", "--workflow", "wf", "--yes")
    assert (result.code, result.out) == (0, "2 of 2 runs\n")
    named = await fencepost("cancel", "--all-matching", "--state", "completed", "--yes")
    assert (named.code, named.out) == (1, "0 of 1 runs\n"), "unless they are asked for"
    assert named.error.startswith(f"fencepost: {task.task.run_id}: ILLEGAL_TRANSITION: ")
    assert sorted(await states(api, run_ids)) == ["CANCELLED", "CANCELLED", "COMPLETED"]


async def test_before_all_that_match_are_done_people_are_asked(fencepost: Program, api: Api) -> None:
    run_ids = await start_runs(api, 2)
    declined = await fencepost.on_terminal("cancel", "--all-matching", "--workflow", "wf", typed="n\n")
    assert declined.code == 1
    assert "Cancel 2 runs?" in declined.out
    assert await states(api, run_ids) == ["PENDING"] * 2
    agreed = await fencepost.on_terminal("signal", "go", "--all-matching", "--workflow", "wf", typed="y\n")
    assert agreed.code == 0
    assert "Signal go to 2 runs?" in agreed.out
    assert "2 of 2 runs" in agreed.out
    nothing = await fencepost.on_terminal("resume", "--all-matching", "--workflow", "wf")
    assert "0 of 0 runs" in nothing.out


async def test_an_interrupt_answers_the_question_before_all_that_match_are_done(fencepost: Program, api: Api) -> None:
    run_ids = await start_runs(api, 2)
    interrupted = await fencepost.on_terminal("cancel", "--all-matching", "--workflow", "wf", interrupted_at="[y/N]")
    assert interrupted.code == 1
    assert "Traceback" not in interrupted.out
    assert await states(api, run_ids) == ["PENDING"] * 2


async def test_more_runs_than_a_page_are_done(fencepost: Program, api: Api) -> None:
    run_ids: list[str] = []
    for _ in range(3):
        run_ids += await start_runs(api, 400)
    result = await fencepost("terminate", "--all-matching", "--workflow", "wf", "--yes", "--json")
    assert result.code == 0
    assert {document["run_id"] for document in result.documents} == set(run_ids)
    assert {document["state"] for document in result.documents} == {"TERMINATED"}


async def test_what_does_not_fit_in_one_go_is_told(
    server: InProcessServer, api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """I12: with a smaller bound than the program's own, in this process."""
    from fencepost_server.cli import control
    from fencepost_server.cli.caller import Caller
    from fencepost_server.cli.faults import CommandFailed

    await start_runs(api, 5)
    monkeypatch.setattr(matching, "MOST_RUNS", 3)
    monkeypatch.setattr(control, "MOST_RUNS", 3)
    caller = Caller(address=server.grpc_address, namespace="default", json=True)
    chosen = matching.Chosen(run_ids=(), workflow="wf", states=(), user="", attributes={}, yes=True)
    with pytest.raises(CommandFailed, match="do it again"):
        await asyncio.to_thread(control.terminate, caller, chosen)
    done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [document["state"] for document in done] == ["TERMINATED"] * 3
    await asyncio.to_thread(control.terminate, caller, chosen)


@pytest.mark.parametrize(
    "command",
    [
        ("cancel", UNKNOWN_RUN, "--grace", "inf"),
        ("runs", "watch", UNKNOWN_RUN, "--after", "9" * 20),
        ("runs", "list", "--limit", "9" * 20),
    ],
    ids=lambda words: words[-2],
)
def test_numbers_that_nothing_can_have_are_wrong_usage(command: tuple[str, ...]) -> None:
    result = run(*command)
    assert result.code == 2
    assert f"Invalid value for '{command[-2]}'" in result.error
