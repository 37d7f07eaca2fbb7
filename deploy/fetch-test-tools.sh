#!/bin/sh
# Installs what tests need: fetch-test-tools.sh [TOOL ...]; all tools without arguments. Programs
# and Python environments go to .tools; what Debian has goes to the system and needs root. Tools
# that are installed are left as they are. A failure is reported and the others go on; tests without
# their tool are recorded as skipped. Fails if a tool could not be installed.
set -u

TOOLS="nats-server llama.cpp llama.cpp-vulkan llama.cpp-sources chromedriver promtool quadlet garage
    docker docker-compose systemd systemd-analyze tc valgrind shellcheck jq curl bash script python3
    gcc cc c c++ go python stubs trackers aws pytest math-verify grpcurl nats
    verifiers openenv apt-ftparchive gpg debian-root"

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 1
# shellcheck source=/dev/null
. "$root/deploy/debian-packages.sh"
# shellcheck source=/dev/null
. "$root/deploy/python-packages.sh"
mkdir -p .tools/bin
tmp=$(mktemp -d "$root/.tools/fetch.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

say() { printf '%s\n' "fetch-test-tools: $*" >&2; }

# Installs a package, unless there is the file or program $1.
install_package() {
    if [ -e "$1" ] || command -v "$1" >/dev/null; then
        return 0
    fi
    shift
    install_debian_packages "$@"
}

install_debian_packages() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "install it as root (Debian: $*)"
        return 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    [ -e "$tmp/updated" ] || apt-get update -qq >&2 || return 1
    : >"$tmp/updated"
    apt-get install -y -qq --no-install-recommends "$@" >"$tmp/log" 2>&1 || {
        cat "$tmp/log" >&2
        return 1
    }
}

# Takes the program $2 out of a package of Debian's testing release. It must not need more than the
# C library of this machine.
unpack_program() {
    name=${2##*/}
    if command -v "$name" >/dev/null || [ -x ".tools/bin/$name" ]; then
        return 0
    fi
    (
        if [ -e "$tmp/apt/apt.conf" ]; then
            export APT_CONFIG="$tmp/apt/apt.conf"
        else
            prepare_testing_release "$tmp/apt" || exit 1
        fi
        unpack_testing_packages "$tmp/root" "$1"
    ) && mv "$tmp/root/$2" .tools/bin/
}

# Creates the Python environment .tools/$1 from the other arguments, files of tests/e2e/python.
# Repeated only if the files change.
create_environment() {
    made=.tools/$1
    shift
    (cd tests/e2e/python && cat "$@") >"$tmp/requirements.txt" &&
        create_python_environment "$made" "$tmp/requirements.txt"
}

# Builds a Go program, which Debian does not have.
build_go_program() {
    if command -v "$1" >/dev/null || [ -x ".tools/bin/$1" ]; then
        return 0
    fi
    install_package go golang-go && GOBIN="$root/.tools/bin" timeout 600 go install "$2" >&2
}

# Packs an empty Debian, of the release of this machine, which tests install packages in. Mounts end
# with the command.
create_debian_root() {
    [ ! -e .tools/debian-root.tar ] || return 0
    release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    install_package debootstrap debootstrap || return 1
    unshare --mount debootstrap --variant=minbase "$release" "$tmp/debian" \
        "$(find_debian_mirror)" >"$tmp/log" 2>&1 || {
        cat "$tmp/log" >&2
        return 1
    }
    rm -rf "$tmp"/debian/var/cache/apt/archives/*.deb "$tmp"/debian/var/lib/apt/lists/*
    tar -C "$tmp/debian" -cf "$tmp/debian.tar" . && mv "$tmp/debian.tar" .tools/debian-root.tar
}

fetch_tool() {
    case $1 in
    nats-server | llama.cpp) "deploy/fetch-$(echo "$1" | tr . -).sh" >/dev/null ;;
    llama.cpp-vulkan) deploy/fetch-llama-cpp.sh --vulkan >/dev/null ;;
    llama.cpp-sources) deploy/fetch-llama-cpp.sh --sources >/dev/null ;;
    chromedriver) deploy/fetch-chromium.sh ;;
    torch) deploy/fetch-torch.sh ;;
    garage)
        # Its crate would build libsodium, and run all tests of it.
        if [ "$(id -u)" = 0 ] && ! command -v garage >/dev/null &&
            [ ! -x .tools/cargo/bin/garage ]; then
            install_package /usr/include/sodium.h libsodium-dev
            install_package pkg-config pkg-config
        fi
        deploy/fetch-cargo-tools.sh garage
        ;;
    promtool) unpack_program promtool usr/bin/promtool ;;
    quadlet) unpack_program podman usr/libexec/podman/quadlet ;;
    python) create_environment python requirements.txt requirements-tests.txt ;;
    # Half of its packages are those of the clients of models too.
    trackers)
        create_environment trackers requirements-trackers.txt requirements-model-clients.txt
        ;;
    stubs | aws | pytest | math-verify | verifiers | openenv)
        create_environment "$1" "requirements-$1.txt"
        ;;
    grpcurl) build_go_program grpcurl github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3 ;;
    nats) build_go_program nats github.com/nats-io/natscli/nats@v0.3.0 ;;
    docker) install_package docker docker.io ;;
    apt-ftparchive) install_package apt-ftparchive apt-utils ;;
    gpg) install_package gpg gpg gpg-agent ;;
    debian-root) create_debian_root ;;
    systemd) install_package /lib/systemd/systemd systemd ;;
    systemd-analyze) install_package systemd-analyze systemd ;;
    tc) install_package tc iproute2 ;;
    script) install_package script bsdutils ;;
    python3)
        # Debian's python3 has no venv by itself.
        python3 -c 'import ensurepip, venv' 2>/dev/null ||
            install_debian_packages python3 python3-venv
        ;;
    gcc | cc | c) install_package gcc gcc libc6-dev ;;
    c++) install_package g++ g++ ;;
    go) install_package go golang-go ;;
    bash | curl | docker-compose | jq | shellcheck | valgrind) install_package "$1" "$1" ;;
    *)
        say "unknown tool; install it yourself"
        return 1
        ;;
    esac
}

# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $TOOLS
failed=
for tool in "$@"; do
    fetch_tool "$tool" || {
        say "no $tool: tests that need it will be skipped"
        failed="$failed $tool"
    }
done
[ -z "$failed" ]
