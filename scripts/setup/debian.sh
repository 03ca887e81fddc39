# shellcheck shell=bash
# Sourced by the scripts: Debian and Ubuntu packages, installed where we may, unpacked into a folder of our own where not.
# Not a script to run. Nothing here asks for a password, names a host, or touches the machine's own package lists unless
# it installs.

export DEBIAN_FRONTEND=noninteractive

may_install() { have apt-get && { ((EUID == 0)) || sudo -n true 2>/dev/null; }; }

as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

# install_packages PACKAGE...: the package lists are fetched only when what the machine knows does not do.
install_packages() {
    may_install || return 1
    local -a install=(apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@")
    as_root "${install[@]}" && return 0
    # A list that cannot be fetched (a third party's source that is down) must not stop the others.
    as_root apt-get update -qq -o DPkg::Lock::Timeout=300 || true
    as_root "${install[@]}"
}

# private_apt FOLDER STATUS_FILE [SOURCES_FOLDER]: an apt of our own, which needs no root. Sets APT_CONFIG.
# STATUS_FILE says what counts as installed; without SOURCES_FOLDER the machine's own sources are read.
private_apt() {
    local folder=$1 status=$2 sources=${3:-}
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    {
        printf 'Dir::State::Lists "%s";\nDir::State::status "%s";\nDir::Cache "%s";\n' \
            "$folder/lists" "$status" "$folder/cache"
        printf 'APT::Sandbox::User "";\nAPT::Install-Recommends "0";\nAPT::Get::List-Cleanup "0";\n'
        printf 'APT::Update::Post-Invoke "";\nAPT::Update::Post-Invoke-Success "";\n'
        if [[ -n $sources ]]; then
            printf 'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "%s";\n' "$sources"
            printf 'Dir::Etc::Preferences "/dev/null";\nDir::Etc::PreferencesParts "/dev/null";\n'
        fi
    } >"$folder/apt.conf"
    export APT_CONFIG=$folder/apt.conf
    apt-get -qq update || true
}

# unpack_packages ROOT SKIP_PATTERN PACKAGE...: downloads them and what they need and is not installed; unpacks into ROOT.
unpack_packages() {
    local root=$1 skip=$2 debs package
    shift 2
    debs=$(mktemp -d "$root.debs.XXXXXX") || return 1
    apt-get install -s "$@" | awk '/^Inst /{print $2}' | grep -vE "^($skip)$" >"$debs/names" || return 1
    (cd "$debs" && xargs apt-get -qq download <names) || return 1
    mkdir -p "$root"
    for package in "$debs"/*.deb; do
        dpkg-deb -x "$package" "$root" || return 1
    done
    rm -rf "$debs"
}

# sources_of_suite SUITE FOLDER: the machine's own first Debian source, told to serve another suite.
sources_of_suite() {
    local suite=$1 folder=$2
    mkdir -p "$folder"
    if [[ -s /etc/apt/sources.list.d/debian.sources ]]; then
        awk -v RS= 'NR == 1' /etc/apt/sources.list.d/debian.sources |
            sed -E "s/^Suites:.*/Suites: $suite/; s/^Components:.*/Components: main/" >"$folder/suite.sources"
    else
        sed -nE "s/^deb (\[[^]]*\] )?([^ ]+) [^ ]+ .*/deb \1\2 $suite main/p" /etc/apt/sources.list |
            grep -v -- '-security' | head -n 1 >"$folder/suite.list"
        [[ -s $folder/suite.list ]]
    fi
}

# unpack_newest NAME PACKAGE SERIES FOLDER: PACKAGE of Debian's unstable suite, and what it needs, into FOLDER/root. Fails
# if it is of another series. FOLDER is emptied first; FOLDER/apt is the caller's to remove. NAME is for people.
unpack_newest() {
    local name=$1 package=$2 series=$3 folder=$4 engine=${1,,} version
    rm -rf "$folder"*
    mkdir -p "$folder/apt" || return 1
    sources_of_suite sid "$folder/apt/sources" || return 1
    : >"$folder/apt/status"
    private_apt "$folder/apt" "$folder/apt/status" "$folder/apt/sources" || return 1
    version=$(apt-cache show "$package" | awk '/^Version:/ {print $2; exit}')
    if [[ $version != "$series".* ]]; then
        say "Debian's unstable suite has $name ${version:-nowhere}, not $series:"
        say "  try the new one: ${name^^}_SERIES in scripts/setup/${engine}_newest.sh and SERIES in tests/engines/$engine"
        return 1
    fi
    unpack_packages "$folder/root" 'perl|perl-base|perl-modules.*|libperl.*' "$package"
}
