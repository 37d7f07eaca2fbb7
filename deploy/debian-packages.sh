# Functions for other scripts: unpack packages of Debian's testing release, as any user and beside
# the packages of this machine. For Debian and Ubuntu on x86-64.
# shellcheck shell=sh

# Prints the Debian mirror of this machine, or the default one.
find_debian_mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^ *#' |
        grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | grep . ||
        echo http://deb.debian.org/debian
}

# Prepares an apt in directory $1 that knows only the testing release. Other commands of apt use it
# until APT_CONFIG is unset.
prepare_testing_release() {
    [ "$(uname -m)" = x86_64 ] || return 1
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -f "$keys" ] || return 1
    mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
    : >"$1/status"
    echo "deb [signed-by=$keys] $(find_debian_mirror) forky main" >"$1/sources.list"
    cat >"$1/apt.conf" <<CONF
Dir::State "$1";
Dir::State::status "$1/status";
Dir::State::lists "$1/lists";
Dir::Cache "$1/cache";
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Sandbox::User "";
CONF
    export APT_CONFIG="$1/apt.conf"
    apt-get -q update >&2
}

# Downloads packages of the prepared release and unpacks them in directory $1. Needs space beside it.
unpack_testing_packages() {
    unpacked=$1
    shift
    debs=$(mktemp -d "${unpacked%/*}/debs.XXXXXX")
    (cd "$debs" && apt-get -q download "$@") >&2 || return 1
    for package in "$debs"/*.deb; do
        dpkg-deb -x "$package" "$unpacked" || return 1
    done
    rm -rf "$debs"
}
