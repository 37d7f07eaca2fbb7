"""Tests what the probe reports."""

import importlib.util
import types
import unittest
import unittest.mock

from flotilla_trainer import probe


class Reports(unittest.TestCase):
    def test_a_missing_bitsandbytes_is_reported_and_no_error(self):
        respond = types.SimpleNamespace(progress=lambda _stage: None)
        found = probe.run("cpu", "f32", respond)["bitsandbytes"]
        self.assertIs(found, importlib.util.find_spec("bitsandbytes") is not None)
        with unittest.mock.patch("importlib.util.find_spec", lambda *_: None):
            self.assertIs(probe.run("cpu", "f32", respond)["bitsandbytes"], False)


if __name__ == "__main__":
    unittest.main()
