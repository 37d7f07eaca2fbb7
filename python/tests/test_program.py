"""Specs that name models or data sets of this machine, which the program submits."""

import asyncio
import json
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import grpc

import flotilla
from flotilla import aio
from flotilla.v1 import control_pb2

REFUSED = 'field base.model: "org/name" would be found on the caller\'s machine (R123)'
SPEC = "base: { model: org/name }\n"

# Prints what it was called with, and what the spec says.
PROGRAM = """\
#!/bin/sh
printf '%s\\n' "$@" >"$RECORD"
for path in "$@"; do :; done
cat "$path" >>"$RECORD"
if [ "$2" = check ]; then
    echo '{"files": [{"field": "sft.data", "lines": "3"}], "samplesPerCycle": "0"}'
else
    echo '{"run": "mine-1", "runs": ["mine-1"], "data": {"files": []}, "new": 1}'
fi
"""
FAILING = """\
#!/bin/sh
echo 'downloading' >&2
echo '{"error": "submit mine.yaml", "causes": ["no model (H101)"], "code": "H101"}' >&2
exit 1
"""


class ProgramTests(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.record = self.directory / "record"
        self.refusal = REFUSED
        address = self.start_gateway()
        (self.directory / "fleet.json").write_text(json.dumps({"gateway": address}))
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.directory)
        # No program of this machine is found.
        interpreter = str(self.directory / "bin/python")
        environment = {"PATH": "/usr/bin:/bin", "RECORD": str(self.record)}
        for patch in (
            mock.patch.object(sys, "executable", interpreter),
            mock.patch.dict(os.environ, environment),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def start_gateway(self) -> str:
        def refuse(
            request: control_pb2.SubmitRequest, context: grpc.ServicerContext
        ) -> control_pb2.SubmitResponse:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
            return control_pb2.SubmitResponse()

        submit = grpc.unary_unary_rpc_method_handler(
            refuse,
            request_deserializer=control_pb2.SubmitRequest.FromString,
            response_serializer=control_pb2.SubmitResponse.SerializeToString,
        )
        pool = ThreadPoolExecutor(2)
        self.addCleanup(pool.shutdown)
        server = grpc.server(pool)
        handler = grpc.method_handlers_generic_handler("flotilla.v1.Runs", {"Submit": submit})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        return f"127.0.0.1:{port}"

    def install(self, program: str, name: str = "bin/flotilla") -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(program)
        path.chmod(0o755)

    def read_call(self) -> tuple[list[str], str]:
        """Returns the arguments before the spec's path, and the path's content."""
        called = self.record.read_text().splitlines()
        end = called.index("--")
        return called[:end], "\n".join(called[end + 2 :]) + "\n"

    def test_a_file_and_a_text_are_submitted_by_the_program_beside_python(self) -> None:
        self.install(PROGRAM)
        Path("mine.yaml").write_text(SPEC)
        with flotilla.connect(self.directory) as fleet:
            for spec in ("mine.yaml", SPEC, {"base": {"model": "org/name"}}):
                self.assertEqual(fleet.submit(spec).id, "mine-1")
                arguments, content = self.read_call()
                expected = ["run", "submit", "--json", "--dir", str(self.directory)]
                self.assertEqual(arguments, expected)
                if isinstance(spec, str):
                    self.assertEqual(content, SPEC)
            self.assertEqual([run.id for run in fleet.submit_sweep(SPEC)], ["mine-1"])
            report = fleet.check_spec(SPEC)
            self.assertEqual((report.files[0].field, report.files[0].lines), ("sft.data", 3))
            self.assertEqual(self.read_call()[0][1], "check")
        left = sorted(path.name for path in self.directory.iterdir())
        self.assertEqual(left, ["bin", "fleet.json", "mine.yaml", "record"])

    def test_the_program_is_also_found_on_the_path_and_for_async_calls(self) -> None:
        self.install(PROGRAM, "other/flotilla")
        os.environ["PATH"] = f"{self.directory / 'other'}:/usr/bin:/bin"

        async def submit() -> str:
            async with aio.connect(self.directory) as fleet:
                return (await fleet.submit(SPEC)).id

        self.assertEqual(asyncio.run(submit()), "mine-1")

    def test_what_is_missing_or_fails_is_named(self) -> None:
        address = json.loads(Path("fleet.json").read_text())["gateway"]
        with flotilla.connect(self.directory) as fleet, flotilla.connect(address=address) as other:
            calls: list[tuple[str, Callable[[], object]]] = [
                ("R123.*beside this Python or on PATH", lambda: fleet.submit(SPEC)),
                ("R123.*not with an address", lambda: other.submit(SPEC)),
                ("R123.*beside the spec", lambda: fleet.submit(SPEC, {"a.jsonl": b""})),
            ]
            for words, call in calls:
                with self.assertRaisesRegex(flotilla.SpecFileError, words) as raised:
                    call()
                self.assertEqual(raised.exception.code, "R123")
            self.install(FAILING)
            with self.assertRaises(flotilla.SpecFileError) as failed:
                fleet.submit(SPEC)
            self.assertEqual(failed.exception.message, "submit mine.yaml: no model (H101)")

    def test_other_refusals_are_those_of_the_gateway(self) -> None:
        self.install(PROGRAM)
        self.refusal = "field sft.data: there is no file (R108)"
        with flotilla.connect(self.directory) as fleet:
            with self.assertRaises(flotilla.InvalidRequestError) as refused:
                fleet.submit(SPEC)
        self.assertEqual(refused.exception.code, "R108")
        self.assertFalse(self.record.exists())


if __name__ == "__main__":
    unittest.main()
