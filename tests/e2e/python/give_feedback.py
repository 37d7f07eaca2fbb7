"""Asks a channel and rates its answers: URL CHANNEL RATING PROMPT...

Prints the days for which the first answer is kept, and the status of the feedback on each."""

import json
import sys

import flotilla
from openai import OpenAI

url, channel, rating, *prompts = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none")
fleet = flotilla.connect(address=url.removeprefix("http://").removesuffix("/v1"))


def rate(answer_id):
    said = {"rating": rating} if rating in ("up", "down") else {"edit": rating}
    try:
        fleet.give_feedback(channel, answer_id, **said)
    except flotilla.NotFoundError:
        return 404
    return 200


days, statuses = None, []
for number, prompt in enumerate(prompts):
    raw = client.completions.with_raw_response.create(model=channel, prompt=prompt, max_tokens=4)
    if number == 0:
        days = raw.headers.get("flotilla-kept-days")
    statuses.append(rate(raw.parse().id))
print(json.dumps({"days": days, "statuses": statuses}))
