"""The cluster that tests run on, an operator of it, and a broker that is kept by one. Not fixtures."""

from __future__ import annotations

import hashlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import requests
import yaml

from broker_adapter.http.admin_client import AdminClient
from outbox_core import Broker, connect
from outbox_operator.kubernetes_api import KubernetesApi
from outbox_operator.manifests import manifests_text
from outbox_operator.resource import API_VERSION, KIND, MANAGER, PLURAL
from tests.engines.kubernetes.api_requests import APPLY, MERGE, ApiRequests, Refused
from tests.fixtures.local_server import guarded, servers_folder

DEADLINE_S = 180.0
SYSTEM = "outbox-system"
"""Of the operators that have rights in the test's namespace alone."""
EVERYWHERE = "outbox-everywhere"
"""Of those that have them in all."""
IMAGE = "outbox-mq:0.1.0"
MODULE = Path(__file__).with_name("controlplane")
_PLURALS = {
    "Namespace": "/api/v1|namespaces",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1|customresourcedefinitions",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1|clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1|clusterrolebindings",
    "ServiceAccount": "/api/v1|serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1|roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1|rolebindings",
    "StorageClass": "/apis/storage.k8s.io/v1|storageclasses",
    "Deployment": "/apis/apps/v1|deployments",
}
Seen = TypeVar("Seen")


def controlplane_binary() -> Path:
    """What `./scripts/test --engines` has built."""
    source = b"".join((MODULE / name).read_bytes() for name in ("go.mod", "go.sum", "main.go"))
    folder = servers_folder().parent / "engines" / f"kubernetes-{hashlib.sha256(source).hexdigest()[:16]}"
    binary = folder / "controlplane"
    if not binary.is_file():
        pytest.fail("the control plane is not there. Run ./scripts/test --engines kubernetes", pytrace=False)
    return binary


