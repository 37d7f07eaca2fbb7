"""Loads the model to train: a base, a base with an adapter, or random weights."""

import importlib.util
import json
import os
import resource

import peft
import torch
import transformers

from .errors import Refused

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


# The modules of an adapter whose spec names none.
USUAL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

# Modules of models whose q, k and v are one matrix, or gate and up.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}

# Models with images, of which only the text part is loaded: patterns of tensor names in their files
# and adapters, and what replaces them in the text part.
TEXT_PARTS = {
    "gemma3": {
        r"^model\.language_model\.": "model.",
        r"^language_model\.model\.": "model.",
        r"^language_model\.lm_head\.": "lm_head.",
    },
}


def text_part_names(base):
    """Returns the patterns of tensor names of a base with images; None for other bases."""
    return TEXT_PARTS.get(_read_fields(base).get("model_type"))


def _read_fields(base):
    path = os.path.join(base, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f"{path} is not a JSON object")
    return fields


def read_config(base):
    """Returns the configuration of a base, or of its text part. Code of the base is never run."""
    path, fields = os.path.join(base, "config.json"), _read_fields(base)
    quantized = fields.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise Refused(
            f"{path}: field `quantization_config` says that the weights are quantised "
            f"({method or quantized}), and they cannot be trained; use the model that they were "
            "made from"
        )
    kind = fields.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        code = [name for name in sorted(os.listdir(base)) if name.endswith(".py")]
        needed = f"`auto_map` and {', '.join(code)}" if code else "`auto_map`"
        if fields.get("auto_map") or code:
            raise Refused(
                f"{path}: model_type {kind!r} needs code of the model's directory ({needed}), and "
                "code of models is never run; use a model that transformers "
                f"{transformers.__version__} knows, such as qwen3, llama, mistral or gemma3"
            )
        raise Refused(
            f"{path}: transformers {transformers.__version__} does not know model_type {kind!r}; "
            "install a version that does, or use a model such as qwen3, llama, mistral or gemma3"
        )
    config = transformers.AutoConfig.from_pretrained(
        base, local_files_only=True, trust_remote_code=False
    )
    if kind not in TEXT_PARTS:
        return config
    text = config.get_text_config()
    if fields.get("eos_token_id") is not None:
        text.eos_token_id = fields["eos_token_id"]
    return text


def positions(config, most):
    """Returns the tokens of the longest sequence, at most `most` if the model does not bound it."""
    return getattr(config, "max_position_embeddings", None) or most


def attention(config, policy):
    """Returns the attention to compute with: of those of torch, only the plain one caps scores."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else policy.attention


def target_modules(model, wanted):
    """Returns the modules of the model that get an adapter: the wanted ones, or those that contain
    them. Experts are no modules and get none: names of parts of experts alone are refused. Without
    any, all linear modules but the output; also if all usual ones are wanted, and the model has
    others."""
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    linear = {_last_part(name) for name in modules}
    found = {name if name in linear else FUSED.get(name) for name in wanted} & linear
    output = model.get_output_embeddings()
    others = {_last_part(name) for name, module in modules.items() if module is not output}
    unknown = sorted(set(wanted) - USUAL - others)
    if unknown:
        raise Refused(
            f"field lora.target_modules: this model has no linear module {', '.join(unknown)}; "
            f"name some of {', '.join(sorted(others))}"
        )
    if found and not (USUAL <= set(wanted) and others - found):
        return sorted(found)
    # The weights of all experts of a layer are one parameter of three dimensions.
    experts = {_last_part(name) for name, value in model.named_parameters() if value.dim() == 3}
    lost = [name for name in wanted if name in experts or FUSED.get(name) in experts]
    if lost:
        raise Refused(
            f"field lora.target_modules: {', '.join(lost)} are only in the experts of this model, "
            f"and experts get no adapter; name some of {', '.join(sorted(others))}"
        )
    return "all-linear"


def _last_part(name):
    return name.rsplit(".", 1)[-1]


def peak_memory_bytes(device):
    """Returns the most memory that this process has taken: of its GPU, or resident without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.


