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
    have apt-get || return 1
    local folder=$SERVERS/mariadb root
    root=$(fresh_root "$folder")
    private_apt "$folder/apt" /var/lib/dpkg/status
    unpack_packages "$root" 'perl|perl-.*|libperl.*' mariadb-server-core mariadb-client-core
    mv -T "$root" "$folder/root"
    write_launcher "$folder/mariadbd" "export LD_LIBRARY_PATH=$(library_path "$folder/root")" \
        "exec '$folder/root/usr/sbin/mariadbd' --no-defaults --basedir='$folder/root/usr'" \
        "--plugin-dir='$folder/root/usr/lib/mysql/plugin' --lc-messages-dir='$folder/root/usr/share/mysql' \"\$@\""
    write_launcher "$folder/mariadb-install-db" "export LD_LIBRARY_PATH=$(library_path "$folder/root")" \
        "exec '$folder/root/usr/bin/mariadb-install-db' --no-defaults --basedir='$folder/root/usr' \"\$@\""
    rm -rf "$folder/apt"
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

# Debian has MySQL in its unstable suite only, built for a newer C library: the whole tree is unpacked, and run through
# its own loader. What that suite holds moves; the version found is whatever it is today.
unpack_mysql_of_sid() {
    local folder=$SERVERS/mysql root loader
    root=$(fresh_root "$folder")
    sources_of_suite sid "$folder/apt/sources"
    : >"$folder/apt/status"
    private_apt "$folder/apt" "$folder/apt/status" "$folder/apt/sources"
    unpack_packages "$root" 'perl|perl-base|perl-modules.*|libperl.*|libdb5.*|libgdbm.*' mysql-server-core
    mv -T "$root" "$folder/root"
    loader=$(find "$folder/root/usr/lib" -name 'ld-linux-*.so.*' | head -n 1)
    [[ -n $loader ]]
    write_launcher "$folder/mysqld" "" \
        "exec '$loader' --library-path '$(dirname "$loader")' '$folder/root/usr/sbin/mysqld' --no-defaults" \
        "--basedir='$folder/root/usr' --plugin-dir='$folder/root/usr/lib/mysql/plugin'" \
        "--lc-messages-dir='$folder/root/usr/share/mysql' \"\$@\""
    rm -rf "$folder/apt"
    "$folder/mysqld" --version
}

unpack_mysql_of_ubuntu() {
    local folder=$SERVERS/mysql root package
    root=$(fresh_root "$folder")
    private_apt "$folder/apt" /var/lib/dpkg/status
    package=$(apt-cache search --names-only '^mysql-server-core' | awk '{print $1}' | sort -V | tail -n 1)
    [[ -n $package ]]
    unpack_packages "$root" 'perl|perl-.*|libperl.*' "$package"
    mv -T "$root" "$folder/root"
    write_launcher "$folder/mysqld" "export LD_LIBRARY_PATH=$(library_path "$folder/root")" \
        "exec '$folder/root/usr/sbin/mysqld' --no-defaults --basedir='$folder/root/usr'" \
        "--plugin-dir='$folder/root/usr/lib/mysql/plugin' --lc-messages-dir='$folder/root/usr/share/mysql' \"\$@\""
    rm -rf "$folder/apt"
    "$folder/mysqld" --version
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

library_path() {
    find "$1/usr/lib" "$1/lib" -maxdepth 1 -name '*-linux-gnu*' -type d 2>/dev/null | paste -sd: -
}

# Written last and moved into place, so that a launcher that is there is one that works.
write_launcher() {
    local path=$1 environment=$2
    shift 2
    printf '#!/bin/sh\n%s\n%s\n' "$environment" "$*" >"$path.new"
    chmod +x "$path.new"
    mv -T "$path.new" "$path"
}
