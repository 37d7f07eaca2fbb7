"""Asks a served model in a conversation and for a completion: URL MODEL QUESTION PROMPT.

PROMPT is the conversation with the question as the model's template writes it. Prints as JSON, of
both, the greedy answer, whole and streamed, its tokens, and the number of tokens of the prompt.
"""

import json
import sys

import openai

url, model, question, prompt = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
fixed = {"model": model, "temperature": 0, "max_tokens": 16}
messages = [{"role": "user", "content": question}]

whole = client.chat.completions.create(**fixed, messages=messages, logprobs=True, top_logprobs=1)
stream = client.chat.completions.create(**fixed, messages=messages, stream=True)
conversation = {
    "text": whole.choices[0].message.content or "",
    "streamed": "".join(part.choices[0].delta.content or "" for part in stream if part.choices),
    "tokens": [token.token for token in whole.choices[0].logprobs.content],
    "prompt_tokens": whole.usage.prompt_tokens,
}
whole = client.completions.create(**fixed, prompt=prompt, logprobs=1)
stream = client.completions.create(**fixed, prompt=prompt, stream=True)
completion = {
    "text": whole.choices[0].text,
    "streamed": "".join(part.choices[0].text for part in stream if part.choices),
    "tokens": whole.choices[0].logprobs.tokens,
    "prompt_tokens": whole.usage.prompt_tokens,
}
print(json.dumps({"conversation": conversation, "completion": completion}))
