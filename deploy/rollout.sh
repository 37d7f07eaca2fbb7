#!/usr/bin/env bash
# Installs, joins, upgrades and queries a few hosts over ssh, and switches their stacks.
#
#   deploy/rollout.sh install HOST…   install the program as /usr/local/bin/flotilla
#   deploy/rollout.sh join    HOST…   start the agent as a service: in a closed fleet with TOKEN_FILE,
#                                     in an open one with FLOTILLA_NATS and ROLES
#   deploy/rollout.sh upgrade HOST…   upgrade one host after the other: drain, replace, restart; on a
#                                     failure restore the old program and stop
#   deploy/rollout.sh status  HOST…   print the status of each host's service
#   deploy/rollout.sh stack NAME HOST…            switch one host after the other to a stack that is
#                                     installed there: burn in as the agent's user, switch, restart
#                                     the agent; on a failure switch that host back and stop
#   deploy/rollout.sh stack-rollback NAME HOST…   switch hosts that use the stack back to their
#                                     previous one, and restart their agents
#
# HOST is an argument of ssh, for root or a user with passwordless sudo. Environment:
#   BINARY       the program [target/x86_64-unknown-linux-musl/release/flotilla, from `make static`]
#   TOKEN_FILE   a file with a join token with enough uses for the hosts
#   FLOTILLA_NATS, ROLES   NATS servers of an open fleet, and roles such as generator,evaluator
#   FLOTILLA_STACKS   the agents' directory of stacks, owned by root [/opt/flotilla/stacks]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${BINARY:-$here/target/x86_64-unknown-linux-musl/release/flotilla}
program=/usr/local/bin/flotilla
credentials=/var/lib/flotilla/credentials
# As in flotilla-agent.service.
stacks=${FLOTILLA_STACKS:-/opt/flotilla/stacks}
# A temporary user with the groups and limits of the agent's.
as_agent='systemd-run --quiet --wait --pipe --collect -p DynamicUser=yes -p SupplementaryGroups=render'
as_agent="$as_agent -p SupplementaryGroups=video -p LimitMEMLOCK=infinity -p WorkingDirectory=/tmp"
as_agent="$as_agent -E HOME=/tmp"
restart='systemctl restart flotilla-agent'
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10)

fail() {
    echo "rollout: $*" >&2
    exit 1
}

# Runs a command on a host as root, with the stdin of this function.
as_root() {
    local host=$1 command=$2
    # The command is quoted once here and unquoted once by the remote shell.
    ssh "${ssh_options[@]}" -- "$host" \
        "if [ \"\$(id -u)\" = 0 ]; then $command; else sudo -n sh -c $(printf '%q' "$command"); fi"
}

# Copies the program to a host and prints its path there.
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
        # A file instead of an argument, because all users can see arguments.
        as_root "$host" "$program join - --dir $credentials --service" < "$TOKEN_FILE"
    else
        as_root "$host" "$program service install --nats $FLOTILLA_NATS --roles $ROLES" < /dev/null
    fi
}

upgrade_on() {
    local host=$1 there fleet="--dir $credentials"
    [ -z "${FLOTILLA_NATS:-}" ] || fleet="--nats $FLOTILLA_NATS"
    there=$(send "$host") || return 1
    local upgrade="$program upgrade --binary $there/flotilla --installed $program --service $fleet"
    as_root "$host" "chmod 0755 $there/flotilla; $upgrade; code=\$?; rm -r $there; exit \$code" < /dev/null
}

stack_on() {
    local host=$1 use="$program stack use $stack --untested --stacks $stacks"
    local test="$as_agent $program stack use $stack --only-test --stacks $stacks"
    local back="$program stack roll-back --from $stack --stacks $stacks"
    # What another user can change must not be tried and used by root.
    local owner="[ \"\$(stat -c %u $stacks $stacks/$stack | sort -u)\" = 0 ]"
    owner="{ $owner || { echo $stacks/$stack is not there, or not owned by root >&2; false; }; }"
    # A stack that was in use before stays, whatever the restart does.
    local was="[ \"\$(readlink $stacks/current)\" = $stack ]"
    local start="{ $restart || { $back; $restart; false; }; }"
    as_root "$host" "if $was; then $restart; else $owner && $test && $use && $start; fi" < /dev/null
}

stack_rollback_on() {
    local host=$1
    # The agents of hosts that never switched are restarted, too.
    as_root "$host" "$program stack roll-back --from $stack --stacks $stacks && $restart" < /dev/null
}

status_on() {
    local host=$1
    as_root "$host" "systemctl show flotilla-agent -p ActiveState -p StatusText --value | paste -sd ' '; $program --version" < /dev/null
}

# Checks that a value for a remote shell is a name or an address.
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
stack | stack-rollback)
    [ $# -gt 0 ] || fail "which stack? usage: rollout.sh $action NAME HOST…"
    stack=$1
    shift
    [[ $stack =~ ^[A-Za-z0-9_+][A-Za-z0-9._+-]*$ ]] || fail "$stack is no name of a stack"
    plain FLOTILLA_STACKS "$stacks"
    ;;
*) fail "usage: rollout.sh install|join|upgrade|status HOST…, or stack|stack-rollback NAME HOST…" ;;
esac
[ -z "${FLOTILLA_NATS:-}" ] || plain FLOTILLA_NATS "$FLOTILLA_NATS"
[ $# -gt 0 ] || fail "which boxes? name their hosts"

failed=()
for host in "$@"; do
    echo "== $host"
    "${action//-/_}_on" "$host" && continue
    # Stop at the first host where the program or the stack does not work.
    [ "$action" != upgrade ] || fail "$host was not upgraded, and nothing after it"
    [ "$action" != stack ] || fail "$host was not switched to $stack, and nothing after it"
    failed+=("$host")
done
[ ${#failed[@]} = 0 ] || fail "$action failed on ${failed[*]}"
