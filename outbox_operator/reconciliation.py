"""One look at one resource: observe what there is, decide, act. What later rounds need is written before it counts."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, assert_never

from kubernetes.utils.quantity import parse_quantity

from broker_adapter.http.admin_client import AdminClient
from outbox_core.common.errors import BrokerError, BrokerUnavailable, OutboxError
from outbox_core.runtime.event_logger import EventLogger
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
    EndCordon,
    Figures,
    GrowClaim,
    Observed,
    Pod,
    PodSettings,
    Remembered,
    ResourceCondition,
    RoundDecision,
    SecretKey,
    decide,
)
from outbox_operator.broker_objects import Names, objects_of
from outbox_operator.kubernetes_api import KubernetesApi, KubernetesRefused, Object
from outbox_operator.resource import API_VERSION, KIND, PORT, REVISION_LABEL, SETTINGS_ANNOTATION

logger: EventLogger = EventLogger(__name__)

_BROKER_TIMEOUT_MS: Final = 5_000
_MESSAGE_CHARS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What a round came to."""

    settled: bool
    released: bool
    changed: Sequence[ResourceCondition] = ()
    """Conditions that are not as they were before."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """The objects of one round."""

    resource: Object
    names: Names
    spec: BrokerSpec
    workload: Object | None
    pod: Object | None
    claim: Object | None
    revisions: Mapping[str, Object]
    """ConfigMaps, by revision."""
    token: str | None
    missing: Sequence[str]

    @property
    def admin(self) -> AdminClient | None:
        """The client of the broker; None while its pod has no address, or one that is another pod's soon."""
        if self.pod is None or "deletionTimestamp" in self.pod["metadata"]:
            return None
        status = self.pod.get("status", {})
        address = status.get("podIP")
        if address is None or status.get("phase") != "Running":
            return None
        host = f"[{address}]" if ":" in address else address
        return AdminClient(f"http://{host}:{PORT}", token=self.token, timeout_ms=_BROKER_TIMEOUT_MS)


