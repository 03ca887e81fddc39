"""A kubelet whose pods are local processes: a program of its own, which ends with whoever started it.

It registers a node, binds a folder to each claim of a volume, runs the container of each pod that is bound to its node
as a process, asks its probes, and reports what becomes of it. Nothing is isolated. So each start of a pod has a
loopback address of its own, which stands for 0.0.0.0 in its arguments, and a folder stands for each mounted path.

A probe is asked ten times a second and fails for good once it has failed for its period times its threshold: tests do
not wait for periods. There are one container a pod, no init containers, hooks, exec probes and mounted tokens.
"""

from __future__ import annotations

import base64
import itertools
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from urllib3.exceptions import HTTPError

from tests.engines.kubernetes.api_requests import MERGE, ApiRequests, Object, Refused
from tests.fixtures.local_server import guarded

NODE = "process"
TURN_SECONDS = 0.1
PAUSE_SECONDS_MAX = 4
"""Before a container that ended is started again; doubled from a half each time."""


class Pod:
    """One pod, which is turned by the one loop of the kubelet."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self._kubelet = kubelet
        self._api = kubelet.api
        self.object = pod
        self._namespace, self._name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        [self._container] = pod["spec"]["containers"]
        self._folder = kubelet.folder / "pods" / pod["metadata"]["uid"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = "ContainerCreating"
        self._starts, self._next_start_s, self._started_at = 0, 0.0, ""
        self._exit_code: int | None = None
        self._is_up = self._is_ready = False
        self._failing_since_s: dict[str, float] = {}
        self._kill_at_s: float | None = None
        self._reported: Object | None = None

    @property
    def path(self) -> str:
        """Where it is at the API server."""
        return f"/api/v1/namespaces/{self._namespace}/pods/{self._name}"

    def turn(self) -> bool:
        """Look at it once; returns whether it is still there."""
        if self._kill_at_s is not None:
            return self._end()
        if self._process is None and time.monotonic() >= self._next_start_s:
            self._start()
        if self._process is not None:
            self._look()
        self._report()
        return True

    def stop(self, grace_seconds: int) -> None:
        """Have it end: at once by SIGTERM, after a while by SIGKILL."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + grace_seconds
            self._is_ready = False
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)

    def _end(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            if time.monotonic() < (self._kill_at_s or 0):
                self._report()
                return True
            self._process.kill()
            self._process.wait()
        self._kubelet.remove(self)
        return False

    def _start(self) -> None:
        try:
            arguments, env = self._command()
        except Refused as error:  # what it mounts is not there yet
            self._waiting, self._next_start_s = f"CreateContainerConfigError: {error}", time.monotonic() + 0.5
            return
        with (self._kubelet.folder / f"{self._namespace}_{self._name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                guarded(arguments), env=env, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._starts, self._started_at = self._starts + 1, _now()
        self._is_up = self._is_ready = False
        self._failing_since_s.clear()

    def _command(self) -> tuple[list[str], dict[str, str]]:
        self._address = self._kubelet.next_address()
        env = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH") if name in os.environ}
        for source in self._container.get("envFrom", ()):
            env |= self._get("configmaps", source["configMapRef"]["name"]).get("data", {})
        folders = {volume["name"]: self._volume(volume) for volume in self.object["spec"].get("volumes", ())}
        paths = {mount["mountPath"]: folders[mount["name"]] for mount in self._container.get("volumeMounts", ())}
        paths["0.0.0.0"] = self._address
        words = [*self._kubelet.programs[self._container["command"][0]], *self._container.get("args", ())]
        for path, here in paths.items():
            words = [word.replace(path, str(here)) for word in words]
        return words, env

    def _get(self, plural: str, name: str) -> Object:
        return self._api.ask("GET", f"/api/v1/namespaces/{self._namespace}/{plural}/{name}")

    def _volume(self, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            claim = self._get("persistentvolumeclaims", volume["persistentVolumeClaim"]["claimName"])
            found = self._api.ask("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return Path(found["spec"]["hostPath"]["path"])
        folder = self._folder / volume["name"]
        folder.mkdir(exist_ok=True)
        self._write_secret(volume, self._get("secrets", volume["secret"]["secretName"]))
        return folder

    def take_secret(self, secret: Object) -> None:
        """Renew the files of a Secret that has changed."""
        for volume in self.object["spec"].get("volumes", ()):
            mounted = (self._namespace, volume.get("secret", {}).get("secretName"))
            if mounted == (secret["metadata"]["namespace"], secret["metadata"]["name"]) and self._starts:
                self._write_secret(volume, secret)

    def _write_secret(self, volume: Object, secret: Object) -> None:
        """Replace each file whole, as the kubelet replaces all of them."""
        for item in volume["secret"]["items"]:
            file = self._folder / volume["name"] / item["path"]
            unfinished = file.with_suffix(".new")
            unfinished.write_bytes(base64.b64decode(secret["data"][item["key"]]))
            unfinished.replace(file)

    def _look(self) -> None:
        assert self._process is not None
        self._exit_code = self._process.poll()
        if self._exit_code is None:
            self._is_up = self._is_up or self._answers("startupProbe") is True
            if self._is_up:
                self._is_ready = self._answers("readinessProbe") or (
                    self._is_ready and not self._failed("readinessProbe")
                )
                self._answers("livenessProbe")
            if self._failed("livenessProbe") or self._failed("startupProbe"):
                self._process.kill()
            return
        self._process, self._is_ready, self._waiting = None, False, "CrashLoopBackOff"
        self._next_start_s = time.monotonic() + min(2 ** (self._starts - 2), PAUSE_SECONDS_MAX)

    def _answers(self, probe: str) -> bool:
        get = self._container[probe]["httpGet"]
        [port] = [one["containerPort"] for one in self._container["ports"] if one["name"] == get["port"]]
        try:
            urllib.request.urlopen(f"http://{self._address}:{port}{get['path']}", timeout=3).close()
        except OSError:
            self._failing_since_s.setdefault(probe, time.monotonic())
            return False
        self._failing_since_s.pop(probe, None)
        return True

    def _failed(self, probe: str) -> bool:
        since_s, limits = self._failing_since_s.get(probe), self._container[probe]
        return since_s is not None and time.monotonic() - since_s > limits["periodSeconds"] * limits["failureThreshold"]

    def _report(self) -> None:
        is_running = self._process is not None
        state: Object = (
            {"running": {"startedAt": self._started_at}} if is_running else {"waiting": {"reason": self._waiting}}
        )
        status = {
            "phase": "Running" if self._starts else "Pending",
            "podIP": self._address or None,
            "podIPs": [{"ip": self._address}] if self._address else None,
            "conditions": [
                {"type": name, "status": str(self._is_ready), "lastTransitionTime": _now()}
                for name in ("ContainersReady", "Ready")
            ],
            "containerStatuses": [
                {
                    "name": self._container["name"], "image": self._container["image"], "imageID": "process",
                    "ready": self._is_ready, "started": self._is_up, "restartCount": max(self._starts - 1, 0),
                    "state": state, **self._last_state(),
                }
            ],
        }  # fmt: skip
        brief = {**status, "conditions": self._is_ready}
        if brief != self._reported:
            body = {"metadata": {"uid": self.object["metadata"]["uid"]}, "status": status}
            self._kubelet.ask("PATCH", f"{self.path}/status", body, kind=MERGE)
            self._reported = brief

    def _last_state(self) -> Object:
        if self._exit_code is None:
            return {}
        ended = {"exitCode": max(self._exit_code, 0), "reason": "Error", "startedAt": self._started_at}
        return {"lastState": {"terminated": ended | {"finishedAt": self._started_at}}}


class Kubelet:
    """The loop that turns pods, and the threads that wait for events."""

    def __init__(self, api: ApiRequests, folder: Path) -> None:
        self.api = api
        self.folder = folder
        self.programs = {"outbox": [sys.executable, "-m", "outbox"]}
        # Two runs on one machine must not meet: the pods of one would answer the probes and clients of the other.
        self._network = f"127.{secrets.randbelow(250) + 2}"
        self._addresses = itertools.count(1)
        self._events: queue.SimpleQueue[tuple[str, Object]] = queue.SimpleQueue()
        self._pods: dict[str, Pod] = {}

    def run(self) -> None:
        """Turn, for ever."""
        self._register()
        for plural in ("persistentvolumeclaims", "pods", "secrets"):
            threading.Thread(target=self._follow, args=(f"/api/v1/{plural}",), daemon=True).start()
        while True:
            try:
                self._take(*self._events.get(timeout=TURN_SECONDS))
            except queue.Empty:
                self._pods = {uid: pod for uid, pod in self._pods.items() if pod.turn()}

    def next_address(self) -> str:
        """An address that no pod had before."""
        number = next(self._addresses)
        return f"{self._network}.{number // 250}.{number % 250 + 1}"

    def ask(self, method: str, path: str, body: Object, **how: str) -> None:
        """Send a request about something that may be gone, or be another one of its name."""
        try:
            self.api.ask(method, path, body, **how)
        except Refused as error:
            if error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                raise

    def remove(self, pod: Pod) -> None:
        """Say that a pod has ended."""
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.object["metadata"]["uid"]}}
        self.ask("DELETE", pod.path, options)

    def _register(self) -> None:
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
        room = {"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "1Ti"}
        ready = {"type": "Ready", "status": "True", "reason": "ProcessKubelet", "lastTransitionTime": _now()}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        status = {"capacity": room, "allocatable": room, "conditions": [ready], "addresses": addresses}
        self.ask("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status}, kind=MERGE)

    def _follow(self, path: str) -> None:
        while True:  # the server ends a watch after a while
            try:
                for event, found in self.api.follow(path):
                    self._events.put((event, found))
            except (OSError, HTTPError) as error:
                print(f"watch: {error}", file=sys.stderr, flush=True)

    def _take(self, event: str, found: Object) -> None:
        if found["kind"] == "PersistentVolumeClaim":
            if event != "DELETED" and not found["spec"].get("volumeName"):
                self._provide(found)
            return
        if found["kind"] == "Secret":
            if event == "MODIFIED":
                for pod in self._pods.values():
                    pod.take_secret(found)
            return
        uid, pod = found["metadata"]["uid"], self._pods.get(found["metadata"]["uid"])
        if event == "DELETED" or found["spec"].get("nodeName") != NODE:
            return
        if "deletionTimestamp" not in found["metadata"]:
            if pod is None:
                self._pods[uid] = Pod(self, found)
        elif pod is not None:
            pod.stop(found["metadata"].get("deletionGracePeriodSeconds", 0))

    def _provide(self, claim: Object) -> None:
        """Make a volume for a claim, as a provisioner does; the controller of volumes binds both."""
        metadata, spec = claim["metadata"], claim["spec"]
        folder = self.folder / "volumes" / metadata["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        names = {name: metadata[name] for name in ("namespace", "name", "uid")}
        volume = {
            "metadata": {"name": f"process-{metadata['uid']}"},
            "spec": {
                "accessModes": spec["accessModes"],
                "capacity": spec["resources"]["requests"],
                "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **names},
                "hostPath": {"path": str(folder)},
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": spec.get("storageClassName", ""),
            },
        }
        self.ask("POST", "/api/v1/persistentvolumes", volume)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    Kubelet(ApiRequests(Path(sys.argv[1])), Path(sys.argv[2])).run()
