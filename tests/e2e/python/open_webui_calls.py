"""Calls a served model as Open WebUI 0.12.4 does, with the HTTP client that it uses.

    open_webui_calls.py BASE_URL MODEL QUESTION

Field by field as its `routers/openai.py`, `utils/headers.py` and `utils/middleware.py`: the check of a
connection, a message from the browser, which offers a tool, the title of the chat, and a message to a
model that is gone. Prints what it would show of each, as JSON.
"""

import asyncio
import json
import sys

import aiohttp

# Those about the user are sent if the administrator wants it.
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "A%20User",
    "X-OpenWebUI-User-Id": "6e1f0a52-6d3a-4a8e-9d4b-0d1c2b3a4958",
    "X-OpenWebUI-User-Email": "user@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Auth-Type": "jwt",
}

# One of its own tools, which it offers to all models unless that is turned off.
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "Get the current time.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


async def list_models(session, url):
    """Returns the ids of the models. Anything but JSON with the status 200 is shown as an error."""
    async with session.get(f"{url}/models", headers=HEADERS) as answer:
        assert answer.status == 200, answer.status
        return [model["id"] for model in (await answer.json())["data"]]


async def post_chat(session, url, payload):
    """Posts a request for a chat. The body is a text, whose type the headers have."""
    return await session.request(
        "POST",
        f"{url}/chat/completions",
        data=json.dumps(payload),
        headers={**HEADERS, "X-OpenWebUI-Chat-Id": "0b7d6e0e-1b52-4c4c-8a52-3d5e4f6a7b8c"},
    )


async def split_lines(content):
    rest = b""
    async for data, _ in content.iter_chunks():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()
    yield rest.decode()


async def read_stream(answer):
    """Returns the text, the end and the usage of a streamed answer."""
    assert "text/event-stream" in answer.headers.get("Content-Type", ""), await answer.text()
    found = {"text": "", "finish": None, "usage": None, "done": False}
    async for line in split_lines(answer.content):
        if not line.startswith("data:"):
            assert not line.strip(), line
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            found["done"] = True
            continue
        event = json.loads(data)
        assert "error" not in event, event
        found["usage"] = event.get("usage") or found["usage"]
        for choice in event.get("choices", [])[:1]:
            found["finish"] = choice.get("finish_reason") or found["finish"]
            found["text"] += choice.get("delta", {}).get("content") or ""
    return found


async def main():
    url, model, question = sys.argv[1:]
    message = {
        "stream": True,
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "tools": [TOOL],
        "stream_options": {"include_usage": True},
    }
    title = {
        "model": model,
        "messages": [{"role": "user", "content": f"### Task:\nName this chat: {question}"}],
        "stream": False,
        "max_tokens": 16,
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        found = {"models": await list_models(session, url)}
        async with await post_chat(session, url, message) as answer:
            found["message"] = await read_stream(answer)
        async with await post_chat(session, url, title) as answer:
            assert answer.status == 200, await answer.text()
            titled = await answer.json()
        found["title"] = titled["choices"][0]["message"]["content"]
        async with await post_chat(session, url, {**message, "model": "gone"}) as answer:
            found["refused"] = [answer.status, (await answer.json())["error"]["message"]]
    print(json.dumps(found))


asyncio.run(main())
