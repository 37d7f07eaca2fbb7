"""Feedback on answers, which is sent over HTTP."""

import asyncio
import json
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import flotilla
from flotilla import aio

KEPT = {"object": "feedback"}
NOT_KEPT = {"error": {"message": "channel stable has kept no answer \"a\" (R120)"}}


class Gateway(ThreadingHTTPServer):
    """Gives prepared answers, the last one again and again."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, json.loads(body)))
        answers = self.server.answers
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        text = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FeedbackTests(unittest.TestCase):
    def start(self, *answers: tuple[int, object]) -> Gateway:
        gateway = Gateway(*answers)
        self.addCleanup(gateway.server_close)
        self.addCleanup(gateway.shutdown)
        return gateway

    def test_feedback_is_sent_until_the_answer_is_kept(self) -> None:
        gateway = self.start((404, NOT_KEPT), (200, KEPT))
        with flotilla.connect(address=gateway.address) as fleet:
            fleet.give_feedback("stable", "a", rating="up", comment="fine")
        said = {"model": "stable", "id": "a", "rating": "up", "comment": "fine"}
        self.assertEqual(gateway.seen, [("/v1/feedback", said)] * 2)

    def test_feedback_is_sent_without_blocking(self) -> None:
        gateway = self.start((404, NOT_KEPT), (200, KEPT))

        async def give() -> None:
            async with aio.connect(address=gateway.address) as fleet:
                await fleet.give_feedback("stable", "a", reward=0.0, edit="4")

        asyncio.run(give())
        said = {"model": "stable", "id": "a", "reward": 0.0, "edit": "4"}
        self.assertEqual(gateway.seen, [("/v1/feedback", said)] * 2)

    def test_a_refusal_has_the_class_and_the_code_of_its_kind(self) -> None:
        cases: list[tuple[int, object, type[flotilla.RpcError], str]] = [
            (400, {"error": {"message": "wrong (G101)"}}, flotilla.InvalidRequestError, "G101"),
            (404, {"error": {"message": "no served model (R118)"}}, flotilla.NotFoundError, "R118"),
            (404, NOT_KEPT, flotilla.NotFoundError, "R120"),
            (403, {"message": "not permitted (M102)"}, flotilla.PermissionDeniedError, "M102"),
            (401, "no token", flotilla.UnauthenticatedError, ""),
            (429, {"error": "too many (G104)"}, flotilla.LimitError, "G104"),
            (503, "", flotilla.UnavailableError, "G106"),
            (500, "[]", flotilla.RpcError, ""),
        ]
        for status, answer, kind, code in cases:
            gateway = self.start((status, answer))
            with flotilla.connect(address=gateway.address) as fleet:
                with self.subTest(status), self.assertRaises(kind) as raised:
                    fleet.give_feedback("stable", "a", rating="up")
                self.assertEqual(raised.exception.code, code)

    def test_a_gateway_that_is_not_there_is_named(self) -> None:
        gateway = self.start((200, KEPT))
        address = gateway.address
        gateway.shutdown()
        gateway.server_close()
        with flotilla.connect(address=address) as fleet:
            with self.assertRaisesRegex(flotilla.UnavailableError, address):
                fleet.give_feedback("stable", "a", rating="up")


if __name__ == "__main__":
    unittest.main()
