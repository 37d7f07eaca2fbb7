"""Renders chat templates with transformers, as references for services/chat-template.

    python chat.py ../../services/chat-template/src/golden

The script renders each *.jinja in the directory and writes golden.json. Needs transformers and
jinja2.
"""

import json
import pathlib
import sys
from datetime import datetime
from unittest import mock

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils


def message(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": ["ü", 2.5, None, "<&'>"]}}}
CONVERSATIONS = {
    "question": [message("user", "2+2=")],
    "system": [message("system", " Be brief. "), message("user", " 2+2= \n")],
    "answered": [message("user", "2+2="), message("assistant", " 4 ")],
    "system answered": [message("system", "Be brief."), message("user", "2+2="), message("assistant", "4")],
    "turns": [message("user", "2+2="), message("assistant", "4"), message("user", "And 3+3?"), message("assistant", "6\n")],
    "thoughts": [
        message("user", "2+2="),
        message("assistant", "<think>\ntwo\n</think>\n\n4"),
        message("user", "And 3+3?"),
        message("assistant", "<think>\nthree\n</think>\n\n6"),
    ],
    "tools": [message("user", "1+2?"), message("assistant", "", tool_calls=[CALL]), message("tool", "3"), message("tool", "4")],
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
