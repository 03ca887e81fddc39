# shellcheck shell=bash
# Sourced by scripts/test: libfaketime, by which tests/engines/redis steps the clock of one server. Not a script to run.
# It is unpacked even where we may install: nothing but those tests looks for it.

set_up_faketime() {
    [[ -e $ENGINES/faketime/libfaketime.so.1 ]] && return 0
    locked step "fetch libfaketime" fetch_faketime "$ENGINES/faketime"
}

# Fetched into a folder beside and renamed, so that an interrupted download is never used.
fetch_faketime() {
    local folder=$1 unfinished=$1.unfinished library
    [[ ! -d $folder ]] || return 0 # another clone fetched it while we waited for the lock
    rm -rf "$unfinished"
    mkdir -p "$unfinished" || return 1
    unpack_own_packages "$unfinished" libfaketime || return 1
    library=$(cd "$unfinished" && find root/usr/lib -path '*/faketime/libfaketime.so.1' | head -n 1)
    [[ -n $library ]] || return 1
    ln -s "$library" "$unfinished/libfaketime.so.1" && mv -T "$unfinished" "$folder"
}
