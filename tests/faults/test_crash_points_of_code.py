"""A crash at each commit of a code run: whatever was to be committed has one effect, and the run comes to the very end
that it comes to without the crash (I1, I2, I4, I6, I13); see test_crash_points.

One test tries a story with all crashes, for it is to be short: what was another server in one is the one that has the
next accident.
"""

from __future__ import annotations

import pytest

from fencepost.v1 import worker_service_pb2 as pb
from tests.faults.crash_stories_of_code import CodeStory
from tests.faults.crash_stories_of_code_ends import ALL_CODE_STORIES
from tests.faults.crashing import Crash
from tests.faults.crashing_code import open_code_stage
from tests.faults.scene import Scene


@pytest.mark.parametrize("told", ALL_CODE_STORIES, ids=lambda told: told.__name__)
async def test_a_crash_at_a_commit_changes_nothing_of_what_becomes_of_a_code_run(scene: Scene, told: CodeStory) -> None:
    stage = await open_code_stage(scene)
    await told(stage)
    expected = await stage.outcome()
    left = {table: n for table, n in expected[1].items() if n and table != "request"}
    assert left == {}, "no rows are left, but those that repeats of requests are known by"
    for crash in Crash:
        stage.run_ids, stage.same_process, stage.crash = [], True, crash
        try:
            await told(stage)
            assert await stage.outcome() == expected
            await stage.wake()
            assert await stage.outcome() == expected
            await stage.worker.sync()
            assert stage.worker.unread(pb.Tasks) == []
        except Exception as error:
            error.add_note(f"the crash: {crash.value}")
            raise
        stage.onwards()
