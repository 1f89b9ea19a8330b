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


async def hashes(api: Api, *texts: str) -> list[str]:
    """Register manifests; their hashes."""
    return [(await api.register(text)).definition.definition_hash for text in texts]


async def test_a_definition_is_activated_and_removed_by_the_beginning_of_its_hash(fencepost: Program, api: Api) -> None:
    first, second = await hashes(api, manifest(1), manifest(2, compatibility_id="2"))
    rolled_back = await fencepost("definitions", "activate", "wf", first[:8].upper())
    assert rolled_back.out.splitlines()[1:] == [
        f"active    {first[:12]} (compatibility id 1)",
        f"before    {second[:12]}",
    ]
    as_json = await fencepost("definitions", "activate", "wf", second, "--json")
    assert (as_json.document["state"], as_json.document["previous_hash"]) == ("ACTIVE", first)
    removed = await fencepost("definitions", "remove", "wf", first[:12], "--yes", "--wait")
    assert removed.code == 0
    assert [line.split()[-1] for line in removed.out.splitlines()[2:]] == ["REMOVED", "0"]
    again = await fencepost("definitions", "remove", "wf", first, "--yes", "--json")
    assert (again.document["state"], again.document["remaining_runs"]) == ("REMOVED", 0)
    listed = await fencepost("definitions", "list", "--json")
    assert [d["state"] for d in listed.documents] == ["ACTIVE", "REMOVED"]
    assert "REMOVED" in (await fencepost("definitions", "list")).out
    shown = await fencepost("definitions", "get", "wf", "--definition", first[:9])
    assert "state          REMOVED" in shown.out.splitlines()
    refused = await fencepost("definitions", "activate", "wf", first[:12])
    assert refused.error.startswith("fencepost: DEFINITION_REMOVED: ")
    back = await fencepost("definitions", "register", "-", stdin=manifest(1))
    assert "DEFINITION_REMOVED" in back.error


async def test_a_definition_is_not_removed_without_a_word_of_consent(fencepost: Program, api: Api) -> None:
    (hash_,) = await hashes(api, manifest(1))
    unasked = await fencepost("definitions", "remove", "wf", hash_)
    assert (unasked.code, unasked.out) == (2, "")
    assert "say --yes" in unasked.error
    declined = await fencepost.on_terminal("definitions", "remove", "wf", hash_, typed="n\n")
    assert declined.code == 1
    assert f"Remove the ACTIVE definition {hash_[:12]} (compatibility id 1) of workflow wf?" in declined.out
    assert (await fencepost("definitions", "list", "--json")).document["state"] == "ACTIVE"
    agreed = await fencepost.on_terminal("definitions", "remove", "wf", hash_, typed="y\n")
    assert agreed.code == 0
    assert (await fencepost("definitions", "list", "--json")).document["state"] == "REMOVED"


async def test_what_is_no_hash_or_that_of_several_definitions_is_told(fencepost: Program, api: Api) -> None:
    (hash_,) = await hashes(api, manifest(1))
    for word in ("wf", hash_[:7], hash_ + "0", hash_[:8] + "g"):
        for command in (("activate", "wf", word), ("remove", "wf", word, "--yes"), ("diff", word, hash_)):
            result = await fencepost("definitions", *command)
            assert (result.code, word in result.error) == (2, True), command
    unknown = "0" * 8 if not hash_.startswith("0" * 8) else "1" * 8
    for command in (("activate", "wf", unknown), ("diff", unknown, hash_), ("activate", "other", hash_[:8])):
        assert "no definition has a hash that begins with" in (await fencepost("definitions", *command)).error
    assert "UNKNOWN_DEFINITION" in (await fencepost("definitions", "remove", "wf", "0" * 64, "--yes")).error


async def test_two_definitions_are_compared_line_by_line(fencepost: Program, api: Api, tmp_path: Path) -> None:
    slow = manifest(2, compatibility_id="2", nodes={"n2": {"queue": "slow"}})
    first, second = await hashes(api, manifest(2), slow)
    result = await fencepost("definitions", "diff", first[:8], second)
    assert result.out.splitlines() == [
        "workflow  wf",
        f"a         {first[:12]} (compatibility id 1, PREVIOUS)",
        f"b         {second[:12]} (compatibility id 2, ACTIVE)",
        "",
        '/compatibility_id: "1" → "2"',
        '/sequence/1/queue: not set → "slow"',
    ]
    (tmp_path / "new.json").write_text(manifest(2, nodes={"n2": {"lease": "2m"}}))
    file = str(tmp_path / "new.json")
    as_json = await fencepost("definitions", "diff", first, file, "--json", "--workflow", "wf")
    assert as_json.document["differences"] == ['/sequence/1/lease: not set → "2m"']
    assert as_json.document["a"] == {
        "given": first, "definition_hash": first, "compatibility_id": "1", "state": "PREVIOUS",
    }  # fmt: skip
    assert (as_json.document["b"]["given"], as_json.document["b"]["state"]) == (file, None)
    same = await fencepost("definitions", "diff", "-", first, stdin=manifest(2))
    assert (same.code, same.out.splitlines()[-1]) == (0, "no difference")
    assert (await fencepost("definitions", "diff", first, first[:8], "--json")).document["differences"] == []


async def test_all_differences_are_told_however_many_and_files_need_no_server(tmp_path: Path) -> None:
    nowhere = Program("127.0.0.1:1")
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "b.json").write_text(manifest(200, workflow_id="from-yaml", queue="q"))
    result = await nowhere("definitions", "diff", str(tmp_path / "a.yaml"), str(tmp_path / "b.json"), "--json")
    assert len(result.document["differences"]) == 200
    (tmp_path / "other.json").write_text(manifest(1))
    (tmp_path / "bad.json").write_text(FAULTY)
    others = {"other.json": "from-yaml and wf", "bad.json": "/more", "missing.json": "No such file"}
    for name, text in others.items():
        assert text in (await nowhere("definitions", "diff", str(tmp_path / "a.yaml"), str(tmp_path / name))).error
