#!/usr/bin/env python3
"""An environment of two turns: a tool that checks the sum of a prompt such as `47+85=`.

A turn that ends with the right sum, `#132`, ends the episode and is paid. After a wrong one, the tool
answers with the right sum and the question, and the model has one more turn, which pays half.
Requests and answers are lines of JSON: see docs/VERIFIERS.md, "environment". An answer depends on the
request alone, because it is asked for again when the episode is judged.
"""
import json
import re
import sys


def answer(request):
    question = request["prompt"]["prompt"]
    total = sum(int(number) for number in re.findall(r"\d+", question))
    written = re.search(r"#(\d+)$", request["action"].strip())
    if written is not None and int(written[1]) == total:
        return {"reward": 0.5 if request["history"] else 1.0, "done": True}
    if request["history"] or request["last"]:
        return {"done": True}
    return {"observation": f"{total} {question}"}


for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], **answer(request)}), flush=True)
