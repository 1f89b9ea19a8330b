"""Random operations on two servers over one database, and on an oracle: answers, views and tables are the same.

A run prints, when it fails, the operations that led there, the shortest that were found. ``PROPERTY_EXAMPLES`` in the
environment asks for so many examples of each machine instead of the few of every day, by chance instead of always the
same.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.fixtures.api import Api
from tests.fixtures.raw_worker import seconds
from tests.fixtures.servers import StartInProcessServer
from tests.properties import workflows
from tests.properties.oracle import Oracle
from tests.properties.oracle_model import Complete, Fail, Outcome, Release
from tests.properties.oracle_run import Limits
from tests.properties.real import Real
from tests.properties.scene import Lease, Scene

T = TypeVar("T")
MANY = int(os.environ.get("PROPERTY_EXAMPLES", "0"))
FREE = 1
MAX_RUNS = 4
NOT_OF_INTEREST = 11
SHRINKING_SECONDS = 60
SERVERS = st.integers(0, 1)
ANY = st.integers(0, 11)
OUTPUTS = st.sampled_from(workflows.INPUTS)
COMPLETES = st.builds(Complete, OUTPUTS)
FAILS = st.builds(
    Fail,
    st.sampled_from(["OPERATIONAL", "CORRECTIVE"]),
    feedback=st.none() | st.just("do better"),
    retry_after=st.sampled_from([None, None, 0.0, 3600.0]),
    checkpoint=st.none() | st.tuples(st.integers(1, 3), st.just("last")),
)
LONG = 86400.0
GRACE = 3600.0
"""The servers' ``cancel_grace``: longer than any example takes, as all times here that are not over at once."""
REQUEST_IDS = st.sampled_from(["", "", "c1", "c2"])


def outcomes() -> st.SearchStrategy[Outcome]:
    """What workers report: mostly that they are done."""
    bad = st.sampled_from([Complete(7), Fail("PERMANENT"), Release(), Fail("PERMANENT", "NO", retry_after=0.0)])
    return st.one_of(COMPLETES, COMPLETES, COMPLETES, FAILS, FAILS, bad)


