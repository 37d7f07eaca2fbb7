"""Runs a Python file as the cell of a notebook, in a kernel as Jupyter starts it.

    run_notebook.py FILE    print the outputs of the cell, in nbformat's JSON
"""

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

cell = nbformat.v4.new_code_cell(Path(sys.argv[1]).read_text())
notebook = nbformat.v4.new_notebook(cells=[cell])
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(json.dumps(notebook.cells[0].outputs))
