"""A crash at each commit of the step engine: whatever was to be committed has one effect, and the run comes to the very
end that it comes to without the crash (I1, I4, I6, I13).

Each operation is tried with four crashes (tests.faults.crashing): the connection to the database breaks before the
commit, or after it; the server dies before the commit, or between it and what it would have told, and another goes on.
The same steps without any accident come first, and the histories, results and rows that are left have to be the same.
One test tries a story with all crashes, for what comes first is the same for each: what was another server in one is
the one that has the next accident.
"""

from __future__ import annotations

import pytest

from tests.faults.crash_stories import Story
from tests.faults.crash_stories_of_flow import ALL_STORIES
from tests.faults.crashing import Crash, Stage, open_stage
from tests.faults.scene import Scene


@pytest.mark.parametrize("told", ALL_STORIES, ids=lambda told: told.__name__)
async def test_a_crash_at_a_commit_changes_nothing_of_what_becomes_of_a_run(scene: Scene, told: Story) -> None:
    stage = await open_stage(scene, Stage)
    await told(stage)
    expected = await stage.outcome()
    for crash in Crash:
        stage.run_ids, stage.same_process, stage.crash = [], True, crash
        try:
            await told(stage)
            assert await stage.outcome() == expected
            await stage.wake()
            assert await stage.outcome() == expected
        except Exception as error:
            error.add_note(f"the crash: {crash.value}")
            raise
        stage.onwards()