class Machine(RuleBasedStateMachine):
    """Steps, keys and leases; the class attributes are set for each test."""

    manifests: ClassVar[tuple[workflows.Manifest, ...]] = workflows.PLAIN
    enter: ClassVar[Callable[[], Scene]]
    wait: ClassVar[Callable[[Coroutine[Any, Any, Any]], Any]]

    def __init__(self) -> None:
        super().__init__()
        self.scene = type(self).enter()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Let the event loop's thread do it."""
        result: T = type(self).wait(coroutine)
        return result

    def teardown(self) -> None:
        """Leave the servers to the next example."""
        self.do(self.scene.real.close())

    def picks(self, index: int) -> int:
        """A run."""
        return index % len(self.scene.run_ids)

    def lease(self, index: int, worker: int) -> Lease | None:
        """A lease that is out; if there is none, a worker makes room for some.

        Rules have no preconditions for that: what is out may depend on which server was faster, and Hypothesis wants
        to find the same rules again.
        """
        if not self.scene.leases:
            self.do(self.scene.set_capacity(worker, 2))
        return self.scene.pick_lease(index) if self.scene.leases else None

    def of_interest(self, index: int, *states: str) -> int:
        """A run in one of some states if there is any, mostly."""
        runs = [run for run, oracle in enumerate(self.scene.oracle.runs) if oracle.state in states]
        return runs[index % len(runs)] if runs and index != NOT_OF_INTEREST else self.picks(index)

    @initialize(
        first=SERVERS,
        room=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        kind=ANY,
        data=OUTPUTS,
        again=st.lists(st.tuples(SERVERS, st.booleans()), max_size=2),
        outputs=st.lists(OUTPUTS, max_size=3),
        then=st.sampled_from([None, Fail("PERMANENT")]),
    )
    def begin(
        self,
        first: int,
        room: tuple[int, int],
        kind: int,
        data: Any,
        again: list[tuple[int, bool]],
        outputs: list[Any],
        then: Outcome | None,
    ) -> None:
        for server, manifest in zip(itertools.cycle((first, 1 - first)), self.manifests, strict=False):
            self.do(self.scene.register(server, manifest))
        for server, change in again:
            manifest = dict(self.manifests[kind % len(self.manifests)])
            self.do(self.scene.register(server, manifest | ({"output_schema": {}} if change else {})))
        for worker, capacity in enumerate(room):
            self.do(self.scene.set_capacity(worker, capacity))
        self.do(self.scene.start(first, self.manifests[kind % len(self.manifests)]["id"], data))
        # Runs that have come some way, and half of them are about to be undone: there the random operations begin.
        for outcome in [*map(Complete, outputs), *([then] if then else [])]:
            if (lease := self.lease(0, first)) is not None:
                self.do(self.scene.report(lease, outcome, lease.worker))

    @rule(
        server=SERVERS,
        kind=ANY,
        data=OUTPUTS,
        keys=st.fixed_dictionaries(
            {},
            optional={
                "request_key": st.sampled_from(["k1", "k2"]),
                "dedupe_key": st.sampled_from(["d1", "d2"]),
                "request_id": st.sampled_from(["r1", "r2", "r3"]),
                "user_id": st.sampled_from(["", "ada"]),
                "bind": st.booleans(),
            },
        ),
        twice=st.booleans(),
    )
    def start(self, server: int, kind: int, data: Any, keys: dict[str, Any], twice: bool) -> None:
        if len(self.scene.run_ids) >= MAX_RUNS:
            return
        workflow_id = self.manifests[kind % len(self.manifests)]["id"]
        if "dedupe_key" not in keys:
            keys.pop("bind", None)
        repeatable = "request_key" in keys or "request_id" in keys
        for at in (server, 1 - server) if twice and repeatable else (server,):
            self.do(self.scene.start(at, workflow_id, data, **keys))

    @rule(worker=SERVERS, capacity=st.integers(0, 4))
    def set_capacity(self, worker: int, capacity: int) -> None:
        self.do(self.scene.set_capacity(worker, capacity))

    @rule(index=ANY, outcome=outcomes(), first=SERVERS, repeats=st.sampled_from([0, 0, 1, 2]))
    def report(self, index: int, outcome: Outcome, first: int, repeats: int) -> None:
        lease = self.lease(index, first)
        if lease is None:
            return
        # Over its own stream at least once: else its server would not know that the worker has room again.
        self.do(self.scene.report(lease, outcome, first if repeats else lease.worker, repeats))

    @rule(index=ANY, outputs=st.lists(OUTPUTS, min_size=1, max_size=4))
    def complete(self, index: int, outputs: list[Any]) -> None:
        for output in outputs:
            lease = self.lease(index, index % 2)
            if lease is not None:
                self.do(self.scene.report(lease, Complete(output), lease.worker))

    @rule(index=ANY, count=st.integers(1, 3), kind=st.sampled_from(["PERMANENT", "CORRECTIVE", "OPERATIONAL"]))
    def fail(self, index: int, count: int, kind: str) -> None:
        for _ in range(count):
            lease = self.lease(index, index % 2)
            if lease is not None:
                self.do(self.scene.report(lease, Fail(kind), lease.worker))

    @rule(index=ANY, other=st.none() | outcomes(), worker=SERVERS)
    def repeat(self, index: int, other: Outcome | None, worker: int) -> None:
        """What was reported before, or something else with its token."""
        latest = self.scene.reported[-12:]
        if latest:
            reported = latest[index % len(latest)]
            self.do(self.scene.report(reported.lease, other or reported.outcome, worker))

    @rule(index=ANY, off=st.sampled_from([-1, 1]), outcome=outcomes(), worker=SERVERS)
    def report_with_another_token(self, index: int, off: int, outcome: Outcome, worker: int) -> None:
        lease = self.lease(index, worker)
        if lease is not None and lease.token + off > 0:
            self.do(self.scene.forge(lease, off, outcome, worker))

    @rule(worker=SERVERS)
    def heartbeat(self, worker: int) -> None:
        self.do(self.scene.heartbeat(worker))
        self.do(self.scene.settle())

    @rule(index=ANY)
    def expire(self, index: int) -> None:
        lease = self.lease(index, index % 2)
        if lease is not None and self.scene.is_held(lease):
            self.do(self.scene.expire(lease))