class Reconciliation:
    """Looks at resources, each by one thread at a time; several resources at once."""

    def __init__(self, api: KubernetesApi, *, now_s: Callable[[], float] = time.time) -> None:
        self._api = api
        self._now_s = now_s

    def run(self, namespace: str, name: str) -> RoundOutcome:
        """Look at a resource once. Raises KubernetesRefused if the API server does not answer, or the resource itself
        cannot be read or written; what it refuses of the broker's objects is a condition.
        """
        resource = self._api.get(API_VERSION, KIND, namespace, name)
        if resource is None:
            return RoundOutcome(settled=True, released=True)
        found = self._find(resource)
        seen = self._observe(found)
        decision = decide(seen)
        before = _conditions(resource)
        if decision.remembered != seen.remembered:
            self._write(found, seen, decision, decision.conditions)
        refusal = self._act(found, seen, decision)
        conditions = decision.conditions if refusal is None else _with(decision.conditions, refusal)
        if not decision.released:
            self._write(found, seen, decision, conditions)
        changed = [condition for condition in conditions if _state(condition) != before.get(condition.type)]
        for condition in changed:
            logger.info(
                "condition_changed",
                extra={"namespace": namespace, "broker": name, "condition": condition.type, "status": condition.status,
                       "reason": condition.reason, "says": condition.message},
            )  # fmt: skip
        is_done = refusal is None
        return RoundOutcome(
            settled=decision.settled and is_done, released=decision.released and is_done, changed=changed
        )

    # -- observe

    def _find(self, resource: Object) -> _Found:
        metadata = resource["metadata"]
        names = Names(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
        spec = BrokerSpec.of(resource["spec"])
        workload = self._get(names, "apps/v1", "StatefulSet", names.name)
        secrets = {key: self._secret(names, key) for key in spec.secrets}
        maps = self._api.items("v1", "ConfigMap", names.namespace, names.labels)
        token = None if spec.operator_token is None else secrets[spec.operator_token]
        return _Found(
            resource=resource,
            names=names,
            spec=spec,
            workload=workload,
            pod=self._own_pod(names),
            claim=self._get(names, "v1", "PersistentVolumeClaim", names.claim),
            revisions={
                config_map["metadata"]["name"].removeprefix(f"{names.name}-"): config_map for config_map in maps
            },
            token=None if token is None else token.strip(),
            missing=[f"key {key.key} of Secret {key.name}" for key, secret in secrets.items() if secret is None],
        )

    def _get(self, names: Names, api_version: str, kind: str, name: str) -> Object | None:
        return self._api.get(api_version, kind, names.namespace, name)

    def _own_pod(self, names: Names) -> Object | None:
        """Returns the pod, unless it is one of somebody else's set: the token is not sent there."""
        pod = self._get(names, "v1", "Pod", names.pod)
        if pod is None or not names.labels.items() <= pod["metadata"].get("labels", {}).items():
            return None
        return pod

    def _secret(self, names: Names, key: SecretKey) -> str | None:
        secret = self._get(names, "v1", "Secret", key.name)
        value = None if secret is None else secret.get("data", {}).get(key.key)
        return None if value is None else base64.b64decode(value).decode()

    def _observe(self, found: _Found) -> Observed:
        remembered = _remembered(found.resource.get("status", {}))
        previous = found.revisions.get(remembered.ready_revision)
        figures, silence = _ask(found)
        return Observed(
            spec=found.spec,
            now_s=int(self._now_s()),
            deleted="deletionTimestamp" in found.resource["metadata"],
            remembered=remembered,
            previous=None if previous is None else _settings(previous),
            missing=found.missing,
            has_workload=found.workload is not None,
            pod=None if found.pod is None else _pod(found.pod),
            claim=None if found.claim is None else _claim(found.claim, found.spec),
            figures=figures,
            silence=silence,
        )

    # -- act

    def _act(self, found: _Found, seen: Observed, decision: RoundDecision) -> ResourceCondition | None:
        """Do what was decided, in order, up to what is refused, which is returned as a condition."""
        for action in decision.actions:
            try:
                self._do(found, action)
            except KubernetesRefused as error:
                if error.status is None:
                    raise
                return _refusal(f"{type(action).__name__}: {error}")
            except BrokerError as error:
                return _refusal(f"{type(action).__name__}: {error}")
        kept = {decision.remembered.revision, decision.remembered.ready_revision, seen.spec.pod.revision}
        if seen.pod is not None:
            kept.add(seen.pod.revision)
        for revision, settings in found.revisions.items():
            if revision not in kept and decision.settled:
                self._api.delete({"apiVersion": "v1", "kind": "ConfigMap"} | settings)
        return None

    def _do(self, found: _Found, action: Action) -> None:
        names = found.names
        match action:
            case Apply(pod):
                self._refuse_foreign(found)
                for wanted in objects_of(names, found.spec, pod, claimed=_claimed(found.workload)):
                    self._api.apply(wanted, force=found.workload is not None)
            case GrowClaim():
                size = {"requests": {"storage": found.spec.volume_size}}
                self._api.merge(_there(found.claim), {"spec": {"resources": size}})
            case BeginCordon():
                _admin(found).cordon(reason=CORDON_REASON)
            case EndCordon():
                _admin(found).uncordon()
            case DeleteWorkload():
                self._refuse_foreign(found)
                self._api.delete(_there(found.workload))
            case DeleteClaim():
                self._api.delete(_there(found.claim))
            case _:
                assert_never(action)

    def _refuse_foreign(self, found: _Found) -> None:
        """Raise KubernetesRefused if the set of this name is somebody else's, or an earlier resource's."""
        if found.workload is None:
            return
        owners = [owner["uid"] for owner in found.workload["metadata"].get("ownerReferences", ())]
        if found.names.uid not in owners:
            text = (
                f"there is a StatefulSet {found.names.name} already, which is not this resource's: choose another name"
            )
            raise KubernetesRefused(text, status=409)

    def _write(
        self, found: _Found, seen: Observed, decision: RoundDecision, conditions: Sequence[ResourceCondition]
    ) -> None:
        """Write the status, if it differs."""
        status = found.resource.get("status", {})
        wanted = _status(found.resource, seen, decision.remembered, conditions, now_s=self._now_s())
        if {name: part for name, part in status.items() if name in wanted} == _present(wanted):
            return
        self._api.merge(found.resource, {"status": wanted}, subresource="/status")
        found.resource["status"] = status | wanted


def _ask(found: _Found) -> tuple[Figures | None, str]:
    """Returns what the broker says, or why it says nothing."""
    client = found.admin
    if client is None:
        return None, "its pod does not run" if found.pod is not None else ""
    try:
        health, status = client.health(), client.status(limit=1)
    except OutboxError as error:
        return None, str(error)
    age_ms = status.oldest_unacked_age_ms
    return Figures(
        version=health.version or "",
        cordon=None if status.cordon is None else status.cordon.reason,
        drained=status.drained,
        ready=status.ready,
        in_flight=status.in_flight,
        scheduled=status.scheduled,
        dead=status.dead,
        oldest_at_s=None if age_ms is None else int(time.time() - age_ms / 1_000),
    ), ""


def _pod(pod: Object) -> Pod:
    status = pod.get("status", {})
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
    going = "deletionTimestamp" in pod["metadata"]
    return Pod(
        revision=pod["metadata"].get("labels", {}).get(REVISION_LABEL, ""),
        ready=conditions.get("Ready") == "True" and not going,
        problem="it is being deleted" if going else _problem(status),
    )


def _problem(status: Mapping[str, Any]) -> str:
    """Returns what the kubelet, or the scheduler, says of a pod that is not ready."""
    for container in status.get("containerStatuses", ()):
        for phase in (container.get("state", {}), container.get("lastState", {})):
            for state in ("waiting", "terminated"):
                said = phase.get(state)
                if said is not None:
                    code = f", exit status {said['exitCode']}" if "exitCode" in said else ""
                    return f"{said.get('reason', state)}{code}"
    unmet = [
        condition
        for condition in status.get("conditions", ())
        if condition["status"] != "True" and condition.get("message")
    ]
    return str(status.get("message") or (unmet[0]["message"] if unmet else ""))[:_MESSAGE_CHARS_MAX]


def _claim(claim: Object, spec: BrokerSpec) -> Claim:
    asked = claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0")
    return Claim(
        is_smaller=parse_quantity(asked) < parse_quantity(spec.volume_size),
        going="deletionTimestamp" in claim["metadata"],
    )


def _settings(config_map: Object) -> PodSettings | None:
    text = config_map["metadata"].get("annotations", {}).get(SETTINGS_ANNOTATION)
    return None if text is None else PodSettings.from_json(text)


def _claimed(workload: Object | None) -> str | None:
    """Returns the size in the template of an existing set."""
    if workload is None:
        return None
    [template] = workload["spec"]["volumeClaimTemplates"]
    return str(template["spec"]["resources"]["requests"]["storage"])


def _admin(found: _Found) -> AdminClient:
    client = found.admin
    if client is None:
        raise BrokerUnavailable("its pod has no address any more")
    return client


def _there(found: Object | None) -> Object:
    if found is None:
        raise KubernetesRefused("it is not there any more", status=404)
    return found


# -- the status --------------------------------------------------------------------------------------------------------


def _remembered(status: Mapping[str, Any]) -> Remembered:
    since = status.get("revisionTime")
    return Remembered(
        revision=status.get("revision", ""),
        since_s=0 if since is None else int(datetime.fromisoformat(since).timestamp()),
        ready_revision=status.get("readyRevision", ""),
        refused_revision=status.get("refusedRevision", ""),
        drained=status.get("drained", False),
    )


def _status(
    resource: Object, seen: Observed, remembered: Remembered, conditions: Sequence[ResourceCondition], *, now_s: float
) -> Object:
    """Returns the status; None where a field is to go."""
    generation, figures = resource["metadata"]["generation"], seen.figures
    before = {condition["type"]: condition for condition in resource.get("status", {}).get("conditions", ())}
    status: Object = {
        "observedGeneration": generation,
        "revision": remembered.revision or None,
        "revisionTime": _time(remembered.since_s) if remembered.since_s else None,
        "readyRevision": remembered.ready_revision or None,
        "refusedRevision": remembered.refused_revision or None,
        "drained": remembered.drained or None,
        "conditions": [
            _condition(condition, before.get(condition.type), generation, now_s=now_s) for condition in conditions
        ],
    }
    if figures is not None:
        status |= {
            "version": figures.version or None,
            "backlog": figures.ready + figures.in_flight,
            "inFlight": figures.in_flight,
            "scheduled": figures.scheduled,
            "deadLetters": figures.dead,
            "oldestMessageTime": None if figures.oldest_at_s is None else _time(figures.oldest_at_s),
        }
    return status


def _condition(
    condition: ResourceCondition, before: Mapping[str, Any] | None, generation: int, *, now_s: float
) -> Object:
    status = str(condition.status)
    since = before["lastTransitionTime"] if before is not None and before["status"] == status else _time(int(now_s))
    return {
        "type": condition.type, "status": status, "reason": condition.reason, "message": condition.message,
        "lastTransitionTime": since, "observedGeneration": generation,
    }  # fmt: skip


def _present(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in status.items() if part is not None}


def _conditions(resource: Object) -> dict[str, tuple[str, str]]:
    return {
        condition["type"]: (condition["status"], condition["reason"])
        for condition in resource.get("status", {}).get("conditions", ())
    }


def _state(condition: ResourceCondition) -> tuple[str, str]:
    return str(condition.status), condition.reason


def _refusal(text: str) -> ResourceCondition:
    return ResourceCondition(
        type=ConditionType.DEGRADED, status=True, reason="Refused", message=text[:_MESSAGE_CHARS_MAX]
    )


def _with(conditions: Sequence[ResourceCondition], instead: ResourceCondition) -> list[ResourceCondition]:
    return [instead if condition.type is instead.type else condition for condition in conditions]


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
