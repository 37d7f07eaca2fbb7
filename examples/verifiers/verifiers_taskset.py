#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["verifiers>=0.4,<0.5"]
# ///
"""Scores completions with a taskset of Prime Intellect's `verifiers`.

    verifiers_taskset.py TASKSET --prompts > prompts.jsonl     # prompts of a run
    argv: [/opt/verifiers_taskset.py, TASKSET]                 # the verifier of the run

A taskset is an installed package, such as one of the Environments Hub, or a module beside this
file. A prompt names its task with the field `task`. Rewards that need a runtime (a container with
the files of an agent) are left out, as a completion is a single reply.
"""
import argparse
import json

from line_server import serve, write_line
import verifiers.v1 as vf

parser = argparse.ArgumentParser()
parser.add_argument("taskset", help="name of the package, such as gsm8k-v1")
parser.add_argument("--config", type=json.loads, default={}, help="settings of the taskset, as JSON")
parser.add_argument("--pass-at", type=float, default=1.0, help="least reward of a pass")
parser.add_argument("--tasks", type=int, default=100_000, help="most tasks that are loaded")
parser.add_argument("--prompts", action="store_true", help="print the prompts and exit")
arguments = parser.parse_args()

config = vf.taskset_config_type(arguments.taskset)
taskset = vf.load_taskset(config(**{**arguments.config, "id": arguments.taskset}))
tasks = list(taskset.take(arguments.tasks))


def list_messages(task):
    """Returns the messages that the model answers."""
    prompt = task.data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    system = task.data.system_prompt
    return ([vf.SystemMessage(content=system)] if system else []) + messages


def build_trace(task, completion):
    """Returns the trace of a rollout with one reply."""
    messages = [*list_messages(task), vf.AssistantMessage(content=completion)]
    nodes = [
        vf.MessageNode(
            message=message,
            parent=index - 1 if index else None,
            sampled=index == len(messages) - 1,
        )
        for index, message in enumerate(messages)
    ]
    recorded = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=vf.AgentConfig())
    return vf.Trace(task=recorded, agent=agent, nodes=nodes, is_completed=True, ok=True)


async def judge(sample):
    task = tasks[sample["task"]]
    trace = build_trace(task, sample["completion"])
    await task.score(trace)
    outcome = "pass" if trace.reward >= arguments.pass_at else "fail"
    rewards = {name: reward and reward.score for name, reward in trace.rewards.items()}
    return {"outcome": outcome, "reward": trace.reward, "detail": json.dumps(rewards)}


if arguments.prompts:
    for index, task in enumerate(tasks):
        messages = [message.model_dump(exclude_none=True) for message in list_messages(task)]
        write_line({"id": f"task-{index}", "task": index, "messages": messages})
else:
    serve(judge)
