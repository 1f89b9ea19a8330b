"""`fencepost schedules …` against a server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.cli.program import Program
from tests.engine.rows import count
from tests.engine.scheduling import fire_now, get, until
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest

CRON = ("--workflow", "wf", "--cron", "0 6 * * 1-5", "--time-zone", "Europe/Berlin")
FILE = """\
workflow_id: wf
cron: "0 6 * * 1-5"
time_zone: Europe/Berlin
input: {price: 1.50, big: 123456789012345678901234567890}
overlap: QUEUE_ONE
catch_up_window: 1h
jitter: 90s
run_timeout: 2h30m
priority: 2
user_id: ada
attributes: {team: a}
start_time: "2024-01-01T00:00:00+00:00"
end_time: "2099-01-01T00:00:00+01:00"
"""


async def test_a_schedule_is_made_of_options_shown_listed_and_deleted(fencepost: Program, api: Api) -> None:
    made = await fencepost("schedules", "create", "nightly", *CRON, "--input", '{"a": 1.50}', "--jitter", "1m30s")
    assert (made.code, made.err) == (0, "")
    assert "0 6 * * 1-5 Europe/Berlin" in made.out
    again = await fencepost("schedules", "create", "nightly", *CRON, "--input", '{"a":1.5}', "--jitter", "90s")
    assert again.out.endswith("it existed, with this content\n")
    other = await fencepost("schedules", "create", "nightly", *CRON)
    assert "SCHEDULE_EXISTS" in other.error
    shown = (await fencepost("schedules", "show", "nightly", "--json")).document
    assert shown["spec"]["input"] == {"a": 1.50}
    assert (shown["spec"]["jitter"], shown["spec"]["overlap"], shown["spec"]["interval"]) == (90.0, "SKIP", None)
    assert datetime.fromisoformat(shown["next_fire_time"]) > datetime(2024, 1, 1, tzinfo=UTC)
    listed = await fencepost("schedules", "list")
    assert listed.out.splitlines()[0].split()[:3] == ["SCHEDULE", "WORKFLOW", "WHEN"]
    assert listed.out.splitlines()[1].startswith("nightly   wf        0 6 * * 1-5 Europe/Berlin")
    assert [d["schedule_id"] for d in (await fencepost("schedules", "list", "--json")).documents] == ["nightly"]
    assert (await fencepost("schedules", "delete", "nightly")).out == "deleted\n"
    assert (await fencepost("schedules", "delete", "nightly")).out == "there was none\n"
    assert "SCHEDULE_NOT_FOUND" in (await fencepost("schedules", "show", "nightly")).error


@pytest.mark.parametrize("suffix", ["yaml", "json"])
async def test_a_file_says_the_same_and_an_option_goes_before_it(
    fencepost: Program, api: Api, tmp_path: Path, suffix: str
) -> None:
    from fencepost_server.domain.yamltext import parse_yaml

    file = tmp_path / f"s.{suffix}"
    file.write_text(FILE if suffix == "yaml" else json.dumps(parse_yaml(FILE)))
    made = await fencepost("schedules", "create", "s", "--file", str(file), "--priority", "5", "--json", "--paused")
    spec = (await get(api)).spec
    assert made.document["created"]
    assert made.document["paused"]
    assert spec.input.json == '{"big":12345678901234567890123456789e1,"price":15e-1}'
    assert (spec.priority, spec.user_id, dict(spec.attributes)) == (5, "ada", {"team": "a"})
    assert (spec.jitter.seconds, spec.catch_up_window.seconds, spec.run_timeout.seconds) == (90, 3600, 9000)
    assert (spec.start_time.ToJsonString(), spec.end_time.ToJsonString()) == (
        "2024-01-01T00:00:00Z",
        "2098-12-31T23:00:00Z",
    )
    updated = await fencepost("schedules", "update", "s", "--file", "-", "--every", "1h", "--offset", "5m", stdin=FILE)
    assert "every 1 h 0 m plus 5 m 0 s" in updated.out
    spec = (await get(api)).spec
    assert (spec.WhichOneof("when"), spec.time_zone) == ("interval", "")
    stale = await fencepost("schedules", "update", "s", *CRON, "--etag", made.document["etag"])
    assert "STALE_ETAG" in stale.error


async def test_a_pause_a_trigger_and_a_backfill_do_as_they_say(fencepost: Program, api: Api, dsn: str) -> None:
    await api.register(manifest(1))
    await fencepost("schedules", "create", "s", *CRON)
    paused = await fencepost("schedules", "pause", "s", "--reason", "holidays")
    assert "paused: holidays" in paused.out
    first = await fencepost("schedules", "trigger", "s", "--request-id", "r", "--json")
    again = await fencepost("schedules", "trigger", "s", "--request-id", "r", "--json")
    assert first.document == again.document
    assert (await fencepost("schedules", "trigger", "s")).out.startswith("run  ")
    span = ("--from", "2024-03-01T00:00+01:00", "--to", "2024-03-06T00:00+01:00")
    filled = await fencepost("schedules", "backfill", "s", *span)
    assert len(filled.out.splitlines()) == 3, "Friday, Monday and Tuesday"
    repeated = await fencepost("schedules", "backfill", "s", *span, "--json")
    assert [d["run_id"] for d in repeated.documents] == filled.out.split()
    assert await count(dsn, "run") == 5
    resumed = await fencepost("schedules", "resume", "s", "--json")
    assert not resumed.document["paused"]
    await fire_now(dsn)
    await until(api, started_runs=5, skipped_overlap=1)
    assert "1 for a run under way" in (await fencepost("schedules", "show", "s")).out


async def test_fire_times_are_told_as_local_times_or_in_utc(fencepost: Program, api: Api) -> None:
    await fencepost(
        "schedules", "create", "s", "--workflow", "wf", "--cron", "30 2 * * *", "--time-zone", "Europe/Berlin"
    )
    arguments = ("schedules", "fire-times", "s", "--from", "2027-03-27T00:00Z", "--limit", "3")
    found = await fencepost(*arguments, "--json")
    assert [d["fire_time"] for d in found.documents] == [
        "2027-03-27T01:30:00Z",
        "2027-03-28T01:00:00Z",
        "2027-03-29T00:30:00Z",
    ]
    local = await fencepost(*arguments, TZ="Europe/Berlin")
    assert local.out.splitlines()[1] == "2027-03-28 03:00:00+02:00"
    await fencepost("schedules", "create", "past", "--workflow", "wf", "--every", "1m", "--end", "2024-01-01")
    assert "it fires no more" in (await fencepost("schedules", "fire-times", "past")).error


async def test_faults_of_a_spec_are_told_with_their_places(fencepost: Program, api: Api) -> None:
    refused = await fencepost(
        "schedules", "create", "s", "--workflow", "wf", "--cron", "0 0 30 2 *", "--time-zone", "Mars/Base"
    )
    assert refused.code == 1
    assert "spec.cron" in refused.error
    assert "spec.time_zone" in refused.error
    for arguments, said, code in (
        (["--workflow", "wf"], "either --cron or --every", 2),
        (["--cron", "0 0 * * *"], "--workflow is missing", 2),
        (["--workflow", "wf", "--every", "5"], "is not a duration", 2),
        (["--workflow", "wf", "--every", "5s", "--overlap", "maybe"], "is none of skip", 2),
        (["--workflow", "wf", "--every", "5s", "--start", "soon"], "is not a time", 2),
        (["--workflow", "wf", "--every", "5s", "--attribute", "x"], "is not KEY=VALUE", 2),
        (["--workflow", "wf", "--every", "5s", "--input", "{"], "INVALID_JSON", 1),
        (["--file", "none.yaml"], "No such file", 1),
    ):
        result = await fencepost("schedules", "create", "s", *arguments)
        assert said in result.error
        assert result.code == code


async def test_every_fault_of_a_file_is_told(fencepost: Program, api: Api) -> None:
    text = "workflow_id: 1\ncron: {}\nevery: 5s\njitter: 5\noverlap: never\nstart_time: soon\nattributes: {a: 1}\n"
    result = await fencepost("schedules", "create", "s", "--file", "-", stdin=text)
    assert result.code == 1
    for place in (
        "/workflow_id",
        "/cron",
        "/every: there is no such key",
        "/jitter",
        "/overlap",
        "/start_time",
        "/attr",
    ):
        assert place in result.error
    assert (await fencepost("schedules", "create", "s", "--file", "-", stdin="a: &x 1")).code == 1
    assert "must be an object" in (await fencepost("schedules", "create", "s", "--file", "-", stdin="[]")).error
