#!/usr/bin/env bash
# Flotilla on a handful of boxes, by ssh and nothing else.
#
#   deploy/rollout.sh install HOST…   the program as /usr/local/bin/flotilla
#   deploy/rollout.sh join    HOST…   the agent as a service: of a closed fleet with TOKEN_FILE set,
#                                     of an open one with FLOTILLA_NATS and ROLES set
#   deploy/rollout.sh upgrade HOST…   another program, one box after the other: drained, replaced,
#                                     back, or put back, and then no further
#   deploy/rollout.sh status  HOST…   what each box's service says
#
# HOST is what ssh takes; there you are root, or sudo asks nothing. From the environment:
#   BINARY       the program [target/x86_64-unknown-linux-musl/release/flotilla, as `make static` has it]
#   TOKEN_FILE   file with a join token, for as many boxes as you name
#   FLOTILLA_NATS, ROLES   an open fleet's NATS servers, and what its agents do: generator,evaluator
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${BINARY:-$here/target/x86_64-unknown-linux-musl/release/flotilla}
program=/usr/local/bin/flotilla
kit=/var/lib/flotilla/kit
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10)

fail() {
    echo "rollout: $*" >&2
    exit 1
}

# Runs a command on a host as root; what it reads is what this reads.
as_root() {
    local host=$1 command=$2
    # The command is quoted once here and read once there.
    ssh "${ssh_options[@]}" -- "$host" \
        "if [ \"\$(id -u)\" = 0 ]; then $command; else sudo -n sh -c $(printf '%q' "$command"); fi"
}

# Copies the program to a host, and says where it lies.
send() {
    local host=$1 there
    there=$(ssh "${ssh_options[@]}" -- "$host" mktemp -d /tmp/flotilla.XXXXXXXX < /dev/null) || return 1
    [[ $there =~ ^/[A-Za-z0-9./_-]+/flotilla\.[A-Za-z0-9]{8}$ ]] || return 1
    scp -q "${ssh_options[@]}" -- "$binary" "$host:$there/flotilla" || return 1
    printf '%s\n' "$there"
}

install_on() {
    local host=$1 there
    there=$(send "$host") || return 1
    as_root "$host" "install -D -m 0755 $there/flotilla $program && rm -r $there && $program --version" \
        < /dev/null
}

join_on() {
    local host=$1
    if [ -n "${TOKEN_FILE:-}" ]; then
        # Arguments are everybody's to read.
        as_root "$host" "$program join - --dir $kit --service" < "$TOKEN_FILE"
    else
        as_root "$host" "$program service install --nats $FLOTILLA_NATS --roles $ROLES" < /dev/null
    fi
}

upgrade_on() {
    local host=$1 there fleet="--dir $kit"
    [ -z "${FLOTILLA_NATS:-}" ] || fleet="--nats $FLOTILLA_NATS"
    there=$(send "$host") || return 1
    local upgrade="$program upgrade --binary $there/flotilla --installed $program --service $fleet"
    as_root "$host" "chmod 0755 $there/flotilla; $upgrade; code=\$?; rm -r $there; exit \$code" < /dev/null
}

status_on() {
    local host=$1
    as_root "$host" "systemctl show flotilla-agent -p ActiveState -p StatusText --value | paste -sd ' '; $program --version" < /dev/null
}

# What reaches a remote shell is a name or an address, not a program.
plain() {
    [[ $2 =~ ^[A-Za-z0-9._:/,@-]+$ ]] || fail "$1: $2 has characters that a shell would read"
}

action=${1:-}
shift || true
case $action in
install | upgrade)
    [ -f "$binary" ] || fail "there is no $binary: make static, or name one in BINARY"
    ;;
join)
    if [ -z "${TOKEN_FILE:-}" ]; then
        if [ -z "${FLOTILLA_NATS:-}" ] || [ -z "${ROLES:-}" ]; then
            fail "no fleet given; set TOKEN_FILE, or FLOTILLA_NATS and ROLES for an open one"
        fi
        plain ROLES "$ROLES"
    else
        [ -r "$TOKEN_FILE" ] || fail "cannot read the token in $TOKEN_FILE"
    fi
    ;;
status) ;;
*) fail "usage: rollout.sh install|join|upgrade|status HOST…" ;;
esac
[ -z "${FLOTILLA_NATS:-}" ] || plain FLOTILLA_NATS "$FLOTILLA_NATS"
[ $# -gt 0 ] || fail "which boxes? name their hosts"

failed=()
for host in "$@"; do
    echo "== $host"
    "${action}_on" "$host" && continue
    # A program that does not work on one box is not brought to the next.
    [ "$action" != upgrade ] || fail "$host was not upgraded, and nothing after it"
    failed+=("$host")
done
[ ${#failed[@]} = 0 ] || fail "$action failed on ${failed[*]}"
