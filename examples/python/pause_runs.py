"""Pauses all runs that are working, or resumes those that are paused: pause_runs.py [resume]."""

import sys

import flotilla

with flotilla.connect() as fleet:
    for info in fleet.list_runs():
        if sys.argv[1:] == ["resume"] and info.state == "paused":
            fleet.run(info.run).resume("the boxes are free")
        elif sys.argv[1:] == [] and info.state == "running":
            fleet.run(info.run).pause("a script wanted the boxes")
        print(info.run, fleet.run(info.run).get_info().state)
