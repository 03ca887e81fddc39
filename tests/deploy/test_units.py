"""The systemd units: systemd takes them, the command takes their command lines, and their times agree with its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compensator.core.config import load
from outbox_core.runtime.durations_and_sizes import parse_duration_ms
from tests.deploy.manifests import SYSTEMD, UNITS, exec_start, options, unit, value

ENGINE_CLOSE_SECONDS = 10
KNOWN = {
    "Unit": {"Description", "Wants", "After", "StartLimitIntervalSec"},
    "Install": {"WantedBy"},
    "Service": {
        "Type", "NotifyAccess", "ExecStart", "ExecReload", "Environment", "LoadCredential", "WatchdogSec",
        "TimeoutStartSec", "TimeoutStopSec", "KillSignal", "KillMode", "Restart", "RestartSec",
        "RestartPreventExitStatus", "RestartForceExitStatus", "DynamicUser",
        "UMask", "NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities", "ProtectSystem", "ProtectHome",
        "PrivateTmp", "PrivateDevices", "PrivateUsers", "ProtectClock", "ProtectControlGroups", "ProtectHostname",
        "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProcSubset",
        "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "RemoveIPC",
        "LockPersonality", "MemoryDenyWriteExecute", "SystemCallArchitectures", "SystemCallFilter",
        "SystemCallErrorNumber", "MemoryMax", "TasksMax", "LimitNOFILE", "StateDirectory", "StateDirectoryMode",
    },
}  # fmt: skip
COMPENSATOR = SYSTEMD / "outbox-compensator.service"
BROKER = SYSTEMD / "outbox-broker.service"
units = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)


@units
def test_every_key_is_one_that_systemd_knows(path: Path, tmp_path: Path) -> None:
    unknown = [(section, key) for section, key, _ in unit(path) if key not in KNOWN.get(section, set())]

    assert unknown == []
    if shutil.which("systemd-analyze"):
        here = tmp_path / path.name
        here.write_text(path.read_text().replace("/opt/outbox-mq/bin/outbox", sys.executable))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@units
def test_the_command_takes_its_command_line(path: Path) -> None:
    assert options(exec_start(path))


@units
def test_a_secret_comes_as_a_credential_and_the_command_reads_it_where_systemd_puts_it(path: Path) -> None:
    credentials = {value.partition(":")[0] for _, key, value in unit(path) if key == "LoadCredential"}
    read = {word.removeprefix("%d/") for word in exec_start(path) if word.startswith("%d/")}

    assert credentials == read != set()
    assert not any("password" in word and not word.startswith(("%d/", "--")) for word in exec_start(path))


@units
def test_it_can_do_little_to_its_host(path: Path) -> None:
    set_to = {key: value for section, key, value in unit(path) if section == "Service"}

    for key in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert set_to[key] == "yes"
    assert set_to["ProtectSystem"] == "strict"
    assert set_to["CapabilityBoundingSet"] == ""
    assert (set_to["Restart"], set_to["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_a_reload_of_the_broker_is_a_sighup_that_never_leaves_it_stopped() -> None:
    assert value(BROKER, "ExecReload") == "/bin/kill -HUP $MAINPID"
    assert value(BROKER, "RestartForceExitStatus") == "SIGHUP"


def test_systemd_waits_for_the_compensator_longer_than_it_takes_to_stop() -> None:
    given = options(exec_start(COMPENSATOR))

    assert int(value(COMPENSATOR, "TimeoutStopSec")) * 1000 > parse_duration_ms(given["stop_timeout"])
    assert given["port"] == 9100


def test_systemd_waits_for_the_broker_longer_than_it_takes_to_stop() -> None:
    given = options(exec_start(BROKER))

    assert int(value(BROKER, "TimeoutStopSec")) >= given["shutdown_timeout_ms"] / 1000 + ENGINE_CLOSE_SECONDS
    assert given["data"] == Path("%S") / value(BROKER, "StateDirectory")


def test_a_unit_waits_for_a_notice_if_and_only_if_the_service_gives_one() -> None:
    speaks = {
        room: "Notifier(os.environ)" in "".join(path.read_text() for path in (SYSTEMD.parents[1] / room).rglob("*.py"))
        for room in ("compensator", "broker")
    }

    assert {
        "compensator": value(COMPENSATOR, "Type") == "notify",
        "broker": value(BROKER, "Type") == "notify",
    } == speaks
    assert int(value(COMPENSATOR, "WatchdogSec")) >= 30


def test_the_compensator_takes_the_configuration_that_comes_with_its_unit(tmp_path: Path) -> None:
    config = load({}, file=SYSTEMD / "outbox.toml")

    assert options(exec_start(COMPENSATOR))["config"] == Path("/etc/outbox-mq/outbox.toml")
    assert [source.url for source in config.source_tables()] == ["mysql+pymysql://outbox@127.0.0.1/shop"]
    assert config.broker.url == "http://127.0.0.1:7788"
