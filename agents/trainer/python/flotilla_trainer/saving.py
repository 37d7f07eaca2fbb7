"""What a saved step is made of: Hugging Face's checkpoint directory, taken apart into what is
published and what only a resume needs, and put together again."""

import json
import os
import shutil
import time

from .errors import Refused

# In a saved step's directory.
CHECKPOINT = "checkpoint"
STATE = "state"

# What a resume must find, whatever else the Trainer has put beside it.
REQUIRED = ("optimizer.pt", "scheduler.pt", "trainer_state.json")
OPTIONAL = ("scaler.pt",)
RANDOM = "rng_state"

# Says which training a state belongs to.
IDENTITY = "training.json"

# Of no use to anybody, and with paths of this machine.
DROPPED = ("README.md", "training_args.bin")

# What a model directory has beside weights and config.json.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

# Saved steps the agent has not published yet; training waits when there are more.
UNPUBLISHED_MAX = 2
PUBLISHING_POLL_S = 0.02


def is_state(name):
    return name in REQUIRED or name in OPTIONAL or name.startswith(RANDOM)


def split(saved, directory, call, identity, is_last):
    """Turns the Trainer's checkpoint into `directory`, complete once it has that name."""
    made = f"{saved}.split"
    checkpoint, state = os.path.join(made, CHECKPOINT), os.path.join(made, STATE)
    os.makedirs(checkpoint)
    if not is_last:
        os.makedirs(state)
    for name in sorted(os.listdir(saved)):
        if name in DROPPED or (is_last and is_state(name)):
            continue
        goal = os.path.join(state if is_state(name) else checkpoint, name)
        os.rename(os.path.join(saved, name), goal)
        # safetensors makes files only their owner can read.
        os.chmod(goal, 0o644)
    if call.training.lora is None:
        _complete_model(checkpoint, call.base)
    else:
        _name_base(os.path.join(checkpoint, "adapter_config.json"), call.base_name)
    if not is_last:
        _write_json(os.path.join(state, IDENTITY), identity)
    shutil.rmtree(saved)
    os.rename(made, directory)


def _name_base(path, base_name):
    """PEFT writes its settings in no fixed order, with the path of this machine's base."""
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    settings["base_model_name_or_path"] = base_name
    for name in ("target_modules", "exclude_modules"):
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])
    _write_json(path, settings)


def _complete_model(checkpoint, base):
    for name in TOKENIZER_FILES:
        source = os.path.join(base, name)
        if os.path.exists(source):
            shutil.copyfile(source, os.path.join(checkpoint, name))
    path = os.path.join(checkpoint, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config.pop("_name_or_path", None)
    config["use_cache"] = True
    _write_json(path, config)


def _write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")


def join(resume, identity, directory):
    """The Trainer's checkpoint of a step that was published, as links. Refused when it is
    another training's, or something it needs is absent: the Trainer would go on without."""
    path = os.path.join(resume.state, IDENTITY)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not the state of a training by this trainer: {error}") from error
    for field, expected in identity.items():
        if not isinstance(found, dict) or found.get(field) != expected:
            seen = found.get(field, "absent") if isinstance(found, dict) else "absent"
            raise Refused(f"{path}: field `{field}` is {seen}, expected {expected}")
    names = os.listdir(resume.state)
    missing = [name for name in REQUIRED if name not in names]
    if not any(name.startswith(RANDOM) for name in names):
        missing.append(f"{RANDOM}.pth")
    if missing:
        raise Refused(f"{resume.state} lacks {missing[0]}; only the whole state goes on exactly")
    _check_step(os.path.join(resume.state, "trainer_state.json"), resume.step)
    os.makedirs(directory)
    # Either tree has files of the store's beside its own.
    for source, of_state in ((resume.checkpoint, False), (resume.state, True)):
        for name in os.listdir(source):
            if is_state(name) == of_state:
                os.symlink(os.path.join(os.path.abspath(source), name), os.path.join(directory, name))
    return directory


def _check_step(path, step):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file).get("global_step")
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if found != step:
        raise Refused(f"{path}: field `global_step` is {found}, expected {step}")


def await_publishing(out):
    """The agent removes what it has published; the disk must not fill with what it has not."""
    while sum(name.isdigit() for name in os.listdir(out)) > UNPUBLISHED_MAX:
        time.sleep(PUBLISHING_POLL_S)
