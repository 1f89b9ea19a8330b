"""`fencepost schedules …`: make schedules, look at them, pause them, start runs of theirs."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller
from fencepost_server.cli.faults import CommandFailed
from fencepost_server.cli.filters import time_of
from fencepost_server.cli.output import lasted, local, room, shortened, show_pairs, show_table, write_json, write_line
from fencepost_server.cli.runs import payload_text
from fencepost_server.cli.schedule_specs import Said, spec_document

if TYPE_CHECKING:
    from fencepost import Schedule, ScheduleSpec

Id = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The schedule's id.", show_default=False)]


def create(
    caller: Caller,
    schedule: Id,
    said: Said,
    paused: Annotated[bool, typer.Option("--paused", help="Make it paused.")] = False,
) -> None:
    """Make a schedule, from options, a file, or both. The same content again changes nothing."""
    with caller.connect() as client:
        made = client.schedules.create(schedule, said.spec(), paused=paused)
    if caller.json:
        write_json({"created": made.created, **_document(made)})
        return
    _show(made)
    if not made.created:
        write_line("it existed, with this content")


def update(
    caller: Caller,
    schedule: Id,
    said: Said,
    etag: Annotated[
        str,
        typer.Option("--etag", help="As `show` told: refuse if it was changed since.", show_default=False),
    ] = "",
) -> None:
    """Replace what a schedule does: all of it, from options, a file, or both."""
    with caller.connect() as client:
        changed = client.schedules.update(schedule, said.spec(), etag=etag)
    _tell(caller, changed)


def list_(caller: Caller) -> None:
    """List schedules by id."""
    with caller.connect() as client:
        found = client.schedules.list()
        if caller.json:
            for schedule in found:
                write_json(_document(schedule))
            return
        rows = [
            (
                s.schedule_id,
                s.spec.workflow_id,
                _when(s.spec),
                "paused" if s.paused else local(s.next_fire_time) or "never",
                local(s.last_fire_time),
                str(s.started_runs),
                shortened(s.last_error, 80),
            )
            for s in found
        ]
    titles = ("SCHEDULE", "WORKFLOW", "WHEN", "NEXT", "LAST", "RUNS", "LAST ERROR")
    show_table(titles, rows, whole=("SCHEDULE", "NEXT"))


def show(caller: Caller, schedule: Id) -> None:
    """Show a schedule: what it does, when it fires next, what came of it so far."""
    with caller.connect() as client:
        found = client.schedules.get(schedule)
    _tell(caller, found)


def pause(
    caller: Caller,
    schedule: Id,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for people.", show_default=False)] = "",
) -> None:
    """Let a schedule fire no more until it is resumed."""
    with caller.connect() as client:
        changed = client.schedules.pause(schedule, reason)
    _tell(caller, changed)


def resume(caller: Caller, schedule: Id) -> None:
    """Let a paused schedule fire again, from now on: times that passed are not made up for."""
    with caller.connect() as client:
        changed = client.schedules.resume(schedule)
    _tell(caller, changed)


def trigger(
    caller: Caller,
    schedule: Id,
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            metavar="ID",
            help="The same id again gets the same run. Default: a new one.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Start a run of a schedule now, whatever is under way; also of a paused one."""
    with caller.connect() as client:
        run_id = client.schedules.trigger(schedule, request_id=request_id).run_id
    if caller.json:
        write_json({"run_id": run_id})
        return
    show_pairs([("run", run_id)])


def backfill(
    caller: Caller,
    schedule: Id,
    begin: Annotated[str, typer.Option("--from", metavar="TIME", help="From then on.", show_default=False)],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Before then.", show_default=False)],
) -> None:
    """Start a run for each fire time of a past range that has none; prints the ids of the runs.

    Repeating it changes nothing. A time without an offset is one of this machine's zone.
    """
    from_time, to_time = time_of(begin, "--from"), time_of(end, "--to")
    if from_time is None or to_time is None:
        raise typer.BadParameter("a time is missing", param_hint="--from, --to")
    with caller.connect() as client:
        run_ids = [run.run_id for run in client.schedules.backfill(schedule, from_time, to_time)]
    for run_id in run_ids:
        if caller.json:
            write_json({"run_id": run_id})
        else:
            write_line(run_id)


