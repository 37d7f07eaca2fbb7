"""Runs pytest on a file of tests, and says how it went as harness.py does."""

import os
import sys
from os import _exit, dup, dup2, open as open_file, read, write


class Count:
    """Hears of every test. A skipped one is not a passed one."""

    def __init__(self):
        self.collected = 0
        self.passed = set()
        self.failed = {}

    def pytest_collection_finish(self, session):
        self.collected = len(session.items)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = last_line(report)

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped:
            self.failed.setdefault(report.nodeid, last_line(report))
        elif report.when == "call":
            self.passed.add(report.nodeid)


def last_line(report):
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    return str(crash or report.longrepr).strip().split("\n")[-1]


def main():
    channel, word = dup(1), dup(0)
    null = open_file("/dev/null", 2)
    for descriptor in (0, 1, 2):
        dup2(null, descriptor)
    import pytest

    sys.path.insert(0, os.getcwd())
    count = Count()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "test_program.py"], plugins=[count])
    passed = len(count.passed - set(count.failed))
    total = max(count.collected, passed + len(count.failed))
    if code != 0 and passed == total:
        total += 1
    detail = "; ".join("%s: %s" % pair for pair in count.failed.items())
    text = "done %d %d %s" % (passed, total, detail or "pytest ended with %d" % code)
    write(channel, read(word, 64) + b" " + text.encode("utf-8", "replace")[:2000])
    _exit(0)


main()
