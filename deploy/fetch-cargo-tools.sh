#!/bin/sh
# Installs cargo tools in .tools/cargo from their published sources, except those on PATH:
# fetch-cargo-tools.sh cargo-deny cargo-about cargo-machete
set -eu

cd "$(dirname "$0")/.."
export CARGO_PROFILE_DEV_DEBUG=0
for tool in "$@"; do
    case $tool in
    # Debug builds compile three times as fast, and these run for seconds.
    cargo-deny) version=0.20.2 options=--debug ;;
    cargo-machete) version=0.9.2 options=--debug ;;
    # Runs the tests. Its own site has binaries: nexte.st.
    cargo-nextest) version=0.9.143 options=--debug ;;
    # An S3 server for the tests of the store, with the database that it has by default.
    garage) version=2.5.0 options='--debug --no-default-features --features bundled-libs,lmdb' ;;
    # The compiler, which it starts for each mutant, takes the time.
    cargo-mutants) version=27.1.0 options=--debug ;;
    # Writes the bill of materials of a release.
    cargo-cyclonedx) version=0.5.9 options=--debug ;;
    # It compares many licence texts.
    cargo-about) version=0.9.3 options='--features cli' ;;
    *)
        echo "fetch-cargo-tools: no version is pinned for $tool" >&2
        exit 1
        ;;
    esac
    if [ -x ".tools/cargo/bin/$tool" ] || command -v "$tool" >/dev/null; then
        continue
    fi
    echo "fetch-cargo-tools: building $tool $version in .tools/cargo" >&2
    # For crates that bring libsodium: use that of the system.
    if pkg-config --exists 'libsodium >= 1.0.18' 2>/dev/null; then
        export SODIUM_USE_PKG_CONFIG=1
    fi
    # shellcheck disable=SC2086
    cargo install --quiet --locked --root .tools/cargo --target-dir .tools/cargo/target \
        --version "$version" $options "$tool"
    rm -rf .tools/cargo/target
done
