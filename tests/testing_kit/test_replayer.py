"""A recorded history is replayed with today's code: the same code comes to the same, other code is told apart."""

from __future__ import annotations

import datetime as dt
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from fencepost import Event, EventKind, NondeterminismError, Workflow, WorkflowContext, workflow
from fencepost.testing import AsyncEnvironment, HistoryUnreadable, Replayer
from fencepost_server.cli.documents import event_document
from tests.testing_kit import orders

SOURCE = Path(orders.__file__).read_text("utf-8")


def changed(*replacements: tuple[str, str]) -> Workflow[..., Any]:
    """The workflow after an edit of its module."""
    text = SOURCE
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("edited_orders")
    exec(compile(text, "edited_orders.py", "exec"), vars(module))
    found: Workflow[..., Any] = module.order
    return found


@pytest_asyncio.fixture
async def recorded(env: AsyncEnvironment) -> tuple[str, list[Event], Any]:
    """A run's id, its history, and its output."""
    async with env.worker(orders.STEPS, workflows=orders.WORKFLOWS):
        handle = await env.client.start_run("kit.order", ["tea", "cake"])
        await env.settle()
        await env.skip(dt.timedelta(days=6))
        await handle.signal("approve", "yes")
        output = await env.result(handle)
        return handle.run_id, [event async for event in handle.history()], output


def save(path: Path, run_id: str, events: Sequence[Event]) -> Path:
    """What `fencepost runs history RUN --json` prints, as a file."""
    documents = [event_document(event) for event in events]
    documents[0]["run_id"] = run_id
    path.write_bytes(b"".join(msgspec.json.encode(document) + b"\n" for document in documents))
    return path


async def test_the_same_code_comes_to_the_same_from_events_and_from_files(
    recorded: tuple[str, list[Event], Any], tmp_path: Path
) -> None:
    run_id, events, output = recorded
    replayer = Replayer(orders.order, on_input_change="block")
    for history in (events, save(tmp_path / "run.json", run_id, events)):
        replay = replayer.replay(history, run_id=run_id if history is events else "")
        assert replay.output is not None
        assert replay.output.decode() == output
        assert (replay.run_id, replay.events, replay.failure) == (run_id, len(events), None)
        assert replay.ops == 9
    assert [str(replay) for replay in replayer.replay_folder(tmp_path)] == [
        f"{len(events)} events and 9 ops, completes"
    ]


async def test_every_moment_of_a_run_can_be_replayed(recorded: tuple[str, list[Event], Any]) -> None:
    """Wherever a history was read: the events of one commit have one time, and come together."""
    run_id, events, _ = recorded
    moments = [n for n in range(1, len(events)) if events[n - 1].time != events[n].time]
    assert len(moments) > 6
    for moment in moments:
        replay = Replayer(orders.order, on_input_change="block").replay(events[:moment], run_id=run_id)
        assert replay.events == moment
        assert replay.end in {"goes on", "completes"}


EDITS = [
    ("ctx.run(price, item)", "ctx.run(tax, 3)", "op 1: history has local step price, code asks for local step tax"),
    ("ctx.call(charge, cents)", 'ctx.call("pay", 1)', "op 5: history has step kit.charge, code asks for step pay"),
    ("for item in items:", "for item in items[1:]:", "op 2: history has local step price, code asks for attributes"),
    ("sent = await", "await ctx.sleep(60); sent = await", "op 9: history has child kit.parcel, code asks for sleep 1m"),
    ("ctx.child(parcel,", 'ctx.child("box",', "op 9: history has child kit.parcel, code asks for child box"),
    ("async with asyncio.timeout(30 * DAY):", "if 1:", "op 7: history has sleep 30d, code asks for signal approve"),
    ("return {", "await ctx.sleep(5); return {", "op 10: history has nothing, code asks for sleep 5s"),
    ("return {", "await ctx.run(tax, 1); return {", "has the run completed, code asks for local step tax"),
    ("return {", "raise ValueError('no'); return {", "has the run completed, code fails with ValueError: no"),
    ("return {", "ctx.continue_as_new([]); return {", "has the run completed, code continues as new"),
    ("return {", "await asyncio.Event().wait(); return {", "has the run completed, code waits"),
]


@pytest.mark.parametrize(("old", "new", "difference"), EDITS, ids=[new for _, new, _ in EDITS])
async def test_other_code_is_told_apart_by_the_first_difference(
    recorded: tuple[str, list[Event], Any], old: str, new: str, difference: str, tmp_path: Path
) -> None:
    run_id, events, _ = recorded
    replayer = Replayer(changed((old, new)))
    with pytest.raises(NondeterminismError) as found:
        replayer.replay(events, run_id=run_id)
    assert difference in found.value.message
    path = save(tmp_path / "run.json", run_id, events)
    with pytest.raises(NondeterminismError) as found_in_file:
        replayer.replay_folder(tmp_path)
    assert found_in_file.value.message == f"{path}: {found.value.message}"


async def test_a_patch_lets_old_runs_go_the_old_way(recorded: tuple[str, list[Event], Any]) -> None:
    run_id, events, _ = recorded
    step = 'await ctx.run(refuse, "gift")'
    before = changed((step, f"await ctx.sleep(60); {step}"))
    with pytest.raises(NondeterminismError, match="op 6: history has local step refuse, code asks for sleep 1m"):
        Replayer(before).replay(events, run_id=run_id)
    patched = changed((step, f'\n        if ctx.patched("wait"): await ctx.sleep(60)\n        {step}'))
    Replayer(patched).replay(events, run_id=run_id)


