#!/bin/sh
# Installs a browser for the tests of the web page: Debian's chromium and chromedriver. Needs root.
# On other systems, put chromium and chromedriver on PATH.
set -eu

if command -v chromedriver >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "fetch-chromium: put chromium and chromedriver on PATH (Debian: chromium, chromium-driver)" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
