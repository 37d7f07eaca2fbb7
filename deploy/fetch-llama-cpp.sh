#!/bin/sh
# Prints the directory of a llama.cpp (llama-perplexity and llama-server) and fetches one if needed.
# Searches $FLOTILLA_LLAMA_CPP, then PATH, then .tools/llama.cpp/bin of this repository. The fetched
# one is for tests and CPU machines. On Debian or Ubuntu on x86-64, the packages of Debian's testing
# release are unpacked to .tools together with their C library (seconds, no root). Otherwise, or if
# that fails, the sources in a pinned PyPI package are built (minutes, needs a C++ compiler).
# Idempotent; stdout contains only the path. With --native it only takes or builds one from these
# sources for this machine's processor, with the programs that benchmarks compare with. With
# --sources it prints the directory of the sources, which contain llama.cpp's converters. With
# --vulkan it unpacks Debian's packages with the Vulkan backend and Mesa's driver for CPUs, for tests
# of boxes with a GPU.
set -eu

SDIST=llama_cpp_python
SDIST_VERSION=0.3.36
SDIST_SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
PROGRAMS="llama-perplexity llama-server"
VULKAN_PACKAGES="libggml0-backend-vulkan libvulkan1 mesa-vulkan-drivers"
BENCH_PROGRAMS="llama-bench llama-batched-bench llama-quantize"

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
target=$root/.tools/llama.cpp
# shellcheck source=/dev/null
. "$root/deploy/debian-packages.sh"

say() { printf '%s\n' "fetch-llama-cpp: $*" >&2; }
die() {
    say "$*"
    say "remedy: build or install llama.cpp yourself and point FLOTILLA_LLAMA_CPP to the" \
        "directory that holds llama-perplexity and llama-server"
    exit 1
}

# Succeeds if the programs in directory $1 run, and sets $found to their version.
usable() {
    for program in $PROGRAMS; do
        [ -x "$1/$program" ] || return 1
    done
    found=$("$1/llama-perplexity" --version 2>&1 | sed -n 's/^version: //p') || return 1
    [ -n "$found" ]
}

# Prints the directory of programs that are here and exits, or returns.
find_programs() {
    if [ -n "${FLOTILLA_LLAMA_CPP:-}" ]; then
        usable "$FLOTILLA_LLAMA_CPP" ||
            die "FLOTILLA_LLAMA_CPP=$FLOTILLA_LLAMA_CPP holds no $PROGRAMS that run"
        printf '%s\n' "$FLOTILLA_LLAMA_CPP"
        exit 0
    fi

    on_path=$(command -v llama-perplexity || true)
    if [ -n "$on_path" ] && usable "$(dirname "$on_path")"; then
        dirname "$on_path"
        exit 0
    fi

    if usable "$target/bin"; then
        printf '%s\n' "$target/bin"
        exit 0
    fi
}

case "${1:-}" in
--sources)
    target=$root/.tools/$SDIST-$SDIST_VERSION
    if [ -d "$target" ]; then
        printf '%s\n' "$target"
        exit 0
    fi
    ;;
--native)
    target=$root/.tools/llama.cpp-native
    PROGRAMS="$PROGRAMS $BENCH_PROGRAMS"
    if usable "$target/bin"; then
        printf '%s\n' "$target/bin"
        exit 0
    fi
    ;;
--vulkan)
    target=$root/.tools/llama.cpp-vulkan
    if usable "$target/bin"; then
        printf '%s\n' "$target/bin"
        exit 0
    fi
    ;;
'') find_programs ;;
*) die "unknown option $1; the options are --native, --sources and --vulkan" ;;
esac

