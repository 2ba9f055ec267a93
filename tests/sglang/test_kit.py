"""The backend does in sglang's surroundings what sglang asks of a cache; sglang's own does so but for seven cases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="make test-sglang runs this, in an environment with sglang")

from radixstate.integrations.sglang import plugin
from scenarios import SCENARIOS, NotHereError, Scenario
from world import BACKEND, PEER, SETTINGS, Setting, World

FAILS_THERE = {
    "a_pool_full_of_pinned_states_is_no_error[page1-no_buffer]",  # an assert ends the scheduler
    *(f"no_active_slot_is_a_miss[{setting}]" for setting in SETTINGS),  # the same
    *(f"a_state_that_is_not_finite_is_not_served[{setting}]" for setting in SETTINGS),
}
"""What sglang's own tree does not do."""


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(scenario: Scenario, setting: Setting) -> None:
    world = World(setting)
    try:
        scenario(world)
    except NotHereError as why:
        pytest.skip(f"{why} in {setting}")
    world.end()


@pytest.mark.skipif(BACKEND == PEER, reason="it is what is compared with")
@pytest.mark.parametrize("our_codec", [False, True], ids=["its own pool", "our codec behind it"])
def test_sglangs_own_tree_fails_the_seven_cases_that_are_known(our_codec: bool) -> None:
    """So the kit sees what is wrong, and asks nothing that only radixstate does. Our codec changes nothing of it."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--confcutdir",
        Path(__file__).parent,
    ]
    done = subprocess.run(
        [*command, __file__, "-k", "test_scenario"],
        env=os.environ | {"RADIXSTATE_KIT": PEER, plugin.INT8_POOL: str(int(our_codec))},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^FAILED .*?::test_scenario\[(\w+)-(page\d+-\w+)\]", done.stdout, re.MULTILINE)
    assert {f"{name}[{setting}]" for name, setting in failed} == FAILS_THERE, done.stdout[-3000:]
