"""The table of verdicts: states, evidence and precedence, written once as data. Not where evidence comes from.

Every row of evidence gets the verdict of the first rule whose condition holds; the last rule always does. A condition
is Spark SQL over the columns of Evidence and the named moments of a Policy; `matches` says the same in Python, and the
tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """What is said of a message in a group, or of a message that no group takes."""

    SETTLED = "settled"
    PENDING = "pending"
    UNSENT = "unsent"
    LOST = "lost"
    PHANTOM = "phantom"
    DUPLICATE = "duplicate"
    EARLY = "early"
    LATE = "late"
    DEAD = "dead"
    PARKED = "parked"
    CANCELED = "canceled"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """How bad it is. Findings are warnings and errors."""

    OK = "ok"
    WAIT = "wait"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When things are judged: `fresh_after_ms` is the moment before which nothing is young any more.

    `archive_since_ms`, `inbox_since_ms`: what is older may have been purged; 0: nothing is ever purged.
    """

    now_ms: int
    fresh_after_ms: int
    late_after_ms: int
    archive_since_ms: int = 0
    inbox_since_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the records say of one message in one group ('' where no group takes the topic). Counts and moments.

    covered: whether a rule asks a business row of the topic. deliveries, acks, deaths, redrives, effects: of the group.
    has_group: whether the group is owed the message; group_since_ms: when the group was made. has_inbox: whether the
    group's inbox was read. Moments in ms; 0 where there is none.
    """

    in_outbox: int = 0
    parked: int = 0
    archived: int = 0
    stored: int = 0
    canceled: int = 0
    hashes: int = 0
    covered: int = 0
    business: int = 0
    has_group: int = 0
    deliveries: int = 0
    acks: int = 0
    deaths: int = 0
    redrives: int = 0
    has_inbox: int = 0
    effects: int = 0
    created_ms: int = 0
    sent_ms: int = 0
    stored_ms: int = 0
    due_ms: int = 0
    group_since_ms: int = 0
    first_delivery_ms: int = 0
    acked_ms: int = 0

    @property
    def expected_ms(self) -> int:
        """From when on the group could have had it."""
        return max(self.due_ms, self.stored_ms, self.group_since_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the table."""

    verdict: Verdict
    severity: Severity
    evidence: str
    sql: str
    matches: Callable[[Evidence, Policy], bool]
    meaning: str
    repair: str


