"""Where the jars of BookKeeper's client are found, and what is said where they are missing or of another version."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_broker.cluster.bookkeeper.java_ledgers import BookKeeperOptions
from outbox_broker.cluster.bookkeeper.java_runtime import JARS_VARIABLE, check_jars, find_jars
from outbox_core.common.errors import ConfigurationError


def test_the_folder_of_the_operator_is_taken_with_or_without_a_wildcard(tmp_path: Path) -> None:
    for named in (str(tmp_path), f"{tmp_path}/", f"{tmp_path}/*"):
        assert find_jars({JARS_VARIABLE: named}) == tmp_path


def test_a_folder_that_is_not_there_is_refused_with_the_variable_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{JARS_VARIABLE} names .*no-such, which is no folder; set {JARS_VARIABLE} to"
    ):
        find_jars({JARS_VARIABLE: str(tmp_path / "no-such")})


def test_without_a_folder_and_the_wheel_of_jars_the_cure_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=rf"jars .* are missing; set {JARS_VARIABLE} to .* or install the wheel"
    ):
        find_jars({})


@pytest.mark.parametrize(
    ("jars", "problem"),
    [
        ([], "has no bookkeeper-server jar"),
        (["bookkeeper-common-4.18.0.jar"], "has no bookkeeper-server jar"),
        (["bookkeeper-server-4.16.6.jar"], r"has BookKeeper 4\.16, not 4\.18"),
        (["bookkeeper-server-4.16.6.jar", "bookkeeper-server-4.18.0.jar"], r"has BookKeeper 4\.16, 4\.18, not 4\.18"),
    ],
)
def test_jars_of_another_version_are_refused_before_java_starts(tmp_path: Path, jars: list[str], problem: str) -> None:
    for name in jars:
        (tmp_path / name).touch()

    with pytest.raises(ConfigurationError, match=problem):
        check_jars(tmp_path)


@pytest.mark.parametrize("name", ["bookkeeper-server-4.18.3.jar", "org.apache.bookkeeper-bookkeeper-server-4.18.0.jar"])
def test_any_patch_release_of_the_clients_version_is_taken_as_maven_or_the_distribution_names_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).touch()

    check_jars(tmp_path)


@pytest.mark.parametrize(("ensemble", "write_quorum", "ack_quorum"), [(3, 4, 2), (3, 2, 3), (3, 3, 0), (0, 0, 0)])
def test_quorums_that_do_not_fit_together_are_refused(ensemble: int, write_quorum: int, ack_quorum: int) -> None:
    with pytest.raises(ConfigurationError, match="ensemble >= write quorum >= ack quorum >= 1"):
        BookKeeperOptions(ensemble=ensemble, write_quorum=write_quorum, ack_quorum=ack_quorum)