class WholeMachine(Machine):
    """All that the engine does."""

    @rule(index=ANY, kind=st.sampled_from(["PERMANENT", "PERMANENT", "CORRECTIVE", "OPERATIONAL"]))
    def fail_an_undo(self, index: int, kind: str) -> None:
        """So that a run is blocked, or what led there is tried again; a run whose steps are done is made to fail."""
        lease = self.lease(index, index % 2)
        undoes = [other for other in self.scene.leases if self.scene.undoes(other)]
        if undoes or lease is not None:
            lease = undoes[index % len(undoes)] if undoes else lease
            assert lease is not None
            self.do(self.scene.report(lease, Fail(kind), lease.worker))

    @rule(index=ANY, number=st.integers(1, 4), state=st.sampled_from(["x", {"row": 7}]))
    def checkpoint(self, index: int, number: int, state: Any) -> None:
        lease = self.lease(index, number % 2)
        if lease is not None:
            self.do(self.scene.checkpoint(lease, number, state))

    @rule(server=SERVERS, kind=ANY, data=OUTPUTS, delay=st.sampled_from([None, LONG]), limit=st.booleans())
    def start_with_time(self, server: int, kind: int, data: Any, delay: float | None, limit: bool) -> None:
        if len(self.scene.run_ids) >= MAX_RUNS:
            return
        fields = {"start_delay": delay} if delay else {}
        fields |= {"run_timeout": LONG} if limit else {}
        self.do(self.scene.start(server, self.manifests[kind % len(self.manifests)]["id"], data, **fields))

    @rule(index=ANY, timer=ANY)
    def fire(self, index: int, timer: int) -> None:
        ticking = [i for i, run in enumerate(self.scene.oracle.runs) if any(not t.fired for t in run.timers)]
        if ticking:
            self.do(self.scene.hasten(ticking[index % len(ticking)], timer))

    @rule(server=SERVERS, index=ANY, data=st.sampled_from([1, {"way": 2}]), request_id=REQUEST_IDS)
    def signal(self, server: int, index: int, data: Any, request_id: str) -> None:
        run = self.of_interest(index, "PENDING", "WAITING", "RUNNING", "PAUSED", "BLOCKED")
        wanted = self.scene.oracle.runs[run].signal("go", data, request_id, self.scene.now)
        self.do(self.scene.signal(server, run, data, request_id, wanted))

    @rule(server=SERVERS, index=ANY, grace=st.sampled_from([None, 0.0, LONG]), request_id=REQUEST_IDS)
    def cancel(self, server: int, index: int, grace: float | None, request_id: str) -> None:
        run = self.of_interest(index, "PENDING", "RUNNING", "WAITING", "PAUSED")
        oracle, now = self.scene.oracle.runs[run], self.scene.now
        cancel = functools.partial(oracle.cancel, GRACE if grace is None else grace, now)
        wanted = oracle.once(request_id, ("cancel", grace), cancel)
        fields = {} if grace is None else {"grace": seconds(grace)}
        self.do(self.scene.call(server, "CancelRun", run, {**fields, "request_id": request_id}, wanted))

    @rule(server=SERVERS, index=ANY, end=st.sampled_from([False, False, True]))
    def pause_or_resume(self, server: int, index: int, end: bool) -> None:
        run = self.of_interest(index, "PAUSED") if end else self.picks(index)
        oracle = self.scene.oracle.runs[run]
        if end or oracle.state == "PAUSED":
            self.do(self.scene.call(server, "ResumeRun", run, {}, oracle.resume(self.scene.now)))
        else:
            self.do(self.scene.call(server, "PauseRun", run, {}, oracle.pause(self.scene.now)))

    @rule(server=SERVERS, index=ANY, skip=st.sampled_from([False, False, True]), request_id=REQUEST_IDS)
    def retry(self, server: int, index: int, skip: bool, request_id: str) -> None:
        run = self.of_interest(index, "BLOCKED") if skip else self.of_interest(index, "FAILED", "BLOCKED")
        retry = functools.partial(self.scene.oracle.retry, run, "again", skip, self.scene.now)
        wanted = self.scene.oracle.runs[run].once(request_id, ("retry", skip), retry)
        fields = {"reason": "again", "skip_undo": skip, "request_id": request_id}
        self.do(self.scene.call(server, "RetryRun", run, fields, wanted))

    @rule(server=SERVERS, index=ANY, sure=st.integers(0, 3))
    def terminate(self, server: int, index: int, sure: int) -> None:
        run = self.picks(index)
        if not sure:
            wanted = self.scene.oracle.runs[run].terminate("enough", self.scene.now)
            self.do(self.scene.call(server, "TerminateRun", run, {"reason": "enough"}, wanted))


