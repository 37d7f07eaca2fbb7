"""Prints each result of a run once, though script and fleet are restarted: watch_evals.py RUN."""

import sys
from pathlib import Path

import flotilla

cursor = Path(f"{sys.argv[1]}.cursor")
after = int(cursor.read_text()) if cursor.exists() else 0
with flotilla.connect() as fleet:
    for result in fleet.watch_evals(sys.argv[1], after=after):
        print(result, flush=True)
        cursor.write_text(str(result.cursor))
