"""Progress of a run for people: lines on a terminal, a table in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from typing import Any

from flotilla.v1 import board_pb2

_BAR = 'style="width: 12em; vertical-align: middle"'


class Progress:
    """The progress of a run, from the updates of its board.

    `print(progress)` shows its state in a line; a notebook shows a table of its cycles.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.head = board_pb2.Board.Head(run=run)
        self.cycles: dict[int, board_pb2.Board.Cycle] = {}
        self._printed: set[str] = set()

    def update(self, board: board_pb2.Board) -> list[str]:
        """Takes an update and returns the lines that are new: results, phases, tenths of a phase."""
        self.head = board.head
        self.cycles.update((cycle.cycle, cycle) for cycle in board.cycles)
        head = board.head
        tenth = 10 * head.done // head.total if head.total else 0
        lines = {f"{head.state} {head.cycle} {head.phase} {tenth}": str(self)}
        for cycle in board.cycles:
            for result in _results(cycle):
                line = f"{self.run}: cycle {cycle.cycle}, {result}"
                lines[line] = line
        new = [line for key, line in lines.items() if key not in self._printed]
        self._printed.update(lines)
        return [_escape_controls(line) for line in new]

    def __str__(self) -> str:
        head = self.head
        if head.state not in ("", "running"):
            return f"{self.run}: {head.state}" + (f", {head.message}" if head.message else "")
        count = f", {head.done} of {head.total} {head.unit}" if head.total else ""
        cycle = f"cycle {head.cycle} of {head.cycles}, " if head.cycles else ""
        return f"{self.run}: {cycle}{head.phase}{count}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = self.head
        bar = f'<progress value="{head.done}" max="{head.total}" {_BAR}></progress>'
        names = ("cycle", "samples", "judged", "passed", "kept", "results")
        rows = [_row("th", names)]
        for number in sorted(self.cycles):
            cycle = self.cycles[number]
            train = cycle.train
            kept = cycle.selected.kept if cycle.HasField("selected") else ""
            counts = (f"{train.drawn} / {train.planned}", train.judged, train.passed, kept)
            rows.append(_row("td", (number, *counts, "; ".join(_results(cycle)))))
        title = f"<p><b>{html.escape(str(self))}</b> {bar if head.total else ''}</p>"
        return f"{title}<table>{''.join(rows)}</table>"


class ProgressDisplay:
    """Shows a progress in the output of a notebook's cell, or prints its new lines."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._handle = _display_in_notebook(progress)

    def update(self, board: board_pb2.Board) -> None:
        lines = self._progress.update(board)
        if self._handle is not None:
            self._handle.update(self._progress)
        else:
            for line in lines:
                print(line, flush=True)


def _display_in_notebook(progress: Progress) -> Any:
    """Returns the handle of a display that can be updated; None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display(progress, display_id=True)


def _results(cycle: board_pb2.Board.Cycle) -> Iterator[str]:
    for it in cycle.evals:
        yield f"step {it.step}, {it.suite}: perplexity {it.perplexity:.4f}"
    rates = [("held out", cycle.done.heldout), *((it.suite, it.rate) for it in cycle.done.suites)]
    for suite, rate in rates:
        if rate.samples:
            yield f"{suite}: pass rate {rate.mean:.1%}"


def _row(tag: str, cells: tuple[object, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _escape_controls(line: str) -> str:
    """Escapes characters that a terminal would obey; names and reasons come from other people."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in line)
