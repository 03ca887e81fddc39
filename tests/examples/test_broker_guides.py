"""What docs/guides/operating.md and delay.md show of a broker's backups and recurring messages, typed as it stands.

Times, sizes and counts are those of the page's broker: any are taken for them. All other text is to be printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from broker_adapter.http import HttpBroker
from broker_adapter.http.admin_client import AdminClient
from outbox_broker.backup.manifest import content_path, read_manifest
from outbox_core import Message
from outbox_core.messages.recurring_message import RecurringMessage
from tests.broker_adapter.servers import ServerProcess
from tests.examples.guide_session import Terminal, Typed, steps, terminal

pytestmark = pytest.mark.processes

GUIDES: Final = Path(__file__).parents[2] / "docs" / "guides"
_OF_ITS_BROKER: Final = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z|[\d,]+(?= files| bytes| were copied)|(?<=from )\d+|(?<= to )\d+|(?<=-)\d{12}"
    r"|(?<=contents/)[0-9a-f]+\.\.\.[0-9a-f]+"
)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ServerProcess]:
    """A broker that runs and holds a message."""
    process = ServerProcess(tmp_path / "broker")
    process.start()
    with closing(HttpBroker(process.url)) as client:
        client.publish([Message(id="m1", topic="orders", body=b"paid")])
    yield process
    process.kill()


@pytest.fixture
def opened(tmp_path: Path, broker: ServerProcess) -> Iterator[Terminal]:
    """A terminal whose commands find the broker."""
    with terminal(tmp_path / "terminal") as at:
        at.status(f"export OUTBOX_BROKER__URL={broker.url}")
        yield at


def transcript(page: str, *, with_words: str, places: dict[str, Path]) -> list[Typed]:
    """The commands and answers of the page's console block that has these words, with folders of this machine."""
    blocks = re.findall(r"^```console\n.*?^```$", (GUIDES / page).read_text(), re.MULTILINE | re.DOTALL)
    [block] = [text for text in blocks if with_words in text]
    for named, here in places.items():
        assert named in block
        block = block.replace(named, str(here))
    return [
        replace(step, prints=tuple(_OF_ITS_BROKER.sub("...", line) for line in step.prints))
        for step in steps(block)
        if isinstance(step, Typed)
    ]


def amiss(opened: Terminal, typed: list[Typed]) -> list[str]:
    """What of these answers was not printed."""
    return [line for step in typed for line in opened.do(step)]


def test_a_backup_is_taken_verified_and_restored_as_the_guide_shows(
    broker: ServerProcess, opened: Terminal, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    taken = transcript(
        "operating.md", with_words="outbox broker restore",
        places={"/var/lib/broker": broker.folder, "/mnt/backup/broker": backup},
    )  # fmt: skip
    damaged = transcript("operating.md", with_words="damaged: do not", places={"/mnt/backup/broker": backup})
    asked = transcript("operating.md", with_words="outbox broker folder", places={"/var/lib/broker": broker.folder})

    assert amiss(opened, [*taken, *asked]) == [], opened.text
    messages = [file for file in read_manifest(backup).files if re.match(r"messages/messages-\d+\.segment", file.path)]
    with content_path(backup, max(messages, key=lambda file: file.size_bytes)).open("r+b") as content:
        content.seek(-1, 2)
        [last] = content.read(1)
        content.seek(-1, 2)
        content.write(bytes([last ^ 1]))
    assert amiss(opened, damaged) == [], opened.text


def test_a_recurring_message_is_added_shown_paused_and_deleted_as_the_guide_shows(
    broker: ServerProcess, opened: Terminal
) -> None:
    with closing(AdminClient(broker.url)) as admin:
        admin.add_recurring("invoices", RecurringMessage(topic="billing", cron="30 4 1 * *"))

    typed = transcript("delay.md", with_words="outbox broker schedule add", places={})

    assert amiss(opened, typed) == [], opened.text
