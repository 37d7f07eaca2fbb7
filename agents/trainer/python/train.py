# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch>=2.6",
#   "transformers>=4.57",
#   "peft>=0.17",
#   "accelerate>=1.12",
# ]
# ///
"""The PyTorch worker of the trainer: answers one call, to train or to probe, and exits.

It uses the agent's protocol on stdin and stdout, one JSON object per line. Exit codes: 0 trained
(or refused with a reason), 1 failed, 143 stopped by SIGTERM after saving.
"""

import sys

from flotilla_trainer import main

if __name__ == "__main__":
    sys.exit(main.main())
