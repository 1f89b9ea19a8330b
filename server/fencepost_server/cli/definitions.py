"""`fencepost definitions …`: register, validate, list and get manifests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.caller import Caller, refusal
from fencepost_server.cli.faults import CommandFailed
from fencepost_server.cli.output import local, show_pairs, show_table, write_json, write_line

if TYPE_CHECKING:
    from fencepost import Definition

SHORT_HASH = 12

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE…", help="Manifests: .json, .yaml or .yml; - is standard input.", show_default=False),
]


def register(caller: Caller, files: Files) -> None:
    """Register manifests. The same manifest again changes nothing.

    Every file is tried; the exit code is 1 if one was refused.
    """
    from fencepost import FencepostError
    from fencepost_server.cli.documents import definition_document, error_document

    registered: list[tuple[str, Definition]] = []
    refused: list[tuple[str, CommandFailed]] = []
    with caller.connect() as client:
        for file in files:
            try:
                definition = client.register_definition(_manifest(file))
            except FencepostError as error:
                refused.append((file, refusal(error, caller)))
                if caller.json:
                    write_json({"file": file, "error": error_document(error)})
            else:
                registered.append((file, definition))
                if caller.json:
                    document = definition_document(definition, listed=True)
                    write_json({"file": file, "created": definition.created, **document})
    if registered and not caller.json:
        rows = [
            (file, d.workflow_id, d.compatibility_id, d.definition_hash[:SHORT_HASH], d.state.value, _new(d))
            for file, d in registered
        ]
        show_table(("FILE", "WORKFLOW", "COMPATIBILITY", "DEFINITION", "STATE", "NEW"), rows)
    if refused:
        text = "\n".join(f"{file}: {fault}" for file, fault in refused)
        raise CommandFailed("" if caller.json else text, bare=caller.json)


def _new(definition: Definition) -> str:
    return "yes" if definition.created else "no, it was registered before"


def validate(caller: Caller, files: Files) -> None:
    """Check manifests, and change nothing.

    Every fault is told with its path; the exit code is 1 if there is one.
    """
    from fencepost_server.cli.documents import violation_document

    rows: list[tuple[str, str, str]] = []
    with caller.connect() as client:
        for file in files:
            violations = client.validate_definition(_manifest(file))
            rows += [(file, violation.path or "(whole)", violation.message) for violation in violations]
            if caller.json:
                faults = [violation_document(violation) for violation in violations]
                write_json({"file": file, "valid": not faults, "violations": faults})
            elif not violations:
                write_line(f"{file}: valid")
    if rows and not caller.json:
        show_table(("FILE", "PATH", "FAULT"), rows, whole=("FILE", "PATH", "FAULT"))
    if rows:
        raise typer.Exit(1)


def _manifest(file: str) -> Any:
    """What the client takes. Raises CommandFailed for a file that can't be read."""
    if file == "-":
        # The line break tells the client that this is a text, not the name of a file.
        return _decoded(sys.stdin.buffer.read(), "standard input") + "\n"
    path = Path(file)
    try:
        _decoded(path.read_bytes(), file)
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from error
    return path


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{name}: not UTF-8 text (byte {error.start})") from None


def list_(
    caller: Caller,
    workflow: Annotated[str, typer.Option("--workflow", help="Only those of this workflow.", show_default=False)] = "",
) -> None:
    """List definitions by workflow, the newest of each first."""
    from fencepost_server.cli.documents import definition_document

    with caller.connect() as client:
        found = client.list_definitions(workflow)
        if caller.json:
            for definition in found:
                write_json(definition_document(definition, listed=True))
            return
        rows = [
            (d.workflow_id, d.compatibility_id, d.definition_hash[:SHORT_HASH], d.state.value, local(d.create_time))
            for d in found
        ]
    show_table(("WORKFLOW", "COMPATIBILITY", "DEFINITION", "STATE", "REGISTERED"), rows)


def get(
    caller: Caller,
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", show_default=False)],
    definition: Annotated[
        str, typer.Option("--definition", metavar="HASH", help="Default: the active one.", show_default=False)
    ] = "",
) -> None:
    """Show a definition and its manifest."""
    from fencepost_server.cli.documents import definition_document

    with caller.connect() as client:
        found = client.get_definition(workflow, definition)
    if caller.json:
        write_json(definition_document(found))
        return
    show_pairs(
        [
            ("workflow", found.workflow_id),
            ("compatibility", found.compatibility_id),
            ("definition", found.definition_hash),
            ("state", found.state.value),
            ("registered", local(found.create_time)),
        ]
    )
    write_line("")
    import msgspec

    for line in msgspec.json.format(found.manifest_json, indent=2).splitlines():
        write_line(line)
