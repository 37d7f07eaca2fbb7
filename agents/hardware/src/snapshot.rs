//! One look at a box: everything the checks need, as data. Reads sysfs, procfs and a few files of
//! /etc and /opt; of a card that sleeps only what does not wake it.

mod gpu;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::files::{DATA, Files, Keep, keep_parts, number, part, text};
use crate::profile::is_known;
use crate::torch;

pub use gpu::GpuSeen;
pub use settings::Setting;

/// Serialises to the document `flotilla doctor --json` prints beside its findings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub kernel: Kernel,
    pub cpu: Cpu,
    pub memory: Memory,
    /// In HIP's order.
    pub gpus: Vec<GpuSeen>,
    /// Whether the driver's module is loaded; its own version only when it is not the kernel's.
    pub amdgpu: Option<Module>,
    /// `/dev/kfd`, opened as this user.
    pub kfd: Access,
    /// Process ids with a compute context on any card.
    pub gpu_processes: Vec<GpuProcess>,
    /// Numeric, of this process.
    pub groups: BTreeSet<u32>,
    /// `render` and `video`, where they exist.
    pub gpu_groups: BTreeMap<String, u32>,
    /// Of the variables that matter to GPUs, those that are set.
    pub environment: BTreeMap<String, String>,
    /// Of the same, those that files set for every login or service.
    pub settings: Vec<Setting>,
    /// The environment that trains, where one was named.
    pub python: Option<torch::Snapshot>,
    /// Bytes that may be written where checkpoints and models go.
    pub disk_free: Option<u64>,
    /// `/opt/rocm*`, by path.
    pub rocm: BTreeMap<String, String>,
    /// Files of udev rules that open `/dev/kfd` or cards to everybody.
    pub open_udev_rules: Vec<String>,
    pub selinux_container_devices: Option<bool>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// `6.17.0-19-generic`
    pub release: String,
    pub command_line: String,
    /// `ubuntu 24.04`
    pub distribution: String,
    /// `lxc`, `podman`, …, where it is one.
    pub container: Option<String>,
    /// `wsl`, `QEMU`, …, where it is one.
    pub virtual_machine: Option<String>,
    /// Pages of 4 KiB that graphics may map of the system's memory.
    pub ttm_pages_limit: Option<u64>,
    pub transparent_huge_pages: Option<String>,
    pub swappiness: Option<u64>,
    pub compaction_proactiveness: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    pub model: String,
    pub logical: u32,
    /// Broadcasts TLB invalidations instead of interrupting every core.
    pub invlpgb: bool,
}

/// Bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    pub total: u64,
    pub available: u64,
    pub swap_total: u64,
    pub swap_free: u64,
    /// Of the swap, what is compressed memory.
    pub swap_zram: u64,
    /// What this control group may use, where it is limited.
    pub limit: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    pub version: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    pub pid: u32,
    /// `python3`
    pub name: String,
    /// Of all cards.
    pub vram_bytes: u64,
    /// Where its HIP and HSA come from: `/opt/rocm-7.2.0`, or `elsewhere`.
    pub runtimes: BTreeSet<String>,
}

/// Whether a device can be opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    #[default]
    Absent,
    Usable,
    Denied,
    /// The error in the system's words.
    Failed(String),
}

/// What silicon programs are told there is; `…_<N>` for the GPU of one node.
pub(crate) const OVERRIDE: &str = "HSA_OVERRIDE_GFX_VERSION";

/// Those that change what a GPU process does.
const VARIABLES: [&str; 23] = [
    "AMD_SERIALIZE_KERNEL",
    "CUDA_VISIBLE_DEVICES",
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "HSA_DISABLE_CACHE",
    "HSA_ENABLE_INTERRUPT",
    "HSA_ENABLE_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    OVERRIDE,
    "HSA_XNACK",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ROCM_ARCH",
    "ROCBLAS_USE_HIPBLASLT",
    "ROCR_VISIBLE_DEVICES",
    "TOKENIZERS_PARALLELISM",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
];

impl Snapshot {
    /// Looks once. Whatever cannot be read is left out; nothing fails.
    pub fn take(files: &dyn Files) -> Self {
        Self {
            kernel: kernel(files),
            cpu: cpu(files),
            memory: memory(files),
            gpus: gpu::all(files),
            amdgpu: (!files.list("/sys/module/amdgpu").is_empty())
                .then(|| Module { version: text(files, "/sys/module/amdgpu/version") }),
            kfd: access(files.open_device("/dev/kfd")),
            gpu_processes: gpu_processes(files),
            groups: groups(files),
            gpu_groups: gpu_groups(files),
            environment: environment(files),
            settings: settings::all(files),
            python: torch::Snapshot::look(files),
            disk_free: files.free_bytes(DATA),
            rocm: rocm(files),
            open_udev_rules: open_udev_rules(files),
            selinux_container_devices: text(
                files,
                "/sys/fs/selinux/booleans/container_use_devices",
            )
            .map(|value| value.starts_with('1')),
        }
    }