def eventually(look: Callable[[], Seen], *, what: str, within_s: float = DEADLINE_S) -> Seen:
    """Wait until something is so; returns what was seen."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not seen in time: {what}"
        time.sleep(0.01)
    return seen


def tokens_of(*tokens: str) -> str:
    """The file of a broker that these may do everything at."""
    roles = 'roles = ["publish", "consume", "read", "admin"]\ntopics = ["*"]\n'
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    return "".join(f'[[tokens]]\nname = "all"\nsha256 = "{digest}"\n{roles}' for digest in digests)


class Cluster:
    """The API server, asked as its administrator."""

    def __init__(self, folder: Path, server: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.kubeconfig = folder / "controlplane" / "kubeconfig"
        self._server = server
        self.api: KubernetesApi
        self.requests: ApiRequests
        self.token = secrets.token_urlsafe(16)
        """Of the operator, and of a test that publishes and consumes."""

    def wait_until_ready(self) -> None:
        """Wait until all of the control plane answers."""
        ready = self.folder / "controlplane" / "ready"
        eventually(lambda: ready.exists() or self._server.poll() is not None, what="a control plane that is ready")
        assert self._server.poll() is None, (self.folder / "controlplane.log").read_text()[-4_000:]
        self.api, self.requests = KubernetesApi.connected(self.kubeconfig), ApiRequests(self.kubeconfig)

    def apply_manifests(self, lease_namespace: str, *namespaces: str) -> None:
        """Apply what `outbox operator manifests` prints, every field checked by the server."""
        text = manifests_text(lease_namespace=lease_namespace, namespaces=namespaces, image=IMAGE)
        for wanted in yaml.safe_load_all(text):
            if wanted["kind"] == "Deployment":
                wanted["spec"]["replicas"] = 0  # the tests start operators themselves, and kill them
            self.apply(wanted)
        eventually(self._knows_the_resource, what="a definition that is established")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The API server answers nothing within the block."""
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def apply(self, wanted: dict[str, Any]) -> None:
        """Have an object be so."""
        (group, _, plural), metadata = _PLURALS[wanted["kind"]].partition("|"), wanted["metadata"]
        folder = f"{group}/namespaces/{metadata['namespace']}" if "namespace" in metadata else group
        self.requests.ask("PATCH", f"{folder}/{plural}/{metadata['name']}", wanted, kind=APPLY)

    def _knows_the_resource(self) -> bool:
        try:
            return bool(self.requests.ask("GET", f"/apis/{API_VERSION}/{PLURAL}"))
        except Refused:
            return False

    def make_namespace(self, name: str) -> None:
        """A namespace with the Secret of a broker, and the rights of the operators of SYSTEM."""
        self.requests.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        self.apply_manifests(SYSTEM, name)
        self.make_secret(name, "outbox-mq", {"tokens.toml": tokens_of(self.token), "operator-token": self.token})

    def make_secret(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Make a Secret."""
        secret = {"metadata": {"name": name}, "stringData": data}
        self.requests.ask("POST", f"/api/v1/namespaces/{namespace}/secrets", secret)

    def change_secret(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Change these keys of a Secret."""
        path = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self.requests.ask("PATCH", path, {"stringData": data}, kind=MERGE)

    def kubeconfig_of_operator(self, folder: Path, *, lease_namespace: str = SYSTEM) -> Path:
        """A kubeconfig with a token of the operator's ServiceAccount."""
        path = f"/api/v1/namespaces/{lease_namespace}/serviceaccounts/{MANAGER}/token"
        answer = self.requests.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        mine = yaml.safe_load(self.kubeconfig.read_text())
        mine["users"] = [{"name": "administrator", "user": {"token": answer["status"]["token"]}}]
        written = folder / "kubeconfig"
        written.write_text(yaml.safe_dump(mine))
        return written

    # -- resources

    def create(self, namespace: str, name: str, **spec: Any) -> KeptBroker:
        """Make a resource; `spec` is added to what each has."""
        secret = {"name": "outbox-mq"}
        usual = {
            "image": IMAGE,
            "volume": {"size": "1Gi"},
            "auth": {"tokens": secret | {"key": "tokens.toml"}, "operatorToken": secret | {"key": "operator-token"}},
        }
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": usual | spec}
        self.requests.ask("POST", f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", body)
        return KeptBroker(self, namespace, name)


class KeptBroker:
    """A resource, and the broker behind it."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster = cluster
        self.namespace, self.name = namespace, name
        self.token = cluster.token

    @property
    def path(self) -> str:
        """Where the resource is at the API server."""
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/{PLURAL}/{self.name}"

    def resource(self) -> dict[str, Any] | None:
        """The resource; None if it is gone."""
        return self._cluster.api.get(API_VERSION, KIND, self.namespace, self.name)

    def found(self, api_version: str, kind: str, name: str = "") -> dict[str, Any] | None:
        """An object of it; by default one of its own name."""
        return self._cluster.api.get(api_version, kind, self.namespace, name or self.name)

    @property
    def status(self) -> dict[str, Any]:
        """The resource's status."""
        resource = self.resource()
        assert resource is not None
        found: dict[str, Any] = resource.get("status", {})
        return found

    def condition(self, name: str) -> dict[str, Any]:
        """One condition; empty if it is not told yet."""
        resource = self.resource() or {}
        conditions = resource.get("status", {}).get("conditions", ())
        return next((one for one in conditions if one["type"] == name), {})

    def wait_until(self, condition: str, status: str, reason: str | None = None) -> dict[str, Any]:
        """Wait until a condition has this status, and reason, of the newest spec; returns it."""

        def look() -> dict[str, Any] | None:
            seen, resource = self.condition(condition), self.resource()
            is_newest = resource is not None and seen.get("observedGeneration") == resource["metadata"]["generation"]
            is_so = is_newest and seen["status"] == status and reason in {None, seen["reason"]}
            return seen if is_so else None

        seen = eventually(look, what=f"{condition} is {status}, {reason}")
        assert seen is not None
        return seen

    def wait_until_ready(self) -> None:
        """Wait until the pod of the newest spec is ready."""
        self.wait_until("Progressing", "False", "Settled")
        self.wait_until("Ready", "True")

    def change(self, **spec: Any) -> None:
        """Change fields of its spec."""
        self._cluster.requests.ask("PATCH", self.path, {"spec": spec}, kind=MERGE)

    def delete(self) -> None:
        """Ask for its deletion."""
        self._cluster.requests.ask("DELETE", self.path)

    def free(self) -> None:
        """Take its finalizers away, as a person does where no operator will."""
        self._cluster.requests.ask("PATCH", self.path, {"metadata": {"finalizers": []}}, kind=MERGE)

    def wait_until_gone(self) -> None:
        """Wait until the resource is not there any more."""
        eventually(lambda: self.resource() is None, what="a resource that is gone")

    def pod(self) -> dict[str, Any] | None:
        """Its pod."""
        return self.found("v1", "Pod", f"{self.name}-0")

    def ready_pod(self) -> str:
        """The uid of its pod, if that is ready."""
        pod = self.pod() or {"metadata": {"uid": ""}}
        is_ready = {"type": "Ready", "status": "True"}
        conditions = pod.get("status", {}).get("conditions", ())
        return str(pod["metadata"]["uid"]) if any(is_ready.items() <= one.items() for one in conditions) else ""

    @property
    def url(self) -> str:
        """Where its pod is reached now; empty while it has none with an address."""
        address = (self.pod() or {}).get("status", {}).get("podIP")
        return f"http://{address}:7788" if address else ""

    def evict(self) -> None:
        """Evict its pod, as `kubectl drain` of its node does. Raises Refused where its budget does not let it go."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": f"{self.name}-0"}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}-0/eviction"
        self._cluster.requests.ask("POST", path, eviction)

    def admin(self) -> AdminClient:
        """A client of its administration."""
        return AdminClient(self.url, token=self.token)

    def client(self, url: str = "") -> Broker:
        """A client that publishes and consumes, of its pod as it is, or was."""
        return connect(url or self.url, token=self.token, timeout_ms=30_000)


class StartOperator(Protocol):
    """Starts an operator of the test's namespace, or of all, and waits until it leads, or does not wait."""

    def __call__(self, *, leads: bool = True, everywhere: bool = False) -> Operator: ...


class Operator:
    """`outbox operator run`, to be killed and started again."""

    def __init__(self, kubeconfig: Path, *namespaces: str, lease_namespace: str, log: Path) -> None:
        self._log = log
        command = [
            sys.executable, "-m", "outbox", "operator", "run", "--kubeconfig", str(kubeconfig),
            "--lease-namespace", lease_namespace, "--interval", "500ms", "--busy-interval", "100ms",
            "--log-format", "json", "--port", "0", *(f"--namespace={namespace}" for namespace in namespaces),
        ]  # fmt: skip
        with log.open("wb") as stream:
            self._process = subprocess.Popen(guarded(command), stdout=stream, stderr=stream)

    def wait_until_leading(self) -> None:
        """Wait until it has the lease, which a killed one holds for a while."""
        self._logged("leading")

    def page(self, path: str) -> str:
        """A page of its status."""
        port = self._logged("status_page")["port"]
        return requests.get(f"http://127.0.0.1:{port}{path}", timeout=60).text

    def kill9(self) -> None:
        """End it without warning."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def end(self) -> int:
        """End it in order, which gives its lease up; the exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait until it ends; the exit status."""
        return self._process.wait(DEADLINE_S)

    def end_if_it_runs(self) -> None:
        """End it in order, unless it has ended: so the next one gets the lease at once."""
        if self._process.poll() is None:
            self.end()

    def _logged(self, event: str) -> dict[str, Any]:
        """Wait for a line of its log."""

        def look() -> list[dict[str, Any]]:
            assert self._process.poll() is None, self._log.read_text()
            written = [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line[-1] == "\n"]
            return [line for line in written if line["event"] == event]

        return eventually(look, what=f"{event} in the log of an operator")[0]
