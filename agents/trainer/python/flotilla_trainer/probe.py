"""Checks that torch can compute on this host, before the first order: a wrong wheel or a broken
driver then ends a process that has no job."""

import importlib.metadata
import importlib.util

from .errors import Refused

SIZE = 1024

# The maximum relative error of a product of two SIZE x SIZE matrices, against the CPU in f32.
TOLERANCES = {"f32": 1e-4, "f16": 2e-2, "bf16": 2e-2}


def run(device, dtype, respond):
    """Returns the report. Sends each stage first, so that the agent knows where a hang occurs."""
    if dtype not in TOLERANCES:
        raise Refused(f"probe: dtype is {dtype!r}, expected one of {', '.join(TOLERANCES)}")
    respond.progress({"stage": "import torch"})
    import torch

    found = {"torch": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
    for name in ("transformers", "peft", "accelerate"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise Refused(f"{name} is not installed beside torch {torch.__version__}") from error
    # Only trainings with a base in 4 bits need it.
    found["bitsandbytes"] = importlib.util.find_spec("bitsandbytes") is not None
    respond.progress({"stage": "find devices"})
    if device == "cpu":
        where = torch.device("cpu")
    else:
        if not torch.cuda.is_available():
            raise Refused(
                f"torch {torch.__version__} (HIP {torch.version.hip}, CUDA {torch.version.cuda}) "
                "sees no GPU: No HIP GPUs are available"
            )
        where = torch.device(device if ":" in device else f"{device}:0")
        properties = torch.cuda.get_device_properties(where)
        found["device"] = properties.name
        # "gfx1151" may be followed by features, as in "gfx90a:sramecc+:xnack-".
        found["gfx"] = getattr(properties, "gcnArchName", "").split(":")[0] or None
        found["targets"] = torch.cuda.get_arch_list()
    respond.progress({"stage": "run first kernel"})
    filled = torch.empty(4, device=where).fill_(1.0)
    if filled.sum().item() != 4.0:
        raise Refused("a tensor filled with ones does not hold ones; the driver or wheel is broken")
    respond.progress({"stage": "multiply matrices"})
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    product = (a.to(where, torch_dtype) @ b.to(where, torch_dtype)).float().cpu()
    expected = a @ b
    found["error"] = float((product - expected).norm() / expected.norm())
    if not found["error"] < TOLERANCES[dtype]:
        raise Refused(
            f"a {dtype} matrix product on {where} is off by {found['error']:.2e}, more than "
            f"{TOLERANCES[dtype]}; do not train with this wheel and driver"
        )
    respond.progress({"stage": "run backward pass"})
    weight = torch.ones(SIZE, device=where, requires_grad=True)
    (weight * weight).sum().backward()
    if not bool(torch.isfinite(weight.grad).all()) or weight.grad.sum().item() != 2.0 * SIZE:
        raise Refused("a gradient is wrong; the driver or wheel is broken")
    return found
