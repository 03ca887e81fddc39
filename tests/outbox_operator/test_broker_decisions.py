"""What is decided for a broker, over all that may be observed of it, and over a small world in which it is done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from outbox_operator.broker import (
    CORDON_REASON,
    Action,
    Apply,
    BeginCordon,
    BrokerSpec,
    Claim,
    ConditionType,
    DeleteClaim,
    DeleteWorkload,
    DeletionPolicy,
    EndCordon,
    Figures,
    GrowClaim,
    Observed,
    Pod,
    PodSettings,
    Remembered,
    RoundDecision,
    SecretKey,
    decide,
)

OLD = PodSettings(image="outbox-mq:1")
NEW = PodSettings(image="outbox-mq:2", config={"retention_ms": "7d"})
DEADLINE_S = 60
ROUNDS_MAX = 60


def spec(*, policy: DeletionPolicy = DeletionPolicy.DRAIN, pod: PodSettings = NEW) -> BrokerSpec:
    """What a user asks for."""
    return BrokerSpec(pod=pod, volume_size="1Gi", deletion_policy=policy, rollout_deadline_s=DEADLINE_S)


def every_observation() -> Iterator[Observed]:
    """All combinations of what may be seen."""
    remembered = [
        Remembered(),
        Remembered(revision=NEW.revision, since_s=1),
        Remembered(revision=NEW.revision, since_s=1, ready_revision=OLD.revision),
        Remembered(revision=NEW.revision, since_s=1, ready_revision=NEW.revision),
        Remembered(revision=OLD.revision, since_s=1, ready_revision=OLD.revision, refused_revision=NEW.revision),
        Remembered(revision=NEW.revision, since_s=1, ready_revision=NEW.revision, drained=True),
    ]
    pods = [None, *(Pod(revision=one.revision, ready=ready) for one in (OLD, NEW) for ready in (True, False))]
    claims = [None, Claim(), Claim(is_smaller=True), Claim(going=True)]
    figures = [
        None,
        Figures(drained=False, ready=1),
        Figures(drained=True),
        Figures(drained=False, in_flight=1, cordon="a person's"),
        Figures(drained=True, cordon=CORDON_REASON),
    ]
    choices = itertools.product(
        DeletionPolicy, (False, True), remembered, (None, OLD), ((), ("key k of Secret s",)), (False, True), pods,
        claims, figures, (2, 2 + DEADLINE_S),
    )  # fmt: skip
    for policy, deleted, kept, previous, missing, has_workload, pod, claim, says, now_s in choices:
        yield Observed(
            spec=spec(policy=policy), now_s=now_s, deleted=deleted, remembered=kept, previous=previous, missing=missing,
            has_workload=has_workload, pod=pod, claim=claim, figures=says,
        )  # fmt: skip


@cache
def every_decision() -> list[tuple[Observed, RoundDecision]]:
    """What is decided on each of them."""
    return [(seen, decide(seen)) for seen in every_observation()]


def kinds(decision: RoundDecision) -> set[type[Action]]:
    """What kinds of actions were decided on."""
    return {type(action) for action in decision.actions}


def test_over_all_that_may_be_seen_nothing_undelivered_is_deleted() -> None:
    for seen, decision in every_decision():
        doing, policy = kinds(decision), seen.spec.deletion_policy

        assert seen.deleted or not doing & {DeleteWorkload, DeleteClaim, BeginCordon}, seen
        assert DeleteClaim not in doing or policy is DeletionPolicy.DISCARD, seen
        if DeleteWorkload in doing and policy is DeletionPolicy.DRAIN:
            has_volume = seen.claim is not None and not seen.claim.going
            is_drained = seen.figures is None or (seen.figures.drained and seen.figures.cordon is not None)
            assert not has_volume or (seen.remembered.drained and is_drained), seen
        assert not decision.released or (seen.deleted and not seen.has_workload and seen.pod is None), seen
        assert not decision.released or not doing, seen


def test_over_all_that_may_be_seen_each_condition_is_told_once_and_a_problem_has_a_cure() -> None:
    for seen, decision in every_decision():
        told = {condition.type: condition for condition in decision.conditions}
        degraded = told[ConditionType.DEGRADED]

        assert len(decision.conditions) == len(told) == len(ConditionType), seen
        assert told[ConditionType.READY].status == (seen.pod is not None and seen.pod.ready), seen
        assert not degraded.status or degraded.message, seen
        assert decision.settled == (not told[ConditionType.PROGRESSING].status), seen


def test_over_all_that_may_be_seen_a_missing_secret_leaves_pods_as_they_are() -> None:
    assert [seen for seen, decision in every_decision() if seen.missing and Apply in kinds(decision)] == []


def test_over_all_that_may_be_seen_a_refused_revision_is_not_applied_while_there_is_another() -> None:
    for seen, decision in every_decision():
        for action in decision.actions:
            if isinstance(action, Apply) and seen.remembered.refused_revision == NEW.revision:
                assert action.pod is OLD or seen.previous is None, seen


def test_a_claim_that_is_too_small_grows_and_a_cordon_of_an_earlier_resource_ends() -> None:
    up = Pod(revision=NEW.revision, ready=True)
    seen = Observed(spec=spec(), now_s=1, has_workload=True, pod=up, claim=Claim(is_smaller=True))

    cordoned = replace(seen, figures=Figures(drained=True, cordon=CORDON_REASON))
    by_a_person = replace(seen, figures=Figures(drained=True, cordon="a person's"))

    assert decide(cordoned).actions == [Apply(NEW), GrowClaim(), EndCordon()]
    assert decide(by_a_person).actions == [Apply(NEW), GrowClaim()]


def test_a_pod_that_is_never_ready_without_one_to_go_back_to_is_told_and_kept() -> None:
    begun = Remembered(revision=NEW.revision, since_s=1)
    seen = Observed(
        spec=spec(), now_s=1 + DEADLINE_S, remembered=begun, has_workload=True,
        pod=Pod(revision=NEW.revision, ready=False, problem="CrashLoopBackOff"),
    )  # fmt: skip

    decision = decide(seen)

    [degraded] = [condition for condition in decision.conditions if condition.type is ConditionType.DEGRADED]
    assert (degraded.status, degraded.reason) == (True, "NeverReady")
    assert "CrashLoopBackOff" in degraded.message
    assert decision.actions == [Apply(NEW)]


def test_settings_of_a_pod_are_read_as_they_were_written_and_named_by_their_content() -> None:
    settings = replace(NEW, tokens=SecretKey("outbox-mq", "tokens.toml"), resources={"limits": {"memory": "1Gi"}})

    assert PodSettings.from_json(settings.as_json()) == settings
    assert PodSettings.from_json(settings.as_json()).revision == settings.revision
    assert len({settings.revision, NEW.revision, OLD.revision}) == 3


# -- a world in which it is done ---------------------------------------------------------------------------------------


@dataclass
class World:
    """A cluster with one broker, as little of it as decisions are about. Each step is a second and a delivery."""

    wanted: BrokerSpec
    good: set[str]
    """Revisions whose pods become ready."""
    deleted: bool = False
    left: int = 3
    now_s: int = 100
    remembered: Remembered = field(default_factory=Remembered)
    known: dict[str, PodSettings] = field(default_factory=dict)
    applied: str | None = None
    pod: str | None = None
    up_since_s: int = 0
    has_claim: bool = False
    cordon: str | None = None
    released: bool = False

    @property
    def is_up(self) -> bool:
        return self.pod in self.good and self.now_s > self.up_since_s

    def observe(self) -> Observed:
        drained = self.left == 0
        return Observed(
            spec=self.wanted, now_s=self.now_s, deleted=self.deleted, remembered=self.remembered,
            previous=self.known.get(self.remembered.ready_revision), has_workload=self.applied is not None,
            pod=None if self.pod is None else Pod(revision=self.pod, ready=self.is_up),
            claim=Claim() if self.has_claim else None,
            figures=Figures(drained=drained, ready=self.left, cordon=self.cordon) if self.is_up else None,
        )  # fmt: skip

    def do(self, action: Action) -> None:
        match action:
            case Apply(pod):
                self.applied, self.has_claim = pod.revision, True
                self.known[pod.revision] = pod
            case BeginCordon():
                self.cordon = CORDON_REASON
            case EndCordon():
                self.cordon = None
            case DeleteWorkload():
                self.applied = None
            case DeleteClaim():
                self.has_claim = False
            case GrowClaim():
                raise AssertionError("no claim here is too small")

    def step(self) -> None:
        """What others do in a second."""
        self.now_s += 1
        if self.pod != self.applied:
            self.pod, self.up_since_s = self.applied, self.now_s
        elif self.is_up and self.cordon is not None:
            self.left = max(self.left - 1, 0)

    def round(self, *, dies_after: int | None = None) -> int:
        """Look once, as the operator does; returns how many writes there were. It dies after so many of them."""
        decision = decide(self.observe())
        writes = [lambda: setattr(self, "remembered", decision.remembered)]
        writes += [lambda action=action: self.do(action) for action in decision.actions]
        if decision.released:
            writes.append(lambda: setattr(self, "released", True))
        for write in writes[:dies_after]:
            write()
        return len(writes)


def new_world(*, good: set[str], policy: DeletionPolicy = DeletionPolicy.DRAIN) -> World:
    """A broker of the old settings that serves."""
    world = World(spec(policy=policy, pod=OLD), good=good)
    while not (world.is_up and world.remembered.ready_revision == OLD.revision):
        world.round()
        world.step()
    return world


def run_until_released(world: World, *, dies_at: int | None = None) -> int:
    """Look until the resource is gone; the operator dies at one of all its writes. Returns how many there were."""
    writes = 0
    for _ in range(ROUNDS_MAX):
        dies_after = None if dies_at is None or dies_at < writes else dies_at - writes
        writes += world.round(dies_after=dies_after)
        if world.released:
            return writes
        world.step()
    raise AssertionError("it never ended")


def drained_at(dies_at: int | None) -> World:
    """A broker after its drain, in which the operator died at one of its writes."""
    world = new_world(good={OLD.revision})
    world.deleted = True
    run_until_released(world, dies_at=dies_at)
    return world


def test_a_drain_ends_with_nothing_left_wherever_the_operator_dies() -> None:
    world = new_world(good={OLD.revision})
    world.deleted = True
    writes = run_until_released(world)

    ended = [drained_at(dies_at) for dies_at in range(writes)]

    assert writes > 4
    assert [(one.left, one.has_claim, one.pod, one.cordon) for one in ended] == [
        (0, True, None, CORDON_REASON)
    ] * writes


def test_a_drain_of_a_broker_whose_set_was_deleted_by_hand_has_it_run_again() -> None:
    world = new_world(good={OLD.revision})
    world.deleted = True
    world.applied = world.pod = None

    run_until_released(world)

    assert world.left == 0


def test_a_drain_that_is_blocked_says_so_and_goes_on_when_the_broker_is_back() -> None:
    world = new_world(good={OLD.revision})
    world.deleted, world.good = True, set()
    for _ in range(10):
        world.round()
        world.step()
    blocked = {condition.reason for condition in decide(world.observe()).conditions}

    world.good = {OLD.revision}
    run_until_released(world)

    assert "DrainBlocked" in blocked
    assert world.left == 0


@pytest.mark.parametrize(("policy", "keeps"), [(DeletionPolicy.RETAIN, True), (DeletionPolicy.DISCARD, False)])
def test_another_policy_in_the_middle_of_a_drain_ends_it(policy: DeletionPolicy, keeps: bool) -> None:
    world = new_world(good={OLD.revision})
    world.deleted, world.left = True, ROUNDS_MAX * 2
    world.round()
    world.wanted = replace(world.wanted, deletion_policy=policy)

    run_until_released(world)

    assert (world.left > 0, world.has_claim) == (True, keeps)


def test_a_change_that_works_replaces_what_was_ready() -> None:
    world = new_world(good={OLD.revision, NEW.revision})
    world.wanted = spec()

    for _ in range(4):
        world.round()
        world.step()

    assert (world.pod, world.remembered.ready_revision) == (NEW.revision, NEW.revision)


def test_a_change_that_never_works_is_taken_back_once_and_tried_again_when_the_spec_changes() -> None:
    world = new_world(good={OLD.revision})
    world.wanted = spec()
    seen = []
    for _ in range(DEADLINE_S * 3):
        world.round()
        world.step()
        seen.append(world.applied)

    assert [revision for revision, _ in itertools.groupby(seen)] == [NEW.revision, OLD.revision]
    assert (world.pod, world.is_up) == (OLD.revision, True)
    assert world.remembered.refused_revision == NEW.revision

    corrected = replace(NEW, config={})
    world.good.add(corrected.revision)
    world.wanted = spec(pod=corrected)
    for _ in range(4):
        world.round()
        world.step()

    assert (world.pod, world.remembered.refused_revision) == (corrected.revision, "")
