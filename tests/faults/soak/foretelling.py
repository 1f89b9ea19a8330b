"""What must come of a graph program, from its seed alone: played with the oracle of tests/properties, one step after
the other, without a server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from fencepost.v1 import run_pb2
from tests.faults.soak.graphs import MANIFESTS, SIGNAL, SIGNALS, GraphProgram, script, undo_script
from tests.properties.comparing import failure_of, run_state
from tests.properties.oracle_model import Complete, Fail, Outcome, Task
from tests.properties.oracle_run import Limits, Run

MOST_STEPS = 1000
_KINDS = {"corrective": "CORRECTIVE", "mismatch": "CORRECTIVE", "permanent": "PERMANENT"}


@dataclass(frozen=True, slots=True)
class Fate:
    """How a run ended; of what it did, how often each node was done and undone."""

    state: str
    output: Any
    failure: str
    done: Counter[str]
    undone: Counter[str]


@dataclass
class _Play:
    program: GraphProgram
    run: Run
    stages: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How far the script of each step or undo has come."""
    retry: bool = False
    pardoned: bool = False

    def outcome(self, task: Task) -> Outcome:
        """What the next attempt of a step does."""
        seed, node = self.program.seed, task.node_id
        if task.undoes is not None:
            plan, key = undo_script(seed, node), (task.undoes.of_seq, "undo")
        else:
            plan, key = script(seed, node), (task.task_id, "do")
        stages = [stage for stage in plan.stages if stage != "permanent" or not self.pardoned]
        number = self.stages[key]
        if number >= len(stages):
            return Complete(plan.output)
        self.stages[key] += stages[number] != "permanent"
        return Fail(_KINDS.get(stages[number], "OPERATIONAL"), "SCRIPTED")

    def go_on(self) -> bool:
        """Do the next thing that can be done; False when there is none."""
        run = self.run
        for task in run.tasks.values():
            task.ready_at = run.now
            if run.may_lease(task):
                token = task.token + 1
                run.lease(task.task_id, token, "somebody", run.now)
                run.report(task.task_id, token, self.outcome(task), run.now)
                return True
        timers = [timer for timer in run.timers if not timer.fired and timer.kind in {"SLEEP", "START_DELAY"}]
        if timers:
            run.pass_time(min(timer.fire_at for timer in timers))
            return True
        if run.state == "BLOCKED" or (run.state == "FAILED" and self.retry):
            self.retry, self.pardoned = self.retry and run.state == "BLOCKED", True
            return run.retry("", False, False, run.now).code == "OK"
        return False


def foretell(program: GraphProgram) -> Fate:
    """What comes of a program that is `determined`."""
    manifest = MANIFESTS[program.workflow_id]
    run = Run(manifest, dict(program.input), 0.0, Limits(), start_delay=program.start_delay or None)
    for number in range(SIGNALS):
        run.signal("go", SIGNAL, str(number), 0.0)
    play = _Play(program, run, retry=program.retry)
    for _ in range(MOST_STEPS):
        if not play.go_on():
            break
    assert run.final, f"the oracle comes to no end: {run.state}"
    done = Counter(str(event.fields["node_id"]) for event in run.events if event.kind == "step_completed")
    undone = Counter(str(event.fields["node_id"]) for event in run.events if event.kind == "undo_completed")
    failure = run.failure.code if run.failure and run.state == "FAILED" else ""
    return Fate(run.state, run.output.data if run.output else None, failure, done, undone)


def fate_of(message: run_pb2.Run, events: list[run_pb2.Event], output: Any) -> Fate:
    """What has come of a run."""
    done = Counter(event.step_completed.node_id for event in events if event.HasField("step_completed"))
    undone = Counter(event.undo_completed.node_id for event in events if event.HasField("undo_completed"))
    state = run_state(message.state)
    failure = failure_of(message.failure).code if state == "FAILED" else ""
    return Fate(state, output, failure, done, undone)
