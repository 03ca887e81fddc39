# shellcheck shell=bash
# Sourced by the scripts: the Redis server that the tests of its adapter start for themselves. Not a script to run.
# Debian's redis-tools has the server under another name of the same program, which goes by the name that it is called
# by; the package redis-server would start a service on this machine besides.

set_up_redis() {
    wanted redis || return 0
    find_program redis-server >/dev/null && return 0
    [[ -x $SERVERS/redis/redis-server ]] && return 0
    step "install Redis" install_or_unpack_redis && return 0
    say "No Redis server, and none could be fetched. Either:"
    say "  install it:           apt-get install redis-server"
    say "  go without its tests: OUTBOX_TEST_ALLOW_MISSING=redis"
    return 1
}

install_or_unpack_redis() {
    local program
    install_packages redis-tools && program=$(find_program redis-check-rdb) && link_redis "$program" && return 0
    unpack_redis
}

# Without root: the machine's own package and the libraries that it needs, beside the machine's.
unpack_redis() {
    local folder=$SERVERS/redis libraries
    unpack_own_packages "$folder" redis-tools || return 1
    link_redis "$folder/root/usr/bin/redis-check-rdb" "$folder/bin" || return 1
    libraries=$(find "$folder/root/usr/lib" -maxdepth 1 -name '*-linux-gnu*' -type d | paste -sd:)
    {
        printf '#!/bin/sh\n'
        printf "LD_LIBRARY_PATH='%s' exec '%s' \"\$@\"\n" "$libraries" "$folder/bin/redis-server"
    } >"$folder/redis-server.new"
    chmod +x "$folder/redis-server.new" && mv -T "$folder/redis-server.new" "$folder/redis-server" &&
        "$folder/redis-server" --version
}

# link_redis PROGRAM [FOLDER]: the name by which it is a server.
link_redis() {
    local folder=${2:-$SERVERS/redis}
    mkdir -p "$folder" && ln -sfn "$1" "$folder/redis-server" && "$folder/redis-server" --version
}