    /// The GPU that is meant to work: one with a profile of its own before others, one with
    /// memory of its own before one without.
    pub fn main_gpu(&self) -> Option<&GpuSeen> {
        let order = |gpu: &&GpuSeen| (!is_known(&gpu.gfx), gpu.unified_memory, gpu.ordinal);
        self.gpus.iter().min_by_key(order)
    }

    /// That GPU's memory is the system's.
    pub fn is_unified(&self) -> bool {
        self.main_gpu().is_some_and(|gpu| gpu.unified_memory)
    }
}

fn access(opened: std::io::Result<()>) -> Access {
    match opened {
        Ok(()) => Access::Usable,
        Err(error) => match error.kind() {
            std::io::ErrorKind::NotFound => Access::Absent,
            std::io::ErrorKind::PermissionDenied => Access::Denied,
            _ => Access::Failed(error.to_string()),
        },
    }
}

fn kernel(files: &dyn Files) -> Kernel {
    let release = text(files, "/proc/sys/kernel/osrelease").unwrap_or_default();
    let os = text(files, "/etc/os-release").unwrap_or_default();
    let os_field = |name: &str| {
        let line = os.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(|value| value.trim_matches('"').to_owned()).unwrap_or_default()
    };
    let vendor = text(files, "/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let virtual_machine = if release.to_lowercase().contains("microsoft") {
        Some("WSL".to_owned())
    } else {
        ["QEMU", "VMware", "innotek", "Xen"]
            .iter()
            .find(|name| vendor.contains(**name))
            .map(|_| vendor.clone())
    };
    Kernel {
        command_line: command_line(files),
        distribution: format!("{} {}", os_field("ID"), os_field("VERSION_ID")).trim().to_owned(),
        container: container(files),
        virtual_machine,
        ttm_pages_limit: number(files, "/sys/module/ttm/parameters/pages_limit"),
        transparent_huge_pages: text(files, "/sys/kernel/mm/transparent_hugepage/enabled"),
        swappiness: number(files, "/proc/sys/vm/swappiness"),
        compaction_proactiveness: number(files, "/proc/sys/vm/compaction_proactiveness"),
        release,
    }
}

/// What steers graphics and memory; the rest names disks.
fn command_line(files: &dyn Files) -> String {
    let keep: Keep = |bytes| {
        keep_parts(bytes.trim_ascii_end(), b' ', |word| {
            let known =
                ["amdgpu.", "ttm.", "amdttm.", "amd_iommu", "iommu", "pcie_aspm", "mitigations"];
            known.iter().any(|prefix| word.starts_with(prefix.as_bytes()))
        })
    };
    part(files, "/proc/cmdline", keep)
}

fn container(files: &dyn Files) -> Option<String> {
    if let Some(named) = text(files, "/run/systemd/container").filter(|name| !name.is_empty()) {
        return Some(named);
    }
    let marks = [("/run/.containerenv", "podman"), ("/.dockerenv", "docker")];
    let mark = marks.into_iter().find(|(path, _)| files.read(path).is_ok());
    mark.map(|(_, name)| name.to_owned())
}

fn cpu(files: &dyn Files) -> Cpu {
    // Some have a serial number there.
    let keep: Keep = |bytes| {
        keep_parts(bytes, b'\n', |line| {
            let names: [&[u8]; 4] = [b"processor", b"vendor_id", b"model", b"flags"];
            names.iter().any(|name| line.starts_with(name))
        })
    };
    let info = part(files, "/proc/cpuinfo", keep);
    let field = |name: &str| {
        info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let logical = info.lines().filter(|line| line.starts_with("processor")).count();
    Cpu {
        model: field("model name").unwrap_or_default(),
        logical: u32::try_from(logical).unwrap_or(u32::MAX),
        invlpgb: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "invlpgb")),
    }
}

fn memory(files: &dyn Files) -> Memory {
    let info = text(files, "/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kibibytes =
            value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
        kibibytes.unwrap_or(0).saturating_mul(1024)
    };
    Memory {
        total: bytes("MemTotal"),
        available: bytes("MemAvailable"),
        swap_total: bytes("SwapTotal"),
        swap_free: bytes("SwapFree"),
        swap_zram: swap_zram(files),
        limit: number(files, "/sys/fs/cgroup/memory.max"),
    }
}

/// Where swap files lie is nobody's business.
fn swap_zram(files: &dyn Files) -> u64 {
    let keep: Keep = |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"/dev/zram"));
    let devices = part(files, "/proc/swaps", keep);
    let kibibytes = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
    devices.lines().filter_map(kibibytes).fold(0, u64::saturating_add).saturating_mul(1024)
}

