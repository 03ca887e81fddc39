"""The images: what the manifests run is what the Dockerfile builds, of files and extras that are there."""

from __future__ import annotations

import re
import subprocess
import tomllib

from packaging.requirements import Requirement

from tests.deploy.manifests import ROOT, containers

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = "requirements.lock"
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))


def test_every_image_of_the_manifests_is_built_and_runs_as_the_user_that_they_name() -> None:
    images = {one.container["image"]: one for one in containers()}

    assert STAGES.keys() == {"build", *images}
    for name, one in images.items():
        security = one.pod["spec"]["securityContext"]
        assert f"USER {security['runAsUser']}:{security['runAsGroup']}\n" in STAGES[name]
        assert 'ENTRYPOINT ["outbox"]\n' in STAGES[name]


def test_the_user_that_runs_spark_has_a_name() -> None:
    [uid] = re.findall(r"^USER (\d+):", STAGES["outbox-mq-spark"], re.MULTILINE)

    assert re.search(rf"useradd --uid {uid} .*--home-dir /tmp ", STAGES["outbox-mq-spark"])


def test_the_wheel_is_built_of_all_its_packages() -> None:
    copied = {
        source for line in re.findall(r"^COPY (.*)$", STAGES["build"], re.MULTILINE) for source in line.split()[:-1]
    }
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "pyproject.toml", PROJECT["project"]["readme"], LOCK}
    licenses = {one for one in PROJECT["project"]["license-files"] if one.split("/")[0] not in wheel["packages"]}

    assert needed | licenses == copied
    assert all((ROOT / source).exists() for source in copied)


def test_extras_that_are_installed_exist() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    installed = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], DOCKERFILE)
    named = [*re.findall(r"whl\)\[([^]]*)\]", installed), *re.findall(r"EXTRAS=(\S+)", DOCKERFILE)]
    extras = {extra for listed in named for extra in listed.split(",")}

    assert {"compensator", "broker", "spark"} <= extras <= PROJECT["project"]["optional-dependencies"].keys()


def test_images_have_the_versions_of_the_lock_file() -> None:
    [command] = re.findall(rf"^RUN (sed .*{LOCK}) > /wheels/constraints.txt$", STAGES["build"], re.MULTILINE)
    printed = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    constraints = [Requirement(line) for line in printed.splitlines()]
    locked = re.findall(r"^[a-z0-9][^ ]*==[^ ]+", (ROOT / LOCK).read_text(), re.MULTILINE)

    assert [f"{one.name}{one.specifier}" for one in constraints] == locked
    assert (
        re.findall(r"pip install (.*) \"\$", DOCKERFILE) == ["--no-cache-dir --constraint /wheels/constraints.txt"] * 3
    )
