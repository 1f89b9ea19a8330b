"""ListRuns: each filter, all of them together, pages without gaps, and the labels that lists look for."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost_server.domain.model import Failure, FailureKind, Payload
from fencepost_server.store import runs as stored_runs
from tests.engine.rows import count, execute
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.refusals import refused

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
PARENTS = [str(uuid.UUID(int=n)) for n in (1, 2)]
CODES = ["", "BUSY", "BUSY2", 'a"b\\c', "ü😀", "nul\0", "BUSY\",'x"]
Row = dict[str, Any]


def stamp(at: datetime) -> Timestamp:
    value = Timestamp()
    value.FromDatetime(at)
    return value


def rows(n: int) -> list[Row]:
    """Runs of which each property is held by some, in every combination; several are created at the same time."""
    chosen = random.Random(4)
    return [
        {
            "run_id": str(uuid.UUID(int=chosen.getrandbits(128))),
            "namespace": "other" if number % 11 == 0 else "default",
            "workflow_id": chosen.choice(["a", "b"]),
            "user_id": chosen.choice(["", "u1", "u2"]),
            "state": chosen.choice([1, 2, 3, 4, 5, 6, 10]),
            "created_at": BEGIN + timedelta(seconds=number // 3),
            "code": chosen.choice(CODES),
            "kind": chosen.choice(list(FailureKind)),
            "parent_run_id": chosen.choice([None, *PARENTS]),
            "attributes": {
                key: value
                for key, value in (("env", chosen.choice(["prod", "test"])), ("team", chosen.choice(["x", "y\"'ü"])))
                if chosen.random() < 0.8
            },
        }
        for number in range(n)
    ]


async def insert(dsn: str, made: list[Row]) -> None:
    """Runs as they are stored, of a definition that nobody reads."""
    for row in made:
        failure = Failure(row["kind"], row["code"], "m\0", Payload(json='"\\u0000"')) if row["code"] else None
        await execute(
            dsn,
            """insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state,
                                node_index, next_seq, last_event_at, created_at, failure, parent_run_id)
               values (%(run_id)s, %(namespace)s, %(workflow_id)s, '', %(user_id)s, '', 3, %(state)s, 0, 2,
                       %(created_at)s, %(created_at)s, %(failure)s, %(parent_run_id)s)""",
            {**row, "failure": failure and failure.to_json()},
        )
        for key, value in row["attributes"].items():
            await execute(
                dsn,
                "insert into run_attribute select %(namespace)s, %(key)s, %(value)s, %(created_at)s, %(run_id)s",
                {**row, "key": key, "value": value},
            )


def expected(made: list[Row], holds: Callable[[Row], bool]) -> list[str]:
    found = [row for row in made if row["namespace"] == "default" and holds(row)]
    found.sort(key=lambda row: (row["created_at"], row["run_id"]), reverse=True)
    return [row["run_id"] for row in found]


def has_code(code: str, row: Row) -> bool:
    return bool(row["code"] == code)


MIDDLE = BEGIN + timedelta(seconds=15)
FILTERS: dict[str, tuple[dict[str, Any], Callable[[Row], bool]]] = {
    "all": ({}, lambda row: True),
    "workflow": ({"workflow_id": "a"}, lambda row: row["workflow_id"] == "a"),
    "states": ({"states": [2, 10]}, lambda row: row["state"] in (2, 10)),
    "user": ({"user_id": "u1"}, lambda row: row["user_id"] == "u1"),
    "parent": ({"parent_run_id": PARENTS[0].upper()}, lambda row: row["parent_run_id"] == PARENTS[0]),
    "attribute": ({"attributes": {"env": "prod"}}, lambda row: row["attributes"].get("env") == "prod"),
    "attributes": (
        {"attributes": {"env": "prod", "team": "y\"'ü"}},
        lambda row: row["attributes"] == {"env": "prod", "team": "y\"'ü"},
    ),
    "no such attribute": ({"attributes": {"env": "prod", "Team": "x"}}, lambda row: False),
    "after": ({"created_after": stamp(MIDDLE)}, lambda row: row["created_at"] >= MIDDLE),
    "before": ({"created_before": stamp(MIDDLE)}, lambda row: row["created_at"] < MIDDLE),
    "a moment": (
        {"created_after": stamp(MIDDLE), "created_before": Timestamp(seconds=int(MIDDLE.timestamp()), nanos=1)},
        lambda row: row["created_at"] == MIDDLE,
    ),
    "never": ({"created_after": stamp(MIDDLE), "created_before": stamp(BEGIN)}, lambda row: False),
    "long ago": ({"created_before": Timestamp(seconds=-62135596800)}, lambda row: False),
    "one of several": (
        {"workflow_id": "b", "user_id": "u2", "attributes": {"team": "x"}},
        lambda row: (row["workflow_id"], row["user_id"], row["attributes"].get("team")) == ("b", "u2", "x"),
    ),
    "everything": (
        {
            "workflow_id": "a",
            "states": [1, 2, 3, 4],
            "user_id": "u1",
            "attributes": {"env": "test"},
            "created_after": stamp(BEGIN),
            "created_before": stamp(BEGIN + timedelta(days=1)),
            "parent_run_id": PARENTS[1],
        },
        lambda row: (
            row["workflow_id"] == "a"
            and row["state"] <= 4
            and row["user_id"] == "u1"
            and row["attributes"].get("env") == "test"
            and row["parent_run_id"] == PARENTS[1]
        ),
    ),
    **{
        f"code {code!r}": ({"failure_code": code}, partial(has_code, code))
        for code in CODES
        if code and "\0" not in code
    },
}


async def test_a_list_has_exactly_the_runs_that_fit_newest_first_whatever_the_size_of_its_pages(
    api: Api, dsn: str
) -> None:
    """Also where failures hold what no JSON function of the database takes."""
    made = rows(150)
    await insert(dsn, made)
    for name, (fields, holds) in FILTERS.items():
        wanted = expected(made, holds)
        for page_size in (0, 1, 7):
            found = [run.run_id for run in await api.list_all(page_size=page_size, **fields)]
            assert found == wanted, (name, page_size)
    assert {len(expected(made, holds)) > 0 for _, holds in FILTERS.values()} == {True, False}


async def test_a_rare_fit_is_found_through_pages_that_may_be_empty(
    api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: no page looks at more runs than it may, and none is passed over."""
    made = rows(60)
    await insert(dsn, made)
    monkeypatch.setattr(stored_runs, "_SCAN", 4)
    sizes = []
    for name, (fields, holds) in FILTERS.items():
        found: list[str] = []
        token, pages = "", 0
        while pages == 0 or token:
            request = pb.ListRunsRequest(page_size=3, page_token=token, **fields)
            page = await api.runs.ListRuns(request, timeout=DEADLINE)
            sizes.append(len(page.runs))
            found += [run.run_id for run in page.runs]
            token, pages = page.next_page_token, pages + 1
            assert pages <= 60
        assert found == expected(made, holds), name
    assert {0, 1, 2, 3} == set(sizes)


