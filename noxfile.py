"""The checks of scripts/test one by one, and the tests on every Python that is installed: `nox -s tests-3.12`."""

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "layers", "deps", "tests"]

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@nox.session
def lint(session: nox.Session) -> None:
    """Style and likely mistakes; layout."""
    _install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """The strict type check."""
    _install(session)
    session.run("mypy")


@nox.session
def layers(session: nox.Session) -> None:
    """Imports go down only."""
    _install(session)
    session.run("lint-imports", "--no-cache")


@nox.session
def deps(session: nox.Session) -> None:
    """What is imported is declared, what is declared is used."""
    _install(session)
    session.run("deptry", ".")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests; arguments after `--` go to pytest. Servers and Java are set up by scripts/test and scripts/servers."""
    _install(session)
    session.run("pytest", *session.posargs)


def _install(session: nox.Session) -> None:
    session.install("--require-hashes", "-r", "requirements.lock")
    session.install("--no-deps", "--no-build-isolation", "-e", ".")
