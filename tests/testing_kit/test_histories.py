"""A history is the same whether it was read by a client, printed by the command line, or never left the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.events import event_of
from fencepost.testing.histories import History, HistoryUnreadable, files, message_of, read
from fencepost.v1 import run_pb2
from fencepost_server.cli.documents import event_document

KINDS = sorted(field.name for field in run_pb2.Event.DESCRIPTOR.oneofs_by_name["kind"].fields)
FAR = 1_700_000_000_123_456_000


def filled(kind: str, seq: int = 1) -> run_pb2.Event:
    """An event of that kind in which every field says something."""
    event = run_pb2.Event(seq=seq)
    event.event_time.FromNanoseconds(FAR)
    details = getattr(event, kind)
    details.SetInParent()
    for field in details.DESCRIPTOR.fields:
        _fill(details, field)
    return event


def _fill(details: Any, field: Any) -> None:
    value = getattr(details, field.name)
    name = "" if field.message_type is None else field.message_type.name
    if field.name == "attributes":
        details.attributes.update({"colour": "red", "gone": ""})
    elif name == "Payload":
        value.json = '{"total": 1.50, "id": 18446744073709551617}'
    elif name == "Failure":
        value.MergeFrom(
            run_pb2.Failure(kind=run_pb2.FAILURE_KIND_CORRECTIVE, code="C", message="ü\0", node_id="n", attempt=2)
        )
        value.feedback.json = "[1e400]"
    elif name == "Timestamp":
        value.FromNanoseconds(FAR)
    elif name == "Duration":
        value.FromNanoseconds(1_500_001_000)
    elif field.enum_type is not None or field.cpp_type in {field.CPPTYPE_INT32, field.CPPTYPE_INT64}:
        setattr(details, field.name, 1 if field.enum_type is not None else 7)
    else:
        setattr(details, field.name, b"\0\xff" if field.type == field.TYPE_BYTES else f"a {field.name}")


def messages(history: History) -> list[run_pb2.Event]:
    return read(history)[0]


def printed(events: list[run_pb2.Event]) -> bytes:
    """What `fencepost runs history RUN --json` prints."""
    return b"".join(msgspec.json.encode(event_document(event_of(event))) + b"\n" for event in events)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_comes_back_from_values_and_from_files_as_it_was(kind: str, tmp_path: Path) -> None:
    event = filled(kind, 2 if kind != "run_started" else 1)
    assert message_of(event_of(event)) == event
    history = [event] if event.seq == 1 else [filled("run_started"), event]
    (tmp_path / "run.json").write_bytes(printed(history))
    assert messages(tmp_path / "run.json") == history
    (tmp_path / "run.json").write_bytes(b"[" + b",".join(printed(history).splitlines()) + b"]")
    assert messages(tmp_path / "run.json") == history
    assert messages([event_of(event) for event in history]) == history == messages(history)


def test_binary_payloads_come_back(tmp_path: Path) -> None:
    event = filled("run_started")
    event.run_started.input.binary = b"\0\1"
    (tmp_path / "run.jsonl").write_bytes(printed([event]))
    assert messages(tmp_path / "run.jsonl") == [event]


def test_a_file_may_say_which_run_it_is_of(tmp_path: Path) -> None:
    text = printed([filled("run_started")])
    (tmp_path / "run.json").write_bytes(text)
    assert read(tmp_path / "run.json")[1] == ""
    (tmp_path / "run.json").write_bytes(text.replace(b'{"seq"', b'{"run_id":"r-1","seq"'))
    assert read(tmp_path / "run.json") == ([filled("run_started")], "r-1")


def test_keys_of_a_newer_release_are_passed_over(tmp_path: Path) -> None:
    text = printed([filled("run_started")]).replace(b'{"seq"', b'{"a_new_key":{"x":1},"seq"')
    (tmp_path / "run.json").write_bytes(text)
    assert messages(tmp_path / "run.json") == [filled("run_started")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "there is no event"),
        (b"{nonsense", "run.json"),
        (b'{"seq":1,"event_time":"2026-01-01T00:00:00Z"}', "event 1: 'kind' is missing"),
        (b'{"seq":1,"event_time":"2026-01-01T00:00:00Z","kind":"who_knows"}', "no event of the kind who_knows"),
        (b'{"seq":2,"event_time":"2026-01-01T00:00:00Z","kind":"run_started"}', "event 1 is missing"),
        (b'{"seq":1,"event_time":"2026-01-01T00:00:00Z","kind":"run_paused"}', "event 1 is no run_started"),
        (
            b'{"run_id":5,"seq":1,"event_time":"2026-01-01T00:00:00Z","kind":"run_started"}',
            "json: run_id: Expected",
        ),
        (b'{"seq":1,"event_time":"2026-01-01T00:00:00Z","kind":"timer_started","delay":1e308}', "run.json: event 1: "),
    ],
)
def test_what_is_no_history_is_refused_with_the_place(text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(text)
    with pytest.raises(HistoryUnreadable, match=said):
        messages(tmp_path / "run.json")


def test_a_folder_has_all_histories_below_it_and_one_without_any_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    wanted = [tmp_path / "a.json", tmp_path / "deep" / "b.jsonl"]
    for path in [*wanted, tmp_path / "README.md"]:
        path.write_text("{}")
    assert files(tmp_path) == wanted
    (tmp_path / "empty").mkdir()
    with pytest.raises(HistoryUnreadable, match="no file of it ends with"):
        files(tmp_path / "empty")
