"""`fencepost runs …` against a server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.cli.program import PROGRAM, TIMEOUT, Program, run
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]

UNKNOWN_RUN = "00000000-0000-7000-8000-000000000000"


async def complete_steps(worker: RawWorker, outputs: list[str]) -> None:
    for output in outputs:
        await worker.complete(await worker.task(), output)


async def test_a_run_is_started_shown_listed_and_followed_to_its_end(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    started = await fencepost("runs", "start", "wf", "--input", '{"a": 1.10}', "--request-key", "k", "--json")
    assert started.code == 0
    run_id = started.document["run_id"]
    assert started.document["created"] is True
    await complete_steps(worker, ["1", '"done"'])

    watched = await fencepost("runs", "watch", run_id, "--json")
    kinds = ["run_started", *["step_scheduled", "step_completed"] * 2, "run_completed"]
    assert [event["kind"] for event in watched.documents] == kinds
    assert [event["seq"] for event in watched.documents] == [1, 2, 3, 4, 5, 6]
    assert (await fencepost("runs", "history", run_id, "--json")).documents == watched.documents

    got = await fencepost("runs", "get", run_id, "--json")
    assert '"input":{"a": 1.10}' in got.out, "a payload is printed to the letter"
    assert got.document["state"] == "COMPLETED"
    assert got.document["output"] == "done"
    listed = (await fencepost("runs", "list", "--state", "completed", "--workflow", "wf", "--json")).document
    assert listed["run_id"] == run_id
    assert "input" not in listed
    assert (await fencepost("runs", "list", "--state", "FAILED", "--json")).documents == []


async def test_without_json_people_read_aligned_text(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1))
    worker = await connect_worker(server.grpc_address)
    run_id = (await api.start(input='"' + "x" * 5000 + '"')).run_id
    task = await worker.task()
    during = await fencepost("runs", "get", run_id)
    assert "LEASED" in during.out
    assert "so far" in during.out
    assert "…" in during.out, "a long payload is cut"
    assert len(max(during.out.splitlines(), key=len)) < 250
    await worker.complete(task, "2")
    lines = (await fencepost("runs", "list")).out.splitlines()
    assert lines[0].split() == ["RUN", "WORKFLOW", "STATE", "STARTED", "DURATION", "REQUEST", "KEY", "USER"]
    assert lines[1].startswith(f"{run_id}  wf ")
    assert lines[0].index("STATE") == lines[1].index("COMPLETED")
    history = (await fencepost("runs", "history", run_id)).out
    watched = (await fencepost("runs", "watch", run_id, "--after", "2")).out
    assert [line.split()[0] for line in history.splitlines()] == ["SEQ", "1", "2", "3", "4"]
    assert [line.split()[0] for line in watched.splitlines()] == ["3", "4"]
    assert "s1 on default" in history


async def test_times_are_local_with_their_offset(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    assert "+05:30" in (await fencepost("runs", "get", run_id, TZ="Asia/Kolkata")).out
    assert (await fencepost("runs", "get", run_id, "--json", TZ="Asia/Kolkata")).document["create_time"].endswith("Z")


async def test_on_a_terminal_lists_are_tables_in_colour_and_ids_are_whole(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1, workflow_id="a-workflow-with-quite-a-long-name-for-a-narrow-terminal"))
    run_id = (await api.start("a-workflow-with-quite-a-long-name-for-a-narrow-terminal")).run_id
    result = await fencepost.on_terminal("runs", "list", columns=90)
    assert result.code == 0
    assert run_id in result.out
    assert "\x1b[" in result.out
    assert "…" in result.out


async def test_what_a_worker_wrote_can_not_steer_the_terminal(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, retry={"max_attempts": 1}))
    worker = await connect_worker(server.grpc_address)
    run_id = (await api.start()).run_id
    await worker.fail(await worker.task(), code="EVIL", message="a\x1b]0;title\x07b\nc\u202ed")
    for command in ("get", "history", "wait"):
        assert "a\\x1b]0;title\\x07b c\\u202ed" in (await fencepost("runs", command, run_id)).out


async def test_wait_tells_by_its_exit_code_how_runs_ended(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1, retry={"max_attempts": 1}))
    worker = await connect_worker(server.grpc_address)
    good, bad = (await api.start()).run_id, (await api.start()).run_id
    for _ in range(2):
        task = await worker.task()
        if task.task.run_id == good:
            await worker.complete(task, "1")
        else:
            await worker.fail(task, code="NO", message="no")
    await worker.goodbye()
    open_ = (await api.start()).run_id
    assert (await fencepost("runs", "wait", good)).code == 0
    failed = await fencepost("runs", "wait", good, bad, "--json")
    assert failed.code == 3
    assert [(d["run_id"], d["state"], d["ended"]) for d in failed.documents] == [
        (good, "COMPLETED", True),
        (bad, "FAILED", True),
    ]
    late = await fencepost("runs", "wait", good, open_, "--timeout", "0.2")
    assert late.code == 4
    assert "not yet" in late.out
    unknown = await fencepost("runs", "wait", UNKNOWN_RUN, bad, "--json")
    assert unknown.code == 1
    assert unknown.documents[0]["error"]["reason"] == "RUN_NOT_FOUND"
    told = await fencepost("runs", "wait", UNKNOWN_RUN, bad)
    assert told.error.startswith(f"fencepost: {UNKNOWN_RUN}: RUN_NOT_FOUND: ")
    assert [line.split()[0] for line in told.out.splitlines()] == ["RUN", bad]
    assert (await fencepost("runs", "wait", "-", stdin=f"{good}\n{good}\n")).code == 0
    assert (await fencepost("runs", "wait", "-", stdin="")).code == 2


async def test_start_can_wait_for_what_it_started(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1))
    worker = await connect_worker(server.grpc_address)
    waiting = asyncio.create_task(fencepost("runs", "start", "wf", "--wait", "--json"))
    await complete_steps(worker, ['{"ok": true}'])
    result = await waiting
    assert result.code == 0
    assert result.document["run"]["output"] == {"ok": True}
    await worker.goodbye()
    late = await fencepost("runs", "start", "wf", "--wait-timeout", "0.1")
    assert late.code == 4
    assert "PENDING" in late.out


async def test_a_request_key_finds_the_run_and_another_input_is_refused(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    arguments = ("runs", "start", "wf", "--request-key", "k", "--user", "u", "--priority", "1")
    first = await fencepost(*arguments, "--input-file", "-", "--json", stdin="[1]")
    second = await fencepost(*arguments, "--input", "[1]", "--json")
    assert first.document["run_id"] == second.document["run_id"]
    assert (first.document["created"], second.document["created"]) == (True, False)
    refused = await fencepost(*arguments, "--input", "[2]")
    assert refused.code == 1
    assert refused.error.startswith("fencepost: REQUEST_KEY_CONFLICT: ")
    as_json = json.loads((await fencepost(*arguments, "--input", "[2]", "--json")).error)
    assert as_json["error"]["metadata"]["existing_run_id"] == first.document["run_id"]


async def test_a_dedupe_key_finds_the_active_run_and_another_input_is_bound_only_if_asked_for(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(1))
    arguments = ("runs", "start", "wf", "--dedupe-key", "d")
    first = (await fencepost(*arguments, "--input", "[1]", "--json")).document
    assert (first["created"], first["input_differs"]) == (True, False)
    again = await fencepost(*arguments, "--input", "[1.0]")
    assert again.code == 0
    assert again.out.splitlines()[0].split() == ["run", first["run_id"]]
    assert "found: this run holds the dedupe key" in again.out
    refused = await fencepost(*arguments, "--input", "[2]")
    assert refused.code == 1
    assert refused.error.startswith("fencepost: DEDUPE_KEY_CONFLICT: ")
    as_json = json.loads((await fencepost(*arguments, "--input", "[2]", "--json")).error)
    assert as_json["error"]["metadata"]["existing_run_id"] == first["run_id"]
    bound = (await fencepost(*arguments, "--input", "[2]", "--bind-duplicate", "--json")).document
    assert bound == {**first, "created": False, "input_differs": True}
    told = await fencepost(*arguments, "--input", "[2]", "--bind-duplicate")
    assert "found: a run with another input holds the dedupe key" in told.out
    both = await fencepost(*arguments, "--input", "[1]", "--request-key", "r")
    assert "found: the request key was used before, or this run holds the dedupe key" in both.out

    shown = (await fencepost("runs", "get", first["run_id"])).out
    assert ["dedupe", "key", "d"] in [line.split() for line in shown.splitlines()]
    assert (await fencepost("runs", "get", first["run_id"], "--json")).document["dedupe_key"] == "d"
    assert (await fencepost("runs", "list", "--json")).document["dedupe_key"] == "d"
    worker = await connect_worker(server.grpc_address)
    await complete_steps(worker, ["1"])
    await api.wait(first["run_id"])
    assert (await fencepost(*arguments, "--input", "[2]", "--json")).document["created"] is True


async def test_lines_may_have_dedupe_keys_and_say_themselves_what_becomes_of_a_duplicate(
    fencepost: Program, api: Api
) -> None:
    await api.register(manifest(1))
    lines = [
        {"input": 1, "dedupe_key": "d"},
        {"input": 2, "dedupe_key": "d"},
        {"input": 2, "dedupe_key": "d", "on_active_duplicate": "bind"},
        {"input": 2, "dedupe_key": "d", "on_active_duplicate": "conflict"},
        {"input": 3},
        {"input": 3, "dedupe_key": "e", "on_active_duplicate": "replace"},
        {"input": 3, "on_active_duplicate": "bind"},
    ]
    arguments = ("runs", "start", "wf", "--many", "-", "--json")
    text = "".join(json.dumps(line) + "\n" for line in lines)

    async def outcomes(*flags: str) -> list[tuple[bool, bool] | str]:
        result = await fencepost(*arguments, *flags, stdin=text)
        assert result.code == 1
        told = sorted(result.documents, key=lambda outcome: int(outcome["line"]))
        return [
            outcome["error"]["reason"] if "error" in outcome else (outcome["created"], outcome["input_differs"])
            for outcome in told
        ]

    made, found, bound = (True, False), (False, False), (False, True)
    conflict, wrong = "DEDUPE_KEY_CONFLICT", ["INVALID_REQUEST", "INVALID_REQUEST"]
    # Made before: the lines of one batch go through several lanes, and any of them could have been the first.
    assert (await fencepost("runs", "start", "wf", "--input", "1", "--dedupe-key", "d")).code == 0
    assert await outcomes() == [found, conflict, bound, conflict, made, *wrong]
    # The flag is for the lines that have a key and say nothing.
    assert await outcomes("--bind-duplicate") == [found, bound, bound, conflict, made, *wrong]


def test_a_flag_for_duplicates_needs_a_key_and_keys_of_many_are_in_the_file() -> None:
    alone = run("runs", "start", "wf", "--bind-duplicate")
    assert alone.code == 2
    assert "--bind-duplicate needs --dedupe-key" in alone.error
    assert run("runs", "start", "wf", "--many", "-", "--dedupe-key", "d").code == 2


async def test_every_fault_of_an_input_is_told_with_its_place(fencepost: Program, api: Api) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"b": {"type": "integer"}}}
    await api.register(manifest(1, workflow={"input_schema": schema}))
    error = (await fencepost("runs", "start", "wf", "--input", '{"b": "x"}')).error
    assert error.startswith("fencepost: INPUT_SCHEMA_MISMATCH: ")
    assert "PATH" in error
    assert "/b" in error


async def test_many_runs_are_started_from_a_file_and_each_refused_line_is_told(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    await api.register(manifest(1, workflow={"input_schema": {"type": "integer"}}))
    lines = [json.dumps({"input": n, "request_key": f"k{n}"}) for n in range(1500)]
    lines[3] = '{"input": "three", "priority": 9}'
    lines[7] = '{"input": 7, "unknown": 1}'
    lines[8] = "{"
    lines[9] = ""
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(lines))
    first = await fencepost("runs", "start", "wf", "--many", str(path), "--user", "u")
    assert first.code == 1
    assert first.out.startswith("started 1496, found 0, refused 3 in ")
    told = first.err.splitlines()
    places = [number for number, line in enumerate(told) if not line.startswith("    ")]
    reasons = [told[number].partition(": ")[2].partition(":")[0] for number in places]
    assert [told[number].partition(":")[0] for number in places] == ["line 4", "line 8", "line 9"]
    assert reasons[1:] == ["INVALID_REQUEST", "INVALID_JSON"]
    assert len(told) > 3, "the faults of a line are on lines of their own"
    again = await fencepost("runs", "start", "wf", "--many", "-", "--user", "u", "--json", stdin=path.read_text())
    assert again.code == 1
    outcomes = {outcome["line"]: outcome for outcome in again.documents}
    assert set(outcomes) == set(range(1, 1501)) - {10}
    assert outcomes[4]["error"]["violations"]
    assert outcomes[1]["created"] is False
    assert len(await api.list_all(page_size=1000)) == 1496
    progress = await fencepost.on_terminal("runs", "start", "wf", "--many", str(path), "--user", "u")
    assert "starting" in progress.out
    assert "found 1496" in progress.out


async def test_a_run_may_begin_later_and_have_a_limit_of_its_own(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    lines = '{"start_delay": "1h"}\n{}\n{"start_delay": "5"}\n'
    many = await fencepost("runs", "start", "wf", "--many", "-", "--start-delay", "1h30m", stdin=lines)
    assert many.error.startswith("line 3: INVALID_REQUEST: start_delay: '5' is not a duration such as ")
    runs = [await api.get(listed.run_id) for listed in await api.list_all()]
    delays = [wait.fire_time.ToSeconds() - run.create_time.ToSeconds() for run in runs for wait in run.open_waits]
    assert sorted(delays) == [3600, 5400]
    short = await fencepost("runs", "start", "wf", "--run-timeout", "50ms", "--wait", "--json")
    assert (short.code, short.document["run"]["failure"]["code"]) == (3, "RUN_TIMEOUT")
    wrong = run("runs", "start", "wf", "--run-timeout", "2")
    assert wrong.code == 2
    assert wrong.error.startswith("fencepost: --run-timeout: '2' is not a duration such as ")


async def test_a_watch_shows_events_as_they_come_and_ends_quietly_on_an_interrupt(
    fencepost: Program, api: Api, server: InProcessServer, connect_worker: ConnectWorker
) -> None:
    await api.register(manifest(2))
    worker = await connect_worker(server.grpc_address, handlers=["s1"])
    run_id = (await api.start()).run_id
    process = await fencepost.start("runs", "watch", run_id)
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT):
        assert b"run_started" in await process.stdout.readline()
        assert b"step_scheduled" in await process.stdout.readline()
        await worker.complete(await worker.task(), "1")
        assert b"step_completed" in await process.stdout.readline()
        assert b"step_scheduled" in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert err == b""


async def test_a_closed_pipe_ends_a_command_quietly(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    await api.start_many([api.start_request() for _ in range(1000)])
    process = await fencepost.start("runs", "list", "--limit", "1000", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT):
        await process.stdout.readline()
        process.stdout._transport.close()  # type: ignore[attr-defined]  # there is no public way to close it early
        err = await process.stderr.read()
        await process.wait()
    assert err == b""


async def test_streams_that_were_closed_before_the_start_lead_nowhere(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))

    async def with_closed(streams: str, *arguments: str) -> tuple[int | None, bytes]:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f'exec "$0" "$@" {streams}', str(PROGRAM), *arguments, "--address", fencepost.address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await asyncio.wait_for(process.communicate(b'{"input": 1}\n'), TIMEOUT)
        return process.returncode, err

    assert (await with_closed("2>&-", "runs", "start", "wf", "--many", "-"))[0] == 0
    assert await with_closed(">&-", "runs", "list") == (0, b"")
    code, err = await with_closed("<&-", "runs", "wait", "-")
    assert (code, err) == (2, b"fencepost: no run to wait for\n")


async def test_an_unknown_run_a_wrong_state_and_two_inputs_are_refused(fencepost: Program) -> None:
    unknown = await fencepost("runs", "get", UNKNOWN_RUN)
    assert unknown.code == 1
    assert unknown.error.startswith("fencepost: RUN_NOT_FOUND: ")
    state = await fencepost("runs", "list", "--state", "DONE")
    assert state.code == 2
    assert "PENDING, RUNNING, WAITING, PAUSED, BLOCKED" in state.error
    both = await fencepost("runs", "start", "wf", "--input", "1", "--input-file", "x")
    assert both.code == 2
    missing = await fencepost("runs", "start", "wf", "--input-file", "/nowhere/at/all")
    assert missing.error == "fencepost: /nowhere/at/all: No such file or directory\n"
    assert (await fencepost("runs", "start", "wf")).error.startswith("fencepost: UNKNOWN_WORKFLOW: ")
    for source, arguments in (("--input", ("--input", '{"n": 3')), ("-", ("--input-file", "-"))):
        broken = await fencepost("runs", "start", "wf", *arguments, stdin='{"n": 3')
        assert broken.error.startswith(f"fencepost: INVALID_JSON: {source} is not valid: ")


@pytest.mark.parametrize("command", [("list",), ("watch", UNKNOWN_RUN), ("start", "wf")])
def test_a_server_that_is_not_there_is_told_after_the_patience(command: tuple[str, ...]) -> None:
    result = run("runs", *command, "--address", "127.0.0.1:1", "--timeout", "0.3")
    assert result.code == 1
    assert result.error.startswith("fencepost: no server answers at 127.0.0.1:1: ")
    assert result.error.count("\n") == 1


def test_an_address_that_is_none_is_wrong_usage() -> None:
    assert run("runs", "list", "--address", ",").code == 2


async def test_flags_of_client_commands_may_stand_before_the_command(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    run_id = (await api.start()).run_id
    before = ("--address", fencepost.address, "--namespace", "default", "--json")
    listed = await fencepost(*before, "runs", "list", FENCEPOST_ADDRESS="127.0.0.1:1", FENCEPOST_NAMESPACE="other")
    assert listed.document["run_id"] == run_id
    both = await fencepost("--address", "127.0.0.1:1", "runs", "list", "--address", fencepost.address)
    assert run_id in both.out
    elsewhere = run("--address", "127.0.0.1:1", "migrate", "--dsn", "postgresql://127.0.0.1:1/x")
    assert elsewhere.code == 2
    assert elsewhere.error.startswith("fencepost: --address is for the commands definitions, runs, ")
