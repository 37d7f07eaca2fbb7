#!/usr/bin/env python3
"""Submits a run spec with the files it names, and prints progress and results until it ends.

    GATEWAY=127.0.0.1:7070 ./submit_and_follow.py sft.yaml    # an open fleet
    FLOTILLA_DIR=demo-fleet ./submit_and_follow.py sft.yaml            # a closed one: its directory or a member's credentials
"""
import json, os, pathlib, sys, grpc
from flotilla.v1 import control_pb2 as pb, control_pb2_grpc as rpc  # generated: docs/SCRIPTS.md

def connect():
    if "FLOTILLA_DIR" not in os.environ:
        return grpc.insecure_channel(os.environ.get("GATEWAY", "127.0.0.1:7070"))
    credentials = pathlib.Path(os.environ["FLOTILLA_DIR"])
    fleet = json.loads((credentials / "fleet.json").read_text())
    read = lambda name: (credentials / fleet["identity"][name]).read_bytes()
    tls = grpc.ssl_channel_credentials(read("ca"))
    bearer = grpc.access_token_call_credentials(read("bearer").decode().strip())
    name = ("grpc.ssl_target_name_override", "fleet.flotilla.internal")
    both = grpc.composite_channel_credentials(tls, bearer)
    return grpc.secure_channel(fleet["gateway"], both, options=[name])

def results(cycle):
    yield from (f"step {it.step}, {it.suite}: perplexity {it.perplexity:.4f}" for it in cycle.evals)
    suites = [("held-out", cycle.done.heldout), *((it.suite, it.rate) for it in cycle.done.suites)]
    yield from (f"{name}: pass rate {rate.mean:.1%}" for name, rate in suites if rate.samples)

spec, printed = pathlib.Path(sys.argv[1]), set()
text = spec.read_text()
files = {it.name: it.read_bytes() for it in spec.parent.glob("*.jsonl") if it.name in text}
runs = rpc.RunsStub(connect())
run = runs.Submit(pb.SubmitRequest(spec_yaml=text, files=files)).run
for board in runs.Board(pb.BoardRequest(runs=[run])):  # the whole run, then what changes
    head = board.head
    count = f": {head.done} of {head.total} {head.unit}" if head.total else ""
    lines = [f"cycle {head.cycle}, {head.phase}{count}"]
    lines += [f"cycle {cycle.cycle}, {it}" for cycle in board.cycles for it in results(cycle)]
    print(*(f"{run}: {it}\n" for it in lines if it not in printed), sep="", end="", flush=True)
    printed.update(lines)
print(run, head.state, head.message)
sys.exit(head.state != "succeeded")
