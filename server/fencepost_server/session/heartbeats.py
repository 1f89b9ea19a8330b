"""What a heartbeat says, and how it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.config import Config
from fencepost_server.domain.errors import FencepostError
from fencepost_server.domain.model import Outcome
from fencepost_server.engine.operations import Answer
from fencepost_server.session.frames import Ref, ref_of, result_message, too_many
from fencepost_server.store.tasks import Lease
from fencepost_server.wire.payloads import duration, payload_in, payload_text
from fencepost_server.wire.status import reason_number

MAX_PROGRESS_BYTES = 4096


@dataclass(slots=True)
class Heard:
    """The leases of a heartbeat, each once, where they stand in it, and what was told of their steps as JSON text.
    ``refused``: answers to what names no lease. ``notes``: why something that was told of a lease is not kept.
    """

    indexes: dict[Ref, list[int]] = field(default_factory=dict)
    progress: dict[Ref, str] = field(default_factory=dict)
    refused: list[pb.ItemResult] = field(default_factory=list)
    notes: dict[Ref, str] = field(default_factory=dict)


def hear(heartbeat: pb.Heartbeat, config: Config) -> Heard:
    """Read a heartbeat. Raises FrameTooLarge for too many items."""
    for items in (len(heartbeat.tasks), len(heartbeat.progress)):
        if items > config.max_frame_items:
            raise too_many(items, config.max_frame_items)
    heard = Heard()
    for index, task in enumerate(heartbeat.tasks):
        try:
            ref = ref_of(task)
        except FencepostError as error:
            heard.refused.append(result_message(index, Answer(Outcome.REFUSED, error.reason, error.message)))
            continue
        heard.indexes.setdefault(ref, []).append(index)
    limit = min(MAX_PROGRESS_BYTES, config.max_payload_bytes)
    for told in heartbeat.progress:
        ref = (told.task.run_id, told.task.task_id, told.task.fencing_token)
        if ref not in heard.indexes:
            continue
        try:
            payload, _ = payload_in(told.progress, limit, "progress")
        except FencepostError as error:  # no reason to lose the lease
            heard.notes[ref] = f"{error.reason}: {error.message}"
        else:
            heard.progress[ref] = payload_text(payload)
    return heard


def results(heard: Heard, answered: Mapping[Ref, Lease | None]) -> list[pb.ItemResult]:
    """The answers to leases that were renewed, or are lost (None)."""
    found = []
    for ref, lease in answered.items():
        for index in heard.indexes[ref]:
            if lease is None:
                lost = pb.ItemResult(index=index, outcome=pb.ITEM_OUTCOME_LEASE_LOST)
                lost.reason = reason_number("LEASE_LOST")
                found.append(lost)
            else:
                found.append(
                    pb.ItemResult(
                        index=index,
                        outcome=pb.ITEM_OUTCOME_OK,
                        message=heard.notes.get(ref, ""),
                        lease_duration=duration(max(0.0, lease.seconds)),
                        cancel_wanted=lease.cancel_wanted,
                        last_seq=lease.last_seq,
                    )
                )
    return found
