"""Reads the messages that wait in a delay cluster, and the cancels that it remembers, from a new export.

Read it before the broker: a message that is handed over meanwhile is then in both, never in neither.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from outbox_core.protocol.decoder_cache import json_decoder
from spark_reconcile.core.dataframes import listed
from spark_reconcile.core.errors import NotComparable
from spark_reconcile.core.settings import LedgerSource, Settings
from spark_reconcile.evidence.message_evidence import HELD_SEQUENCE
from spark_reconcile.load.ledger_exports import run_export
from spark_reconcile.sources.broker_logs import MESSAGE_SCHEMA, RUN_SCHEMA, LogSegment, single, survey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class DelayExport(msgspec.Struct, frozen=True, kw_only=True):
    """What `outbox delay export --json` prints: when it began, and since when all cancels are remembered."""

    begun_ms: int
    messages: int
    cancels: int
    cancels_since_ms: int


def export_delay(source: LedgerSource, folder: Path, *, seconds_max: int) -> DelayExport:
    """Export to a folder that is not there yet. Raises ConfigurationError, which names the cure, and NotComparable.

    The command reads the shards' ledgers beside their owners, and writes logs in the broker's format.
    """
    command = ["delay", "export", "--json"]
    said = run_export(command, source, folder, what="the delay cluster", seconds_max=seconds_max)
    return json_decoder(DelayExport).decode(said)


FOLDER: Final = "delay"
"""Subfolder of the output folder for the exports of a run."""


@dataclass(frozen=True, slots=True)
class DelayRecords:
    """An export, and its records in the columns of the broker's logs; Spark has cached the messages."""

    export: DelayExport
    messages: DataFrame
    actions: DataFrame

    @property
    def rows(self) -> int:
        """How many messages and cancels there are."""
        return self.export.messages + self.export.cancels


def read_configured(session: SparkSession, settings: Settings, say: Callable[[str], None]) -> DelayRecords | None:
    """Read the delay cluster of the settings, if there is one; exports of earlier runs are removed."""
    if settings.delay is None:
        return None
    say("reading the delay cluster's ledgers")
    shutil.rmtree(settings.output / FOLDER, ignore_errors=True)
    return read_delay(session, settings, settings.delay)


def read_delay(session: SparkSession, settings: Settings, source: LedgerSource) -> DelayRecords:
    """Export the cluster, and read that. Raises ConfigurationError, NotComparable."""
    folder = settings.output / FOLDER / uuid.uuid4().hex
    export = export_delay(source, folder, seconds_max=settings.limits.export_s_max)
    whole = _frame(session, folder, "messages")
    messages = whole.selectExpr(
        *(f"{HELD_SEQUENCE}L as sequence" if name == "sequence" else name for name in _message_columns(MESSAGE_SCHEMA))
    ).persist()
    read = messages.where("damage is null").count()
    if read != export.messages:
        raise NotComparable(
            f"the export of the delay cluster in {folder} has {export.messages:,} messages, and {read:,} were read: "
            "the folder must be one that all of Spark's workers see"
        )
    # Without a cancel there is no log of actions.
    runs = _frame(session, folder, "actions") if export.cancels else listed(session, [], RUN_SCHEMA)
    return DelayRecords(export, messages, single(runs))


def _frame(session: SparkSession, folder: Path, log: str) -> DataFrame:
    segments: list[LogSegment] = survey(folder, log)
    encoded = msgspec.json.encode(segments).decode()
    return session.read.format("outbox_broker_log").option("log", log).option("segments", encoded).load()


def _message_columns(schema: str) -> list[str]:
    return [column.split()[0] for column in schema.split(", ")]


def with_delayed(messages: DataFrame, actions: DataFrame, delayed: DelayRecords | None) -> tuple[DataFrame, DataFrame]:
    """Returns the messages and actions of the broker with those of the delay cluster, if there is one."""
    if delayed is None:
        return messages, actions
    return messages.unionByName(delayed.messages), actions.unionByName(delayed.actions)
