//! Variables. The agent's children get what the profile says, so what is set here harms other
//! programs of the box, and whatever somebody starts by hand.

use std::collections::BTreeMap;

use super::{Finding, Severity};
use crate::{
    Profile,
    snapshot::{OVERRIDE, Snapshot},
};

type Variables = BTreeMap<String, String>;

pub(super) fn check(box_: &Snapshot, profile: &Profile) -> Vec<Finding> {
    if box_.gpus.is_empty() {
        return Vec::new();
    }
    let cards: Vec<&str> = box_.gpus.iter().map(|gpu| gpu.gfx.as_str()).collect();
    let torch = box_.python.as_ref().and_then(|python| python.torch.as_ref());
    let mut findings = overridden(&box_.environment, &cards);
    findings.extend(remembered(box_));
    findings.extend(allocator(&box_.environment, &cards, torch.map(|it| it.version.as_str())));
    findings.extend(no_cache(box_));
    findings.extend(unified(box_));
    findings.extend(forced_blas(box_));
    findings.extend(unlike_profile(box_, profile));
    findings
}

/// Whether programs are told of other silicon than there is.
pub(crate) fn overridden(environment: &Variables, cards: &[&str]) -> Vec<Finding> {
    let is_override = |name: &str| {
        name.strip_prefix(OVERRIDE).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    let set = environment.iter().filter(|(name, _)| is_override(name));
    set.map(|(name, value)| override_of(name, value, cards)).collect()
}

fn override_of(name: &str, value: &str, cards: &[&str]) -> Finding {
    let (severity, why) = if named(value).is_some_and(|named| cards.contains(&named.as_str())) {
        (Severity::Warn, "it says what the card is anyway, and will be wrong on the next one")
    } else {
        (
            Severity::Fail,
            "programs run kernels of another target: memory faults at address (nil), or results \
             that are only a little wrong",
        )
    };
    Finding {
        id: "C-45",
        severity,
        seen: format!("{name}={value} on {}", cards.join(", ")),
        why,
        remedy: format!(
            "unset {name}; look in ~/.bashrc, /etc/environment, /etc/profile.d and the \
             service's unit. Children of the agent do not get it"
        ),
        source: "ROCm legacy-rocm-build #5696, #5238, #6034: for debugging only",
    }
}

/// `11.5.1` is gfx1151. The driver takes no larger numbers.
fn named(value: &str) -> Option<String> {
    let parts: Option<Vec<u64>> = value.split('.').map(|part| part.parse().ok()).collect();
    match parts.as_deref() {
        Some([major @ ..=63, minor @ ..=255, step @ ..=255]) => {
            Some(format!("gfx{major}{minor:x}{step:x}"))
        }
        _ => None,
    }
}

/// One that waits in a file for the next login.
fn remembered(box_: &Snapshot) -> Vec<Finding> {
    let waiting = box_.settings.iter().filter(|setting| setting.name.starts_with(OVERRIDE));
    let finding = |setting: &crate::snapshot::Setting| Finding {
        id: "C-45",
        severity: Severity::Warn,
        seen: format!("{} sets {}={}", setting.file, setting.name, setting.value),
        why: "every program started by a login or a service gets it, and it is for debugging only",
        remedy: format!("delete that line of {}", setting.file),
        source: "ROCm legacy-rocm-build #5696: forgotten in .bashrc",
    };
    waiting.map(finding).collect()
}

const ALLOCATORS: [&str; 3] =
    ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

/// What torch's allocator can be told.
const OPTIONS: [&str; 15] = [
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "roundup_power2_divisions",
];

/// The first torch whose allocator can expand segments on ROCm.
const EXPANDS: (u64, u64) = (2, 11);

/// What torch's allocator is told, by three names for the same thing.
pub(crate) fn allocator(
    environment: &Variables,
    cards: &[&str],
    torch: Option<&str>,
) -> Vec<Finding> {
    let set: BTreeMap<&str, &str> = ALLOCATORS
        .iter()
        .filter_map(|name| Some((*name, environment.get(*name)?.as_str())))
        .collect();
    let options = options(set.values().copied());
    let is_true = |value: &&str| value.eq_ignore_ascii_case("true");
    let expandable = options.get("expandable_segments").is_some_and(is_true);
    let seen = set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
    let seen = seen.join(" ");
    let mut findings = Vec::new();
    let mut found = |severity, why, source| {
        findings.push(Finding {
            id: "C-46",
            severity,
            seen: seen.clone(),
            why,
            remedy: "unset all three; the agent gives its children the profile's".into(),
            source,
        });
    };
    if expandable && options.contains_key("max_split_size_mb") {
        found(
            Severity::Fail,
            "expandable_segments together with max_split_size_mb silently returns zeros from \
             live allocations",
            "ROCm legacy-rocm-build #6603",
        );
    } else if expandable && cards.contains(&"gfx1201") {
        found(Severity::Fail, "expandable_segments hangs on gfx1201", "pytorch #192259");
    } else if expandable && torch.is_some_and(|torch| super::number(torch) < Some(EXPANDS)) {
        found(
            Severity::Warn,
            "expandable_segments does nothing on ROCm before torch 2.11",
            "torch's own message: not supported on this platform",
        );
    }
    let mut values = set.values();
    let first = values.next();
    if values.any(|value| Some(value) != first) {
        found(
            Severity::Warn,
            "the three names mean the same, and which one counts depends on torch's version",
            "pytorch #183387",
        );
    }
    if options.keys().any(|name| !OPTIONS.contains(name)) {
        found(
            Severity::Warn,
            "torch refuses to start with an option it does not know",
            "torch, c10/core/AllocatorConfig",
        );
    }
    findings
}

/// By name. `roundup_power2_divisions:[256:1,512:2]` goes on behind its comma.
fn options<'a>(values: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, &'a str> {
    let parts = values.flat_map(|value| value.split(',')).map(str::trim);
    let is_name = |part: &&str| part.starts_with(|c: char| c.is_ascii_alphabetic());
    parts.filter(is_name).map(|part| part.split_once(':').unwrap_or((part, ""))).collect()
}

fn no_cache(box_: &Snapshot) -> Option<Finding> {
    (box_.environment.get("HSA_DISABLE_CACHE")? == "1").then(|| Finding {
        id: "C-47",
        severity: Severity::Warn,
        seen: "HSA_DISABLE_CACHE=1".into(),
        why: "it turns the GPU's L2 cache off, which halved a measured throughput",
        remedy: "unset it".into(),
        source: "HIP's documentation of environment variables",
    })
}

fn unified(box_: &Snapshot) -> Option<Finding> {
    let value = box_.environment.get("GGML_CUDA_ENABLE_UNIFIED_MEMORY")?;
    (value != "0").then(|| Finding {
        id: "C-66",
        severity: Severity::Warn,
        seen: format!("GGML_CUDA_ENABLE_UNIFIED_MEMORY={value}"),
        why: "llama.cpp's HIP build then computes on corrupt memory",
        remedy: "unset it; the memory of an integrated GPU is unified without it".into(),
        source: "llama.cpp #26148",
    })
}

fn forced_blas(box_: &Snapshot) -> Option<Finding> {
    let forced = box_.environment.get("ROCBLAS_USE_HIPBLASLT")? == "1";
    (forced && box_.gpus.iter().any(|gpu| gpu.gfx == "gfx1201")).then(|| Finding {
        id: "C-49",
        severity: Severity::Warn,
        seen: "ROCBLAS_USE_HIPBLASLT=1 on gfx1201".into(),
        why: "forced, hipBLASLt stalls on this target",
        remedy: "unset it. Children of the agent do not get it".into(),
        source: "ROCm legacy-rocm-build #5581",
    })
}

/// What the profile sets for a reason, and under which check.
const REASONS: [(&str, &str, &str); 5] = [
    ("HSA_ENABLE_SDMA", "C-48", "SDMA engines hang now and then on this target"),
    ("ROCBLAS_USE_HIPBLASLT", "C-49", "hipBLASLt has this target's tuned kernels"),
    (
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
        "C-50",
        "without it scaled dot-product attention is slower than eager",
    ),
    ("OMP_NUM_THREADS", "C-57", "threads of every library multiply"),
    ("TOKENIZERS_PARALLELISM", "C-57", "tokenizers warn or hang in a process that forks"),
];

/// Children of the agent get the profile's value; what is started by hand gets this.
fn unlike_profile(box_: &Snapshot, profile: &Profile) -> Vec<Finding> {
    let unlike = REASONS.into_iter().filter_map(|(name, id, why)| {
        let (wanted, value) = (profile.environment.get(name)?, box_.environment.get(name)?);
        (wanted != value).then(|| Finding {
            id,
            severity: Severity::Info,
            seen: format!("{name}={value}, where the profile {} has {wanted}", profile.name),
            why,
            remedy: format!("for what you start by hand: export {name}={wanted}"),
            source: "the profile",
        })
    });
    unlike.collect()
}
