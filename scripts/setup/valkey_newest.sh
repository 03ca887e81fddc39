# shellcheck shell=bash
# Sourced by scripts/test: the Valkey of Debian's unstable suite for tests/engines/valkey. Not a script to run.
#
# It is built for a newer C library, so it is unpacked with its libraries and run by the loader among these. That needs no
# root, and leaves the Redis that is installed alone. The server is the same program as its tools, by the name that it is
# called by.

# The suite moves: another series must be chosen. tests/engines/valkey looks for the same.
VALKEY_SERIES=9.1

set_up_valkey_newest() {
    [[ -d $ENGINES/valkey-$VALKEY_SERIES ]] && return 0
    have apt-get || { say "Valkey $VALKEY_SERIES is fetched from Debian, and there is no apt-get." && return 1; }
    locked step "fetch Valkey $VALKEY_SERIES" fetch_valkey "$ENGINES/valkey-$VALKEY_SERIES"
}

# Fetched into a folder beside and renamed, so that an interrupted download is never used.
fetch_valkey() {
    local folder=$1 unfinished=$1.unfinished program loader
    [[ ! -d $folder ]] || return 0 # another clone fetched it while we waited for the lock
    unpack_newest Valkey valkey-tools "$VALKEY_SERIES" "$unfinished" || return 1
    program=$(cd "$unfinished/root" && find usr/bin -name 'valkey-check-rdb' | head -n 1)
    loader=$(cd "$unfinished/root" && find usr/lib -name 'ld-linux-*.so.*' | head -n 1)
    [[ -n $program && -n $loader ]] || return 1
    printf '#!/bin/sh\nexec "%s" --argv0 valkey-server --library-path "%s" "%s" "$@"\n' "$folder/root/$loader" \
        "$folder/root/$(dirname "$loader")" "$folder/root/$program" >"$unfinished/valkey-server" || return 1
    chmod +x "$unfinished/valkey-server" || return 1
    rm -rf "$unfinished/apt"
    mv -T "$unfinished" "$folder" && "$folder/valkey-server" --version
}