mkdir -p "$root/.tools"
tmp=$(mktemp -d "$root/.tools/fetch.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

# Unpacks llama.cpp and the packages of the arguments to $tmp.
unpack_packages() {
    prepare_testing_release "$tmp/apt" || return 1
    needed=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
        --no-breaks --no-replaces --no-enhances libllama0 "$@" | grep '^[a-z]' | sort -u |
        grep -vE '^(debconf|cdebconf|perl|wget|curl)') || return 1
    # shellcheck disable=SC2086
    unpack_testing_packages "$tmp/root" $needed llama.cpp-tools llama.cpp-tools-extra || return 1
    if grep -q avx512_bf16 /proc/cpuinfo; then
        kernels=zen4
    elif grep -q avx2 /proc/cpuinfo; then
        kernels=haswell
    else
        kernels=x64
    fi
    libraries=$tmp/root/usr/lib/x86_64-linux-gnu
    [ -f "$libraries/ggml/backends0/libggml-cpu-$kernels.so" ] || return 1
    mkdir "$tmp/bin"
    # Backends beside the dynamic linker are all loaded, those elsewhere only one at a time. The
    # backend leaves out drivers for CPUs unless a device is named by its number.
    # shellcheck disable=SC2016
    backends='export GGML_BACKEND_PATH="$libraries/ggml/backends0/libggml-cpu-'$kernels'.so"'
    if [ $# -gt 0 ]; then
        (cd "$libraries" && ln -s "ggml/backends0/libggml-cpu-$kernels.so" \
            ggml/backends0/libggml-vulkan.so .) || return 1
        # shellcheck disable=SC2016
        backends='export GGML_VK_VISIBLE_DEVICES=0
export VK_DRIVER_FILES="${VK_DRIVER_FILES:-$root/usr/share/vulkan/icd.d/lvp_icd.json}"'
    fi
    # Programs of a newer release only run with the C library of that release.
    for program in $PROGRAMS $BENCH_PROGRAMS; do
        cat >"$tmp/bin/$program" <<WRAPPER
#!/bin/sh
root=\$(CDPATH='' cd -- "\$(dirname -- "\$0")/../root" && pwd)
libraries=\$root/usr/lib/x86_64-linux-gnu
$backends
exec "\$libraries/ld-linux-x86-64.so.2" --library-path "\$libraries:\$libraries/llama" \\
    "\$root/usr/bin/$program" "\$@"
WRAPPER
        chmod 755 "$tmp/bin/$program"
    done
    rm -rf "$tmp/apt"
    usable "$tmp/bin"
}

# Unpacks the sources to $tmp and sets $sources.
unpack_sources() {
    command -v python3 >/dev/null || return 1
    python3 -m venv "$tmp/venv" >&2 || return 1
    "$tmp/venv/bin/pip" install --quiet --disable-pip-version-check cmake ninja >&2 || return 1
    # Builds only this package from sources, because pip needs the build tools as wheels to read its
    # metadata.
    "$tmp/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
        --no-binary "$SDIST" -d "$tmp" "$SDIST==$SDIST_VERSION" >&2 || return 1
    archive=$tmp/$SDIST-$SDIST_VERSION.tar.gz
    echo "$SDIST_SHA256  $archive" | sha256sum --check --quiet >&2 || return 1
    tar -xzf "$archive" -C "$tmp"
    rm "$archive"
    sources=$tmp/$SDIST-$SDIST_VERSION/vendor/llama.cpp
}

build_programs() {
    command -v c++ >/dev/null && unpack_sources || return 1
    # Flush the log, because lines that are not written when the program returns are lost.
    sed -i 's|^\( *\)llama_backend_free();|\1common_log_flush(common_log_main());\n&|' \
        "$sources/tools/perplexity/perplexity.cpp"
    say "building llama.cpp; this takes minutes"
    PATH="$tmp/venv/bin:$PATH" cmake -S "$sources" -B "$tmp/build" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=ON \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >&2 || return 1
    # shellcheck disable=SC2086
    PATH="$tmp/venv/bin:$PATH" cmake --build "$tmp/build" --target $PROGRAMS >&2 || return 1
    mkdir -p "$tmp/bin"
    for program in $PROGRAMS; do
        cp "$tmp/build/bin/$program" "$tmp/bin/" || return 1
    done
    rm -rf "$tmp/build" "$tmp/venv" "${tmp:?}/$SDIST-$SDIST_VERSION"
    usable "$tmp/bin"
}

if [ "${1:-}" = --sources ]; then
    unpack_sources || die "the sources of llama.cpp could not be fetched"
    mv "$sources" "$target"
    printf '%s\n' "$target"
    exit 0
fi
if [ "${1:-}" = --vulkan ]; then
    # shellcheck disable=SC2086
    unpack_packages $VULKAN_PACKAGES || die "Debian's packages with Vulkan cannot be used here"
elif [ "${1:-}" = --native ] || ! unpack_packages; then
    [ "${1:-}" = --native ] ||
        say "Debian's packages of llama.cpp cannot be used here; building it instead"
    rm -rf "${tmp:?}"/*
    build_programs || die "llama.cpp could not be built"
fi
# Rename, so that concurrent fetches never see an incomplete directory.
rm -rf "$target"
mv "$tmp" "$target"
trap - EXIT
chmod 755 "$target"
say "fetched llama.cpp $found"
printf '%s\n' "$target/bin"
