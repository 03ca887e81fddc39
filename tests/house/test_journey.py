"""The journeys of docs/ARCHITECTURE.md, held against one message that travels under a tracer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
DEADLINE_SECONDS = 120
# Which a message enters only where it is refused, filtered, a dead letter, or pulled inside the broker's process.
BESIDE = {
    "broker_adapter/http/errors.py",
    "subscription_matcher.py",
    "dead_letter_writer.py",
    "group/dead_letters.py",
}


@pytest.fixture(scope="module")
def calls() -> Mapping[str, Sequence[str]]:
    """The modules of all calls of each journey, in their order."""
    program = [sys.executable, str(ROOT / "scripts" / "journey.py"), "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name: figures["calls"] for name, figures in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("heading", "name"), [("## Publish to stored", "publish"), ("## Pull to acknowledged", "pull")]
)
def test_a_message_enters_the_modules_of_its_journey_in_the_order_of_the_map(
    calls: Mapping[str, Sequence[str]], heading: str, name: str
) -> None:
    steps = re.search(r"^1\. .*?(?=^Wherever|^\| killed)", ARCHITECTURE.partition(heading)[2], re.MULTILINE | re.DOTALL)
    assert steps is not None
    named = [module for module in re.findall(r"`([\w/]+\.py)`", steps[0]) if module not in BESIDE]

    assert _not_entered_in_order(named, calls[name]) == []


def _not_entered_in_order(named: Sequence[str], calls: Sequence[str]) -> list[str]:
    """Returns the modules that are not called after those named before them."""
    missing, start = [], 0
    for module in named:
        later = next((at for at in range(start, len(calls)) if f"/{calls[at]}".endswith(f"/{module}")), None)
        if later is None:
            missing.append(module)
        else:
            start = later
    return missing
