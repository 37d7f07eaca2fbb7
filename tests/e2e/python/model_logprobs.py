"""Prints the log-probabilities that served models give to their own greedy answers, as JSON.

    model_logprobs.py BASE_URL MODEL...

Fails if a streamed answer has other tokens than a whole one.
"""

import json
import sys

import openai


def main():
    url, *models = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    listed = sorted(model.id for model in client.models.list())
    found = {}
    for model in models:
        fixed = {"model": model, "prompt": "1+2=", "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**fixed, logprobs=1).choices[0].logprobs
        stream = client.completions.create(**fixed, logprobs=1, stream=True)
        choices = [choice for part in stream for choice in part.choices]
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        for name in ["tokens", "text_offset"]:
            streamed = [item for part in parts for item in getattr(part, name)]
            assert streamed == getattr(whole, name), (model, name, streamed, whole)
        for token, logprob, likely in zip(
            whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True
        ):
            assert likely[token] >= logprob, whole
        found[model] = whole.token_logprobs
    print(json.dumps({"models": listed, "logprobs": found}))


if __name__ == "__main__":
    main()
