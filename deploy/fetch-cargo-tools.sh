#!/bin/sh
# Installs cargo tools in .tools/cargo from their published sources, except those on PATH:
# fetch-cargo-tools.sh cargo-deny cargo-about cargo-machete
set -eu

cd "$(dirname "$0")/.."
for tool in "$@"; do
    case $tool in
    cargo-deny) version=0.20.2 features= ;;
    cargo-about) version=0.9.3 features=cli ;;
    cargo-machete) version=0.9.2 features= ;;
    *)
        echo "fetch-cargo-tools: no version is pinned for $tool" >&2
        exit 1
        ;;
    esac
    if [ -x ".tools/cargo/bin/$tool" ] || command -v "$tool" >/dev/null; then
        continue
    fi
    echo "fetch-cargo-tools: building $tool $version in .tools/cargo" >&2
    # A debug build: the tools run for seconds, and it compiles three times as fast.
    cargo install --quiet --locked --debug --root .tools/cargo --target-dir .tools/cargo/target \
        ${features:+--features "$features"} --version "$version" "$tool"
    rm -rf .tools/cargo/target
done
