#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["openenv>=0.10,<1"]
# ///
"""Scores completions with an OpenEnv environment: each is the one action of an episode.

    argv: [/opt/openenv_step.py, "http://127.0.0.1:8000", --field, message]

The prompt's field `reset` has the arguments of the episode's start, such as a seed, and `action`
more fields of the action. The environment's server must allow several sessions if the verifier has
several processes or `concurrent` requests.
"""
import argparse

from line_server import serve
from openenv import GenericEnvClient

parser = argparse.ArgumentParser()
parser.add_argument("url", help="address of the environment's server")
parser.add_argument("--field", default="message", help="field of the action with the completion")
parser.add_argument("--pass-at", type=float, default=1.0, help="least reward of a pass")
arguments = parser.parse_args()


async def judge(sample):
    async with GenericEnvClient(base_url=arguments.url) as environment:
        await environment.reset(**sample.get("reset", {}))
        action = {**sample.get("action", {}), arguments.field: sample["completion"]}
        result = await environment.step(action)
    if result.reward is None:
        raise ValueError("the environment gave no reward for the step")
    outcome = "pass" if result.reward >= arguments.pass_at else "fail"
    return {"outcome": outcome, "reward": result.reward}


serve(judge)
