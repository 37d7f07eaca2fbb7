"""Sends requests to served models with OpenAI's client, and prints how they ended as JSON.

    ask_models.py BASE_URL MODEL REQUESTS THREADS

Half of the requests stream their answers. A request fails early if it fails before the client has a
part of the answer, and late afterwards.
"""

import json
import sys
import threading
import time

import openai


def ask(client, model, number):
    """Returns `ok`, `early: REASON` or `late: REASON`."""
    prompt = f"{number % 100}+{number % 7}="
    has_part = False
    try:
        if number % 2:
            stream = client.completions.create(
                model=model, prompt=prompt, max_tokens=24, stream=True, temperature=0
            )
            for part in stream:
                has_part = True
                assert part.model == model, part.model
        else:
            answer = client.completions.create(
                model=model, prompt=prompt, max_tokens=24, temperature=0
            )
            assert answer.model == model, answer.model
            assert answer.usage.completion_tokens > 0, answer
    except Exception as error:  # any failure counts
        return f"{'late' if has_part else 'early'}: {type(error).__name__}: {error}"
    return "ok"


def main():
    url, model, requests, threads = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=180)
    numbers, lock, ends = iter(range(int(requests))), threading.Lock(), []

    def work():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            end = ask(client, model, number)
            with lock:
                ends.append(end)

    workers = [threading.Thread(target=work) for _ in range(int(threads))]
    began = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(
        json.dumps({
            "ok": ends.count("ok"),
            "early": [end for end in ends if end.startswith("early")],
            "late": [end for end in ends if end.startswith("late")],
            "seconds": time.monotonic() - began,
        })
    )


if __name__ == "__main__":
    main()
