"""`fencepost runs get|list|history|query|watch`: what became of runs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller
from fencepost_server.cli.filters import STATES, attributes_of, state_of, time_of
from fencepost_server.cli.output import (
    lasted,
    local,
    readable_json,
    room,
    shortened,
    show_line,
    show_pairs,
    show_table,
    style_of,
    write_json,
    write_line,
)

if TYPE_CHECKING:
    from fencepost import Event, Failure, OpenStep, OpenWait, Run, Value

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]


def get(caller: Caller, run: RunId) -> None:
    """Show a run: its state, what it was started with and what came of it, and the steps that are open."""
    from fencepost_server.cli.documents import run_document

    with caller.connect() as client:
        found = client.get_run(run)
    if caller.json:
        write_json(run_document(found))
        return
    show_run(found)


def show_run(run: Run) -> None:
    """Write a run for people."""
    width = room() - 12
    show_pairs(
        [
            ("run", run.run_id),
            ("workflow", run.workflow_id),
            ("definition", run.definition_hash),
            ("state", run.state.value if run.ending is None else f"{run.state.value}, then {run.ending.value}"),
            ("request key", run.request_key),
            ("dedupe key", run.dedupe_key),
            ("user", run.user_id),
            ("attributes", " ".join(f"{key}={value}" for key, value in sorted(run.attributes.items()))),
            ("parent", run.parent_run_id),
            ("goes on for", run.previous_run_id),
            ("goes on as", run.next_run_id),
            *(("waits because", reason) for reason in reasons(run)),
            ("priority", str(run.priority)),
            ("started", local(run.create_time)),
            ("ended", local(run.end_time)),
            ("duration", _duration(run)),
            ("events", str(run.last_seq)),
            ("input", payload_text(run.input, width)),
            ("output", payload_text(run.output, width)),
            ("failure", shortened(failure_text(run.failure), width * 4)),
        ]
    )
    if run.open_steps:
        write_line("")
        titles = ("NODE", "HANDLER", "QUEUE", "STATE", "ATTEMPT", "SINCE", "WORKER", "PROGRESS", "LAST FAILURE")
        show_table(titles, [_step_row(step) for step in run.open_steps])
    if run.open_waits:
        write_line("")
        show_table(("NODE", "WAITS FOR", "SINCE EVENT"), [_wait_row(wait) for wait in run.open_waits])
    if run.pending_signals:
        write_line("")
        show_table(("SIGNAL", "NOT TAKEN"), [(name, str(count)) for name, count in run.pending_signals.items()])


def reasons(run: Run) -> list[str]:
    """Why nothing happens, as far as the server knows it: the first of each kind of wait."""
    told = [f"no connected worker has its code ({run.waiting_reason})"] if run.waiting_reason else []
    waiting = {(step.handler, step.queue, step.waiting_reason): None for step in run.open_steps if step.waiting_reason}
    told += [
        f"no connected worker takes {handler} from the queue {queue} ({reason})"
        for handler, queue, reason in list(waiting)[:_REASONS_SHOWN]
    ]
    if len(waiting) > _REASONS_SHOWN:
        told.append(f"and {len(waiting) - _REASONS_SHOWN} more handlers, see below")
    return told


_REASONS_SHOWN = 10


def _wait_row(wait: OpenWait) -> tuple[str, ...]:
    if wait.fire_time is not None:
        waits_for = local(wait.fire_time)
    elif wait.child_run_id:
        waits_for = f"run {wait.child_run_id}"
    else:
        waits_for = f"signal {wait.signal_name}"
    return wait.node_id, waits_for, str(wait.seq)


def _step_row(step: OpenStep) -> tuple[str, ...]:
    node = "(decides)" if step.decide else f"{step.node_id} (undo)" if step.undo else step.node_id
    return (
        f"{node} [{step.item}]" if step.scope_id else node,
        step.handler,
        step.queue,
        step.state.value,
        str(step.attempt),
        local(step.ready_time),
        step.worker_name,
        payload_text(step.progress, 40),
        shortened(failure_text(step.last_failure), 80),
    )


def payload_text(value: Value | None, width: int) -> str:
    """A payload in ``width`` characters; '' for none."""
    if value is None:
        return ""
    if value.binary is not None:
        return f"({len(value.binary)} bytes)"
    return shortened(value.json or "null", width)


def failure_text(failure: Failure | None) -> str:
    """A failure in one line; '' for none."""
    if failure is None:
        return ""
    where = f" at {failure.node_id}" if failure.node_id else ""
    where += f", attempt {failure.attempt}" if where and failure.attempt else ""  # only steps have attempts
    return f"{failure.kind.value} {failure.code}{where}: {failure.message}"


def _duration(run: Run) -> str:
    """How long it took, or has taken so far by this machine's clock."""
    if run.end_time is not None:
        return lasted((run.end_time - run.create_time).total_seconds())
    return lasted((dt.datetime.now(dt.UTC) - run.create_time).total_seconds()) + " so far"


