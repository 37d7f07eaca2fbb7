#!/usr/bin/env bash
# Creates an environment with PyTorch for the CPU in .tools/torch, unless FLOTILLA_TORCH_PYTHON
# names a suitable interpreter. Repeated only if the requirements change.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/python-packages.sh

wanted=deploy/requirements-torch.txt
python=${FLOTILLA_TORCH_PYTHON:-}
if [ -n "$python" ]; then
    "$python" -c 'import torch, transformers, peft, accelerate, trl, bitsandbytes' || {
        echo "FLOTILLA_TORCH_PYTHON=$python lacks what $wanted lists" >&2
        exit 1
    }
    exit 0
fi
done_with=.tools/torch/requirements.txt
if cmp -s "$wanted" "$done_with"; then
    exit 0
fi
echo "making .tools/torch (2 GB, or 6 GB if only PyPI can be reached)" >&2
make_python_environment .tools/torch
# The CPU build has a tenth of the size. If its index cannot be reached, PyPI is used.
index=https://download.pytorch.org/whl/cpu
python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)' "$index/" \
    2>/dev/null || index=
install_python_packages .tools/torch --requirement "$wanted" ${index:+--extra-index-url "$index"}
cp "$wanted" "$done_with"
