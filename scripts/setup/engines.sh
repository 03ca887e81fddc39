# shellcheck shell=bash
# Sourced by scripts/test: the tests on real engines, and what they need. Not a script to run.
#
# An engine is a folder of tests/engines with a file `needs`, which lists what has to be set up, one need a line:
#   controlplane       etcd and Kubernetes, built by Go from the module in tests/engines/kubernetes
#   faketime           libfaketime of Debian
#   galera             Galera, MariaDB and rsync of Debian
#   java               Java 17 or later
#   jars               the jars that pom.xml in that folder resolves to, fetched by Maven
#   rabbitmq-newest    RabbitMQ of Debian's unstable suite
#   redis              the Redis server that the plain tests run on
#   valkey-newest      Valkey of Debian's unstable suite
# A new kind of need is a new case in set_up_need.

# Beside the fetched servers, so that jars outlive the clone. tests/engines/jars.py looks in the same place.
ENGINES=$(dirname "$SERVERS")/engines

# What one engine's servers and tests take at most, so that two of them find room.
ENGINE_MEMORY_KIB=$((6 * 1024 * 1024))
ENGINES_LOGS=
declare -A RUNNING_ENGINES=() # by the process that tests it

# run_engines [ENGINE or path below tests/engines]... [pytest options]: sets up all that the named engines need, then tests
# each by a pytest of its own; all engines where none is named.
run_engines() {
    local -a targets=() failed=()
    local target
    while (($# > 0)) && [[ $1 != -* ]]; do
        targets+=("tests/engines/${1#tests/engines/}")
        shift
    done
    ((${#targets[@]} > 0)) || mapfile -t targets < <(engine_names | sed 's|^|tests/engines/|')
    ((${#targets[@]} > 0)) || die "there is no engine in tests/engines"
    for target in "${targets[@]}"; do
        [[ -e tests/engines/$(engine_of "$target")/needs ]] ||
            die "there is no engine named $(engine_of "$target"); there are: $(engine_names | paste -sd ' ')"
    done
    if ((${#targets[@]} == 1)); then
        set_up_needs "${targets[0]}" && "$PYTHON" -m pytest "${targets[0]}" "$@" || failed+=("${targets[0]}")
    else
        test_several_engines "$@"
    fi
    ((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
}

# Packages are installed one after the other. Then two engines are tested at a time where there is memory for two: one
# waits for its servers half of the time. What its tests print is shown whole, when they end. What is built for a quarter of
# an hour is built beside the other engines' tests.
test_several_engines() {
    local target at_once=1
    local -a ready=()
    for target in "${targets[@]}"; do
        if set_up_needs "$target" fetched; then ready+=("$target"); else failed+=("$target"); fi
    done
    (($(available_memory_kib) < 2 * ENGINE_MEMORY_KIB)) || at_once=2
    ENGINES_LOGS=$(mktemp -d "${TMPDIR:-/tmp}/outbox-mq-engines.XXXXXX")
    trap end_engines EXIT
    trap 'exit 130' INT TERM
    for target in ${ready[@]+"${ready[@]}"}; do
        ((${#RUNNING_ENGINES[@]} < at_once)) || end_engine
        begin_engine "$target" "$@"
    done
    while ((${#RUNNING_ENGINES[@]} > 0)); do
        end_engine
    done
}

begin_engine() {
    local target=$1
    shift
    say "tests of $(engine_of "$target") begin"
    set -m # a process group of its own, which SIGINT reaches
    { set_up_needs "$target" built && "$PYTHON" -m pytest "$target" "$@"; } >"$ENGINES_LOGS/${target//\//-}" 2>&1 </dev/null &
    RUNNING_ENGINES[$!]=$target
    set +m
}

# Of those that run, the first to end.
end_engine() {
    local process= status=0 target
    wait -n -p process "${!RUNNING_ENGINES[@]}" || status=$?
    target=${RUNNING_ENGINES[$process]}
    unset "RUNNING_ENGINES[$process]"
    cat "$ENGINES_LOGS/${target//\//-}"
    ((status == 0)) || failed+=("$target")
}

# pytest ends its servers at SIGINT. What was not shown is shown.
end_engines() {
    local process
    trap '' INT TERM # a second one would leave servers behind
    for process in "${!RUNNING_ENGINES[@]}"; do
        kill -INT -- "-$process" 2>/dev/null || true
    done
    while ((${#RUNNING_ENGINES[@]} > 0)); do
        end_engine
    done
    rm -rf "$STEP_LOG" "$ENGINES_LOGS"
}

engine_names() { find tests/engines -mindepth 2 -maxdepth 2 -name needs -printf '%h\n' | sed 's|.*/||' | sort; }

engine_of() {
    local below=${1#tests/engines/}
    printf '%s\n' "${below%%[/:]*}"
}

# set_up_needs TARGET [fetched|built]: all of them; or those that are fetched, or built, alone.
set_up_needs() {
    local engine need kind
    engine=$(engine_of "$1")
    for need in $(<"tests/engines/$engine/needs"); do
        kind=fetched
        [[ $need != controlplane ]] || kind=built
        [[ ${2:-$kind} != "$kind" ]] || set_up_need "$engine" "$need" || return 1
    done
}

set_up_need() {
    case $2 in
        controlplane) set_up_controlplane ;;
        faketime) set_up_faketime ;;
        galera) set_up_galera ;;
        java) set_up_java ;;
        jars) set_up_jars "$1" ;;
        rabbitmq-newest) set_up_rabbitmq_newest ;;
        redis) locked set_up_redis ;;
        valkey-newest) set_up_valkey_newest ;;
        *)
            say "tests/engines/$1/needs names '$2', which scripts/setup/engines.sh does not know."
            return 1
            ;;
    esac
}

set_up_jars() {
    local engine=$1 folder
    folder=$(jar_folder "$engine") || return 1
    [[ -d $folder ]] && return 0
    if [[ $folder == "$REPO"/* ]]; then
        say "The jars of $engine are kept outside the repository, and $HOME/.cache cannot be written to."
        say "  name a folder that can: OUTBOX_TEST_SERVERS=/path/to/servers (the jars go to /path/to/engines)"
        return 1
    fi
    set_up_maven || return 1
    locked step "fetch the jars of $engine" fetch_jars "$PWD/tests/engines/$engine/pom.xml" "$folder" && return 0
    say "The jars of $engine could not be fetched; Maven's own words are above."
    say "  Maven needs a repository that it can reach: the network, or a mirror in ~/.m2/settings.xml; then run again"
    return 1
}

# Named by the pom's content: a changed pom is another folder, and a folder that is there is complete.
jar_folder() {
    local hash
    hash=$(sha256sum <"tests/engines/$1/pom.xml") && printf '%s/%s-%s\n' "$ENGINES" "$1" "${hash:0:16}"
}

# Fetched into a folder beside and renamed, so that an interrupted download is never used. What an earlier one left is
# removed: the lock is ours. Maven's own repository is thrown away, since a pom is resolved once.
fetch_jars() {
    local pom=$1 folder=$2 unfinished=$2.unfinished
    [[ ! -d $folder ]] || return 0 # another clone fetched it while we waited for the lock
    rm -rf "$unfinished"
    mkdir -p "$unfinished" || return 1
    mvn --batch-mode --no-transfer-progress --strict-checksums --file "$pom" \
        -Dmaven.repo.local="$unfinished/repository" \
        -Dmaven.wagon.http.retryHandler.count=3 -Dmaven.wagon.rto=60000 \
        dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory="$unfinished/jars" || return 1
    mv -T "$unfinished/jars" "$folder" && rm -rf "$unfinished"
}

set_up_maven() {
    have mvn && return 0
    step "install Maven" install_packages maven || true
    have mvn && return 0
    say "No Maven, which fetches the engines' jars, and it could not be installed."
    say "  install it: apt-get install maven, or put the mvn of another installation on the PATH"
    return 1
}
