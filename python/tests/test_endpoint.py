"""Directories and arguments that name a fleet."""

import json
import os
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from flotilla import CredentialsError
from flotilla.endpoint import Endpoint, find_endpoint

IDENTITY = {"name": "eve", "bearer": "bearer.jwt", "ca": "ca.pem"}


class EndpointTests(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def write_fleet(self, **fields: object) -> None:
        (self.directory / "fleet.json").write_text(json.dumps({"gateway": "box:7070", **fields}))

    def test_a_directory_has_address_and_credentials(self) -> None:
        self.write_fleet(identity=IDENTITY)
        (self.directory / "bearer.jwt").write_text("secret\n")
        (self.directory / "ca.pem").write_bytes(b"pem")
        expected = Endpoint("box:7070", "secret", b"pem")
        self.assertEqual(find_endpoint(self.directory), expected)
        with mock.patch.dict(os.environ, FLOTILLA_DIR=str(self.directory)):
            self.assertEqual(find_endpoint(), expected)
        self.assertEqual(find_endpoint(self.directory, address="a:1").address, "a:1")
        self.assertNotIn("secret", repr(expected))

    def test_an_open_fleet_has_an_address_alone(self) -> None:
        self.write_fleet()
        self.assertEqual(find_endpoint(self.directory), Endpoint("box:7070"))
        self.assertEqual(find_endpoint(address="a:1"), Endpoint("a:1"))

    def test_arguments_have_all_credentials(self) -> None:
        (self.directory / "ca.pem").write_bytes(b"pem")
        expected = Endpoint("a:1", "secret", b"pem")
        for ca in (b"pem", self.directory / "ca.pem"):
            self.assertEqual(find_endpoint(address="a:1", token="secret", ca=ca), expected)

    def test_what_is_missing_is_named_with_its_remedy(self) -> None:
        self.write_fleet(identity=IDENTITY)
        (self.directory / "keys/admin").mkdir(parents=True)
        (self.directory / "keys/fleet.json").write_text('{"name": "flotilla"}')
        missing = self.directory / "a/b/missing"
        calls: list[tuple[str, Callable[[], Endpoint]]] = [
            ("argument ca", lambda: find_endpoint(address="a:1", token="secret")),
            ("argument token", lambda: find_endpoint(address="a:1", ca=b"pem")),
            ("argument address", lambda: find_endpoint(token="secret", ca=b"pem")),
            ("FLOTILLA_DIR", find_endpoint),
            ("missing/fleet.json", lambda: find_endpoint(missing)),
            ("inside a fleet's", lambda: find_endpoint(self.directory / "keys")),
            ("inside a fleet's", lambda: find_endpoint(self.directory / "keys/admin")),
            ("bearer.jwt", lambda: find_endpoint(self.directory)),
        ]
        with mock.patch.dict(os.environ, {}, clear=True):
            for words, call in calls:
                with self.subTest(words), self.assertRaisesRegex(CredentialsError, words) as raised:
                    call()
                self.assertTrue(raised.exception.code and raised.exception.remedy)
        for text in ("no json", "[]", "{}", '{"gateway": "a:1", "identity": 1}'):
            (self.directory / "fleet.json").write_text(text)
            with self.subTest(text), self.assertRaisesRegex(CredentialsError, "fleet.json is not"):
                find_endpoint(self.directory)


if __name__ == "__main__":
    unittest.main()