async def test_another_input_is_a_difference_if_that_is_asked_for(recorded: tuple[str, list[Event], Any]) -> None:
    run_id, events, _ = recorded
    edited = changed(("ctx.run(tax, cents)", "ctx.run(tax, cents + 1)"))
    Replayer(edited).replay(events, run_id=run_id)
    with pytest.raises(NondeterminismError, match="op 4: history has another input of local step tax"):
        Replayer(edited, on_input_change="block").replay(events, run_id=run_id)


async def test_a_run_that_waits_is_replayed_up_to_there_and_a_step_before_the_wait_is_found(
    env: AsyncEnvironment,
) -> None:
    async with env.worker(orders.STEPS, workflows=orders.WORKFLOWS):
        handle = await env.client.start_run("kit.order", ["tea"])
        await env.settle()
        events = [event async for event in handle.history()]
    assert Replayer(orders.order).replay(events, run_id=handle.run_id).end == "goes on"
    one_more = changed(("        async with asyncio", "        ctx.call(charge, 0)\n        async with asyncio"))
    with pytest.raises(NondeterminismError, match=r"op 6: history has sleep 30d, code asks for step kit.charge"):
        Replayer(one_more).replay(events, run_id=handle.run_id)


async def test_a_run_that_failed_or_was_cancelled_is_replayed_to_its_end(env: AsyncEnvironment) -> None:
    async with env.worker(orders.STEPS, workflows=orders.WORKFLOWS):
        failed = await env.client.start_run("kit.order", ["tea"])
        await env.skip(dt.timedelta(days=8))
        await failed.wait(20)
        cancelled = await env.client.start_run("kit.order", ["tea"])
        await env.settle()
        await cancelled.cancel("changed my mind")
        await cancelled.wait(20)
        histories = {handle.run_id: [e async for e in handle.history()] for handle in (failed, cancelled)}
    assert histories[failed.run_id][-1].kind is EventKind.RUN_FAILED
    assert histories[cancelled.run_id][-1].kind is EventKind.RUN_CANCELLED
    for run_id, events in histories.items():
        Replayer(orders.order, on_input_change="block").replay(events, run_id=run_id)
    wait = 'said = await ctx.signal("approve", type=str, timeout=7 * DAY)'
    patient = changed((wait, f"try: {wait}\n            except fencepost.SignalTimeout: said = 'no'"))
    difference = r"op 8: history has nothing, code asks for child kit\.parcel"
    with pytest.raises(NondeterminismError, match=difference):
        Replayer(patient).replay(histories[failed.run_id], run_id=failed.run_id)


@workflow("kit.refused", compatibility_id="1", input_schema={"type": "integer"})
async def refused(ctx: WorkflowContext, number: Any) -> None:
    await ctx.run(abs, number)
    ctx.continue_as_new("no number")


@workflow("kit.refused", compatibility_id="1", input_schema={"type": "integer"})
async def not_continued(ctx: WorkflowContext, number: Any) -> None:
    await ctx.run(abs, number)


async def test_a_run_that_may_not_continue_as_new_with_what_it_wanted_to_is_replayed_to_its_end(
    env: AsyncEnvironment,
) -> None:
    async with env.worker(workflows=[refused]):
        handle = await env.client.start_run(refused, 1)
        failure = (await handle.wait()).failure
    assert failure is not None
    assert failure.code == "INPUT_SCHEMA_MISMATCH"
    events = [event async for event in handle.history()]
    assert Replayer(refused).replay(events).failure is None, "it is the server that has refused it"
    with pytest.raises(NondeterminismError, match="event 3: history has the run failed, code completes"):
        Replayer(not_continued).replay(events)


async def test_what_the_code_did_is_told_event_by_event_up_to_the_difference(
    recorded: tuple[str, list[Event], Any],
) -> None:
    run_id, events, _ = recorded
    told: list[str] = []
    with pytest.raises(NondeterminismError):
        Replayer(changed(("ctx.run(tax, cents)", "ctx.run(price, '')"))).replay(events, run_id=run_id, tell=told.append)
    text = "\n".join(told)
    assert text.startswith(
        "    1  run_started\n        op 1: local step price\n    2  local_step_ended op 1 price attempt 1\n"
    )
    assert "        op 4: local step price\n        op 5: step kit.charge\n" in text
    assert told[-1].split()[1:5] == ["local_step_ended", "op", "4", "tax"]


async def test_chance_depends_on_the_run_and_whoever_does_not_say_it_is_told(
    recorded: tuple[str, list[Event], Any],
) -> None:
    run_id, events, _ = recorded
    Replayer(orders.order, on_input_change="block").replay(events, run_id=run_id)
    with pytest.raises(
        NondeterminismError, match=r"history has another input of child kit.parcel \(ctx.random .* run_id"
    ):
        Replayer(orders.order, on_input_change="block").replay(events)


async def test_a_history_of_another_workflow_is_refused(recorded: tuple[str, list[Event], Any], tmp_path: Path) -> None:
    _, events, _ = recorded
    with pytest.raises(ValueError, match=r"the history is of kit\.order, not of kit\.parcel"):
        Replayer(orders.parcel).replay(events)
    (tmp_path / "parcels").mkdir()
    started = {"seq": 1, "event_time": "2026-01-01T00:00:00Z", "kind": "run_started", "workflow_id": "kit.parcel"}
    (tmp_path / "parcels" / "y.json").write_text(json.dumps(started))
    with pytest.raises(ValueError, match=r"y\.json: the history is of kit\.parcel, not of kit\.order"):
        Replayer(orders.order).replay_folder(tmp_path)
    (tmp_path / "parcels" / "y.json").unlink()
    with pytest.raises(HistoryUnreadable, match="no file of it"):
        Replayer(orders.order).replay_folder(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"seq": 1}))
    with pytest.raises(HistoryUnreadable, match=r"x\.json: event 1: 'kind' is missing"):
        Replayer(orders.order).replay_folder(tmp_path)
