"""What the clients ask of schedules; `plans` says how."""

from __future__ import annotations

import datetime as dt

from fencepost.models import stamp_of, time_of
from fencepost.plans import Asker, Page, Plan, new_id
from fencepost.schedules import Schedule, ScheduleSpec, fill_spec, schedule_of
from fencepost.v1 import schedule_service_pb2 as schedules


class ScheduleRequests(Asker):
    """Plans of everything about schedules."""

    def create(self, schedule_id: str, spec: ScheduleSpec, paused: bool) -> Plan[Schedule]:
        """Make a schedule."""
        request = schedules.CreateScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, paused=paused, request_id=new_id()
        )
        fill_spec(request.spec, spec)
        response = yield from self._ask("schedules", "CreateSchedule", request)
        return schedule_of(response.schedule, created=response.created)

    def get(self, schedule_id: str) -> Plan[Schedule]:
        """Read a schedule."""
        request = schedules.GetScheduleRequest(namespace=self._namespace, schedule_id=schedule_id)
        response = yield from self._ask("schedules", "GetSchedule", request)
        return schedule_of(response.schedule)

    def list_page(self, size: int, token: str) -> Plan[Page[Schedule]]:
        """Read one page of schedules."""
        request = schedules.ListSchedulesRequest(namespace=self._namespace, page_size=size, page_token=token)
        response = yield from self._ask("schedules", "ListSchedules", request)
        return [schedule_of(found) for found in response.schedules], response.next_page_token

    def update(self, schedule_id: str, spec: ScheduleSpec, etag: str) -> Plan[Schedule]:
        """Replace what a schedule does."""
        request = schedules.UpdateScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, etag=etag, request_id=new_id()
        )
        fill_spec(request.spec, spec)
        response = yield from self._ask("schedules", "UpdateSchedule", request)
        return schedule_of(response.schedule)

    def delete(self, schedule_id: str) -> Plan[bool]:
        """Delete a schedule."""
        request = schedules.DeleteScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, request_id=new_id()
        )
        response = yield from self._ask("schedules", "DeleteSchedule", request)
        deleted: bool = response.deleted
        return deleted

    def pause(self, schedule_id: str, reason: str) -> Plan[Schedule]:
        """Let it fire no more."""
        request = schedules.PauseScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, reason=reason, request_id=new_id()
        )
        response = yield from self._ask("schedules", "PauseSchedule", request)
        return schedule_of(response.schedule)

    def resume(self, schedule_id: str) -> Plan[Schedule]:
        """Let it fire again."""
        request = schedules.ResumeScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, request_id=new_id()
        )
        response = yield from self._ask("schedules", "ResumeSchedule", request)
        return schedule_of(response.schedule)

    def trigger(self, schedule_id: str, request_id: str) -> Plan[str]:
        """Start a run of it now; returns the run's id."""
        request = schedules.TriggerScheduleRequest(
            namespace=self._namespace, schedule_id=schedule_id, request_id=request_id or new_id()
        )
        response = yield from self._ask("schedules", "TriggerSchedule", request)
        run_id: str = response.run_id
        return run_id

    def backfill(self, schedule_id: str, from_time: dt.datetime, to_time: dt.datetime) -> Plan[list[str]]:
        """Start a run for each fire time of a past range; returns the runs' ids. Raises ValueError for a naive time."""
        request = schedules.BackfillScheduleRequest(
            namespace=self._namespace,
            schedule_id=schedule_id,
            from_time=stamp_of(from_time),
            to_time=stamp_of(to_time),
            request_id=new_id(),
        )
        response = yield from self._ask("schedules", "BackfillSchedule", request)
        return list(response.run_ids)

    def fire_times(self, schedule_id: str, from_time: dt.datetime | None, limit: int) -> Plan[list[dt.datetime]]:
        """When it will fire. Raises ValueError for a naive time."""
        request = schedules.ListFireTimesRequest(namespace=self._namespace, schedule_id=schedule_id, limit=limit)
        if from_time is not None:
            request.from_time.CopyFrom(stamp_of(from_time))
        response = yield from self._ask("schedules", "ListFireTimes", request)
        return [time_of(when) for when in response.fire_times]
