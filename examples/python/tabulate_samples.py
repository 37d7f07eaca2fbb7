"""Counts the fates of a cycle's samples, and shows the worst prompts: tabulate_samples.py RUN CYCLE."""

import sys

import flotilla

with flotilla.connect() as fleet:
    run = fleet.run(sys.argv[1])
    samples = flotilla.to_dataframe(run.read_samples(int(sys.argv[2])))
print(samples["fate"].value_counts())
print(samples.groupby("prompt")["reward"].mean().sort_values().head())
