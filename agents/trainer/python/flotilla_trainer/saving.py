"""Splits Hugging Face's checkpoint directory into the published checkpoint and the state that only
a resume needs, and joins the two for a resume."""

import json
import os
import shutil
import time

import safetensors.torch

from . import models
from .errors import Refused

# Subdirectories of a saved step.
CHECKPOINT = "checkpoint"
STATE = "state"

# Files that a resume requires; the Trainer may add others.
REQUIRED = ("optimizer.pt", "scheduler.pt", "trainer_state.json")
OPTIONAL = ("scaler.pt",)
RNG_STATE = "rng_state"

ADAPTER_FILE = "adapter_model.safetensors"

# Names the training that a state belongs to.
IDENTITY = "training.json"

# Not needed, and contains paths of this host.
DROPPED = ("README.md", "training_args.bin")

# Files of a model directory besides weights and config.json.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

# Saved steps that the agent has not published yet; with more, training waits.
UNPUBLISHED_MAX = 2
PUBLISHING_POLL_S = 0.02


def is_state(name):
    return name in REQUIRED or name in OPTIONAL or name.startswith(RNG_STATE)


def split(saved, directory, call, identity, is_last):
    """Moves the Trainer's checkpoint to `directory`, which only appears when it is complete."""
    if call.training.lora and models.text_part_names(call.base):
        _name_as_in_base(os.path.join(saved, ADAPTER_FILE))
    partial = f"{saved}.split"
    checkpoint, state = os.path.join(partial, CHECKPOINT), os.path.join(partial, STATE)
    os.makedirs(checkpoint)
    if not is_last:
        os.makedirs(state)
    for name in sorted(os.listdir(saved)):
        if name in DROPPED or (is_last and is_state(name)):
            continue
        target = os.path.join(state if is_state(name) else checkpoint, name)
        os.rename(os.path.join(saved, name), target)
        # safetensors creates files that only their owner can read.
        os.chmod(target, 0o644)
    if call.training.lora is None:
        _add_model_files(checkpoint, call.base)
    else:
        _normalize_adapter_config(os.path.join(checkpoint, "adapter_config.json"), call.base_name)
    if not is_last:
        _write_json(os.path.join(state, IDENTITY), identity)
    shutil.rmtree(saved)
    os.rename(partial, directory)


def _name_as_in_base(path):
    """Gives the tensors of an adapter the names of the whole base with images, on which PEFT then
    loads the adapter."""
    text, whole = "base_model.model.model.", "base_model.model.model.language_model."
    tensors = safetensors.torch.load_file(path)
    named = {name.replace(text, whole, 1): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(named, path, metadata={"format": "pt"})


def _normalize_adapter_config(path, base_name):
    """Makes PEFT's settings reproducible: fixed order, and no local path of the base."""
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    settings["base_model_name_or_path"] = base_name
    for name in ("target_modules", "exclude_modules"):
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])
    _write_json(path, settings)


def _add_model_files(checkpoint, base):
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
    """Builds the Trainer's checkpoint of a published step from links. Rejects missing files and the
    checkpoint of another training, because the Trainer checks neither."""
    check_identity(resume.state, identity)
    names = os.listdir(resume.state)
    missing = [name for name in REQUIRED if name not in names]
    if not any(name.startswith(RNG_STATE) for name in names):
        missing.append(f"{RNG_STATE}.pth")
    if missing:
        raise Refused(f"{resume.state} lacks {missing[0]}; resuming needs the complete state")
    _check_step(os.path.join(resume.state, "trainer_state.json"), resume.step)
    os.makedirs(directory)
    # Both trees also contain files of the store.
    for source, is_state_tree in ((resume.checkpoint, False), (resume.state, True)):
        for name in os.listdir(source):
            if is_state(name) == is_state_tree:
                os.symlink(os.path.join(os.path.abspath(source), name), os.path.join(directory, name))
    return directory


def check_identity(state, identity):
    """Rejects the state of another training."""
    path = os.path.join(state, IDENTITY)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} is not a saved training state of this trainer: {error}") from error
    for field, expected in identity.items():
        if not isinstance(found, dict) or found.get(field) != expected:
            seen = found.get(field, "absent") if isinstance(found, dict) else "absent"
            raise Refused(f"{path}: field `{field}` is {seen}, expected {expected}")


def _check_step(path, step):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file).get("global_step")
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if found != step:
        raise Refused(f"{path}: field `global_step` is {found}, expected {step}")


def await_publishing(out):
    """Waits while too many saved steps are unpublished, so that the disk does not fill."""
    while sum(name.isdigit() for name in os.listdir(out)) > UNPUBLISHED_MAX:
        time.sleep(PUBLISHING_POLL_S)
