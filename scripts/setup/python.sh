# shellcheck shell=bash
# Sourced by the scripts: the virtual environment and what is installed in it. Not a script to run.

PYTHON=$REPO/.venv/bin/python

# An interpreter of 3.11 or later: $PYTHON3 where it is set, else the newest that the project is tested on.
find_python() {
    local candidate
    for candidate in ${PYTHON3:+"$PYTHON3"} python3.14 python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

set_up_venv() {
    "$PYTHON" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return 0
    local python
    if ! python=$(find_python); then
        if may_install; then
            step "install Python" install_packages python3 python3-venv || true
        fi
        python=$(find_python) || die "Python 3.11 or later is needed, and none was found. Install one, or name it: PYTHON3=/path/to/python3 $0"
    fi
    if ! "$python" -c 'import ensurepip, venv; ensurepip.version()' 2>/dev/null; then
        step "install Python's venv module" install_packages "$(venv_package "$python")" ||
            die "Python's venv module is missing. Install it: apt-get install $(venv_package "$python")"
    fi
    step "make .venv ($("$python" -V))" "$python" -m venv --clear "$REPO/.venv"
}

venv_package() { "$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'; }

# Everything that requirements.lock names, by hash, then the project itself, in place. The stamp makes it once per lock.
set_up_packages() {
    local stamp=$REPO/.venv/.installed wanted
    wanted=$("$PYTHON" - <<'HASH'
import hashlib, pathlib
names = "requirements.lock", "pyproject.toml"
print(hashlib.sha256(b"".join(pathlib.Path(name).read_bytes() for name in names)).hexdigest())
HASH
    )
    [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && return 0
    rm -f "$stamp"
    step "install requirements.lock" install_lock || return 1
    step "install the project" install_project || return 1
    printf '%s\n' "$wanted" >"$stamp"
}

install_lock() {
    # The wheel of a source distribution (pyspark) is built once, in isolation, and kept in pip's cache. The tools that
    # build it are the one thing the lock does not fix.
    "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off --require-hashes \
        -r "$REPO/requirements.lock"
}

OLDEST_SQLALCHEMY=$REPO/.venv/oldest-sqlalchemy

# Beside the packages of requirements.lock, in a folder that PYTHONPATH puts before them.
set_up_oldest_sqlalchemy() {
    local lock=$REPO/scripts/setup/sqlalchemy.lock
    cmp -s "$lock" "$OLDEST_SQLALCHEMY/.lock" && return 0
    rm -rf "$OLDEST_SQLALCHEMY"
    step "install the oldest SQLAlchemy" "$PYTHON" -m pip install --disable-pip-version-check --no-input \
        --progress-bar off --require-hashes --no-deps --target "$OLDEST_SQLALCHEMY" -r "$lock" || return 1
    cp "$lock" "$OLDEST_SQLALCHEMY/.lock"
}

install_project() {
    "$PYTHON" -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation -e "$REPO"
}
