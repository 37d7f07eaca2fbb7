#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["math-verify>=0.9,<1"]
# ///
"""Judges mathematical answers with Hugging Face's math-verify: `\\boxed{\\frac12}` equals `0.5`.

The prompt's `answer` is a number, an expression or LaTeX, or a whole solution that contains one.
"""
from line_server import serve
from math_verify import parse, verify


def read_expression(text):
    """Bare LaTeX is found only between dollars."""
    return parse(text) if "$" in text or "\\boxed" in text else parse(f"${text}$")


def judge(sample):
    expected = read_expression(sample["answer"])
    if not expected:
        raise ValueError(f"the prompt's answer {sample['answer']!r} is no mathematics")
    found = parse(sample["completion"])
    if verify(expected, found):
        return {"outcome": "pass"}
    detail = f"found {found[-1]!r}" if found else "no answer found"
    return {"outcome": "fail", "detail": f"{detail}, expected {sample['answer']!r}"}


serve(judge)
