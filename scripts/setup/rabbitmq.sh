# shellcheck shell=bash
# Sourced by the scripts: the RabbitMQ server that the tests of its adapter start for themselves. Not a script to run.
# It is installed, not unpacked: its scripts and Erlang's have their places in the file system written into them.

RABBITMQ_SERVER=/usr/lib/rabbitmq/bin/rabbitmq-server

set_up_rabbitmq() {
    wanted rabbitmq || return 0
    [[ -x $RABBITMQ_SERVER ]] && return 0
    step "install RabbitMQ" install_rabbitmq && return 0
    say "No RabbitMQ server, and none could be installed. Either:"
    say "  install it:           apt-get install rabbitmq-server"
    say "  go without its tests: OUTBOX_TEST_ALLOW_MISSING=rabbitmq"
    return 1
}

# The package would start a service on this machine, unless a policy forbids that; the tests start servers of their own.
install_rabbitmq() {
    local policy=/usr/sbin/policy-rc.d status=0 is_ours=no
    may_install || return 1
    if [[ ! -e $policy ]]; then
        is_ours=yes
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null && as_root chmod +x "$policy"
    fi
    install_packages rabbitmq-server || status=$?
    [[ $is_ours == no ]] || as_root rm -f "$policy"
    return "$status"
}
