"""Loads the model to train: a base, a base with an adapter, or random weights."""

import peft
import torch
import transformers

from .errors import Refused

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


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
        weights = peft.utils.load_peft_weights(start, device="cpu")
        peft.set_peft_model_state_dict(model, weights)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Refused(f"load the adapter {start}: {error}") from error
    return model


def _load_base(source, options, where, from_config):
    if from_config:
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
        # Initialised on the CPU, so that every device gets the same weights.
        return transformers.AutoModelForCausalLM.from_config(config, **options).to(where)
    if where.type != "cpu":
        # Directly to the GPU, so that the host only holds one shard at a time.
        options["device_map"] = {"": where}
    return transformers.AutoModelForCausalLM.from_pretrained(
        source, local_files_only=True, low_cpu_mem_usage=True, trust_remote_code=False, **options
    )


def _add_adapter(model, call, adapter):
    lora = call.training.lora
    try:
        if adapter:
            settings = peft.PeftConfig.from_pretrained(adapter)
            settings.lora_dropout = lora.dropout
            return peft.PeftModel.from_pretrained(
                model, adapter, is_trainable=True, config=settings
            )
        settings = peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=lora.target_modules,
            lora_dropout=lora.dropout,
            bias="none",
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, settings)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = f"load the adapter {adapter}" if adapter else "field lora"
        raise Refused(f"{what}: {error}") from error
