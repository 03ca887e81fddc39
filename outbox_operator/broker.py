"""What is to be done for one OutboxBroker, decided over what was observed of it: its creation, a rollout and the way
back, a drain before the end. Pure.

A pod's settings are a revision, named by their content. A revision that becomes ready is the one that the broker goes
back to: where the next one is not ready within `rolloutDeadlineSeconds`, it is refused, named in the status, and not
tried again until the resource changes.

Each round decides anew, and an action may be repeated: whatever killed the operator between two of them, the next round
goes on. The one thing that later rounds cannot see is kept in the status, and written before what depends on it is
done: that the broker was drained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, assert_never

CORDON_REASON: Final = "its OutboxBroker is deleted"
"""By this a new operator, or a broker on a kept volume, knows that the cordon is the operator's own."""
_REVISION_CHARS: Final = 10


class DeletionPolicy(StrEnum):
    """What becomes of undelivered messages when the resource is deleted."""

    DRAIN = "Drain"
    """Nothing new is taken, and the pod goes when nothing is left to deliver. The volume stays."""
    RETAIN = "Retain"
    """The pod goes at once. The volume stays, with all that is in it, for a resource of the same name."""
    DISCARD = "Discard"
    """The pod and its volume go at once, with all that is in it."""


class ConditionType(StrEnum):
    """The conditions of a resource."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key of a Secret in the resource's namespace."""

    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What the broker's pod is made of. Another value is another pod."""

    image: str
    config: Mapping[str, str] = field(default_factory=dict)
    """Of [broker], by name, in the form that the environment has."""
    tokens: SecretKey | None = None
    """None: it serves everybody."""
    resources: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        """The text that from_json() reads, which differs where the settings do."""
        tokens = None if self.tokens is None else [self.tokens.name, self.tokens.key]
        parts = {"config": self.config, "image": self.image, "resources": self.resources, "tokens": tokens}
        return json.dumps(parts, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PodSettings:
        """Returns the settings of a revision that was rolled out before."""
        parts = json.loads(text)
        tokens = None if parts["tokens"] is None else SecretKey(*parts["tokens"])
        return cls(image=parts["image"], config=parts["config"], tokens=tokens, resources=parts["resources"])

    @property
    def revision(self) -> str:
        """The name of these settings."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()[:_REVISION_CHARS]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSpec:
    """The resource's spec, with the defaults that the API server has put in."""

    pod: PodSettings
    volume_size: str
    storage_class: str | None = None
    operator_token: SecretKey | None = None
    deletion_policy: DeletionPolicy = DeletionPolicy.DRAIN
    rollout_deadline_s: int = 600

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> BrokerSpec:
        """Returns what a resource asks for."""
        auth, volume = spec.get("auth", {}), spec["volume"]
        return cls(
            pod=PodSettings(
                image=spec["image"],
                config=dict(spec.get("config", {})),
                tokens=_secret_key(auth.get("tokens")),
                resources=spec.get("resources", {}),
            ),
            volume_size=volume["size"],
            storage_class=volume.get("storageClassName"),
            operator_token=_secret_key(auth.get("operatorToken")),
            deletion_policy=DeletionPolicy(spec.get("deletionPolicy", DeletionPolicy.DRAIN)),
            rollout_deadline_s=spec.get("rolloutDeadlineSeconds", 600),
        )

    @property
    def secrets(self) -> Sequence[SecretKey]:
        """The keys of Secrets that it names."""
        return [key for key in (self.pod.tokens, self.operator_token) if key is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What earlier rounds have left in the status."""

    revision: str = ""
    """That is rolled out, or was."""
    since_s: int = 0
    """When that was begun, in seconds of the epoch."""
    ready_revision: str = ""
    """The last one that became ready."""
    refused_revision: str = ""
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The broker's pod. `problem` is what the kubelet says of one that is not ready."""

    revision: str
    ready: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of its volume."""

    is_smaller: bool = False
    """Than the resource asks for."""
    going: bool = False
    """It is being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the broker itself says."""

    version: str = ""
    cordon: str | None = None
    """Why it takes no new messages; None: it takes them."""
    drained: bool
    ready: int = 0
    in_flight: int = 0
    scheduled: int = 0
    dead: int = 0
    oldest_at_s: int | None = None

    @property
    def left(self) -> str:
        """What is left, for people."""
        return f"{self.ready} ready, {self.in_flight} in flight, {self.scheduled} scheduled; {self.dead} dead letters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that a decision is made of."""

    spec: BrokerSpec
    now_s: int
    deleted: bool = False
    """Its deletion is asked for."""
    remembered: Remembered = Remembered()
    previous: PodSettings | None = None
    """Those of the revision that became ready last, where they are still known."""
    missing: Sequence[str] = ()
    """Keys of Secrets that are not there."""
    has_workload: bool = False
    pod: Pod | None = None
    claim: Claim | None = None
    figures: Figures | None = None
    silence: str = ""
    """Why there are no figures."""


# -- what is to be done ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apply:
    """Have the objects of the broker be as these settings say; make them where they are not there."""

    pod: PodSettings


@dataclass(frozen=True, slots=True)
class GrowClaim:
    """Have the claim ask for as much as the resource does."""


@dataclass(frozen=True, slots=True)
class BeginCordon:
    """Have the broker take no new messages."""


@dataclass(frozen=True, slots=True)
class EndCordon:
    """Have the broker take new messages again."""


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    """Delete the StatefulSet, and its pod with it."""


@dataclass(frozen=True, slots=True)
class DeleteClaim:
    """Delete the claim, and its volume with it."""


Action = Apply | GrowClaim | BeginCordon | EndCordon | DeleteWorkload | DeleteClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCondition:
    """One condition of the resource."""

    type: ConditionType
    status: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """What is to be done, in this order, once the status says `remembered`."""

    actions: Sequence[Action]
    remembered: Remembered
    conditions: Sequence[ResourceCondition]
    settled: bool
    """Nothing is under way: there is time until the next look."""
    released: bool = False
    """The resource may go."""


def decide(seen: Observed) -> RoundDecision:
    """Returns what is to be done now."""
    if not seen.deleted:
        return _serve(seen)
    match seen.spec.deletion_policy:
        case DeletionPolicy.DRAIN:
            return _drain(seen)
        case DeletionPolicy.RETAIN:
            return _end(seen, "Stopping", keeps_claim=True)
        case DeletionPolicy.DISCARD:
            return _end(seen, "Discarding", keeps_claim=False)
        case _:
            assert_never(seen.spec.deletion_policy)


# -- while it is wanted ------------------------------------------------------------------------------------------------


def _serve(seen: Observed) -> RoundDecision:
    rollout = _roll_out(seen)
    actions = list(rollout.actions)
    if seen.figures is not None and seen.figures.cordon == CORDON_REASON:  # on a volume that an earlier one has left
        actions.append(EndCordon())
    return replace(rollout, actions=actions)


def _roll_out(seen: Observed) -> RoundDecision:
    """Have the pod be as the spec says, or go back to what was ready before."""
    wanted, remembered = seen.spec.pod, seen.remembered
    if seen.missing:
        # Neither is a pod made that could not start, nor one replaced that serves.
        keys = ", ".join(seen.missing)
        return _decision(
            seen, [], remembered, Degradation("SecretMissing", f"create {keys}: running pods stay as they are")
        )
    back = seen.previous if seen.previous is not None and seen.previous.revision != wanted.revision else None
    is_refused = back is not None and remembered.refused_revision == wanted.revision
    if not is_refused and remembered.revision != wanted.revision:
        remembered = replace(remembered, revision=wanted.revision, since_s=seen.now_s)
    is_up = seen.pod is not None and seen.pod.ready and seen.pod.revision == wanted.revision
    is_late = seen.now_s - remembered.since_s >= seen.spec.rollout_deadline_s
    if is_up:
        remembered = replace(remembered, ready_revision=wanted.revision, refused_revision="")
    elif back is not None and not is_refused and is_late:
        is_refused = True
        remembered = replace(remembered, refused_revision=wanted.revision)
    if is_refused and back is not None:
        remembered = replace(remembered, revision=back.revision)
    pod = back if is_refused and back is not None else wanted
    actions: list[Action] = [Apply(pod)]
    if seen.claim is not None and seen.claim.is_smaller and not seen.claim.going:
        actions.append(GrowClaim())
    return _decision(seen, actions, remembered, _problem(seen, pod, is_late=is_late))


@dataclass(frozen=True, slots=True)
class Degradation:
    """Why the resource is degraded; the message names the cure."""

    reason: str
    message: str


def _problem(seen: Observed, pod: PodSettings, *, is_late: bool) -> Degradation | None:
    wanted, says = seen.spec.pod, "" if seen.pod is None or not seen.pod.problem else f" ({seen.pod.problem})"
    if pod.revision != wanted.revision:
        return Degradation(
            "RevisionRefused",
            f"revision {wanted.revision} was not ready within {seen.spec.rollout_deadline_s} s, and {pod.revision} was "
            "taken back; its pod's log says why: correct the spec",
        )
    if _is_up(seen, pod.revision):
        return None
    if seen.remembered.ready_revision == pod.revision:
        return Degradation("PodNotReady", f"the pod is not ready{says}; look at its log and its node")
    if is_late:
        return Degradation("NeverReady", f"the pod was never ready{says}; look at its log, and correct the spec")
    return None


def _is_up(seen: Observed, revision: str) -> bool:
    return seen.pod is not None and seen.pod.ready and seen.pod.revision == revision


def _decision(
    seen: Observed, actions: Sequence[Action], remembered: Remembered, problem: Degradation | None
) -> RoundDecision:
    """A round's decision on a broker that serves."""
    applied = next((action.pod.revision for action in actions if isinstance(action, Apply)), remembered.revision)
    is_up = _is_up(seen, applied)
    if problem is None and is_up and seen.figures is None and seen.silence:
        problem = Degradation("NoFigures", seen.silence)
    progressing = not is_up and problem is None
    ready = seen.pod is not None and seen.pod.ready
    return RoundDecision(
        actions=actions,
        remembered=remembered,
        conditions=[
            _ready(seen, ready=ready),
            ResourceCondition(
                type=ConditionType.PROGRESSING,
                status=progressing,
                reason="RollingOut" if progressing else "Settled" if is_up else "Stuck",
                message=f"revision {applied} is rolled out" if progressing else "",
            ),
            _degraded(problem),
        ],
        settled=not progressing,
    )


def _ready(seen: Observed, *, ready: bool) -> ResourceCondition:
    says = "" if seen.pod is None else seen.pod.problem
    reason = "Serving" if ready else "NoPod" if seen.pod is None else "PodNotReady"
    return ResourceCondition(type=ConditionType.READY, status=ready, reason=reason, message="" if ready else says)


def _degraded(problem: Degradation | None) -> ResourceCondition:
    if problem is None:
        return ResourceCondition(type=ConditionType.DEGRADED, status=False, reason="AsWanted")
    return ResourceCondition(type=ConditionType.DEGRADED, status=True, reason=problem.reason, message=problem.message)


# -- when it is not wanted any more ------------------------------------------------------------------------------------


def _drain(seen: Observed) -> RoundDecision:
    """Cordon the broker and wait until nothing is left to deliver; then end it."""
    # It never had a volume, or the volume is deleted, as with all of its namespace: there is nothing to drain.
    if seen.claim is None or seen.claim.going:
        return _end(seen, "Stopping", keeps_claim=True)
    figures = seen.figures
    if figures is None:
        return _end(seen, "Drained", keeps_claim=True) if seen.remembered.drained else _reach(seen)
    is_done = figures.cordon is not None and figures.drained
    if is_done and seen.remembered.drained:
        return _end(seen, "Drained", keeps_claim=True)
    # The next round ends it, which finds in the status that it was drained: once its pod is gone, nobody can ask.
    actions: list[Action] = [] if figures.cordon is not None else [BeginCordon()]
    return _ending(seen, actions, "Draining", f"left: {figures.left}", drained=is_done)


def _reach(seen: Observed) -> RoundDecision:
    """Have a broker that cannot be asked run again: what it has is on its volume."""
    rollout = _roll_out(seen)
    problem = Degradation(
        "DrainBlocked",
        f"the broker cannot be asked what it still has: {seen.silence or 'it has no pod'}. Nothing is deleted: have it "
        "run, or set deletionPolicy to Retain, which keeps the volume, or Discard, which does not",
    )
    ending = _ending(seen, rollout.actions, "Draining", "the broker is not reached", problem=problem)
    return replace(ending, remembered=rollout.remembered)


def _end(seen: Observed, reason: str, *, keeps_claim: bool) -> RoundDecision:
    """Delete the pod, and unless it is kept the claim, and release the resource when the pod is gone."""
    actions: list[Action] = [DeleteWorkload()] if seen.has_workload else []
    if not keeps_claim and seen.claim is not None and not seen.claim.going:
        actions.append(DeleteClaim())
    is_gone = not seen.has_workload and seen.pod is None and not actions
    ending = _ending(seen, actions, reason, "the pod ends", drained=seen.remembered.drained)
    return replace(ending, released=is_gone)


def _ending(
    seen: Observed, actions: Sequence[Action], reason: str, message: str, *,
    drained: bool = False, problem: Degradation | None = None,
) -> RoundDecision:  # fmt: skip
    return RoundDecision(
        actions=actions,
        remembered=replace(seen.remembered, drained=drained),
        conditions=[
            _ready(seen, ready=seen.pod is not None and seen.pod.ready),
            ResourceCondition(type=ConditionType.PROGRESSING, status=True, reason=reason, message=message),
            _degraded(problem),
        ],
        settled=False,
    )


def _secret_key(reference: Mapping[str, str] | None) -> SecretKey | None:
    return None if reference is None else SecretKey(reference["name"], reference["key"])
