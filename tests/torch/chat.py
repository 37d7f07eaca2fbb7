"""What transformers' apply_chat_template writes, for services/control to be compared with.

    python chat.py ../../services/control/src/data/chat/golden

renders each *.jinja there and writes golden.json. Needs transformers and jinja2.
"""

import json
import pathlib
import sys
from datetime import datetime
from unittest import mock

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils


def say(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["ü", 2.5, None, "<&'>"]}}}
CONVERSATIONS = {
    "question": [say("user", "2+2=")],
    "system": [say("system", " Be brief. "), say("user", " 2+2= \n")],
    "answered": [say("user", "2+2="), say("assistant", " 4 ")],
    "system answered": [say("system", "Be brief."), say("user", "2+2="), say("assistant", "4")],
    "turns": [say("user", "2+2="), say("assistant", "4"), say("user", "And 3+3?"), say("assistant", "6\n")],
    "thoughts": [
        say("user", "2+2="),
        say("assistant", "<think>\ntwo\n</think>\n\n4"),
        say("user", "And 3+3?"),
        say("assistant", "<think>\nthree\n</think>\n\n6"),
    ],
    "tools": [say("user", "1+2?"), say("assistant", "", tool_calls=[CALL]), say("tool", "3"), say("tool", "4")],
}


class Noon(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 3, 7, 12, 0, 0)


def main(directory):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    rendered = []
    for path in sorted(directory.glob("*.jinja")):
        for name, messages in CONVERSATIONS.items():
            for answer_next in (False, True):
                try:
                    text = tokenizer.apply_chat_template(
                        messages,
                        chat_template=path.read_text(),
                        add_generation_prompt=answer_next,
                        tokenize=False,
                    )
                except Exception:  # a template may raise anything
                    text = None
                rendered.append(
                    {"template": path.stem, "conversation": name, "answer_next": answer_next, "text": text}
                )
    golden = {"conversations": CONVERSATIONS, "rendered": rendered}
    (directory / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    with mock.patch.object(chat_template_utils, "datetime", Noon):
        main(pathlib.Path(sys.argv[1]))
