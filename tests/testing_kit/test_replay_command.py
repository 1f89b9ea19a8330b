"""`fencepost runs history RUN --replay MODULE:WORKFLOW`: a run of production, replayed here, also under a debugger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest_asyncio

from fencepost import AsyncClient
from fencepost.testing import AsyncEnvironment, Replayer
from tests.cli.program import Program, Result
from tests.fixtures.processes import environment
from tests.testing_kit import orders

SOURCE = Path(orders.__file__).read_text("utf-8")


class Replaying:
    """A run that has completed, and a folder with the code that it is replayed with."""

    def __init__(self, run_id: str, folder: Path, address: str) -> None:
        self.run_id = run_id
        self.folder = folder
        self._program = Program(address)

    async def __call__(self, *options: str, edit: tuple[str, str] = ("", ""), stdin: str = "") -> Result:
        """Type the command where the code lies."""
        assert not edit[0] or SOURCE.count(edit[0]) == 1
        text = SOURCE.replace(*edit) if edit[0] else SOURCE
        (self.folder / "their_orders.py").write_text(text, "utf-8")
        place = [] if "--replay" in options else ["--replay", "their_orders:order"]
        # A program of its own would start in the test's directory.
        variables = {**environment({}), "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return await self._program("runs", "history", self.run_id, *place, *options, stdin=stdin, **variables)


@pytest_asyncio.fixture
async def replaying(env: AsyncEnvironment, tmp_path: Path) -> Replaying:
    async with env.worker(orders.STEPS, workflows=orders.WORKFLOWS):
        handle = await env.client.start_run("kit.order", ["tea", "cake"], user_id="ada")
        await handle.signal("approve", "yes")
        await env.result(handle)
    return Replaying(handle.run_id, tmp_path, env.address)


async def test_the_same_code_is_shown_op_by_op(replaying: Replaying) -> None:
    done = await replaying()
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0].split() == ["1", "run_started"]
    assert [line.strip() for line in lines if line.strip().startswith("op ")] == [
        *("op 1: local step price", "op 2: local step price", "op 3: attributes", "op 4: local step tax"),
        *("op 5: step kit.charge", "op 6: local step refuse", "op 7: sleep 30d", "op 8: signal approve"),
        "op 9: child kit.parcel",
    ]
    assert lines[-1] == "replayed 14 events and 9 ops without a difference: the code completes"


async def test_other_code_is_told_with_the_first_difference_and_a_code_of_1(replaying: Replaying) -> None:
    done = await replaying(edit=("ctx.run(tax, cents)", "ctx.run(price, 'x')"))
    assert done.code == 1
    difference = "op 4: history has local step tax, code asks for local step price"
    assert done.error == f"fencepost: the code does not do what the history says: {difference}\n"
    assert done.out.splitlines()[-1].split()[1:5] == ["local_step_ended", "op", "4", "tax"]


async def test_it_is_told_to_programs_too(replaying: Replaying) -> None:
    done = await replaying("--json")
    assert done.document == {
        "run_id": replaying.run_id, "difference": None, "events": 14, "ops": 9, "end": "completes",
    }  # fmt: skip
    other = await replaying("--json", edit=("ctx.run(tax, cents)", "ctx.sleep(5)"))
    assert other.code == 1
    difference = "op 4: history has local step tax, code asks for sleep 5s"
    assert json.loads(other.error) == {"run_id": replaying.run_id, "difference": difference}


async def test_a_debugger_stops_in_the_workflow(replaying: Replaying) -> None:
    edit = ("    sent = await", "    breakpoint()\n    sent = await")
    done = await replaying(edit=edit, stdin="p 'said is ' + said\np ctx.user_id\nn\np 'sent is ' + sent\nc\n")
    assert done.code == 0, done
    assert "said is yes" in done.out
    assert "'ada'" in done.out
    assert "sent is parcel of" in done.out
    assert "without a difference" in done.out


async def test_a_file_of_the_command_is_a_history(replaying: Replaying, tmp_path: Path, env: AsyncEnvironment) -> None:
    printed = await Program(env.address)("runs", "history", replaying.run_id, "--json")
    assert printed.code == 0, printed
    assert [document.get("run_id") for document in printed.documents] == [replaying.run_id, *[None] * 13]
    (tmp_path / "run.json").write_text(printed.out, "utf-8")
    from_file = Replayer(orders.order, on_input_change="block").replay(tmp_path / "run.json", user_id="ada")
    async with AsyncClient(env.address) as client:
        events = [event async for event in client.history(replaying.run_id)]
    assert from_file == Replayer(orders.order).replay(events, run_id=replaying.run_id)


async def test_what_is_no_workflow_is_refused_in_a_line(replaying: Replaying) -> None:
    for place, said in (
        ("order", "it is MODULE:WORKFLOW"),
        (".their_orders:order", "it is MODULE:WORKFLOW"),
        ("no_such_module:order", "No module named 'no_such_module'"),
        ("their_orders:price", "their_orders:price is no function with @workflow"),
        ("their_orders:missing.too", "their_orders:missing.too is no function with @workflow"),
        ("their_orders:parcel", "their_orders:parcel is kit.parcel, and the run is one of kit.order"),
    ):
        done = await replaying("--replay", place)
        assert done.code == 2
        assert said in done.error
        assert done.error.count("\n") == 1
    broken = await replaying(edit=("DAY = 86_400.0", "DAY = 1 / 0"))
    assert broken.code == 1
    assert "their_orders can't be imported" in broken.err
    assert "ZeroDivisionError" in broken.err


async def test_a_run_that_does_not_exist_is_told_as_by_other_commands(replaying: Replaying) -> None:
    done = await replaying._program("runs", "history", "0190e4f2-0000-7000-8000-000000000000", "--replay", "json:loads")
    assert done.code == 2
    place = await replaying()
    assert place.code == 0
    replaying.run_id = "0190e4f2-0000-7000-8000-000000000000"
    missing = await replaying()
    assert missing.code == 1
    assert "RUN_NOT_FOUND" in missing.error