def list_(
    caller: Caller,
    workflow: Annotated[str, typer.Option("--workflow", help="Only those of this workflow.", show_default=False)] = "",
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help=f"Only those in this state: {', '.join(STATES)}. May be repeated."),
    ] = None,
    user: Annotated[str, typer.Option("--user", help="Only those on behalf of this user.", show_default=False)] = "",
    attribute: Annotated[
        list[str] | None,
        typer.Option("--attribute", metavar="KEY=VALUE", help="Only those with this attribute. May be repeated."),
    ] = None,
    created_after: Annotated[
        str, typer.Option("--created-after", metavar="TIME", help="Only those started then or later.")
    ] = "",
    created_before: Annotated[
        str, typer.Option("--created-before", metavar="TIME", help="Only those started before.")
    ] = "",
    failure_code: Annotated[
        str, typer.Option("--failure-code", metavar="CODE", help="Only those that failed, or are blocked, with it.")
    ] = "",
    parent: Annotated[str, typer.Option("--parent", metavar="RUN", help="Only the children of this run.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1 << 31, help="How many at most.")] = 50,
) -> None:
    """List runs, newest first: those for which all of it holds."""
    from fencepost_server.cli.documents import run_document

    states = [state_of(name) for name in state or []]
    attributes = attributes_of(attribute or [])
    after, before = time_of(created_after, "--created-after"), time_of(created_before, "--created-before")
    with caller.connect() as client:
        found = client.list_runs(
            workflow or None,
            states,
            limit,
            user_id=user,
            attributes=attributes,
            created_after=after,
            created_before=before,
            failure_code=failure_code,
            parent_run_id=parent,
        )
        if caller.json:
            for run in found:
                write_json(run_document(run, listed=True))
            return
        rows = [
            (r.run_id, r.workflow_id, r.state.value, local(r.create_time), _duration(r), r.request_key, r.user_id)
            for r in found
        ]
    show_table(
        ("RUN", "WORKFLOW", "STATE", "STARTED", "DURATION", "REQUEST KEY", "USER"),
        rows,
        whole=("RUN", "STATE", "DURATION"),
    )


def history(
    caller: Caller,
    run: RunId,
    replay: Annotated[
        str,
        typer.Option(
            "--replay",
            metavar="MODULE:WORKFLOW",
            help="Replay it with this code, in this process, and show what the code does.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Show all that has happened to a run."""
    if replay:
        from fencepost_server.cli.replaying import replay as replay_run

        replay_run(caller, run, replay)
        return
    with caller.connect() as client:
        if caller.json:
            for event in client.history(run):
                write_json(_document(run, event))
            return
        width = max(room() - 70, 40)
        rows = [
            (str(e.seq), local(e.time, precise=True), e.kind.value, e.node_id, event_text(e, width))
            for e in client.history(run)
        ]
    show_table(("SEQ", "TIME", "EVENT", "NODE", "DETAILS"), rows, whole=("SEQ", "TIME", "EVENT"))


def query(
    caller: Caller,
    run: RunId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which of its queries.", show_default=False)],
    given: Annotated[
        str, typer.Argument(metavar="[INPUT]", help="Its arguments, in JSON. Default: null.", show_default=False)
    ] = "null",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, max=60, help="How long to wait for the answer.")
    ] = 10.0,
) -> None:
    """Ask a run of a code workflow something, and show the answer as JSON. It changes nothing."""
    from fencepost import Value
    from fencepost_server.cli.documents import value_document

    with caller.connect() as client:
        answer = client.query_run(run, name, Value(json=given), timeout=wait, type=Value)
    if caller.json:
        write_json(value_document("output", answer))
    elif answer.binary is not None:
        write_line(payload_text(answer, room()))
    else:
        write_line(readable_json(answer.json or "null"))


def watch(
    caller: Caller,
    run: RunId,
    after: Annotated[
        int, typer.Option("--after", metavar="SEQ", min=0, max=1 << 62, help="Only events after this number.")
    ] = 0,
) -> None:
    """Show what happens to a run as it happens, until it has ended."""
    with caller.connect() as client:
        for event in client.watch_run(run, after):
            if caller.json:
                write_json(_document(run, event))
                continue
            style = style_of("FAILED" if "failed" in event.kind else "COMPLETED" if event.kind.is_final else "")
            show_line(
                (f"{event.seq:>5}  {local(event.time, precise=True)}  ", "dim"),
                (f"{event.kind.value:<15}  ", style),
                (f"{event.node_id:<12}  " if event.node_id else "", "bold"),
                (event_text(event, max(room() - 70, 40)), ""),
            )


def _document(run: str, event: Event) -> dict[str, Any]:
    """An event; the first one says whose events these are, so that a file of them can be replayed."""
    from fencepost_server.cli.documents import event_document

    return ({"run_id": run} if event.seq == 1 else {}) | event_document(event)


def event_text(event: Event, width: int) -> str:
    """What an event tells beyond its kind and node."""
    parts = [*_subject(event)]
    if event.attempt:
        parts.append(f"attempt {event.attempt}")
    if event.state is not None:
        parts.append(event.state.value)
    if event.failure is not None:
        parts.append(failure_text(event.failure))
    if event.reason:
        parts.append(event.reason)
    if event.ready_time is not None:
        parts.append(f"again in {lasted((event.ready_time - event.time).total_seconds())}")
    if event.grace is not None:
        parts.append(f"grace {lasted(event.grace)}")
    if event.output_seq == event.seq:
        parts.append("output of the function")  # which the event holds, but does not tell: the run does
    elif event.output_seq:
        parts.append(f"output of event {event.output_seq}")
    if event.payload is not None:
        parts.append(payload_text(event.payload, width))
    return shortened("; ".join(parts), width)


def _subject(event: Event) -> Iterator[str]:
    """What an event is about: what runs, what is waited for, and where."""
    if event.op:
        yield f"op {event.op}"
    if event.patch_id:
        yield event.patch_id
    if event.delay is not None:
        yield f"for {lasted(event.delay)}"
    for key, value in sorted(event.attributes.items()):
        yield f"{key}={value}" if value else f"no {key}"
    if event.continued_from_run_id:
        yield f"goes on for run {event.continued_from_run_id}"
    if event.next_run_id:
        yield f"run {event.next_run_id}"
    if event.deadline_time is not None:
        yield f"until {local(event.deadline_time)} at most"
    if event.workflow_id:
        yield f"{event.workflow_id} {event.definition_hash[:12]}".rstrip()
    if event.handler:
        yield f"{event.handler} on {event.queue}"
    if event.signal_name:
        yield f"signal {event.signal_name}"
    if event.signal_seq:
        yield f"signal of event {event.signal_seq}"
    if event.fire_time is not None:
        yield f"until {local(event.fire_time)}"
    if event.timeout_time is not None:
        yield f"until {local(event.timeout_time)} at most"
    if event.timer_kind is not None:
        yield event.timer_kind.value.lower().replace("_", " ")
    if event.child_run_id:
        yield f"run {event.child_run_id}"
    if event.of_seq:
        yield f"of event {event.of_seq}" + (f" of run {event.of_run_id}" if event.of_run_id else "")
    if event.kind == "choice_made":
        yield "no case" if event.case_index < 0 else f"case {event.case_index}"
    if event.kind == "scope_opened":
        yield f"{event.items} branches or items"
    if event.scope_id and event.kind != "scope_closed":
        yield f"item {event.item} of event {event.scope_id}"
