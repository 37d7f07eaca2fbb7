"""Asks a served model with OpenAI's client: URL MODEL PROMPT TOKENS.

Prints as JSON its greedy answer, whole and streamed, the log-probabilities of both, and those of the
prompt, or the reason why it does not score prompts.
"""

import json
import sys

import openai

url, model, prompt, tokens = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
fixed = {"model": model, "prompt": prompt, "temperature": 0}
whole = client.completions.create(**fixed, max_tokens=int(tokens), logprobs=1)
stream = client.completions.create(**fixed, max_tokens=int(tokens), stream=True)
found = {
    "text": whole.choices[0].text,
    "streamed": "".join(part.choices[0].text for part in stream if part.choices),
    "logprobs": whole.choices[0].logprobs.token_logprobs,
}
try:
    scored = client.completions.create(**fixed, max_tokens=1, echo=True, logprobs=1)
    found["scored"] = scored.choices[0].text
    found["prompt_logprobs"] = scored.choices[0].logprobs.token_logprobs
except openai.BadRequestError as error:
    found["refused"] = str(error)
print(json.dumps(found))
