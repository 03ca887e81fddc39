# shellcheck shell=bash
# Sourced by scripts/test: Galera, by which the MariaDB servers of tests/engines/galera form a cluster. Not a script to run.
# It is unpacked even where we may install: nothing but those tests looks for it.

set_up_galera() {
    locked set_up_mariadb || return 1
    [[ -d $ENGINES/galera ]] && return 0
    have apt-get || { say "Galera is fetched from Debian, and there is no apt-get." && return 1; }
    locked step "fetch Galera" fetch_galera "$ENGINES/galera"
}

# Into FOLDER/bin what a node runs to copy another one's data, into FOLDER/lib the library. Fetched into a folder beside
# and renamed, so that an interrupted download is never used.
fetch_galera() {
    local folder=$1 unfinished=$1.unfinished root=$1.unfinished/root program
    [[ ! -d $folder ]] || return 0 # another clone fetched it while we waited for the lock
    rm -rf "$unfinished"
    mkdir -p "$unfinished/kept/bin" "$unfinished/kept/lib" || return 1
    # Also what is installed already: tests run it as another user, who may not read what a home folder holds.
    unpack_own_packages "$unfinished" --reinstall galera-4 rsync mariadb-server || return 1
    for program in rsync wsrep_sst_rsync wsrep_sst_common; do
        cp "$root/usr/bin/$program" "$unfinished/kept/bin" || return 1
    done
    find "$root/usr/bin" "$root/bin" \( -name lsof -o -name ss \) -exec cp {} "$unfinished/kept/bin" \; 2>/dev/null
    find "$root"/usr/lib/*-linux-gnu "$root"/lib/*-linux-gnu -maxdepth 1 -name '*.so*' \
        -exec cp -P {} "$unfinished/kept/lib" \; 2>/dev/null
    cp "$root/usr/lib/galera/libgalera_smm.so" "$unfinished/kept/lib" || return 1
    mv -T "$unfinished/kept" "$folder" && rm -rf "$unfinished"
}
