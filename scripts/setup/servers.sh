# shellcheck shell=bash
# Sourced by the scripts: the database servers that the tests start for themselves, found or fetched. Not a script to run.
# Each server that was unpacked has one launcher, $SERVERS/<name>/<program>, which the test fixtures look for.

# wanted NAME: false where the tests are given a server by URL, or may do without it.
wanted() {
    local url=OUTBOX_TEST_${1^^}_URL
    [[ -z ${!url:-} && ,${OUTBOX_TEST_ALLOW_MISSING:-}, != *,$1,* ]]
}

set_up_mariadb() {
    wanted mariadb || return 0
    find_program mariadbd >/dev/null && return 0
    [[ -x $SERVERS/mariadb/mariadbd ]] && return 0
    step "install MariaDB" install_or_unpack_mariadb && return 0
    say "No MariaDB server, and none could be fetched. Either:"
    say "  install it:           apt-get install mariadb-server-core mariadb-client-core"
    say "  name a running one:   OUTBOX_TEST_MARIADB_URL=mysql+pymysql://root@host:3306/"
    say "  go without its tests: OUTBOX_TEST_ALLOW_MISSING=mariadb"
    return 1
}

set_up_mysql() {
    wanted mysql || return 0
    is_real_mysql && return 0
    [[ -x $SERVERS/mysql/mysqld ]] && return 0
    step "fetch MySQL" unpack_mysql && return 0
    say "No MySQL server, and none could be fetched. Either:"
    say "  install it:           mysqld 8.0 or later on the PATH (beside MariaDB, it must not be a link to it)"
    say "  name a running one:   OUTBOX_TEST_MYSQL_URL=mysql+pymysql://root@host:3306/"
    say "  go without its tests: OUTBOX_TEST_ALLOW_MISSING=mysql"
    return 1
}

install_or_unpack_mariadb() {
    install_packages mariadb-server-core mariadb-client-core && find_program mariadbd >/dev/null && return 0
    unpack_mariadb
}

# Without root: the machine's own packages, unpacked beside it, on the machine's own C library.
unpack_mariadb() {
    local folder=$SERVERS/mariadb
    unpack_own_packages "$folder" mariadb-server-core mariadb-client-core || return 1
    write_launcher "$folder/mariadb-install-db" "$folder/root/usr/bin/mariadb-install-db" || return 1
    write_launcher "$folder/mariadbd" "$folder/root/usr/sbin/mariadbd" || return 1
    "$folder/mariadbd" --version
}

unpack_mysql() {
    have apt-get || return 1
    # shellcheck disable=SC1091
    case $(. /etc/os-release && printf '%s' "$ID") in
        ubuntu) unpack_mysql_of_ubuntu ;;
        *) unpack_mysql_of_sid ;;
    esac
}

# Unpacked even where we may install: Ubuntu's package would push MariaDB's out.
unpack_mysql_of_ubuntu() {
    local folder=$SERVERS/mysql package
    package=$(apt-cache search --names-only '^mysql-server-core' | awk '{print $1}' | sort -V | tail -n 1)
    unpack_own_packages "$folder" "${package:-mysql-server-core-8.0}" || return 1
    write_launcher "$folder/mysqld" "$folder/root/usr/sbin/mysqld" || return 1
    "$folder/mysqld" --version
}

# Debian has MySQL in its unstable suite only, built for a newer C library: the whole tree is unpacked, and run through
# its own loader. What that suite holds moves; the version found is whatever it is today.
unpack_mysql_of_sid() {
    local folder=$SERVERS/mysql root loader
    root=$(fresh_root "$folder") || return 1
    sources_of_suite sid "$folder/apt/sources" || return 1
    : >"$folder/apt/status"
    private_apt "$folder/apt" "$folder/apt/status" "$folder/apt/sources" || return 1
    unpack_packages "$root" 'perl|perl-base|perl-modules.*|libperl.*|libdb5.*|libgdbm.*' mysql-server-core || return 1
    mv -T "$root" "$folder/root" && rm -rf "$folder/apt" || return 1
    loader=$(find "$folder/root/usr/lib" -name 'ld-linux-*.so.*' | head -n 1)
    [[ -n $loader ]] || return 1
    write_launcher "$folder/mysqld" "$loader" --library-path "$(dirname "$loader")" "$folder/root/usr/sbin/mysqld" ||
        return 1
    "$folder/mysqld" --version
}

unpack_own_packages() {
    local folder=$1 root
    shift
    have apt-get || return 1
    root=$(fresh_root "$folder") || return 1
    private_apt "$folder/apt" /var/lib/dpkg/status || return 1
    unpack_packages "$root" 'perl|perl-.*|libperl.*' "$@" || return 1
    mv -T "$root" "$folder/root" && rm -rf "$folder/apt"
}

# MariaDB installs a link named mysqld.
is_real_mysql() {
    local program
    program=$(find_program mysqld) && "$program" --version 2>/dev/null | grep -qvi mariadb
}

fresh_root() {
    mkdir -p "$1/apt"
    rm -rf "$1/root" "$1"/root.new*
    printf '%s\n' "$1/root.new"
}

# write_launcher PATH COMMAND...: a script at PATH that runs the unpacked server with its own libraries and messages.
# Written last and moved into place, so that a launcher that is there is one that works.
write_launcher() {
    local path=$1 root libraries extra
    root=$(dirname "$path")/root
    shift
    # A server that comes with its loader finds its libraries by that; another loader must not see them.
    libraries=$(find "$root/usr/lib" "$root/lib" -maxdepth 1 -name '*-linux-gnu*' -type d 2>/dev/null | paste -sd:)
    [[ $1 == */ld-linux-* ]] && libraries=
    extra="--plugin-dir='$root/usr/lib/mysql/plugin' --lc-messages-dir='$root/usr/share/mysql'"
    [[ $path == */mariadb-install-db ]] && extra=
    {
        printf '#!/bin/sh\n'
        [[ -z $libraries ]] || printf "export LD_LIBRARY_PATH='%s'\n" "$libraries"
        printf 'exec'
        printf " '%s'" "$@"
        printf " --no-defaults --basedir='%s' %s \"\$@\"\n" "$root/usr" "$extra"
    } >"$path.new"
    chmod +x "$path.new" && mv -T "$path.new" "$path"
}
