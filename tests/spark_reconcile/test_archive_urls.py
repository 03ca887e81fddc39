"""URLs in the settings: an archive's goes to Spark as it is; where a local folder is needed, a URL is refused.

A run over an archive that a URL names is in test_many_sources.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Settings
from spark_reconcile.cli.run_command import app
from spark_reconcile.core.settings_file import read_config, settings_of
from spark_reconcile.load.read_plan import check_archives

FILE = """
[database]
url = "sqlite:///shop.db"
[archive]
parquet = ["s3a://bucket/archive/2026", "moved", "hdfs://name:8020/archive"]
[broker]
data = "{data}"
[output]
folder = "{output}"
"""


def test_the_url_of_an_archive_reaches_spark_unchanged_and_a_folder_is_taken_from_the_file(tmp_path: Path) -> None:
    settings = _read(tmp_path)

    assert settings.archives == ("s3a://bucket/archive/2026", tmp_path / "moved", "hdfs://name:8020/archive")


@pytest.mark.parametrize(("setting", "told"), [("data", r"\[broker\] data"), ("output", r"\[output\] folder")])
def test_a_url_where_a_local_folder_is_needed_is_refused_with_the_cure(tmp_path: Path, setting: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{told} names a URL .s3a:.*must be a folder of this machine: "):
        _read(tmp_path, **{setting: "s3a://bucket/folder"})


@pytest.mark.parametrize("option", ["--broker-data", "--output"])
def test_a_url_on_the_command_line_is_refused_with_the_cure(tmp_path: Path, option: str) -> None:
    given = {"--broker-data": str(tmp_path), "--output": str(tmp_path / "out"), option: "s3a://bucket/folder"}
    options = [part for pair in given.items() for part in pair]

    refused = CliRunner().invoke(app, ["run", "--url", "sqlite:///shop.db", *options])
    report = CliRunner().invoke(app, ["report", "--output", "s3a://bucket/folder"])

    assert isinstance(refused.exception, ConfigurationError)
    assert "must be a folder of this machine" in str(refused.exception)
    assert "must be a folder of this machine" in str(report.exception)


def test_a_folder_whose_name_ends_with_a_colon_is_no_url(tmp_path: Path) -> None:
    (tmp_path / "data:" / "broker").mkdir(parents=True)

    settings = Settings(
        database_url="sqlite:///shop.db", broker_data=tmp_path / "data:" / "broker", output=tmp_path / "out:"
    )

    assert settings.output == tmp_path / "out:"


def test_an_archive_that_is_named_by_two_urls_is_refused(tmp_path: Path) -> None:
    local = tmp_path.as_uri()

    for pair in (["s3a://bucket/archive", "s3a://bucket/archive/"], [local, f"{local}/../{tmp_path.name}"]):
        with pytest.raises(ConfigurationError, match="name it once"):
            check_archives(pair)


def _read(folder: Path, *, data: str = "broker", output: str = "out") -> Settings:
    path = folder / "reconcile.toml"
    path.write_text(FILE.format(data=data, output=output))
    return settings_of(read_config(path), folder=folder)
