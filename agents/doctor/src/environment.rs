//! Checks of environment variables. The agent's children receive the profile's values, so a bad
//! variable of the host harms only other programs and those started by hand.

use std::collections::BTreeMap;

use super::{DoctorFinding, Severity};
use hardware::{
    HardwareProfile,
    host_snapshot::{GFX_OVERRIDE, HostSnapshot},
};

type VariableMap = BTreeMap<String, String>;

pub(super) fn check_variables(
    box_: &HostSnapshot,
    profile: &HardwareProfile,
) -> Vec<DoctorFinding> {
    if box_.gpus.is_empty() {
        return Vec::new();
    }
    let cards: Vec<&str> = box_.gpus.iter().map(|gpu| gpu.gfx.as_str()).collect();
    let torch = box_.python.as_ref().and_then(|python| python.torch.as_ref());
    let mut findings = check_gfx_override(&box_.environment, &cards);
    findings.extend(check_stored_overrides(box_));
    findings.extend(check_allocator(
        &box_.environment,
        &cards,
        torch.map(|it| it.version.as_str()),
    ));
    findings.extend(check_hsa_cache(box_));
    findings.extend(check_ggml_unified_memory(box_));
    findings.extend(check_forced_blas(box_));
    findings.extend(check_profile_values(box_, profile));
    findings
}

pub(crate) fn check_gfx_override(environment: &VariableMap, cards: &[&str]) -> Vec<DoctorFinding> {
    let is_override = |name: &str| {
        name.strip_prefix(GFX_OVERRIDE).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    let set = environment.iter().filter(|(name, _)| is_override(name));
    set.map(|(name, value)| override_finding(name, value, cards)).collect()
}

fn override_finding(name: &str, value: &str, cards: &[&str]) -> DoctorFinding {
    let (severity, why) = if target_of_override(value)
        .is_some_and(|named| cards.contains(&named.as_str()))
    {
        (Severity::Warn, "it repeats what the card reports, and will be wrong on the next card")
    } else {
        (
            Severity::Fail,
            "programs run kernels of another target: memory faults at address (nil), or results \
             that are only a little wrong",
        )
    };
    DoctorFinding {
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

/// Converts `11.5.1` to gfx1151. Returns `None` for numbers that the driver does not accept.
fn target_of_override(value: &str) -> Option<String> {
    let parts: Option<Vec<u64>> = value.split('.').map(|part| part.parse().ok()).collect();
    match parts.as_deref() {
        Some([major @ ..=63, minor @ ..=255, step @ ..=255]) => {
            Some(format!("gfx{major}{minor:x}{step:x}"))
        }
        _ => None,
    }
}

fn check_stored_overrides(box_: &HostSnapshot) -> Vec<DoctorFinding> {
    let waiting = box_.settings.iter().filter(|setting| setting.name.starts_with(GFX_OVERRIDE));
    let finding = |setting: &hardware::host_snapshot::StoredVariable| DoctorFinding {
        id: "C-45",
        severity: Severity::Warn,
        seen: format!("{} sets {}={}", setting.file, setting.name, setting.value),
        why: "every program started by a login or a service gets it, and it is for debugging only",
        remedy: format!("delete that line of {}", setting.file),
        source: "ROCm legacy-rocm-build #5696: forgotten in .bashrc",
    };
    waiting.map(finding).collect()
}

/// Three names of one variable.
pub(crate) const ALLOCATOR_VARIABLES: [&str; 3] =
    ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

const ALLOCATOR_OPTIONS: [&str; 15] = [
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

/// The first version of torch that supports expandable segments on ROCm.
const EXPANDABLE_SINCE: (u64, u64) = (2, 11);

pub(crate) fn check_allocator(
    environment: &VariableMap,
    cards: &[&str],
    torch: Option<&str>,
) -> Vec<DoctorFinding> {
    let set: BTreeMap<&str, &str> = ALLOCATOR_VARIABLES
        .iter()
        .filter_map(|name| Some((*name, environment.get(*name)?.as_str())))
        .collect();
    let options = parse_options(set.values().copied());
    let is_true = |value: &&str| value.eq_ignore_ascii_case("true");
    let expandable = options.get("expandable_segments").is_some_and(is_true);
    let seen = set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
    let seen = seen.join(" ");
    let mut findings = Vec::new();
    let mut found = |severity, why, source| {
        findings.push(DoctorFinding {
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
    } else if expandable
        && torch.is_some_and(|torch| super::parse_major_minor(torch) < Some(EXPANDABLE_SINCE))
    {
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
    if options.keys().any(|name| !ALLOCATOR_OPTIONS.contains(name)) {
        found(
            Severity::Warn,
            "torch refuses to start with an option it does not know",
            "torch, c10/core/AllocatorConfig",
        );
    }
    findings
}

/// A value such as `roundup_power2_divisions:[256:1,512:2]` continues behind its comma.
fn parse_options<'a>(values: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, &'a str> {
    let parts = values.flat_map(|value| value.split(',')).map(str::trim);
    let is_name = |part: &&str| part.starts_with(|c: char| c.is_ascii_alphabetic());
    parts.filter(is_name).map(|part| part.split_once(':').unwrap_or((part, ""))).collect()
}

fn check_hsa_cache(box_: &HostSnapshot) -> Option<DoctorFinding> {
    (box_.environment.get("HSA_DISABLE_CACHE")? == "1").then(|| DoctorFinding {
        id: "C-47",
        severity: Severity::Warn,
        seen: "HSA_DISABLE_CACHE=1".into(),
        why: "it turns the GPU's L2 cache off, which halved a measured throughput",
        remedy: "unset it".into(),
        source: "HIP's documentation of environment variables",
    })
}

fn check_ggml_unified_memory(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let value = box_.environment.get("GGML_CUDA_ENABLE_UNIFIED_MEMORY")?;
    (value != "0").then(|| DoctorFinding {
        id: "C-66",
        severity: Severity::Warn,
        seen: format!("GGML_CUDA_ENABLE_UNIFIED_MEMORY={value}"),
        why: "llama.cpp's HIP build then computes on corrupt memory",
        remedy: "unset it; the memory of an integrated GPU is unified without it".into(),
        source: "llama.cpp #26148",
    })
}

fn check_forced_blas(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let forced = box_.environment.get("ROCBLAS_USE_HIPBLASLT")? == "1";
    (forced && box_.gpus.iter().any(|gpu| gpu.gfx == "gfx1201")).then(|| DoctorFinding {
        id: "C-49",
        severity: Severity::Warn,
        seen: "ROCBLAS_USE_HIPBLASLT=1 on gfx1201".into(),
        why: "forced, hipBLASLt stalls on this target",
        remedy: "unset it. Children of the agent do not get it".into(),
        source: "ROCm legacy-rocm-build #5581",
    })
}

/// The variables that the profile sets, with the check's id and the reason.
const PROFILE_REASONS: [(&str, &str, &str); 5] = [
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

/// The agent's children receive the profile's value; programs started by hand do not.
fn check_profile_values(box_: &HostSnapshot, profile: &HardwareProfile) -> Vec<DoctorFinding> {
    let unlike = PROFILE_REASONS.into_iter().filter_map(|(name, id, why)| {
        let (wanted, value) = (profile.environment.get(name)?, box_.environment.get(name)?);
        (wanted != value).then(|| DoctorFinding {
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