async def test_the_filter_that_leaves_the_fewest_leads(api: Api, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One label is on every run, the other on one of the oldest: it is on the first page all the same."""
    made = rows(60)
    for number, row in enumerate(made):
        row |= {"namespace": "default", "user_id": "all", "workflow_id": "all", "attributes": {"env": "all"}}
        if number == 2:
            row["attributes"] = {"env": "all", "order": "7"}
        if number == 3:
            row["user_id"] = "one"
        if number == 4:
            row["workflow_id"] = "one"
    await insert(dsn, made)
    monkeypatch.setattr(stored_runs, "_SCAN", 5)
    cases: list[tuple[int, dict[str, Any]]] = [
        (2, {"attributes": {"env": "all", "order": "7"}, "user_id": "all"}),
        (3, {"attributes": {"env": "all"}, "user_id": "one", "workflow_id": "all"}),
        (4, {"attributes": {"env": "all"}, "user_id": "all", "workflow_id": "one"}),
    ]
    for place, fields in cases:
        page = await api.runs.ListRuns(pb.ListRunsRequest(**fields), timeout=DEADLINE)
        assert [run.run_id for run in page.runs] == [made[place]["run_id"]]
        assert not page.next_page_token


async def test_a_token_goes_on_in_a_list_with_other_filters(api: Api, dsn: str) -> None:
    """It names a place in the order, which is that of every list of runs."""
    made = rows(60)
    await insert(dsn, made)
    page = await api.runs.ListRuns(pb.ListRunsRequest(page_size=5), timeout=DEADLINE)
    last = page.runs[-1].run_id
    all_ids = expected(made, lambda row: True)
    for fields, holds in FILTERS.values():
        request = pb.ListRunsRequest(page_token=page.next_page_token, page_size=1000, **fields)
        found = [run.run_id for run in (await api.runs.ListRuns(request, timeout=DEADLINE)).runs]
        assert found == [run_id for run_id in expected(made, holds) if all_ids.index(run_id) > all_ids.index(last)]


async def test_all_faults_of_a_filter_are_told_at_once(api: Api) -> None:
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.list_all(
            workflow_id="no name",
            states=[99],
            user_id="u" * 201,
            attributes={f"k{n}": "" for n in range(8)} | {"-": "v" * 201},
            created_after=Timestamp(seconds=1 << 60),
            created_before=Timestamp(nanos=-1),
            failure_code="\0",
            parent_run_id="x",
            page_size=-1,
        )
    assert refusal.error.paths == [
        "states[0]",
        "workflow_id",
        "user_id",
        "attributes",
        "attributes['-']",
        "attributes['-']",
        "created_after",
        "created_before",
        "failure_code",
        "parent_run_id",
        "page_size",
    ]


async def test_all_faults_of_labels_and_times_of_a_start_are_told_at_once(api: Api, dsn: str) -> None:
    await api.register(manifest())
    for labels in ({"a" * 100: "v" * 200}, {f"k{n}": "ü😀" for n in range(32)}, {"a/b.c-d_e": ""}):
        await api.start(attributes=labels)
    made = await count(dsn, "run")
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.start(
            attributes={f"k{n}": "v" for n in range(31)} | {"": "v", "b" * 101: "", "c": "\0", "d": "v" * 201},
            start_delay=Duration(seconds=-1),
            run_timeout=Duration(),
        )
    assert refusal.error.paths == [
        "attributes",
        "attributes['']",
        f"attributes['{'b' * 100}']",
        "attributes['c']",
        "attributes['d']",
        "start_delay",
        "run_timeout",
    ]
    ten_years = 10 * 365 * 86_400
    with refused("INVALID_REQUEST") as refusal:
        await api.start(start_delay=Duration(seconds=ten_years + 1), run_timeout=Duration(seconds=ten_years + 1))
    assert refusal.error.paths == ["start_delay", "run_timeout"]
    assert await count(dsn, "run") == made


async def test_a_run_shows_its_labels_and_is_listed_by_them(api: Api, dsn: str) -> None:
    """Also one of many that were started in one batch, and its labels alone."""
    await api.register(manifest())
    labels: list[dict[str, str]] = [{"env": "prod", "n": "0"}, {"env": "prod"}, {}, {"env": "ü😀\\u0000\"'"}]
    results = await api.start_many([api.start_request(attributes=each) for each in labels])
    run_ids = [result.started.run_id for result in results]
    assert [dict((await api.get(run_id)).attributes) for run_id in run_ids] == labels
    for sought in ({"env": "prod"}, {"n": "0"}, {"env": "prod", "n": "0"}, labels[3]):
        found = {run.run_id: dict(run.attributes) for run in await api.list_all(attributes=sought)}
        fit = (pair for pair in zip(run_ids, labels, strict=True) if sought.items() <= pair[1].items())
        assert found == dict(fit), sought
    assert await count(dsn, "run_attribute") == sum(map(len, labels))


async def test_labels_and_times_are_part_of_a_request_but_not_of_its_input(api: Api) -> None:
    """I7: the same request id with another label is a conflict; the same request key is the same run."""
    await api.register(manifest())
    fields: dict[str, Any] = {"attributes": {"b": "2", "a": "1"}, "start_delay": Duration(seconds=1)}
    fields["run_timeout"] = Duration(seconds=60)
    first = await api.start(request_id="r", request_key="k", **fields)
    again = await api.start(request_id="r", request_key="k", **fields | {"attributes": {"a": "1", "b": "2"}})
    assert (again.run_id, again.created) == (first.run_id, True)
    for other in ({"attributes": {"a": "1"}}, {"start_delay": Duration()}, {"run_timeout": Duration(seconds=61)}):
        with refused("REQUEST_ID_CONFLICT"):
            await api.start(request_id="r", request_key="k", **fields | other)
        assert (await api.start(request_key="k", **fields | other)).run_id == first.run_id


async def test_every_run_is_in_every_list_as_soon_as_it_has_been_started(api: Api) -> None:
    """Reads never lag: also by the user that has it."""
    await api.register(manifest())

    async def start(number: int) -> None:
        for turn in range(25):
            user = f"u{number}-{turn}"
            run_id = (await api.start(user_id=user)).run_id
            for fields in ({}, {"workflow_id": "wf"}, {"user_id": user}, {"states": [run_pb2.RUN_STATE_PENDING]}):
                request = pb.ListRunsRequest(page_size=1000, **fields)
                listed = (await api.runs.ListRuns(request, timeout=DEADLINE)).runs
                assert run_id in {run.run_id for run in listed}, fields

    await asyncio.gather(*map(start, range(4)))
