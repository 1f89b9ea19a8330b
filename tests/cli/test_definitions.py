"""`fencepost definitions …` against a server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.program import Program
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest

YAML = """\
id: from-yaml
compatibility_id: "1"
sequence:
  - id: n1
    step: s1
"""

FAULTY = '{"id": "x", "compatibility_id": "1", "sequence": [{"id": "n1"}], "more": 1}'


async def test_manifests_in_json_and_yaml_are_registered_listed_and_shown(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(manifest(1, workflow_id="from-json"))
    (tmp_path / "b.yaml").write_text(YAML)
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.yaml")]
    first = await fencepost("definitions", "register", *files, "--json")
    assert first.code == 0
    assert [(d["file"], d["workflow_id"], d["created"]) for d in first.documents] == [
        (files[0], "from-json", True),
        (files[1], "from-yaml", True),
    ]
    again = await fencepost("definitions", "register", "-", stdin=YAML)
    assert again.code == 0
    assert "no, it was registered before" in again.out
    listed = await fencepost("definitions", "list")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["WORKFLOW", "from-json", "from-yaml"]
    only = await fencepost("definitions", "list", "--workflow", "from-yaml", "--json")
    assert only.document["state"] == "ACTIVE"
    shown = await fencepost("definitions", "get", "from-yaml")
    assert '"step": "s1"' in shown.out
    got = await fencepost("definitions", "get", "from-yaml", "--definition", only.document["definition_hash"], "--json")
    assert got.document["manifest"]["sequence"] == [{"id": "n1", "step": "s1"}]


async def test_validate_tells_every_fault_with_its_path_and_registers_nothing(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.yml", tmp_path / "bad.json"
    good.write_text(YAML)
    bad.write_text(FAULTY)
    assert (await fencepost("definitions", "validate", str(good))).out == f"{good}: valid\n"
    result = await fencepost("definitions", "validate", str(good), str(bad))
    assert (result.code, result.err) == (1, "")
    lines = result.out.splitlines()
    assert lines[1].split() == ["FILE", "PATH", "FAULT"]
    assert len(lines) >= 4
    assert all(line.startswith(str(bad)) for line in lines[2:])
    as_json = await fencepost("definitions", "validate", str(good), str(bad), "--json")
    assert as_json.code == 1
    assert [document["valid"] for document in as_json.documents] == [True, False]
    assert len(as_json.documents[1]["violations"]) == len(lines) - 2
    assert (await fencepost("definitions", "list", "--json")).documents == []


async def test_a_refused_manifest_does_not_keep_the_others_from_being_registered(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.yml", tmp_path / "bad.json"
    good.write_text(YAML)
    bad.write_text(FAULTY)
    result = await fencepost("definitions", "register", str(bad), str(good))
    assert result.code == 1
    assert f"{bad}: INVALID_MANIFEST: " in result.error
    assert "PATH" in result.error
    assert "from-yaml" in result.out
    as_json = await fencepost("definitions", "register", str(bad), str(good), "--json")
    assert (as_json.code, as_json.err) == (1, "")
    assert as_json.documents[0]["error"]["reason"] == "INVALID_MANIFEST"
    assert as_json.documents[1]["created"] is False


async def test_drift_and_what_is_unknown_are_refused(fencepost: Program, api: Api) -> None:
    await api.register(manifest(1))
    drift = await fencepost("definitions", "register", "-", stdin=manifest(2))
    assert "DEFINITION_DRIFT" in drift.error
    unknown = await fencepost("definitions", "get", "nobody-knows", "--json")
    assert json.loads(unknown.error)["error"]["reason"] == "UNKNOWN_WORKFLOW"
    wrong_hash = await fencepost("definitions", "get", "wf", "--definition", "0" * 64)
    assert wrong_hash.error.startswith("fencepost: UNKNOWN_DEFINITION: ")


async def test_files_that_can_not_be_read_are_told_by_name(fencepost: Program, tmp_path: Path) -> None:
    missing = await fencepost("definitions", "register", str(tmp_path / "missing.json"))
    assert missing.error == f"fencepost: {tmp_path}/missing.json: No such file or directory\n"
    (tmp_path / "latin.yaml").write_bytes(b"id: caf\xe9\n")
    latin = await fencepost("definitions", "validate", str(tmp_path / "latin.yaml"))
    assert latin.error == f"fencepost: {tmp_path}/latin.yaml: not UTF-8 text (byte 7)\n"


async def test_a_missing_file_does_not_keep_the_others_from_being_tried(
    fencepost: Program, api: Api, tmp_path: Path
) -> None:
    files = [str(tmp_path / name) for name in ("missing.json", "good.yaml", "bad.json", "notes.txt")]
    (tmp_path / "good.yaml").write_text(YAML)
    (tmp_path / "bad.json").write_text(FAULTY)
    (tmp_path / "notes.txt").write_text(YAML)
    unreadable = [f"fencepost: {files[0]}: No such file or directory", f"{files[3]}: the name of a manifest ends with "]

    validated = await fencepost("definitions", "validate", *files)
    assert validated.code == 1
    assert validated.out.startswith(f"{files[1]}: valid\nFILE ")
    assert files[2] in validated.out
    lines = validated.error.splitlines()
    assert [line.startswith(text) for line, text in zip(lines, unreadable, strict=True)] == [True, True]
    as_json = await fencepost("definitions", "validate", *files, "--json")
    assert (as_json.code, as_json.err) == (1, "")
    assert [(d["file"], d["valid"]) for d in as_json.documents] == [(file, file == files[1]) for file in files]

    registered = await fencepost("definitions", "register", *files)
    assert registered.code == 1
    assert "from-yaml" in registered.out
    assert registered.error.startswith(unreadable[0])
    for text in (*unreadable[1:], f"{files[2]}: INVALID_MANIFEST: "):
        assert text in registered.error
    as_json = await fencepost("definitions", "register", *files, "--json")
    assert as_json.code == 1
    assert [d.get("error", {}).get("reason") for d in as_json.documents] == [
        "UNREADABLE_FILE",
        None,
        "INVALID_MANIFEST",
        "UNREADABLE_FILE",
    ]


async def test_numbers_of_a_manifest_are_shown_as_people_write_them(fencepost: Program, api: Api) -> None:
    schema = {"minimum": -0.5, "maximum": 2000, "enum": [20, 1e300, 1.5e-3, "2e1", 'a "2e1" b']}
    await api.register(manifest(1, workflow={"input_schema": schema}))
    shown = (await fencepost("definitions", "get", "wf")).out
    for text in ('"maximum": 2000', '"minimum": -0.5', "20,", "1e300,", "0.0015,", '"2e1",', r'"a \"2e1\" b"'):
        assert text in shown
    assert "2e3" not in shown
    as_json = await fencepost("definitions", "get", "wf", "--json")
    assert as_json.document["manifest"]["input_schema"]["maximum"] == 2000
