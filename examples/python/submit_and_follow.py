"""Submits a run spec, shows its progress and prints its results: submit_and_follow.py SPEC."""

import sys

import flotilla

with flotilla.connect() as fleet:  # the fleet of FLOTILLA_DIR
    run = fleet.submit(sys.argv[1])
    info = run.wait(show=True)
    print(*run.list_evals(), sep="\n")
    print(info.run, info.state)