def profile(examples: int, steps: int) -> settings:
    """A few examples, always the same; or many by chance."""
    return settings(
        max_examples=MANY or examples,
        stateful_step_count=steps,
        derandomize=not MANY,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
async def play(
    dsn: str,
    in_process_server: StartInProcessServer,
    connect_api: Callable[[str], Api],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Plays a machine with manifests on two servers: Hypothesis in a thread, the servers in this one."""
    # What fails by taking too long is slow to shrink, and a test is ended after three minutes.
    monkeypatch.setattr("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", SHRINKING_SECONDS)
    quick = {
        "poll_interval": 0.05, "outage_gap": 60.0, "free_redeliveries": FREE, "cancel_grace": GRACE, "listen_dsn": dsn,
    }  # fmt: skip
    servers = [await in_process_server(dsn, **quick) for _ in range(2)]
    addresses = [server.grpc_address for server in servers]
    apis = [connect_api(address) for address in addresses]
    loop = asyncio.get_running_loop()
    numbers = itertools.count(1)

    def wait(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    def enter() -> Scene:
        real = Real(dsn, apis, addresses, f"n{next(numbers)}")
        wait(real.open())
        return Scene(Oracle(Limits(FREE, GRACE)), real)

    async def run(machine: type[Machine], manifests: tuple[workflows.Manifest, ...], examples: int, steps: int) -> None:
        members = {"manifests": manifests, "enter": staticmethod(enter), "wait": staticmethod(wait)}
        played = type(machine.__name__, (machine,), members)
        await asyncio.to_thread(run_state_machine_as_test, played, settings=profile(examples, steps))

    return run


Play = Callable[..., Coroutine[Any, Any, None]]


async def test_steps_keys_and_leases_are_as_the_oracle_says(play: Play) -> None:
    await play(Machine, workflows.PLAIN, 10, 25)


async def test_undo_is_as_the_oracle_says(play: Play) -> None:
    await play(WholeMachine, workflows.UNDO, 12, 30)


async def test_branches_and_items_are_as_the_oracle_says(play: Play) -> None:
    await play(WholeMachine, (*workflows.PARALLEL, *workflows.MAP, *workflows.CHOOSE, *workflows.INPUT), 12, 30)


async def test_waits_and_timers_are_as_the_oracle_says(play: Play) -> None:
    await play(WholeMachine, (*workflows.WAITS, *workflows.LIMITS), 12, 30)


async def test_nodes_inside_each_other_are_as_the_oracle_says(play: Play) -> None:
    await play(WholeMachine, workflows.NESTED, 8, 30)
