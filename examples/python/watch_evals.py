"""Prints each result of a run once, though script and fleet are restarted: watch_evals.py RUN."""

import sys
from pathlib import Path

import flotilla

cursor = Path(f"{sys.argv[1]}.cursor")
new_cursor = cursor.with_suffix(".new")
after = int(cursor.read_text()) if cursor.exists() else 0
with flotilla.connect() as fleet:
    for result in fleet.watch_evals(sys.argv[1], after=after):
        print(result, flush=True)
        new_cursor.write_text(str(result.cursor))
        new_cursor.replace(cursor)  # if the script is killed, one of the two is whole
