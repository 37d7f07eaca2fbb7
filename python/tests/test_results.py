"""Errors, evals, progress and tables, from messages as the gateway sends them."""

import sys
import unittest
from typing import Any
from unittest import mock

import flotilla
from flotilla import HELDOUT, EvalResult, FlotillaError, MissingPackageError, Progress, Sample
from flotilla.v1 import board_pb2, control_pb2, facts_pb2, fleet_pb2

Board = board_pb2.Board


def perplexity(cursor: int = 7) -> EvalResult:
    result = facts_pb2.Eval(run="a-1", cycle=1, step=8, suite="worked", perplexity=2.5, stderr=0.5)
    return EvalResult.from_message(control_pb2.EvalEvent(cursor=cursor, eval=result))


def pass_rates() -> EvalResult:
    rate = facts_pb2.CycleDone.Rate(mean=0.25, stderr=0.1, prompts=4, samples=8)
    suites = [
        facts_pb2.CycleDone.SuiteRate(suite="carry", rate=rate),
        facts_pb2.CycleDone.SuiteRate(suite="unjudged"),
    ]
    at = [facts_pb2.CycleDone.PassAt(k=4, mean=0.5)]
    rates = facts_pb2.PassRates(run="a-1", cycle=2, heldout=rate, pass_at=at, suites=suites)
    return EvalResult.from_message(control_pb2.EvalEvent(cursor=9, pass_rates=rates))


class ErrorTests(unittest.TestCase):
    def test_the_first_code_counts_and_has_its_remedy(self) -> None:
        error = FlotillaError("no answer (B104): because (X101)")
        self.assertEqual(error.code, "B104")
        self.assertTrue(error.remedy and error.remedy in str(error))
        unknown = FlotillaError("what is this (Z999)")
        self.assertEqual((unknown.code, unknown.remedy), ("Z999", ""))
        self.assertEqual(FlotillaError("no code").code, "")

    def test_an_unreachable_gateway_is_named(self) -> None:
        with flotilla.connect(address="127.0.0.1:1") as fleet:
            for call in (fleet.list_runs, lambda: next(fleet.watch_evals())):
                with self.assertRaisesRegex(flotilla.UnavailableError, "127.0.0.1:1") as raised:
                    call()
                self.assertEqual(raised.exception.code, "G106")


class EvalTests(unittest.TestCase):
    def test_a_result_is_a_perplexity_or_pass_rates(self) -> None:
        self.assertEqual(str(perplexity()), "a-1, cycle 1, step 8, worked: perplexity 2.5000")
        rates = pass_rates()
        self.assertEqual(list(rates.pass_rates), [HELDOUT, "carry"])
        self.assertEqual(rates.pass_rates[HELDOUT].pass_at, {4: 0.5})
        expected = "a-1, cycle 2, step 0, held out: pass rate 25.0%, carry: pass rate 25.0%"
        self.assertEqual(str(rates), expected)


class ProgressTests(unittest.TestCase):
    def board(self, done: int, state: str = "running", **fields: Any) -> Board:
        head = Board.Head(
            run="a-1",
            state=state,
            cycle=1,
            cycles=2,
            phase="generate",
            done=done,
            total=100,
            unit="samples",
            message="<b>\x1b[2J",
        )
        return Board(head=head, **fields)

    def test_lines_are_printed_once_and_by_tenths(self) -> None:
        progress = Progress("a-1")
        self.assertEqual(
            progress.update(self.board(0)), ["a-1: cycle 1 of 2, generate, 0 of 100 samples"]
        )
        self.assertEqual(progress.update(self.board(9)), [])
        figure = Board.Figure(step=8, suite="worked", perplexity=2.5)
        cycles = [Board.Cycle(cycle=1, evals=[figure])]
        lines = progress.update(self.board(19, cycles=cycles))
        expected = "a-1: cycle 1, step 8, worked: perplexity 2.5000"
        self.assertEqual(lines[1], expected)
        self.assertEqual(progress.update(self.board(19, cycles=cycles)), [])

    def test_texts_of_others_are_escaped(self) -> None:
        progress = Progress("a-1")
        lines = progress.update(self.board(100, "failed"))
        self.assertEqual(lines, ["a-1: failed, <b>\\x1b[2J"])
        self.assertIn("&lt;b&gt;", progress._repr_html_())
        self.assertIn("<progress", progress._repr_html_())


class TableTests(unittest.TestCase):
    def test_without_pandas_the_remedy_is_named(self) -> None:
        with mock.patch.dict(sys.modules, pandas=None):
            with self.assertRaisesRegex(MissingPackageError, "pip install") as raised:
                flotilla.to_dataframe([])
        self.assertIn("pandas is not installed", raised.exception.message)

    def test_records_become_rows(self) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError:
            self.skipTest("pandas is not installed")
        evals = flotilla.to_dataframe([perplexity(), pass_rates()])
        self.assertEqual(list(evals["suite"]), ["worked", HELDOUT, "carry"])
        self.assertEqual(list(evals["pass_rate"].dropna()), [0.25, 0.25])
        page = board_pb2.SamplesPage(
            prompts=[
                board_pb2.SamplesPage.Prompt(
                    prompt_id="p0",
                    text="1+1=",
                    samples=[
                        board_pb2.SamplesPage.Sample(
                            text="2", outcome="pass", reward=1, logprob=-1
                        ),
                        board_pb2.SamplesPage.Sample(index=1, text="3", outcome="error"),
                    ],
                )
            ]
        )
        samples = flotilla.to_dataframe(Sample.from_page("a-1", 1, page))
        self.assertEqual(list(samples["text"]), ["2", "3"])
        self.assertEqual(samples["reward"].isna().tolist(), [False, True])
        agents = [fleet_pb2.AgentStatus(agent="a", telemetry=fleet_pb2.Telemetry(watts=5))]
        self.assertEqual(flotilla.to_dataframe(agents)["telemetry.watts"][0], 5)
        self.assertTrue(flotilla.to_dataframe([]).empty)


if __name__ == "__main__":
    unittest.main()
