"""What the sink has accepted and refused, against what the histories say that happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fencepost.v1 import run_pb2
from tests.faults.soak.conditional_sink import Trial
from tests.faults.soak.findings import Finding, Rule

STOPS = frozenset({"run_terminated", "run_ending", "op_cancelled"})
"""Events that may stop steps which are under way."""
Histories = Mapping[str, Sequence[run_pb2.Event]]


def is_local(step: str) -> bool:
    """Whether a key is that of a local step."""
    return step.partition("/")[2].startswith("-")


def wrong_trials(trials: Sequence[Trial]) -> Iterator[Finding]:
    """In the log of the sink itself: refusals that were none, tokens out of order, one lease that acted twice."""
    largest: defaultdict[str, int] = defaultdict(int)
    acted: Counter[tuple[str, bool, int, int]] = Counter()
    for trial in trials:
        before, fresh = largest[trial.step], trial.token >= largest[trial.step]
        if fresh != (trial.verdict != "refused") or trial.largest != before:
            yield Finding(Rule.REPEATED, f"{trial}: token {trial.token} after {before} was {trial.verdict}")
        if not fresh:
            continue
        largest[trial.step] = trial.token
        # Attempts of a local step share the token of whoever decides its run; of others each has one of its own.
        lease = trial.step, trial.undo, trial.token, trial.attempt if is_local(trial.step) else 0
        acted[lease] += 1
        if acted[lease] == 2:
            yield Finding(Rule.REPEATED, f"{trial}: the same lease acted twice")


def completions(run_id: str, events: Sequence[run_pb2.Event]) -> Iterator[tuple[str, int, int]]:
    """The steps that completed: idempotency key, token, and the event."""
    for event in events:
        if event.HasField("step_completed"):
            said = event.step_completed
            yield f"{run_id}/{said.task_id}", said.fencing_token, event.seq
        elif event.HasField("local_step_ended") and not event.local_step_ended.HasField("failure"):
            local = event.local_step_ended
            yield f"{run_id}/-{local.op}", local.fencing_token, event.seq


class Undoing:
    """What histories say of undo: what was begun to be undone, what was undone with which token, and which runs were
    cut off in it.
    """

    def __init__(self, histories: Histories) -> None:
        self._begun: set[tuple[str, int]] = set()
        self._done: dict[tuple[str, int], int] = {}
        for run_id, events in histories.items():
            scheduled = {event.seq: event.undo_scheduled for event in events if event.HasField("undo_scheduled")}
            self._begun |= {(said.of_run_id or run_id, said.of_seq) for said in scheduled.values()}
            for event in events:
                if event.HasField("undo_completed"):
                    said = scheduled[event.undo_completed.task_id]
                    self._done[said.of_run_id or run_id, said.of_seq] = event.undo_completed.fencing_token
        self._terminated = {
            run_id for run_id, events in histories.items() if any(event.HasField("run_terminated") for event in events)
        }

    def fits(self, of: tuple[str, int] | None, is_undone: bool) -> bool:
        """Whether an effect may be (un)done of which the history says that. Who terminates a run may come between an
        undo and its report.
        """
        if of is not None and of in self._begun - self._done.keys() and of[0] in self._terminated:
            return True
        return is_undone == (of in self._done)

    def completed_with(self, of: tuple[str, int]) -> int | None:
        """The token with which the undo of an event completed; None: it has not."""
        return self._done.get(of)


def wrong_effects(histories: Histories, trials: Sequence[Trial], effects: Mapping[str, bool]) -> Iterator[Finding]:
    """Completed steps without their effect, or that acted again; what was undone and is not, and the reverse."""
    accepted: defaultdict[str, list[Trial]] = defaultdict(list)
    undos: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.verdict != "refused":
            (undos if trial.undo else accepted)[trial.step].append(trial)
    undoing = Undoing(histories)
    known = set()
    for run_id, events in histories.items():
        for step, token, seq in completions(run_id, events):
            known.add(step)
            of_step = accepted.get(step, [])
            if token not in {trial.token for trial in of_step}:
                yield Finding(Rule.EFFECTS, f"{step} completed with token {token} and has not acted with it")
            if any(trial.token > token for trial in of_step):
                yield Finding(Rule.REPEATED, f"{step} acted again after it had completed: {of_step}")
            if step in effects and not undoing.fits((run_id, seq), effects[step]):
                yield Finding(Rule.EFFECTS, f"{step}: undone is {effects[step]}, which its history does not say")
            yield from _wrong_undos(step, undoing.completed_with((run_id, seq)), undos.get(step, []))
    stray = sorted({trial.run_id for trial in trials} - histories.keys())
    if stray:
        yield Finding(Rule.LOST, f"runs acted that are not there: {stray[:10]}")
    yield from _unfinished(histories, effects, known, undoing)


def lost_results(histories: Histories, told: Sequence[tuple[str, bool, int]]) -> Iterator[Finding]:
    """Results that a worker was told are recorded, and that are not what completed their step or its undo (I1): it has
    run again, which the sink takes for known and no history shows, or it has never completed.
    """
    undoing = Undoing(histories)
    recorded: dict[tuple[str, bool], int | None] = {}
    stopped = set()
    for run_id, events in histories.items():
        for step, token, seq in completions(run_id, events):
            recorded[step, False], recorded[step, True] = token, undoing.completed_with((run_id, seq))
        if any(event.WhichOneof("kind") in STOPS for event in events):
            stopped.add(run_id)
    for step, undo, token in told:
        run_id, found = step.partition("/")[0], recorded.get((step, undo))
        # A run that ends takes what its steps still say, and records nothing of it: an Advance is refused then.
        excused = found is None and not is_local(step) and (undo or run_id in stopped)
        if found != token and not excused:
            what = f"the undo of {step}" if undo else step
            yield Finding(Rule.LOST, f"{what}: its result with token {token} was acknowledged, recorded is {found}")


def _wrong_undos(step: str, token: int | None, undos: Sequence[Trial]) -> Iterator[Finding]:
    """Of a step whose undo has completed with a token: that it has not acted with it, or acted again after it."""
    if token is None:
        return
    if token not in {trial.token for trial in undos}:
        yield Finding(Rule.EFFECTS, f"the undo of {step} completed with token {token} and has not acted with it")
    if any(trial.token > token for trial in undos):
        yield Finding(Rule.REPEATED, f"the undo of {step} acted again after it had completed: {undos}")


def _unfinished(
    histories: Histories, effects: Mapping[str, bool], completed: set[str], undoing: Undoing
) -> Iterator[Finding]:
    """Effects of steps that did not complete: their runs must have stopped them."""
    ended: dict[str, tuple[str, int]] = {}
    stopped = set()
    for run_id, events in histories.items():
        for event in events:
            kind = str(event.WhichOneof("kind"))
            if kind in {"step_failed", "step_cancelled"}:
                ended[f"{run_id}/{getattr(event, kind).task_id}"] = (run_id, event.seq)
            elif kind in STOPS:
                stopped.add(run_id)
    for step, is_undone in effects.items():
        run_id = step.partition("/")[0]
        if step in completed or run_id not in histories or (is_local(step) and not is_undone):
            # A local step that nobody waits for any more leaves no event, whether or not it has acted.
            continue
        if step not in ended and run_id not in stopped:
            yield Finding(Rule.EFFECTS, f"{step} has acted, and nothing in its history says what became of it")
        elif not undoing.fits(ended.get(step), is_undone):
            yield Finding(Rule.EFFECTS, f"{step}, which did not complete: undone is {is_undone}")
