# Functions for other scripts: make Python environments and install packages into them.
# shellcheck shell=sh

UV_VERSION=0.13.9

# Makes environment $1 with the packages of file $2, unless it has them.
create_python_environment() {
    cmp -s "$2" "$1/requirements.txt" && return 0
    printf '%s\n' "making $1" >&2
    make_python_environment "$1" &&
        install_python_packages "$1" --requirement "$2" &&
        cp "$2" "$1/requirements.txt"
}

# Makes environment $1 anew, without pip, which takes longer to install than most packages.
make_python_environment() {
    python3 -m venv --clear --without-pip "$1" >&2
}

# Installs packages into environment $1, with pip's options $2 and so on. uv needs seconds where pip
# needs minutes, but it does not read pip's settings: pip is used where uv fails. uv's cache shares
# its files with the environment, and is of no use afterwards.
install_python_packages() {
    environment=$1
    shift
    if uv=$(find_uv); then
        failed=
        UV_CACHE_DIR=.tools/uv-cache "$uv" pip install --quiet \
            --index-strategy unsafe-best-match --python "$environment/bin/python" "$@" >&2 ||
            failed=1
        rm -rf .tools/uv-cache
        [ -n "$failed" ] || return 0
    fi
    "$environment/bin/python" -m ensurepip >/dev/null &&
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
}

# Prints the path of uv, which is fetched to .tools unless it is installed.
find_uv() {
    command -v uv && return 0
    if [ ! -x .tools/uv/bin/uv ]; then
        python3 -m venv --clear .tools/uv >&2 &&
            .tools/uv/bin/python -m pip install --quiet --disable-pip-version-check \
                "uv==$UV_VERSION" >&2 || return 1
    fi
    printf '%s\n' "$PWD/.tools/uv/bin/uv"
}
