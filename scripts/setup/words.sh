# shellcheck shell=bash
# Sourced by the scripts: one line a step with the time it took, the log of a step that failed, and clear ways out.
# Not a script to run.

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
# Fetched servers outlive the clone. Exported, so that the test fixtures look in the same place.
export OUTBOX_TEST_SERVERS=${OUTBOX_TEST_SERVERS:-${XDG_CACHE_HOME:-$HOME/.cache}/outbox-mq/servers}
mkdir -p "$OUTBOX_TEST_SERVERS" 2>/dev/null || OUTBOX_TEST_SERVERS=$REPO/.servers
mkdir -p "$OUTBOX_TEST_SERVERS"
SERVERS=$OUTBOX_TEST_SERVERS
STEP_LOG=$(mktemp "${TMPDIR:-/tmp}/outbox-mq-step.XXXXXX")
trap 'rm -f "$STEP_LOG"' EXIT

say() { printf '%s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# step NAME COMMAND...: runs it with its output kept back; prints the output only when it fails, and returns its status.
step() {
    local name=$1 began status=0
    shift
    began=$(now_ms)
    # `set -e` does not hold in here, since our caller tests the status: commands that may fail say `|| return 1`.
    ("$@") >"$STEP_LOG" 2>&1 </dev/null || status=$?
    report_step "$name" "$began" "$status"
    ((status == 0)) || sed 's/^/    /' "$STEP_LOG" >&2
    return "$status"
}

report_step() {
    local took=$(($(now_ms) - $2)) word=ok
    (($3 == 0)) || word=FAILED
    printf '%-34s %-6s %5d.%d s\n' "$1" "$word" $((took / 1000)) $((took % 1000 / 100)) >&2
}

# locked COMMAND...: one at a time for all clones that share the folder of fetched servers.
locked() {
    ( flock 9 && "$@" ) 9>"$SERVERS/.lock"
}

now_ms() { date +%s%3N; }

have() { command -v "$1" >/dev/null 2>&1; }

# Servers live in sbin, which is not on everybody's PATH.
find_program() {
    local name folder
    for name in "$@"; do
        command -v "$name" 2>/dev/null && return 0
        for folder in /usr/local/sbin /usr/sbin /sbin; do
            if [[ -x $folder/$name ]]; then
                printf '%s\n' "$folder/$name"
                return 0
            fi
        done
    done
    return 1
}
