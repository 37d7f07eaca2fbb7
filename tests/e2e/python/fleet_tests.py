"""Tests of the Python client with a closed fleet, in FLOTILLA_DIR, and the files of its specs.

The fleet has trainer, generator, verifier and evaluator, and no runs; the current directory has
sft.yaml, which begins base-1, raft.yaml, which continues it, and the directory of a model. The
program is on PATH. READER is a directory with the credentials of a user who may only read.
"""

import asyncio
import contextlib
import dataclasses
import io
import itertools
import os
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any

import flotilla
from flotilla import HELDOUT, aio
from flotilla.v1 import control_pb2


def connect_with(**fields: Any) -> flotilla.Fleet:
    """Connects with another address, token or authority."""
    with flotilla.connect() as fleet:
        return flotilla.Fleet(dataclasses.replace(fleet.endpoint, **fields))


class FleetTests(unittest.TestCase):
    """The tests are in the order of their names, and use the runs of those before."""

    def setUp(self) -> None:
        self.fleet = flotilla.connect()
        self.addCleanup(self.fleet.close)

    def test_1_a_run_is_submitted_and_shown(self) -> None:
        self.assertEqual(self.fleet.get_caller().scope, "admin")
        report = self.fleet.check_spec("sft.yaml")
        self.assertIn("data.jsonl", [file.file for file in report.files])
        run = self.fleet.submit("sft.yaml")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            info = run.wait(show=True)
        self.assertEqual((run.id, info.state, info.has_ended), ("base-1", "succeeded", True))
        self.assertIn("base-1: cycle 0, step 20, heldout: perplexity ", printed.getvalue())
        self.assertIn("base-1: succeeded", printed.getvalue())
        evals = run.list_evals()
        self.assertTrue(evals and all(it.perplexity and it.perplexity > 1 for it in evals))
        watched = list(itertools.islice(self.fleet.watch_evals(run.id), len(evals)))
        self.assertEqual(watched, evals)
        facts = [event.subject for event in run.watch_facts()]
        self.assertEqual((facts[0], facts[-1]), ("flotilla.base-1.spec", "flotilla.base-1.done"))

    def test_2_samples_and_pass_rates_are_read(self) -> None:
        run = self.fleet.submit(Path("raft.yaml").read_text())
        info = run.wait()
        self.assertEqual(info.message.cycles_done[1].sampled, 64)
        rates = [it for it in run.list_evals() if it.pass_rates]
        self.assertEqual([it.cycle for it in rates], [0, 1])
        self.assertGreater(rates[1].pass_rates[HELDOUT].samples, 0)
        samples = list(run.read_samples(1))
        self.assertEqual(len(samples), 64)
        self.assertEqual(len({(it.prompt_id, it.index) for it in samples}), 64)
        self.assertTrue(all(it.outcome in ("pass", "fail") for it in samples))
        table = flotilla.to_dataframe(samples)
        self.assertEqual(len(table), 64)
        self.assertTrue(table["reward"].between(0, 1).all())
        self.assertTrue(list(run.read_samples(1, "heldout")))
        with tempfile.TemporaryDirectory() as directory:
            files = run.download_checkpoint(directory)
            names = {path.name for path in files.iterdir()}
        self.assertIn("adapter_model.safetensors", names)
        best = [it.checkpoint.cycle for it in run.list_checkpoints() if it.best]
        self.assertEqual(best, [run.get_checkpoint().checkpoint.cycle])

    def test_3_a_run_is_paused_resumed_and_cancelled(self) -> None:
        spec = re.sub(r"max_steps: \d+", "max_steps: 9999", Path("sft.yaml").read_text())
        run = self.fleet.submit(spec)
        run.pause("a game")
        info = run.get_info()
        self.assertEqual((info.state, info.reason), ("paused", "by admin: a game"))
        run.resume()
        self.assertEqual(run.get_info().state, "running")
        run.cancel("enough")
        with self.assertRaisesRegex(flotilla.RunFailedError, "cancelled") as raised:
            run.wait()
        self.assertEqual(raised.exception.code, "A113")
        with self.assertRaises(flotilla.StateError):
            run.pause()
        states = {it.run: it.state for it in self.fleet.list_runs()}
        self.assertEqual(states["base-1"], "succeeded")
        self.assertEqual(states[run.id], "cancelled")

    def test_4_a_dict_is_a_spec_and_a_bad_one_is_refused(self) -> None:
        spec = {"name": "dict", "base": {"checkpoint": "base-1"}, "sft": {"data": "data.jsonl"}}
        report = self.fleet.check_spec(spec)
        self.assertEqual(report.files[0].file, "data.jsonl")
        cases: list[tuple[Any, str]] = [
            (spec | {"colour": "red"}, "colour"),
            (spec | {"sft": {"data": "none.jsonl"}}, "none.jsonl"),
            ("a: [", ""),
        ]
        for wrong, words in cases:
            with self.assertRaisesRegex(flotilla.InvalidRequestError, words) as raised:
                self.fleet.submit(wrong)
            self.assertTrue(raised.exception.code and raised.exception.remedy, wrong)

    def test_5_agents_channels_and_any_method(self) -> None:
        roles = {role for agent in self.fleet.list_agents() for role in agent.roles}
        self.assertEqual(roles, {"trainer", "generator", "verifier", "evaluator"})
        moved = self.fleet.move_channel("stable", "base-1", reason="the first")
        self.assertEqual((moved.channel, moved.number), ("stable", 1))
        self.assertEqual([it.channel for it in self.fleet.list_channels()], ["stable"])
        self.assertEqual(list(self.fleet.read_exchanges("stable")), [])
        with self.assertRaises(flotilla.StateError):
            self.fleet.roll_back_channel("stable")
        with self.assertRaises(flotilla.NotFoundError) as not_kept:
            self.fleet.give_feedback("stable", "chatcmpl-1", rating="up")
        self.assertEqual(not_kept.exception.code, "R120")
        with self.assertRaisesRegex(flotilla.InvalidRequestError, "from 0 to 1"):
            self.fleet.give_feedback("stable", "chatcmpl-1", reward=7.0)
        request = control_pb2.AuditRequest(run="base-1")
        report = self.fleet.call("Runs/Audit", request, control_pb2.AuditReport)
        self.assertEqual(list(report.findings), [])

    def test_6_wrong_names_tokens_and_authorities_are_refused(self) -> None:
        with self.assertRaises(flotilla.NotFoundError) as unknown:
            self.fleet.run("none-1").get_info()
        self.assertEqual(unknown.exception.code, "R101")
        for token, code in [("nonsense", "K102"), (None, "K101")]:
            with connect_with(token=token) as fleet:
                for call in (fleet.list_runs, lambda: next(fleet.watch_evals())):
                    with self.assertRaises(flotilla.UnauthenticatedError) as raised:
                        call()
                    self.assertEqual(raised.exception.code, code)
                    self.assertTrue(raised.exception.remedy)
            with connect_with(token=token) as fleet, self.assertRaises(flotilla.UnauthenticatedError):
                fleet.give_feedback("stable", "chatcmpl-1", rating="up")
        # On the gateway's machine, TLS is not needed, but a token is.
        with connect_with(ca_pem=None, token=None) as fleet:
            with self.assertRaises(flotilla.UnauthenticatedError) as raised:
                fleet.list_runs()
            self.assertEqual(raised.exception.code, "K101")
        with connect_with(address="127.0.0.1:1") as fleet:
            with self.assertRaises(flotilla.UnavailableError) as away:
                fleet.list_runs()
            self.assertEqual(away.exception.code, "G106")

    def test_7_a_reader_may_only_read(self) -> None:
        endpoint = flotilla.connect(os.environ["READER"]).endpoint
        explicit = flotilla.connect(
            address=endpoint.address, token=endpoint.token, ca=endpoint.ca_pem
        )
        with explicit as fleet:
            self.assertEqual(fleet.get_caller().name, "eve")
            self.assertEqual(fleet.run("base-1").get_info().state, "succeeded")
            with self.assertRaises(flotilla.PermissionDeniedError) as raised:
                fleet.run("base-1").cancel()
            self.assertEqual(raised.exception.code, "K104")

    def test_8_a_model_of_this_machine_is_the_base_of_a_run(self) -> None:
        training = {"max_steps": 10, "batch_size": 16, "learning_rate": 0.003, "max_tokens": 64}
        spec: dict[str, Any] = {
            "name": "local",
            "base": {"model": "model"},
            "sft": {"data": "data.jsonl", "training": training},
        }
        report = self.fleet.check_spec(spec)
        self.assertEqual([file.file for file in report.files], ["data.jsonl"])
        run = self.fleet.submit(spec)
        self.assertEqual((run.id, run.wait().state), ("local-1", "succeeded"))
        with self.assertRaisesRegex(flotilla.SpecFileError, "none is not a directory"):
            self.fleet.submit(spec | {"base": {"model": "none"}})


class AsyncFleetTests(unittest.IsolatedAsyncioTestCase):
    async def test_async_calls_do_the_same(self) -> None:
        async with aio.connect() as fleet:
            spec = Path("sft.yaml").read_text().replace("name: base", "name: async")
            runs = [await fleet.submit(spec) for _ in range(2)]
            infos = await asyncio.gather(*(run.wait() for run in runs))
            self.assertEqual([it.state for it in infos], ["succeeded"] * 2)
            expected = await runs[0].list_evals()
            seen = []
            async for result in fleet.watch_evals(runs[0].id):
                seen.append(result)
                if len(seen) == len(expected):
                    break
            self.assertEqual(seen, expected)
            with self.assertRaises(flotilla.NotFoundError):
                await fleet.run("none-1").pause()
            with self.assertRaisesRegex(flotilla.InvalidRequestError, "from 0 to 1"):
                await fleet.give_feedback("stable", "chatcmpl-1", reward=7.0)
        async with aio.connect(address="127.0.0.1:1") as fleet:
            with self.assertRaises(flotilla.UnavailableError):
                await fleet.list_runs()


if __name__ == "__main__":
    unittest.main()
