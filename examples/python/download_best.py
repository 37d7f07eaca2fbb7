"""Downloads the best checkpoint of a run: download_best.py RUN DIRECTORY."""

import sys

import flotilla

with flotilla.connect() as fleet:
    run = fleet.run(sys.argv[1])
    checkpoint = run.get_checkpoint()
    directory = run.download_checkpoint(sys.argv[2])
    print(f"cycle {checkpoint.checkpoint.cycle}, step {checkpoint.checkpoint.step}:")
    print(*sorted(path.name for path in directory.iterdir()))
