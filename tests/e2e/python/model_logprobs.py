"""Prints the log-probabilities that served models give to their own greedy answers, as JSON.

    model_logprobs.py BASE_URL MODEL...
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
        answer = client.completions.create(
            model=model, prompt="1+2=", max_tokens=8, temperature=0, logprobs=1
        )
        tokens = answer.choices[0].logprobs.model_extra["content"]
        found[model] = [token["logprob"] for token in tokens]
    print(json.dumps({"models": listed, "logprobs": found}))


if __name__ == "__main__":
    main()