_EXPECTED_MS: Final = "greatest(due_ms, stored_ms, group_since_ms)"

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        verdict=Verdict.MISMATCH,
        severity=Severity.ERROR,
        evidence="the body's hash differs between outbox, archive and broker",
        sql="hashes > 1",
        matches=lambda e, p: e.hashes > 1,
        meaning="What arrived is not what was published.",
        repair="Keep both; compare by hand. Nothing is resent by itself.",
    ),
    Rule(
        verdict=Verdict.EARLY,
        severity=Severity.ERROR,
        evidence="handed out before its due time",
        sql="deliveries > 0 and first_delivery_ms < due_ms",
        matches=lambda e, p: e.deliveries > 0 and e.first_delivery_ms < e.due_ms,
        meaning="A consumer saw it too soon.",
        repair="None; report the broker's clock and this message's id.",
    ),
    Rule(
        verdict=Verdict.PHANTOM,
        severity=Severity.ERROR,
        evidence="handed out although canceled",
        sql="canceled > 0 and deliveries > 0",
        matches=lambda e, p: e.canceled > 0 and e.deliveries > 0,
        meaning="It was taken back, and a consumer saw it all the same.",
        repair="Undo its effect by hand; report the broker's log and this message's id.",
    ),
    Rule(
        verdict=Verdict.PHANTOM,
        severity=Severity.ERROR,
        evidence="at the broker past its grace, in neither outbox nor archive, and the archive reaches back so far",
        sql=(
            "stored > 0 and in_outbox = 0 and archived = 0 and canceled = 0"
            " and stored_ms <= fresh_after_ms and stored_ms >= archive_since_ms"
        ),
        matches=lambda e, p: (
            e.stored > 0
            and e.in_outbox == 0
            and e.archived == 0
            and e.canceled == 0
            and p.archive_since_ms <= e.stored_ms <= p.fresh_after_ms
        ),
        meaning="Nobody committed it, and it was there all the same.",
        repair="Find who published past the outbox, or with archiving off.",
    ),
    Rule(
        verdict=Verdict.PHANTOM,
        severity=Severity.ERROR,
        evidence="a rule asks for a business row, and there is none",
        sql=(
            "covered > 0 and business = 0 and (stored > 0 or archived > 0) and canceled = 0"
            " and created_ms <= fresh_after_ms"
        ),
        matches=lambda e, p: (
            e.covered > 0
            and e.business == 0
            and (e.stored > 0 or e.archived > 0)
            and e.canceled == 0
            and e.created_ms <= p.fresh_after_ms
        ),
        meaning="The message tells of something that the business's tables do not know.",
        repair="Look for a deleted row, a rule that is too narrow, or a transaction that published past its rollback.",
    ),
    Rule(
        verdict=Verdict.DUPLICATE,
        severity=Severity.ERROR,
        evidence="stored more than once, or more than one effect, under one id",
        sql="stored > 1 or effects > 1",
        matches=lambda e, p: e.stored > 1 or e.effects > 1,
        meaning="One message became two.",
        repair="Raise the broker's window of recent ids; give the consumer an inbox.",
    ),
    Rule(
        verdict=Verdict.CANCELED,
        severity=Severity.OK,
        evidence="canceled, and never handed out",
        sql="canceled > 0",
        matches=lambda e, p: e.canceled > 0,
        meaning="Taken back in time.",
        repair="None needed.",
    ),
    Rule(
        verdict=Verdict.PARKED,
        severity=Severity.WARN,
        evidence="parked in the outbox, not at the broker",
        sql="parked > 0 and stored = 0",
        matches=lambda e, p: e.parked > 0 and e.stored == 0,
        meaning="The broker refused it for good; it waits for people.",
        repair="outbox messages list --state parked; then retry or discard.",
    ),
    Rule(
        verdict=Verdict.UNSENT,
        severity=Severity.ERROR,
        evidence="in the outbox past its grace, not at the broker",
        sql="in_outbox > 0 and stored = 0 and created_ms <= fresh_after_ms",
        matches=lambda e, p: e.in_outbox > 0 and e.stored == 0 and e.created_ms <= p.fresh_after_ms,
        meaning="Committed, and nobody sends it: no compensator runs, or the broker is out.",
        repair="Start the compensator; outbox messages retry ID.",
    ),
    Rule(
        verdict=Verdict.LOST,
        severity=Severity.ERROR,
        evidence="in the archive past its grace, not at the broker",
        sql="archived > 0 and in_outbox = 0 and stored = 0 and sent_ms <= fresh_after_ms",
        matches=lambda e, p: e.archived > 0 and e.in_outbox == 0 and e.stored == 0 and e.sent_ms <= p.fresh_after_ms,
        meaning="The broker said that it has it, and has not.",
        repair="Publish it again from the business row; look at the broker's disk.",
    ),
    Rule(
        verdict=Verdict.LOST,
        severity=Severity.ERROR,
        evidence="acknowledged past its grace, its effect not in the inbox, and the inbox reaches back so far",
        sql=(
            "acks > 0 and has_inbox > 0 and effects = 0 and acked_ms <= fresh_after_ms and acked_ms >= inbox_since_ms"
        ),
        matches=lambda e, p: (
            e.acks > 0 and e.has_inbox > 0 and e.effects == 0 and p.inbox_since_ms <= e.acked_ms <= p.fresh_after_ms
        ),
        meaning="The consumer acknowledged before its transaction committed.",
        repair="Handle it by hand; acknowledge only after the commit.",
    ),
    Rule(
        verdict=Verdict.DEAD,
        severity=Severity.WARN,
        evidence="given up on by its group, not redriven since",
        sql="deaths > redrives and acks = 0",
        matches=lambda e, p: e.deaths > e.redrives and e.acks == 0,
        meaning="Its consumer refused it to the last attempt.",
        repair="Mend the consumer, then redrive the group's dead letters.",
    ),
    Rule(
        verdict=Verdict.LATE,
        severity=Severity.WARN,
        evidence="first handed out, or still waiting, later than the bound after it was due",
        sql=(
            "has_group > 0 and stored > 0 and"
            f" ((deliveries > 0 and first_delivery_ms - {_EXPECTED_MS} > late_after_ms)"
            f" or (deliveries = 0 and deaths = 0 and now_ms - {_EXPECTED_MS} > late_after_ms))"
        ),
        matches=lambda e, p: (
            e.has_group > 0
            and e.stored > 0
            and (
                (e.deliveries > 0 and e.first_delivery_ms - e.expected_ms > p.late_after_ms)
                or (e.deliveries == 0 and e.deaths == 0 and p.now_ms - e.expected_ms > p.late_after_ms)
            )
        ),
        meaning="It came, or will come, but too late.",
        repair="Add consumers; see the group's backlog.",
    ),
    Rule(
        verdict=Verdict.UNKNOWN,
        severity=Severity.WAIT,
        evidence="older than the archive or the inbox is kept, and not in it",
        sql=(
            "(stored > 0 and in_outbox = 0 and archived = 0 and stored_ms < archive_since_ms)"
            " or (acks > 0 and has_inbox > 0 and effects = 0 and acked_ms < inbox_since_ms)"
        ),
        matches=lambda e, p: (
            (e.stored > 0 and e.in_outbox == 0 and e.archived == 0 and e.stored_ms < p.archive_since_ms)
            or (e.acks > 0 and e.has_inbox > 0 and e.effects == 0 and e.acked_ms < p.inbox_since_ms)
        ),
        meaning="The evidence was purged; nothing is claimed either way.",
        repair="None; reconcile before the purge, or keep the archive longer.",
    ),
    Rule(
        verdict=Verdict.SETTLED,
        severity=Severity.OK,
        evidence="stored once and, by each group, acknowledged; with an inbox, its effect is there",
        sql="stored = 1 and (has_group = 0 or (acks > 0 and (has_inbox = 0 or effects = 1)))",
        matches=lambda e, p: (
            e.stored == 1 and (e.has_group == 0 or (e.acks > 0 and (e.has_inbox == 0 or e.effects == 1)))
        ),
        meaning="All is well.",
        repair="None needed.",
    ),
    Rule(
        verdict=Verdict.PENDING,
        severity=Severity.WAIT,
        evidence="anything else: scheduled, in flight, waiting again, or too young to be judged",
        sql="true",
        matches=lambda e, p: True,
        meaning="Still on its way.",
        repair="None; look again later.",
    ),
)
BUSINESS_REPAIRS: Final = {
    Verdict.LOST: "Publish it from this row; find the code path that commits it without a message.",
    Verdict.DUPLICATE: "Find who publishes twice for one row; a rule counts one message a row.",
    Verdict.MISMATCH: "The row has no key, so that no message can be matched: give it one.",
}


def classify(evidence: Evidence, policy: Policy) -> Verdict:
    """The verdict on a row of evidence, in plain Python: what the tests, and readers, hold the SQL against."""
    return next(rule.verdict for rule in RULES if rule.matches(evidence, policy))


def verdict_sql() -> str:
    """The table as one SQL CASE over the columns of Evidence and the moments of Policy."""
    return _case([rule.verdict for rule in RULES])


def reason_sql() -> str:
    """Which line of the table decided, as its words: the CASE of verdict_sql with other results."""
    return _case([rule.evidence for rule in RULES])


def severity_of(verdict: str) -> Severity:
    """How bad a verdict is."""
    return next(rule.severity for rule in RULES if rule.verdict == verdict)


def _case(results: Sequence[str]) -> str:
    texts = ["'" + result.replace("'", "\\'") + "'" for result in results]
    arms = " ".join(f"when {rule.sql} then {text}" for rule, text in zip(RULES, texts, strict=True))
    return f"case {arms} end"
