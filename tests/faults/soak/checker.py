"""The checker: after quiet, everything that was acknowledged is there, everything has ended as it must, and nothing
happened that may not.

It looks at the tables by SQL, at histories through a server, at the sink's log, and compares all of it with what the
oracles of tests/properties and tests/determinism say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost.v1 import run_pb2
from fencepost_server.domain.model import FINAL_STATES, RunState
from tests.determinism.checking import check_chain, check_undo
from tests.determinism.facts import facts_of
from tests.determinism.living import Lived
from tests.faults.scene import fetch
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.faults.soak.effects import lost_results, wrong_effects, wrong_trials
from tests.faults.soak.findings import Finding, Rule
from tests.faults.soak.foretelling import fate_of, foretell
from tests.faults.soak.graphs import MANIFESTS, PREFIX
from tests.faults.soak.legality import illegal_events
from tests.faults.soak.load import Acked
from tests.faults.soak.retracing import differences
from tests.faults.soak.schedules import wrong_schedules
from tests.faults.soak.tables import broken_rows
from tests.fixtures.api import Api
from tests.properties.comparing import plain

COMES_OF: Mapping[str, frozenset[str]] = {
    "pause": frozenset({"run_paused"}),
    "retry": frozenset({"run_retried"}),
    "terminate": frozenset({"run_terminated"}),
    # One that comes to a run that is ending, or being undone, is taken and changes nothing.
    "cancel": frozenset({"run_ending", "run_cancelled", "undo_scheduled"}),
}
"""What is asked for of a run, and the events of which its history has to have one. A resume may come when the run goes
on already.
"""
DUMPED = 40
"""How many of its last events are shown of a run that is stuck."""


@dataclass
class Seen:
    """All runs and their histories, read through a server."""

    runs: dict[str, run_pb2.Run] = field(default_factory=dict)
    histories: dict[str, list[run_pb2.Event]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    """Histories with gaps, which nothing else is said of; also where the tables have none."""


async def see(api: Api, dsn: str) -> Seen:
    """Read everything."""
    seen = Seen()
    for row in await fetch(dsn, "select run_id::text from run order by created_at"):
        run_id = row["run_id"]
        seen.runs[run_id] = await api.get(run_id)
        try:
            seen.histories[run_id] = await api.history(run_id, page_size=1000)
        except AssertionError as gaps:
            seen.histories[run_id] = []
            seen.unreadable.append(f"{run_id}: its history is told otherwise than it is numbered: {gaps}")
    return seen


async def check(dsn: str, api: Api, sink: ConditionalSink, acked: Acked) -> list[Finding]:
    """Everything that is wrong."""
    found = await broken_rows(dsn)
    found += await stuck(dsn, api)
    found += await lost(dsn, acked)
    found += [Finding(Rule.LOST, text) for text in sink.forgotten()]
    seen = await see(api, dsn)
    found += [Finding(Rule.ILLEGAL, text) for text in seen.unreadable]
    found += list(wrong_histories(seen))
    found += list(wrong_signals(seen, acked))
    found += list(wrong_controls(seen, acked))
    trials = sink.trials()
    found += list(wrong_trials(trials))
    found += list(wrong_effects(seen.histories, trials, sink.effects()))
    found += list(lost_results(seen.histories, sink.told()))
    found += list(wrong_graphs(seen, acked))
    found += list(wrong_codes(seen, acked))
    found += await wrong_schedules(dsn, acked.paused)
    return found


async def stuck(dsn: str, api: Api) -> list[Finding]:
    """Runs that have not ended, with their histories."""
    found = []
    for row in await fetch(dsn, "select run_id::text, state from run where ended_at is null or state <> all(%(final)s)",
                           final=[int(state) for state in FINAL_STATES]):  # fmt: skip
        tasks = await fetch(dsn, "select t::text from task t where run_id = %(run_id)s::uuid", run_id=row["run_id"])
        try:
            events = await api.history(row["run_id"], page_size=1000)
        except AssertionError as gaps:
            events = []
            tasks.append({"t": str(gaps)})
        story = "\n".join([f"tasks {tasks}", *map(str, events[-DUMPED:])])
        found.append(Finding(Rule.STUCK, f"{row['run_id']} is {RunState(row['state']).name}:\n{story}"))
    return found


async def lost(dsn: str, acked: Acked) -> list[Finding]:
    """Starts, signals and calls that were acknowledged and are not there (I1), or are there twice (I6)."""
    found = [Finding(Rule.REPEATED, text) for text in acked.conflicts]
    runs = {row["run_id"]: row["request_key"] for row in await fetch(dsn, "select run_id::text, request_key from run")}
    for key, run_id in acked.starts.items():
        if runs.get(run_id) != key:
            found.append(
                Finding(Rule.LOST, f"start {key} was answered with run {run_id}, which has {runs.get(run_id)}")
            )
    asked = {
        (row["chain"], row["request_id"])
        for row in await fetch(
            dsn,
            """
            select coalesce(r.chain_id, r.run_id)::text as chain, q.request_id
            from request q join run r using (run_id)
            """,
        )
    }
    wanted = [*acked.signals, *((run_id, request_id) for run_id, request_id, _ in acked.controls)]
    found += [Finding(Rule.LOST, f"call {each} was answered, and is not known") for each in wanted if each not in asked]
    return found


def wrong_signals(seen: Seen, acked: Acked) -> Iterator[Finding]:
    """Signals that were acknowledged and are no event (I1), or are two (I6)."""
    events = Counter(
        (run_id, event.signal_received.request_id)
        for run_id, history in seen.histories.items()
        for event in history
        if event.HasField("signal_received")
    )
    for run_id, request_id in acked.signals:
        if not any((each, request_id) in events for each in chain_of(seen, run_id)):
            yield Finding(Rule.LOST, f"signal {request_id} to {run_id} was answered, and is no event")
    for (run_id, request_id), number in events.items():
        if number > 1:
            yield Finding(Rule.REPEATED, f"signal {request_id} is {number} events of {run_id}")


def wrong_controls(seen: Seen, acked: Acked) -> Iterator[Finding]:
    """Calls on runs that were acknowledged and of which no event came (I1): that they are known is not enough."""
    wanted = Counter((run_id, what) for run_id, _, what in acked.controls if what in COMES_OF)
    for (first, what), calls in wanted.items():
        kinds = [str(event.WhichOneof("kind")) for run_id in chain_of(seen, first) for event in seen.histories[run_id]]
        events = sum(kind in COMES_OF[what] for kind in kinds)
        if kinds and not events:
            yield Finding(Rule.LOST, f"{what} of {first} was answered, and nothing came of it")
        elif kinds and what == "retry" and events != calls:
            yield Finding(Rule.LOST, f"{calls} retries of {first} were answered, and {events} are events")


def chain_of(seen: Seen, first: str) -> list[str]:
    """The runs of a chain that are there, in order."""
    found, run_id = [], first
    while run_id in seen.runs:
        found.append(run_id)
        run_id = seen.runs[run_id].next_run_id
    return found


def wrong_histories(seen: Seen) -> Iterator[Finding]:
    """Histories that the table of transitions does not allow."""
    for run_id, events in seen.histories.items():
        code = not seen.runs[run_id].workflow_id.startswith(PREFIX)
        for text in illegal_events(events, code=code):
            yield Finding(Rule.ILLEGAL, f"{run_id}: {text}")


def wrong_graphs(seen: Seen, acked: Acked) -> Iterator[Finding]:
    """Graph runs that the oracle has otherwise."""
    for run_id, message in seen.runs.items():
        manifest = MANIFESTS.get(message.workflow_id)
        events = seen.histories[run_id]
        if manifest is None or not events:
            continue
        for text in differences(manifest, message, events):
            yield Finding(Rule.ILLEGAL, f"{run_id} ({message.workflow_id}): {text}")
        program = acked.graphs.get(run_id)
        if program is not None and program.determined:
            output = plain("output", message.output) if message.HasField("output") else None
            found, wanted = fate_of(message, events, output), foretell(program)
            if found != wanted:
                yield Finding(Rule.EFFECTS, f"{run_id}, seed {program.seed}: came to {found}, not {wanted}")


def wrong_codes(seen: Seen, acked: Acked) -> Iterator[Finding]:
    """Code runs that have done something else than what follows from their histories."""
    for first, program in acked.codes.items():
        chain = [Lived(program, seen.runs[each], seen.histories[each], {}) for each in chain_of(seen, first)]
        if not chain:
            continue  # it is lost, which is told already
        try:
            if _is_modelled(chain):
                check_chain(chain)
            else:
                check_undo(chain, [facts_of(each.run.run_id, each.events, None) for each in chain])
        except (AssertionError, KeyError, TypeError) as error:  # what is not there can't be read either
            yield Finding(Rule.EFFECTS, f"{first}, seed {program.seed}: {type(error).__name__}: {error}")


def _is_modelled(chain: Sequence[Lived]) -> bool:
    """Whether tests/determinism knows all that a program may come to. In a run that is cancelled it does not: timers,
    and siblings that nobody cancels, go on beside what ends. Then what is undone is compared.
    """
    return chain[-1].run.state != run_pb2.RUN_STATE_CANCELLED


def told(value: Any) -> str:
    """A finding, cut to what fits a report."""
    text = str(value)
    return text if len(text) < 4000 else text[:4000] + " …"