def device(policy):
    """Returns the torch device; `cuda` includes HIP."""
    if policy.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        raise Refused(
            f"torch {torch.__version__} (built for {built}) sees no GPU; check /dev/kfd and the "
            "user's groups, or install the wheel for this card"
        )
    if policy.memory_fraction:
        torch.cuda.set_per_process_memory_fraction(policy.memory_fraction)
    return torch.device(policy.device if ":" in policy.device else f"{policy.device}:0")


def load(call, where, attention):
    """Returns the model: trained parameters are in f32, frozen weights in the profile's dtype."""
    lora = call.training.lora
    checkpoint = call.resume.checkpoint if call.resume else None
    source = checkpoint if checkpoint and lora is None else call.base
    dtype = DTYPES[call.policy.dtype] if lora else torch.float32
    transformers.set_seed(call.seed % 2**32)
    try:
        options = {"attn_implementation": attention, "dtype": dtype}
        if lora and lora.quantization == "NF4":
            options["quantization_config"] = _nf4(dtype)
        from_config = call.random_init and source == call.base
        model = _load_base(source, options, where, from_config)
    except (OSError, ValueError) as error:
        raise Refused(f"load the base model: {error}") from error
    model.config.use_cache = False
    if lora is None:
        return model
    start = call.slice.start if call.slice else checkpoint
    model = _add_adapter(model, call, start or call.adapter)
    if lora.freeze_a:
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    return model


def restart(model, call):
    """Returns a loaded model with the values of the slice's adapter."""
    start = call.slice.start
    transformers.set_seed(call.seed % 2**32)
    try:
        names = text_part_names(call.base)
        weights = peft.utils.load_peft_weights(start, device="cpu", key_mapping=names)
        peft.set_peft_model_state_dict(model, weights)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Refused(f"load the adapter {start}: {error}") from error
    return model


def _nf4(dtype):
    """Returns the settings of QLoRA: frozen matrices in 4 bits, computed with in `dtype`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise Refused(
            "field lora.quantize is nf4, and this Python has no bitsandbytes; run "
            "`pip install bitsandbytes` in the trainer's environment (--python), or train without "
            "lora.quantize"
        )
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _load_base(source, options, where, from_config):
    if from_config:
        options.pop("quantization_config", None)
        config = read_config(source)
        # Initialised on the CPU, so that every device gets the same weights.
        return transformers.AutoModelForCausalLM.from_config(config, **options).to(where)
    if where.type != "cpu":
        # Directly to the GPU, so that the host only holds one shard at a time.
        options["device_map"] = {"": where}
    options |= {"local_files_only": True, "low_cpu_mem_usage": True, "trust_remote_code": False}
    if names := text_part_names(source):
        return _load_text_part(source, names, options)
    return transformers.AutoModelForCausalLM.from_pretrained(source, **options)


def _load_text_part(source, names, options):
    verbosity = transformers.logging.get_verbosity()
    # The report would name every vision tensor.
    transformers.logging.set_verbosity_error()
    try:
        options |= {"config": read_config(source), "key_mapping": names}
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, **options
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    if found["missing_keys"]:
        raise Refused(
            f"{source} lacks tensors of its text part, such as {min(found['missing_keys'])}, or "
            f"transformers {transformers.__version__} does not find them; download the model "
            "again, or install transformers 5"
        )
    # A whole model is saved as a text model, with the names of one.
    model._weight_conversions = None
    return model


def _add_adapter(model, call, adapter):
    lora = call.training.lora
    try:
        if adapter:
            settings = peft.PeftConfig.from_pretrained(adapter)
            settings.lora_dropout = lora.dropout
            return peft.PeftModel.from_pretrained(
                model,
                adapter,
                is_trainable=True,
                config=settings,
                key_mapping=text_part_names(call.base),
            )
        settings = peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=target_modules(model, lora.target_modules),
            lora_dropout=lora.dropout,
            bias="none",
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, settings)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"load the adapter {adapter}" if adapter else "field lora"
        raise Refused(f"{what}: {error}") from error
