"""Leased tasks packed into frames that the worker can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.model import LeasedTask
from fencepost_server.session.frames import fill_task, fit_history, halve_history, size_of


@dataclass(slots=True)
class Packing:
    """``limit``: the bytes of the largest frame; ``number``: that of the last Tasks frame. ``frames``: number, bytes
    and tasks of each; ``unsent``: the tasks that are too large for any.
    """

    limit: int
    number: int
    frames: list[tuple[int, bytes, Sequence[LeasedTask]]] = field(default_factory=list)
    unsent: list[LeasedTask] = field(default_factory=list)

    def add(self, tasks: Sequence[LeasedTask]) -> None:
        """Pack tasks, in their order."""
        frame: list[LeasedTask] = []
        size = 0
        for task in tasks:
            needed = size_of(task) if task.decide is None else fit_history(task, self.limit)
            if frame and size + needed > self.limit:
                self._close(frame)
                frame, size = [], 0
            frame.append(task)
            size += needed
        self._close(frame)

    def _close(self, tasks: Sequence[LeasedTask]) -> None:
        """One frame of these, or several if they are larger than they looked."""
        number = self.number + 1
        message = pb.SessionResponse()
        frame = message.tasks
        frame.tasks_number = number
        frame.last_frame_id = min([task.frame_id for task in tasks])
        add = frame.tasks.add
        for task in tasks:
            fill_task(add(), task)
        data = message.SerializeToString()
        if len(data) <= self.limit:
            self.number = number
            self.frames.append((number, data, tasks))
        elif len(tasks) > 1:
            middle = len(tasks) // 2
            self._close(tasks[:middle])
            self._close(tasks[middle:])
        elif halve_history(tasks[0]):
            self._close(tasks)
        else:
            self.unsent.extend(tasks)
