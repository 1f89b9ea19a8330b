"""The oracle's ends: what becomes of a run that fails, is cancelled or terminated, and how it is undone.

The first cause wins. A run that ends waits for its leased steps (ENDING), then undoes (UNDOING), then it is what the
cause said. Steps that may have acted without completing are undone first, then completed ones, the latest first.
"""

from __future__ import annotations

from typing import Any

from tests.properties.oracle_flow import Flow
from tests.properties.oracle_model import Failure, Place, Policy, Task, Timer, Undoable, Value, Wait, seconds


class Ends(Flow):
    """A run that can end. ``grace``: of its open steps when it fails."""

    grace: float
    late: list[tuple[Place, Value]]
    dropped: list[Task]
    kept: tuple[list[Timer], list[Wait], list[tuple[int, str, Any]]]

    def node_failed(self, failure: Failure) -> None:
        """A node failed for good: the run fails, unless it ends already."""
        if self.ending is None:
            self.end("FAILED", failure, self.grace)
        else:
            self.go_on_ending()

    def end(self, state: str, failure: Failure, grace: float) -> None:
        """The run is going to end as ``state``: open steps have a grace, nothing else goes on."""
        self.ending = (state, failure)
        leased = [task for task in self.tasks.values() if task.holder and grace > 0]
        quiet = not leased and not self.undoable() and len(self.tasks) == 0
        self.fixed_state = "ENDING"
        of_steps = self.tasks.keys()
        timers = [timer for timer in self.timers if timer.seq not in of_steps and timer.kind != "RUN_TIMEOUT"]
        self.kept = (timers, self.waits, self.signals)
        self.timers, self.waits = [], []
        if not quiet:
            self.emit("run_ending", state=state, failure=failure, grace=grace)
        for task in list(self.tasks.values()):
            if task.holder and grace > 0:
                task.cancelled = True
                task.lease_until = min(task.lease_until, self.now + grace)
            else:
                self.stop(task)
        self.go_on_ending()

    def stop(self, task: Task) -> None:
        """An open step ends because its run does."""
        # Of a step that came back the servers tell a token that is larger than that of its last lease.
        token = {} if task.leased_once and not task.holder else {"fencing_token": task.token}
        task.holder = None
        seq = self.emit("step_cancelled", task_id=task.task_id, node_id=task.node_id, **token)
        self.drop_task(task)
        self.dropped.append(task)
        self.may_have_acted(task, seq)

    def may_have_acted(self, task: Task, seq: int) -> None:
        """A step ended without completing; its undo handler may want to know."""
        undo = task.node.get("undo")
        if undo and undo.get("undo_unfinished") and task.leased_once:
            self.undo_log.append(Undoable(seq, task.place, task.token, True, task.input))

    def drop_task(self, task: Task) -> None:
        """The step is not open any more, and its timeouts with it."""
        del self.tasks[task.task_id]
        self.timers = [timer for timer in self.timers if timer.seq != task.task_id]

    def undoable(self) -> list[Undoable]:
        """What is to be undone, the next one last."""
        return sorted(self.undo_log, key=lambda entry: (entry.unfinished, entry.of_seq))

    def go_on_ending(self) -> None:
        """Take the next step of an end, if there is one to take."""
        if self.ending is None or self.final or self.tasks:
            return
        left = self.undoable()
        if left:
            self.fixed_state = "UNDOING"
            self.schedule_undo(left[-1])
            return
        state, failure = self.ending
        self.failure = failure
        self.emit("run_failed" if state == "FAILED" else "run_cancelled", failure=failure)
        self.settle_as(state)

    def schedule_undo(self, entry: Undoable) -> None:
        """One step is to be undone now."""
        undo = entry.node["undo"]
        task_id = self.emit(
            "undo_scheduled", node_id=entry.node["id"], of_seq=entry.of_seq, handler=undo["step"], queue="default"
        )
        self.tasks[task_id] = Task(
            task_id,
            entry.node,
            entry.place,
            entry.input,
            undo["step"],
            Policy.of(undo.get("retry", {})),
            seconds(undo.get("lease", "1m")),
            token=entry.token,
            ready_at=self.now,
            undoes=entry,
        )

    def undo_failed(self, task: Task, failure: Failure) -> None:
        """A step can't be undone: the run needs a person."""
        assert task.undoes is not None
        self.emit(
            "undo_failed",
            task_id=task.task_id,
            node_id=task.node_id,
            failure=failure,
            fencing_token=task.token,
        )
        task.undoes.token = task.token
        self.drop_task(task)
        self.block(Failure("PERMANENT", "UNDO_FAILED", task.node_id, task.attempt))

    def block(self, failure: Failure) -> None:
        """The run can't go on by itself."""
        self.failure = failure
        self.fixed_state = "BLOCKED"
        self.emit("run_blocked", failure=failure)
