"""A worker as a program: ``python -m tests.faults.soak.worker TARGET SINK_DSN NAME KIND CACHE``.

KIND is graph, for the steps of graph programs, or code, for code programs and their steps; CACHE is how many code runs
it keeps in memory, or "replay" to forget each whenever it can.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, NoReturn

from fencepost import CorrectiveError, OperationalError, PermanentError, Step, StepContext, step, undo
from fencepost.failure import Completed
from fencepost.lease import DecideLease, Lease
from fencepost.ledger import Effects, Ledger
from fencepost.testing.workers import make_worker
from fencepost.v1 import worker_service_pb2 as pb
from tests.determinism import playing
from tests.faults.soak.conditional_sink import ConditionalSink
from tests.faults.soak.graphs import HANDLERS, Script, script, undo_script

DRAIN = 3.0
_RECORDED = {pb.ITEM_OUTCOME_OK, pb.ITEM_OUTCOME_ALREADY_DONE}
HANGING = 60.0


def perform(ctx: StepContext, sink: ConditionalSink, plan: Script) -> Any:
    """One attempt of a step whose script has come as far as its checkpoint says."""
    done = int(ctx.last_checkpoint or 0)
    sink.begin(ctx, done)
    stages = [stage for stage in plan.stages if stage != "permanent" or not sink.is_pardoned(ctx.run_id)]
    stop = ctx.wait_cancelled(plan.seconds)
    if stop or done >= len(stages):
        # One that was told to stop acts all the same, as code does that looks too late.
        sink.act(ctx)
        return plan.output
    stage = stages[done]
    if stage == "permanent":
        raise PermanentError("never", code="SCRIPTED")
    if stage == "acted":
        sink.act(ctx)
    ctx.checkpoint(done + 1)
    sink.save(ctx, done + 1)
    if stage == "mismatch":
        return "no object"
    return go_wrong(ctx, stage)


def go_wrong(ctx: StepContext, stage: str) -> NoReturn:
    """End an attempt as its stage says."""
    if stage == "hang":
        ctx.wait_cancelled(HANGING)
    elif stage == "corrective":
        raise CorrectiveError("do better", code="SCRIPTED", feedback={"better": ctx.attempt})
    raise OperationalError(stage, code="SCRIPTED", retry_after=0.01 if stage == "soon" else None)


def handler(name: str, sink: ConditionalSink) -> Step[..., Any]:
    """What serves a name: ``do-`` and ``undo-`` before the node's id."""
    if name.startswith("undo-"):

        @undo(name)
        def undoing(input: dict[str, Any], output: Any, ctx: StepContext) -> Any:
            return perform(ctx, sink, undo_script(input["seed"], input["node"]))

        return undoing

    @step(name)
    def doing(input: dict[str, Any], ctx: StepContext) -> Any:
        return perform(ctx, sink, script(input["seed"], input["node"]))

    return doing


def note_answers(sink: ConditionalSink) -> None:
    """Let the sink know of each result that this worker is told is recorded: from then on it must not be lost. Nothing
    that a step can see tells of it.
    """
    answered, advance_answered = Ledger.answered, Ledger.advance_answered

    def noting(ledger: Ledger, lease: Lease, result: pb.ItemResult, now: float) -> None:
        if isinstance(lease.outcome, Completed) and result.outcome in _RECORDED:
            undo = bool(lease.step_idempotency_key)
            sink.tell(lease.step_idempotency_key or lease.idempotency_key, lease.token, undo=undo)
        answered(ledger, lease, result, now)

    def noting_advance(ledger: Ledger, lease: DecideLease, result: pb.ItemResult, now: float, effects: Effects) -> None:
        # Not of ALREADY_DONE: a repeat may come under another token than the one that is recorded.
        if ledger.holds(lease) and lease.advance is not None and result.outcome == pb.ITEM_OUTCOME_OK:
            ended = [each for each in lease.advance.commands if each.HasField("record_local_step")]
            for command in ended:
                if not command.record_local_step.HasField("failure"):
                    sink.tell(f"{lease.run_id}/-{command.op}", lease.token, undo=False)
        advance_answered(ledger, lease, result, now, effects)

    ledgers: Any = Ledger
    ledgers.answered = noting
    ledgers.advance_answered = noting_advance


def main(target: str, sink_dsn: str, name: str, kind: str, cache: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sink = ConditionalSink(sink_dsn, name)
    note_answers(sink)
    options: dict[str, object] = {"slots": 20, "drain_timeout": DRAIN, "name": name}
    if kind == "graph":
        worker = make_worker(target, [handler(each, sink) for each in HANDLERS], [], options)
    else:
        playing.act = lambda ctx: bool(sink.act(ctx))
        options |= {"workflow_slots": 50}
        options |= {"always_replay": True} if cache == "replay" else {"workflow_cache": int(cache)}
        worker = make_worker(target, [playing.remote, playing.undone], [playing.program, playing.child], options)
    worker.run()
    sink.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
