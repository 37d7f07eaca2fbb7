"""Runs a solution and its tests, and says how it went.

Says it where the solution does not write, and with a word it has not been told: both are out of
the way, in file descriptors of their own, while the solution runs. What a solution exits with,
prints or catches means nothing.
"""

import sys
from os import _exit, dup, dup2, open as open_file, read, write


def main(task):
    channel, word = dup(1), dup(0)
    null = open_file("/dev/null", 2)
    for descriptor in (0, 1, 2):
        dup2(null, descriptor)
    # A solution may replace what it can reach.
    execute, probe = exec, Probe()

    def say(kind, passed, detail):
        text = "%s %d %d %s" % (kind, passed, len(tests), detail)
        write(channel, read(word, 64) + b" " + text.encode("utf-8", "replace")[:2000])
        _exit(0)

    tests = []
    try:
        tests = [(compile(test, "<test>", "exec", 0, True), test) for test in task["tests"]]
        setup = compile(task["setup"], "<setup>", "exec", 0, True)
    except BaseException as error:
        say("error", 0, "the prompt's tests: " + told(error, ""))
    passed = 0
    try:
        module = type(sys)("solution")
        sys.modules["solution"] = module
        scope = vars(module)
        execute(compile(task["code"], "<solution>", "exec", 0, True), scope)
        scope = {name: watched(value, scope, probe) for name, value in scope.items()}
        if task["entry"]:
            if task["entry"] not in scope:
                say("done", 0, "the solution has no " + task["entry"])
            scope["candidate"] = scope[task["entry"]]
        execute(setup, scope)
    except BaseException as error:
        say("done", 0, told(error, ""))
    detail = ""
    for code, source in tests:
        try:
            execute(code, scope)
        except BaseException as error:
            detail = detail or told(error, source)
            if not task["partial"]:
                break
        else:
            passed += 1
    say("done", passed, detail)


class Probe:
    """Equal to nothing but itself."""


class Dishonest(Exception):
    pass


PLAIN = (int, float, complex, str, bytes, bool, list, tuple, dict, set, frozenset, type(None))


def watched(value, scope, probe):
    """A function of the solution, whose answers must not claim to equal whatever they are compared with."""
    if type(value) is not type(main) or value.__globals__ is not scope:
        return value

    def call(*args, **kwargs):
        answer = value(*args, **kwargs)
        for part in answer if type(answer) in (list, tuple) else (answer,):
            if type(part) not in PLAIN and equals(part, probe):
                raise Dishonest("an answer that equals anything")
        return answer

    call.__name__, call.__doc__, call.__wrapped__ = value.__name__, value.__doc__, value
    return call


def equals(part, probe):
    try:
        return bool(part == probe) or not part != probe
    except Exception:
        return False


def told(error, source):
    """What went wrong and, in a test, where."""
    at, line, trace = "", 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = source.split("\n")
    if 0 < line <= len(lines):
        at = " at: " + lines[line - 1].strip()
    try:
        return "%s: %s%s" % (type(error).__name__, error, at)
    except BaseException:
        return type(error).__name__ + at


