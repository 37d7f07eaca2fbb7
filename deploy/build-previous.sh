#!/bin/sh
# Builds the program of the previous version as .tools/flotilla-previous, for the test of fleets
# with programs of two versions: the commit that made the recording in tests/e2e/recordings.
set -eu

cd "$(dirname "$0")/.."
previous=$(sed -n 's/^const PREVIOUS: &str = "\(.*\)";/\1/p' tests/e2e/tests/all/skew.rs)
commit=$(git log -1 --format=%H -- "tests/e2e/recordings/$previous")
if [ -z "$commit" ]; then
    echo "build-previous: no commit made tests/e2e/recordings/$previous" >&2
    exit 1
fi
program=.tools/flotilla-previous
if [ -x $program ] && [ "$(cat $program.commit 2>/dev/null)" = "$commit" ]; then
    exit 0
fi
source=.tools/previous
rm -rf $source
git clone --quiet --shared --no-checkout . $source
git -C $source checkout --quiet "$commit"
(cd $source && cargo build --locked -p flotilla --target-dir target)
mv $source/target/debug/flotilla $program
echo "$commit" >$program.commit
rm -rf $source
