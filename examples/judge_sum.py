#!/usr/bin/env python3
"""Judges worked sums: `7+5=12 4+8+1=13 #132` for the prompt `47+85=`.

Half of the reward is the share of right steps, the other half is for the right answer. It keeps
running: each line of the input is a completion, each line of the output its verdict with the same
id. See docs/VERIFIERS.md, "Programs that keep running".
"""
import json
import re
import sys

for line in sys.stdin:
    sample = json.loads(line)
    steps = re.findall(r"(\d+(?:\+\d+)+)=(\d+)", sample["completion"])
    right = sum(sum(map(int, terms.split("+"))) == int(result) for terms, result in steps)
    answer = re.search(r"#(\d+)$", sample["completion"].strip())
    answered = answer is not None and answer[1] == sample["answer"]

    reward = (right / len(steps) if steps else 0.0) / 2 + (0.5 if answered else 0.0)
    detail = f"{right} of {len(steps)} steps right, answer {'right' if answered else 'wrong'}"
    verdict = {
        "id": sample["id"],
        "outcome": "pass" if answered else "fail",  # pass rates count outcomes
        "reward": reward,                           # selection compares rewards
        "detail": detail,
    }
    print(json.dumps(verdict), flush=True)