def delete(caller: Caller, schedule: Id) -> None:
    """Delete a schedule; its runs go on."""
    with caller.connect() as client:
        deleted = client.schedules.delete(schedule)
    if caller.json:
        write_json({"schedule_id": schedule, "deleted": deleted})
        return
    write_line("deleted" if deleted else "there was none")


def fire_times(
    caller: Caller,
    schedule: Id,
    begin: Annotated[
        str, typer.Option("--from", metavar="TIME", help="From then on. Default: now.", show_default=False)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many.")] = 10,
) -> None:
    """Tell when a schedule will fire, or would if it were not paused."""
    from fencepost_server.cli.documents import stamp

    with caller.connect() as client:
        times = client.schedules.fire_times(schedule, time_of(begin, "--from"), limit)
    for at in times:
        if caller.json:
            write_json({"fire_time": stamp(at)})
        else:
            write_line(local(at))
    if not times and not caller.json:
        raise CommandFailed("it fires no more")


def _tell(caller: Caller, schedule: Schedule) -> None:
    if caller.json:
        write_json(_document(schedule))
    else:
        _show(schedule)


def _document(schedule: Schedule) -> dict[str, Any]:
    from fencepost_server.cli.documents import stamp

    return {
        "schedule_id": schedule.schedule_id,
        "namespace": schedule.namespace,
        "spec": spec_document(schedule.spec),
        "paused": schedule.paused,
        "pause_reason": schedule.pause_reason,
        "next_fire_time": stamp(schedule.next_fire_time),
        "last_fire_time": stamp(schedule.last_fire_time),
        "last_run_id": schedule.last_run_id,
        "started_runs": schedule.started_runs,
        "skipped_overlap": schedule.skipped_overlap,
        "skipped_missed": schedule.skipped_missed,
        "last_error": schedule.last_error,
        "etag": schedule.etag,
        "create_time": stamp(schedule.create_time),
    }


def _when(spec: ScheduleSpec) -> str:
    if spec.interval is None:
        return spec.cron if spec.time_zone in {"", "UTC"} else f"{spec.cron} {spec.time_zone}"
    shift = f" plus {lasted(spec.offset)}" if spec.offset else ""
    return f"every {lasted(spec.interval)}{shift}"


def _show(schedule: Schedule) -> None:
    spec, width = schedule.spec, room() - 17
    paused = ("paused" + (f": {schedule.pause_reason}" if schedule.pause_reason else "")) if schedule.paused else ""
    show_pairs(
        [
            ("schedule", schedule.schedule_id),
            ("workflow", spec.workflow_id),
            ("when", _when(spec)),
            ("from", local(spec.start_time)),
            ("until", local(spec.end_time)),
            ("state", paused),
            ("next", _next(schedule)),
            ("last", local(schedule.last_fire_time)),
            ("last run", schedule.last_run_id),
            ("last error", shortened(schedule.last_error, width * 4)),
            ("runs", str(schedule.started_runs)),
            ("left out", _left_out(schedule)),
            ("overlap", spec.overlap.value),
            ("catch-up", _optional(spec.catch_up_window)),
            ("jitter", _optional(spec.jitter)),
            ("input", payload_text(spec.input, width)),  # type: ignore[arg-type]  # one that was read is a Value
            ("user", spec.user_id),
            ("priority", str(spec.priority)),
            ("attributes", ", ".join(f"{key}={value}" for key, value in spec.attributes.items())),
            ("run timeout", _optional(spec.run_timeout)),
            ("made", local(schedule.create_time)),
            ("etag", schedule.etag),
        ]
    )


def _next(schedule: Schedule) -> str:
    if schedule.next_fire_time is None:
        return "" if schedule.paused else "never"
    left = (schedule.next_fire_time - dt.datetime.now(dt.UTC)).total_seconds()
    return f"{local(schedule.next_fire_time)}, in {lasted(left)}"


def _left_out(schedule: Schedule) -> str:
    parts = [(schedule.skipped_overlap, "for a run under way"), (schedule.skipped_missed, "missed")]
    return ", ".join(f"{count} {why}" for count, why in parts if count)


def _optional(seconds: float | None) -> str:
    return lasted(seconds) if seconds else ""