fn gpu_processes(files: &dyn Files) -> Vec<GpuProcess> {
    let directory = "/sys/class/kfd/kfd/proc";
    let pids = files.list(directory).into_iter().filter_map(|name| name.parse::<u32>().ok());
    let process = |pid: u32| {
        let own = format!("{directory}/{pid}");
        let pools = files.list(&own).into_iter().filter(|name| name.starts_with("vram_"));
        let held = pools.filter_map(|name| number(files, &format!("{own}/{name}")));
        let name = text(files, &format!("/proc/{pid}/comm")).unwrap_or_default();
        let vram_bytes = held.fold(0, u64::saturating_add);
        GpuProcess { pid, name, vram_bytes, runtimes: runtimes(files, pid) }
    };
    pids.map(process).collect()
}

/// Of another user's process nothing can be read. Where an environment lies is its owner's to
/// tell.
fn runtimes(files: &dyn Files, pid: u32) -> BTreeSet<String> {
    let keep: Keep = |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let found: BTreeSet<&str> = text.lines().filter_map(runtime).collect();
        found.into_iter().collect::<Vec<_>>().join("\n").into_bytes()
    };
    let found = part(files, &format!("/proc/{pid}/maps"), keep);
    let installation = |line: &str| match line.strip_prefix("/opt/") {
        Some(below) => format!("/opt/{}", below.split('/').next().unwrap_or_default()),
        None => "elsewhere".into(),
    };
    found.lines().map(installation).collect()
}

const ELSEWHERE: &str = "elsewhere libamdhip64.so";

/// Of a mapping of one of ROCm's runtime libraries, its file if that is the system's; of what this
/// made of one, the same.
fn runtime(line: &str) -> Option<&str> {
    if !["libamdhip64.so", "libhsa-runtime64.so"].iter().any(|name| line.contains(name)) {
        return None;
    }
    let Some(at) = line.find("/opt/rocm") else { return Some(ELSEWHERE) };
    Some(&line[at..])
}

fn groups(files: &dyn Files) -> BTreeSet<u32> {
    let keep: Keep = |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"Groups:"));
    let line = part(files, "/proc/self/status", keep);
    let numbers = line.strip_prefix("Groups:").unwrap_or_default();
    numbers.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// Names of the other groups and of all members are nobody's business.
fn gpu_groups(files: &dyn Files) -> BTreeMap<String, u32> {
    let keep: Keep = |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let is_kept = |line: &&str| line.starts_with("render:") || line.starts_with("video:");
        let number = |line: &str| line.splitn(4, ':').take(3).collect::<Vec<_>>().join(":");
        text.lines().filter(is_kept).map(number).collect::<Vec<_>>().join("\n").into_bytes()
    };
    let group = part(files, "/etc/group", keep);
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        Some((name.to_owned(), number.parse().ok()?))
    };
    group.lines().filter_map(entry).collect()
}

/// The rest of the environment may hold secrets.
fn environment(files: &dyn Files) -> BTreeMap<String, String> {
    let keep: Keep = |bytes| {
        keep_parts(bytes, 0, |entry| {
            let name = entry.split(|byte| *byte == b'=').next().unwrap_or_default();
            is_variable(&String::from_utf8_lossy(name))
        })
    };
    let text = part(files, "/proc/self/environ", keep);
    let pair = |entry: &str| {
        let (name, value) = entry.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    text.split('\0').filter_map(pair).collect()
}

fn is_variable(name: &str) -> bool {
    let of_one_gpu = name.strip_prefix(OVERRIDE).is_some_and(|rest| rest.starts_with('_'));
    of_one_gpu || VARIABLES.contains(&name)
}

fn rocm(files: &dyn Files) -> BTreeMap<String, String> {
    let directories = files.list_part("/opt", |name| name.starts_with("rocm")).into_iter();
    let version = |name: String| {
        let directory = format!("/opt/{name}");
        Some((directory.clone(), text(files, &format!("{directory}/.info/version"))?))
    };
    directories.filter_map(version).collect()
}

fn open_udev_rules(files: &dyn Files) -> Vec<String> {
    let directory = "/etc/udev/rules.d";
    let keep: Keep = |bytes| {
        let is_open = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            line.contains("0666") && line.contains("kfd") && !line.trim_start().starts_with('#')
        };
        keep_parts(bytes, b'\n', is_open)
    };
    let rules = files.read_parts(directory, |name| name.ends_with(".rules"), keep);
    rules.into_iter().map(|(name, _)| format!("{directory}/{name}")).collect()
}

#[cfg(test)]
mod tests;
