# shellcheck shell=bash
# Sourced by scripts/test: the RabbitMQ of Debian's unstable suite for tests/engines/rabbitmq. Not a script to run.
#
# It is built for a newer C library, so the whole tree is unpacked, and each of Erlang's programs is run through the
# tree's own loader. That needs no root, and leaves the RabbitMQ and Erlang that are installed alone.

# The suite moves: another series is another guide, so it must be chosen. tests/engines/rabbitmq looks for the same.
RABBITMQ_SERIES=4.3

set_up_rabbitmq_newest() {
    [[ -d $ENGINES/rabbitmq-$RABBITMQ_SERIES ]] && return 0
    have apt-get || { say "RabbitMQ $RABBITMQ_SERIES is fetched from Debian, and there is no apt-get." && return 1; }
    locked step "fetch RabbitMQ $RABBITMQ_SERIES" fetch_rabbitmq "$ENGINES/rabbitmq-$RABBITMQ_SERIES"
}

# Fetched into a folder beside and renamed, so that an interrupted download is never used.
fetch_rabbitmq() {
    local folder=$1 unfinished=$1.unfinished
    [[ ! -d $folder ]] || return 0 # another clone fetched it while we waited for the lock
    unpack_newest RabbitMQ rabbitmq-server "$RABBITMQ_SERIES" "$unfinished" || return 1
    run_by_own_loader "$unfinished/root" "$folder/root" || return 1
    rm -rf "$unfinished/apt"
    mv -T "$unfinished" "$folder"
}

# run_by_own_loader ROOT PLACE: the programs in ROOT, which will be at PLACE, become scripts that start them by the loader
# of the tree. What they start is a script of ours again, since Erlang finds its programs in its own folder.
run_by_own_loader() {
    local root=$1 place=$2 loader libraries program
    loader=$(cd "$root" && find usr/lib -name 'ld-linux-*.so.*' | head -n 1)
    [[ -n $loader ]] || return 1
    libraries=$place/$(dirname "$loader"):$place/usr/lib/$(dirname "$loader" | xargs basename)/systemd
    while read -r program; do
        mv "$program" "$program.elf" || return 1
        # The program's own name is kept: escript takes what it is to run from that.
        printf '#!/bin/sh\nexec "%s" --argv0 "$0" --library-path "%s" "%s" "$@"\n' \
            "$place/$loader" "$libraries" "$place/${program#"$root"/}.elf" >"$program"
        chmod +x "$program" || return 1
    done < <(find "$root"/usr/lib/erlang/bin "$root"/usr/lib/erlang/erts-*/bin -type f \
        -exec sh -c 'head -c 4 "$1" | grep -q ELF' _ {} \; -print)
    sed -i "s|ROOTDIR=/usr/lib/erlang\$|ROOTDIR=$place/usr/lib/erlang|" \
        "$root"/usr/lib/erlang/bin/erl "$root"/usr/lib/erlang/erts-*/bin/erl
}
