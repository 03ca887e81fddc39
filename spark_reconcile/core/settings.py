"""The settings of a run: the sources to compare, and the bounds. Values, validated when they are created."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.message import check_group, check_topic

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """How much a run reads, keeps and rechecks at once: how it works, and no verdict. For one machine.

    Up to `snapshot_rows_max` rows of a database are read in one consistent snapshot, more in parallel ranges, table by
    table; up to `medium_rows_max` rows Java is set for a medium amount of work. At most `suspects_max` findings are
    rechecked, `suspects_a_part` at a time. Runs by the hour evaluate `windows_a_batch` hours together. A file whose
    content has not changed for `file_rest_ms` is at rest: its digests are kept, in at most `digest_generations_max`
    generations. Sealed segments of at least `kept_segment_bytes_min` are kept as Parquet: smaller ones are read in less
    time than a Parquet file. Up to `one_partition_rows_max` rows are in one partition, and sets of them are literals of
    query plans: they take less time than the tasks, shuffles and jobs of many. An export from bookies may take
    `export_s_max`.
    """

    snapshot_rows_max: int = 500_000
    medium_rows_max: int = 12_000_000
    suspects_max: int = 100_000
    suspects_a_part: int = 5_000
    windows_a_batch: int = 24 * 7
    file_rest_ms: int = 2_000
    digest_generations_max: int = 24
    kept_segment_bytes_min: int = 4 * MIB
    export_s_max: int = 3_600
    one_partition_rows_max: int = 20_000


MASTER_DEFAULT: Final = "local[*]"
GRACE_SECONDS_DEFAULT: Final = 60.0
LATE_AFTER_SECONDS_DEFAULT: Final = 60.0
CLOCK_SKEW_SECONDS_DEFAULT: Final = 1.0
SLACK_SECONDS_DEFAULT: Final = 3600.0
CONFIRM_AFTER_SECONDS_DEFAULT: Final = 5.0
TIME_UNITS: Final = ("us", "ms", "s")
RULES_MAX: Final = 100
INBOXES_MAX: Final = 100
OUTBOXES_MAX: Final = 1_000
ARCHIVES_MAX: Final = 1_000
GROUPS_MAX: Final = 10_000
KEEP_DAYS_MAX: Final = 36_500

Value = str | int | float | bool


class Operator(StrEnum):
    """How a condition compares a column."""

    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    AT_MOST = "<="
    MORE = ">"
    AT_LEAST = ">="
    IN = "in"
    IS_NULL = "is null"
    IS_NOT_NULL = "is not null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition on a business row; the values are bound parameters, never part of the statement's text."""

    column: str
    operator: Operator = Operator.EQUAL
    values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        match self.operator:
            case Operator.IS_NULL | Operator.IS_NOT_NULL:
                fits = not self.values
            case Operator.IN:
                fits = bool(self.values)
            case _:
                fits = len(self.values) == 1
        if not fits:
            raise ConfigurationError(
                f"the condition on {self.column} has {len(self.values)} values, which {self.operator!s} cannot take"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletenessBound:
    """Until when a database is complete, by the settings: a time, or a lag; the earlier of both.

    For a replica, or a copy that does not change. Without settings, the database is queried, see load.completeness.
    """

    complete_until_ms: int | None = None
    lag_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.lag_seconds is not None and self.lag_seconds < 0:
            raise ConfigurationError("lag_seconds must not be negative: it is how far a replica is behind its source")

    @property
    def is_set(self) -> bool:
        """Whether any of both was set."""
        return self.complete_until_ms is not None or self.lag_seconds is not None

    def at(self, now_ms: int) -> int:
        """Returns until when the database is complete."""
        behind_ms = now_ms - int((self.lag_seconds or 0) * 1000)
        return behind_ms if self.complete_until_ms is None else min(behind_ms, self.complete_until_ms)


class KeyFormat(StrEnum):
    """How the business writes a key of bytes as the text that is the message's key."""

    HEX = "hex"
    """32 digits of 16 bytes, in small letters."""
    UUID = "uuid"
    """The same with dashes; of a column of text, too, with dashes or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusinessRule:
    """Declares which business rows must have a message: each row of `table` that meets all of `where` has one on
    `topic` whose key is the text of `key_column`; of a column of bytes, and of UUIDs in another spelling, the text that
    `key_format` says.

    `time_column` and `deliver_at_column` are UTC datetimes, or integers since the Unix epoch in `time_unit`.
    `body`: how the message's JSON body is built from the row, a field for a column, in order, so that a lost message
    can be rebuilt. `urls`: the databases that have the table, one or many shards; none: every one with an outbox.
    `complete_since_ms`: the table has every row since then; None: since the beginning. `until`: and until then.
    """

    name: str
    table: str
    key_column: str
    time_column: str
    topic: str
    where: Sequence[Condition] = ()
    time_unit: str = "us"
    deliver_at_column: str | None = None
    key_format: KeyFormat | None = None
    body: Mapping[str, str] = field(default_factory=dict)
    urls: Sequence[str] = field(default=(), repr=False)
    complete_since_ms: int | None = None
    until: CompletenessBound = field(default_factory=CompletenessBound)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        if not self.name:
            raise ConfigurationError("every rule needs a name")
        if self.time_unit not in TIME_UNITS:
            raise ConfigurationError(f"rule {self.name}: time_unit is one of {', '.join(TIME_UNITS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSource:
    """One outbox: its tables in the database of `url`, or in a schema on that server. Its message tables, split or not,
    are discovered. SQLite has no schemas and ignores `schema`.
    """

    url: str = field(repr=False)
    schema: str | None = None
    until: CompletenessBound = field(default_factory=CompletenessBound)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxSource:
    """An inbox: the table in which a consumer group records the messages that it has handled.

    `url` and `schema` None: the database and schema of the outbox. `topics` empty: all topics of the group.
    `complete_since_ms`: the inbox has every effect since then; None: since its oldest row.
    """

    group: str
    url: str | None = field(default=None, repr=False)
    schema: str | None = None
    topics: Sequence[str] = ()
    complete_since_ms: int | None = None
    until: CompletenessBound = field(default_factory=CompletenessBound)

    def __post_init__(self) -> None:
        check_group(self.group)
        for topic in self.topics:
            check_topic(topic)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSource:
    """What bookies keep, of a broker or of a delay cluster: its address, bookkeeper://zk1,zk2,zk3/path, and a TOML file
    with a table [cluster] where its other settings are.
    """

    store: str
    config: Path | None = None

    def __post_init__(self) -> None:
        if not self.store.startswith("bookkeeper://"):
            raise ConfigurationError(f"store is no address on BookKeeper: {self.store!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """Time limits of the verdicts.

    `seconds`: a newer step is pending. `late_after_seconds`: a later first delivery after the due time is late.
    `clock_skew_seconds`: permitted difference of the databases' clocks and the broker's. `slack_seconds`: rows are read
    so much before and after the evaluated windows, since ids and rows have timestamps of different clocks.
    `confirm_after_seconds`: suspects are rechecked after this time before they become findings.
    """

    seconds: float = GRACE_SECONDS_DEFAULT
    late_after_seconds: float = LATE_AFTER_SECONDS_DEFAULT
    clock_skew_seconds: float = CLOCK_SKEW_SECONDS_DEFAULT
    slack_seconds: float = SLACK_SECONDS_DEFAULT
    confirm_after_seconds: float = CONFIRM_AFTER_SECONDS_DEFAULT

    def __post_init__(self) -> None:
        times = (
            self.seconds, self.late_after_seconds, self.clock_skew_seconds, self.slack_seconds,
            self.confirm_after_seconds,
        )  # fmt: skip
        if min(times) < 0:
            raise ConfigurationError("[grace]: its seconds must not be negative")

    @property
    def ms(self) -> int:
        """`seconds` in milliseconds."""
        return int(self.seconds * 1000)

    @property
    def clock_skew_ms(self) -> int:
        """`clock_skew_seconds` in milliseconds."""
        return int(self.clock_skew_seconds * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One reconciliation: the sources, the rules, the bounds, and the output folder.

    `schema` has the outbox tables, if they are not in the database of the URL (SQLite ignores it). `outboxes`: more
    of them, on any number of instances. `archives`: folders of Parquet files into which archive rows were moved,
    same columns; a text is a URL (`s3a://bucket/archive`), passed to Spark unchanged. `archive`: whether sent rows
    are kept at all. `broker_data` and `output` are local folders. `complete_since_ms`: the archive has every row
    sent since then; `archive_days`, `inbox_days`: the compensator's retention. Without both: since the oldest row.
    `until`: until when databases are complete that have no `until` of their own. `broker_store`: the broker, if bookies
    keep it; it is exported to `broker_data` then. `delay`: a delay cluster whose due messages go to this broker.
    `groups`: consumer groups that the broker must know, each as `group` or `topic/group`. `accept_missing`: sources
    whose loss of evidence this one run accepts. `keep_days`: how long the folders of runs are kept, by default for
    ever. `limits` decide no verdict.
    """

    database_url: str = field(repr=False)
    broker_data: Path
    output: Path
    schema: str | None = None
    outboxes: Sequence[OutboxSource] = ()
    archives: Sequence[Path | str] = ()
    archive: bool = True
    complete_since_ms: int | None = None
    archive_days: float | None = None
    inbox_days: float | None = None
    until: CompletenessBound = field(default_factory=CompletenessBound)
    rules: Sequence[BusinessRule] = ()
    inboxes: Sequence[InboxSource] = ()
    grace: Grace = field(default_factory=Grace)
    groups: Sequence[str] = ()
    accept_missing: Sequence[str] = ()
    limits: RunLimits = field(default_factory=RunLimits)
    broker_store: LedgerSource | None = None
    delay: LedgerSource | None = None
    keep_days: float | None = None

    def __post_init__(self) -> None:
        check_local_folder(self.broker_data, "[broker] data")
        check_local_folder(self.output, "[output] folder")
        if min(self.archive_days or 0, self.inbox_days or 0) < 0:
            raise ConfigurationError("[database]: archive_days and inbox_days must not be negative")
        if self.keep_days is not None and not 0 < self.keep_days <= KEEP_DAYS_MAX:
            raise ConfigurationError(f"[output]: keep_days is a number from above 0 to {KEEP_DAYS_MAX:,}")
        if len(self.groups) > GROUPS_MAX:
            raise ConfigurationError(f"at most {GROUPS_MAX:,} groups may be named")
        for name in self.groups:
            topic, slash, group = name.rpartition("/")
            check_group(group)
            if slash:
                check_topic(topic)
        if len(self.rules) > RULES_MAX or len(self.inboxes) > INBOXES_MAX:
            raise ConfigurationError(f"at most {RULES_MAX} rules and {INBOXES_MAX} inboxes are allowed")
        if len(self.outboxes) >= OUTBOXES_MAX or len(self.archives) > ARCHIVES_MAX:
            raise ConfigurationError(f"at most {OUTBOXES_MAX} outboxes and {ARCHIVES_MAX} archives are allowed")
        if len({(outbox.url, outbox.schema) for outbox in self.all_outboxes}) <= len(self.outboxes):
            raise ConfigurationError("two outboxes have the same url and schema; name each once")
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(f"two rules have the name {twice[0]!r}; give each its own")

    @property
    def all_outboxes(self) -> list[OutboxSource]:
        """All outboxes."""
        return [OutboxSource(url=self.database_url, schema=self.schema, until=self.until), *self.outboxes]

    def urls_of(self, rule: BusinessRule) -> list[str]:
        """Returns the databases that have a rule's table."""
        return list(rule.urls) or list(dict.fromkeys(outbox.url for outbox in self.all_outboxes))


_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_CURES: Final[Mapping[str, str]] = {
    "[broker] data": "copy the broker's data folder to this machine, or mount it, and name that folder",
    "[output] folder": "name a local folder, or a mounted one, and copy its files afterwards",
}


def is_url(text: str) -> bool:
    """Whether a setting begins with a scheme, like `s3a://bucket/archive` or `file:///archive`."""
    return _URL.match(text) is not None


def check_local_folder(folder: Path, setting: str) -> None:
    """Raises ConfigurationError if a path was made from a URL: Path() turns `s3a://bucket` into `s3a:/bucket`.

    A folder that exists is accepted, whatever its name.
    """
    schemes = [part for part in folder.parts[:-1] if _SCHEME.fullmatch(part)]
    if schemes and not folder.exists():
        raise ConfigurationError(
            f"{setting} names a URL ({schemes[0]}//...), and must be a folder of this machine: {_CURES[setting]}. Only "
            "[archive] parquet takes URLs that Spark can read"
        )
