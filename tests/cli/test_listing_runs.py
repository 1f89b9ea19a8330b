"""`fencepost runs list` with filters, and the labels that runs are started with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fencepost import RunState
from fencepost_server.cli.filters import STATES
from fencepost_server.domain.model import Failure, FailureKind
from tests.cli.program import Program
from tests.engine.rows import execute
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest

PARENT = "01920000-0000-7000-8000-000000000001"


async def test_runs_are_found_by_each_filter_and_by_all_of_them(fencepost: Program, api: Api, dsn: str) -> None:
    await api.register(manifest())
    await api.register(manifest(workflow_id="other"))
    runs = [(await api.start(user_id=user)).run_id for user in ("ada", "ada", "alan")]
    other = (await api.start("other", user_id="ada")).run_id
    for at, run_id in enumerate([*runs, other], 1):
        await execute(
            dsn,
            """update run set created_at = make_timestamptz(2026, 3, %(at)s, 12, 0, 0, 'UTC'),
                              parent_run_id = case when %(at)s < 3 then %(parent)s::uuid end,
                              failure = %(failure)s, state = 5
               where run_id = %(run_id)s""",
            {
                "at": at,
                "run_id": run_id,
                "parent": PARENT,
                "failure": Failure(FailureKind.PERMANENT, f"C{at}", "no").to_json(),
            },
        )
    for flags, expected in (
        (["--user", "ada"], [other, runs[1], runs[0]]),
        (["--workflow", "wf", "--user", "ada"], [runs[1], runs[0]]),
        (["--created-after", "2026-03-03T12:00:00Z"], [other, runs[2]]),
        (["--created-before", "2026-03-03T13:00:00+01:00"], [runs[1], runs[0]]),
        (["--created-after", "2026-03-02", "--created-before", "2026-03-03"], [runs[1]]),
        (["--failure-code", "C3"], [runs[2]]),
        (["--parent", PARENT], [runs[1], runs[0]]),
        (["--parent", PARENT, "--failure-code", "C1", "--state", "blocked", "--user", "ada"], [runs[0]]),
        (["--state", "cancelled"], []),
        (["--attribute", "a=b"], []),
    ):
        listed = await fencepost("runs", "list", *flags, "--json", TZ="UTC")
        assert listed.code == 0, listed.err
        assert [run["run_id"] for run in listed.documents] == expected, flags


def test_every_state_can_be_asked_for() -> None:
    assert set(STATES) == {state.value for state in RunState} - {"UNSPECIFIED"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--state", "asleep"], "WAITING"),
        (["--attribute", "a"], "KEY=VALUE"),
        (["--attribute", "=a"], "KEY=VALUE"),
        (["--attribute", "a=1", "--attribute", "a=2"], "two values"),
        (["--created-after", "yesterday"], "2026-03-01"),
        (["--created-before", "2026-02-30"], "2026-03-01"),
    ],
)
async def test_a_filter_that_says_nothing_is_refused_before_anybody_is_asked(
    fencepost: Program, flags: list[str], said: str
) -> None:
    refused = await fencepost("runs", "list", *flags)
    assert refused.code == 2
    assert said in refused.err


async def test_a_fault_that_the_server_finds_in_a_filter_is_told(fencepost: Program, api: Api) -> None:
    await api.list_all()
    refused = await fencepost("runs", "list", "--parent", "nobody")
    assert refused.code == 1
    assert "parent_run_id" in refused.err


async def test_a_run_is_started_with_labels_and_found_by_them(fencepost: Program, api: Api, tmp_path: Path) -> None:
    await api.register(manifest())
    one = await fencepost("runs", "start", "wf", "--attribute", "env=prod", "--attribute", "note=a=b c", "--json")
    assert one.code == 0, one.err
    run_id = one.document["run_id"]
    lines = [{"attributes": {"env": "test", "order": "7"}}, {}]
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    many = await fencepost("runs", "start", "wf", "--many", str(file), "--attribute", "env=prod", "--json")
    assert many.code == 0, many.err
    second, third = [document["run_id"] for document in many.documents]
    for flags, expected in (
        (["env=prod"], {run_id, third}),
        (["env=test", "order=7"], {second}),
        (["note=a=b c"], {run_id}),
        (["env=prod", "order=7"], set()),
    ):
        listed = await fencepost("runs", "list", *(f"--attribute={text}" for text in flags), "--json")
        assert {run["run_id"] for run in listed.documents} == expected, flags
    got = await fencepost("runs", "get", run_id, "--json")
    assert got.document["attributes"] == {"env": "prod", "note": "a=b c"}
    assert "env=prod note=a=b c" in (await fencepost("runs", "get", run_id)).out
    refused = await fencepost("runs", "start", "wf", "--attribute", "no key=1")
    assert refused.code == 1
    assert "attributes['no key']" in refused.err
