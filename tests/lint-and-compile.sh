#!/usr/bin/env bash
# Lints a crate of this workspace with clippy and rustdoc, and compiles it. Cargo calls it
# instead of rustc (RUSTC_WORKSPACE_WRAPPER), with rustc as the first argument. So all dependencies
# are compiled once; `make lint` checks them a second time.
set -euo pipefail

rustc=$1
shift
arguments=" $* "
# Cargo's questions about the compiler.
if [[ $arguments != *" --crate-name "* || $arguments == *" --crate-name ___ "* ]]; then
    exec "$rustc" "$@"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
lint=(-D warnings)
for argument in "$@"; do
    case ${previous:-} in
    --out-dir) lint+=("$scratch") ;;
    *)
        case $argument in
        --emit=*) ;;
        # Cargo would start what depends on this crate.
        --json=*) lint+=("${argument/artifacts,/}") ;;
        incremental=*) lint+=(debuginfo=0) ;;
        *) lint+=("$argument") ;;
        esac
        ;;
    esac
    previous=$argument
done

case $arguments in
*" --test "* | *" --crate-name build_script_"* | *" --crate-type proc-macro "*) ;;
*) rustdoc "${lint[@]}" ;;
esac
# Clippy is the compiler with more lints. It leaves out some optimisations, so that it serves as
# the compiler only of crates without.
if [[ $arguments == *" opt-level="* ]]; then
    clippy-driver "$rustc" "${lint[@]}" --emit=metadata
    "$rustc" "$@"
else
    clippy-driver "$rustc" "$@" -D warnings
fi
