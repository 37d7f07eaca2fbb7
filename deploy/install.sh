#!/bin/sh
# Installs Flotilla: the program, a nats-server, manual pages and completions.
#
#   ./install.sh                          in an unpacked tarball: installs what lies beside it
#   sh install.sh --from URL-OR-DIR       downloads the tarball of this machine's architecture from a
#                                         release, and checks it by the release's SHA256SUMS
#
#   --prefix DIR    [/usr/local for root, ~/.local for others]
#   --uninstall     removes what was installed; fleets and models stay
#
# Needs sh, tar, sha256sum, and for URLs curl or wget.
set -eu

say() { printf '%s\n' "install: $*"; }
fail() {
    printf '%s\n' "install: $*" >&2
    exit 1
}

from=
uninstall=
if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
while [ $# -gt 0 ]; do
    case $1 in
    --from | --prefix)
        [ $# -ge 2 ] || fail "$1 needs a value"
        [ "$1" = --from ] && from=$2 || prefix=$2
        shift
        ;;
    --uninstall) uninstall=yes ;;
    *) fail "unknown option $1: see the head of this file" ;;
    esac
    shift
done
manifest=$prefix/share/flotilla/installed

# Prints the file $1 of the release.
get() {
    case $from in
    http://* | https://*)
        if command -v curl >/dev/null; then
            curl --fail --silent --show-error --location "$from/$1"
        elif command -v wget >/dev/null; then
            wget --quiet --output-document=- "$from/$1"
        else
            fail "curl or wget is needed to download $from/$1"
        fi
        ;;
    *) cat "$from/$1" ;;
    esac
}

# Downloads and unpacks the release into directory $1, and prints where it is.
unpack_release() {
    case $(uname -s)-$(uname -m) in
    Linux-x86_64) architecture=x86_64 ;;
    Linux-aarch64 | Linux-arm64) architecture=aarch64 ;;
    *) fail "there are programs for Linux on x86-64 and arm64 only, not $(uname -s) on $(uname -m)" ;;
    esac
    get SHA256SUMS >"$1/SHA256SUMS" || fail "no SHA256SUMS in $from: is it a release of Flotilla?"
    archive=$(sed -n "s/^[0-9a-f]*  \(flotilla-[0-9.]*-$architecture-linux\.tar\.gz\)$/\1/p" \
        "$1/SHA256SUMS" | tail -n 1)
    [ -n "$archive" ] || fail "$from has no tarball for $architecture"
    get "$archive" >"$1/$archive" || fail "$from/$archive cannot be read"
    (cd "$1" && grep "  $archive\$" SHA256SUMS | sha256sum -c - >/dev/null 2>&1) ||
        fail "$archive does not have the checksum of SHA256SUMS: download it again"
    tar -xzf "$1/$archive" -C "$1"
    printf '%s\n' "$1/${archive%.tar.gz}"
}

# Copies file $1 to $prefix/$2 with mode $3. A running program is replaced, not written over.
place() {
    mkdir -p "$prefix/${2%/*}"
    cp "$1" "$prefix/$2.new"
    chmod "$3" "$prefix/$2.new"
    mv -f "$prefix/$2.new" "$prefix/$2"
    printf '%s\n' "$2" >>"$manifest.new"
}

if [ -n "$uninstall" ]; then
    [ -f "$manifest" ] || fail "nothing was installed in $prefix: set --prefix"
    while read -r file; do
        rm -f "$prefix/$file"
    done <"$manifest"
    rm -f "$manifest"
    say "removed from $prefix"
    exit 0
fi

if [ -n "$from" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    here=$(unpack_release "$work")
else
    here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
    [ -x "$here/flotilla" ] || fail "no program beside this file: set --from to a release"
fi
"$here/flotilla" --version >/dev/null ||
    fail "the program does not run here: it needs a C library (glibc) of at least 2.28"

mkdir -p "${manifest%/*}"
: >"$manifest.new"
place "$here/flotilla" bin/flotilla 755
server=bin/nats-server
if command -v nats-server >/dev/null && [ ! -e "$prefix/bin/nats-server" ]; then
    # It stays the one on the path. If it is too old for a fleet, the program uses its own.
    server=lib/flotilla/nats-server
fi
place "$here/nats-server" "$server" 755
place "$here/LICENSE-nats-server" share/flotilla/LICENSE-nats-server 644
for file in LICENSE third-party.txt; do
    [ ! -f "$here/$file" ] || place "$here/$file" "share/flotilla/$file" 644
done
for page in "$here"/man/*.1; do
    place "$page" "share/man/man1/${page##*/}" 644
done
place "$here/completions/flotilla.bash" share/bash-completion/completions/flotilla 644
place "$here/completions/_flotilla" share/zsh/site-functions/_flotilla 644
place "$here/completions/flotilla.fish" share/fish/vendor_completions.d/flotilla.fish 644
mv "$manifest.new" "$manifest"

say "installed $("$prefix/bin/flotilla" --version) in $prefix"
case :$PATH: in
*:"$prefix/bin":*) ;;
*) say "add it to the path: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
say "try it: flotilla demo"
