"""Events of a run come by several ways at once, and are fed in their order, each once."""

from __future__ import annotations

import itertools
import random

from fencepost import WorkflowContext, workflow
from fencepost.code_run import CodeRun
from fencepost.run_cache import RunEntry
from fencepost.v1 import run_pb2


@workflow("w", compatibility_id="1")
async def nothing(ctx: WorkflowContext) -> None:
    pass


def events(first: int, last: int) -> list[run_pb2.Event]:
    return [run_pb2.Event(seq=seq) for seq in range(first, last + 1)]


def entry(seq: int = 0) -> RunEntry:
    made = RunEntry("r", CodeRun(nothing, "r", seen_seq=0, advance_no=0))
    made.run.book.seq = seq
    return made


def taken(run: RunEntry) -> list[int]:
    found = [event.seq for event in run.take_buffered()]
    if found:
        run.run.book.seq = found[-1]
    return found


def test_events_that_follow_are_fed_at_once() -> None:
    run = entry(4)
    run.buffer(events(3, 6))
    run.buffer(events(7, 8))
    assert taken(run) == [5, 6, 7, 8]
    assert taken(run) == []


def test_what_is_pushed_while_what_is_before_it_is_read_waits_for_that() -> None:
    run = entry()
    run.buffer(events(9, 9))
    assert taken(run) == []
    run.buffer(events(1, 4))
    assert taken(run) == [1, 2, 3, 4]
    run.buffer(events(5, 8))
    assert taken(run) == [5, 6, 7, 8, 9]


def test_what_is_behind_a_gap_after_known_events_is_left_to_be_read() -> None:
    run = entry()
    run.buffer(events(1, 2))
    run.buffer(events(5, 6))
    assert taken(run) == [1, 2]
    assert run.buffered == []


def test_whatever_the_order_pages_and_pushes_come_in_each_event_is_fed_once() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        run, fed = entry(), list[int]()
        while len(fed) < 20:
            first = chance.randint(1, 20)
            run.buffer(events(first, min(20, first + chance.randint(0, 6))))
            if chance.random() < 0.5:
                fed += taken(run)
                # What the decider does about a gap: it reads what comes next.
                run.buffer(events(len(fed) + 1, min(20, len(fed) + 3)))
        assert fed == list(range(1, 21)), seed
        assert all(a + 1 == b for a, b in itertools.pairwise(fed))
