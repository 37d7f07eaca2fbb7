#!/bin/sh
# Compiles the crates of this workspace with branch coverage for libFuzzer. Cargo calls it instead
# of rustc (RUSTC_WORKSPACE_WRAPPER), with rustc as the first argument.
rustc=$1
shift
case " $* " in
*" build_script_"*) exec "$rustc" "$@" ;;
esac
exec "$rustc" "$@" \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1
