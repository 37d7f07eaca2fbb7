//! A snapshot of a host: everything that the checks need, as data. Reads sysfs, procfs and some
//! files of /etc and /opt. Reads of a suspended card are limited to files that do not wake it.

mod gpu;
mod stored_variables;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::built_in_profiles::has_own_profile;
use crate::host_files::{
    ContentFilter, DATA, HostFiles, keep_parts, read_number, read_text, read_text_filtered,
};
use crate::torch_environment::TorchEnvironment;

pub use gpu::GpuInfo;
pub use stored_variables::StoredVariable;

/// The facts of a host at one moment. `flotilla doctor --json` prints it beside the findings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSnapshot {
    pub kernel: KernelInfo,
    pub cpu: CpuInfo,
    pub memory: MemoryInfo,
    /// In HIP's order.
    pub gpus: Vec<GpuInfo>,
    /// The loaded driver module; it has a version only if it is not the kernel's own.
    pub amdgpu: Option<KernelModule>,
    /// The result of opening `/dev/kfd` as this user.
    pub kfd: DeviceAccess,
    /// The processes with a compute context on any card.
    pub gpu_processes: Vec<GpuProcess>,
    /// The numeric groups of this process.
    pub groups: BTreeSet<u32>,
    /// The ids of `render` and `video`, if they exist.
    pub gpu_groups: BTreeMap<String, u32>,
    /// The GPU-related variables that are set.
    pub environment: BTreeMap<String, String>,
    /// The GPU-related variables that files set for every login or service.
    pub settings: Vec<StoredVariable>,
    /// The Python environment that trains, if one was named.
    pub python: Option<TorchEnvironment>,
    /// The free bytes where checkpoints and models are written.
    pub disk_free: Option<u64>,
    /// The versions of `/opt/rocm*`, by path.
    pub rocm: BTreeMap<String, String>,
    /// The udev rule files that open `/dev/kfd` or cards to all users.
    pub open_udev_rules: Vec<String>,
    pub selinux_container_devices: Option<bool>,
}

/// The kernel, its settings and its environment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Such as `6.17.0-19-generic`.
    pub release: String,
    pub command_line: String,
    /// Such as `ubuntu 24.04`.
    pub distribution: String,
    /// Such as `lxc`, `podman`.
    pub container: Option<String>,
    /// Such as `wsl`, `QEMU`.
    pub virtual_machine: Option<String>,
    /// The system memory that graphics may map, in pages of 4 KiB.
    pub ttm_pages_limit: Option<u64>,
    pub transparent_huge_pages: Option<String>,
    pub swappiness: Option<u64>,
    pub compaction_proactiveness: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuInfo {
    pub model: String,
    pub logical: u32,
    /// True if the processor broadcasts TLB invalidations instead of interrupting every core.
    pub invlpgb: bool,
}

/// The memory and swap, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    pub total: u64,
    pub available: u64,
    pub swap_total: u64,
    pub swap_free: u64,
    /// The part of the swap that is compressed memory.
    pub swap_zram: u64,
    /// The limit of this control group, if any.
    pub limit: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelModule {
    pub version: Option<String>,
}

/// A process with a compute context on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    pub pid: u32,
    /// The command name, such as `python3`.
    pub name: String,
    /// The memory that it holds on all cards.
    pub vram_bytes: u64,
    /// The installations of its HIP and HSA libraries: `/opt/rocm-7.2.0`, or `elsewhere`.
    pub runtimes: BTreeSet<String>,
}

/// The result of opening a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceAccess {
    #[default]
    Absent,
    Usable,
    Denied,
    /// Any other error, as the system describes it.
    Failed(String),
}

/// The variable that makes programs assume another target; `…_<N>` for the GPU of one node.
pub const GFX_OVERRIDE: &str = "HSA_OVERRIDE_GFX_VERSION";

/// The variable that gives one of several GPUs to an agent, by its HIP ordinal.
pub const GPU_CHOICE: &str = "FLOTILLA_GPU";

/// The variables that change what a GPU process does.
const GPU_VARIABLES: [&str; 24] = [
    "AMD_SERIALIZE_KERNEL",
    "CUDA_VISIBLE_DEVICES",
    GPU_CHOICE,
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "HSA_DISABLE_CACHE",
    "HSA_ENABLE_INTERRUPT",
    "HSA_ENABLE_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    GFX_OVERRIDE,
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

impl HostSnapshot {
    /// Reads all facts once. Unreadable ones are omitted; the function never fails.
    pub fn take_snapshot(files: &dyn HostFiles) -> Self {
        Self {
            kernel: read_kernel(files),
            cpu: read_cpu(files),
            memory: read_memory(files),
            gpus: gpu::read_gpus(files),
            amdgpu: (!files.list_names("/sys/module/amdgpu").is_empty())
                .then(|| KernelModule { version: read_text(files, "/sys/module/amdgpu/version") }),
            kfd: device_access(files.open_device("/dev/kfd")),
            gpu_processes: read_gpu_processes(files),
            groups: read_groups(files),
            gpu_groups: read_gpu_groups(files),
            environment: read_environment(files),
            settings: stored_variables::read_stored_variables(files),
            python: TorchEnvironment::find_environment(files),
            disk_free: files.free_bytes(DATA),
            rocm: read_rocm_versions(files),
            open_udev_rules: read_open_udev_rules(files),
            selinux_container_devices: read_text(
                files,
                "/sys/fs/selinux/booleans/container_use_devices",
            )
            .map(|value| value.starts_with('1')),
        }
    }

    /// Returns the GPU that does the work: the one that [`GPU_CHOICE`] names, if it is set.
    /// Otherwise one with its own profile before others, then one with its own memory before
    /// integrated ones.
    pub fn main_gpu(&self) -> Option<&GpuInfo> {
        if let Some(named) = self.environment.get(GPU_CHOICE) {
            let ordinal = named.trim().parse::<u32>();
            return self.gpus.iter().find(|gpu| ordinal == Ok(gpu.ordinal));
        }
        let order = |gpu: &&GpuInfo| (!has_own_profile(&gpu.gfx), gpu.unified_memory, gpu.ordinal);
        self.gpus.iter().min_by_key(order)
    }

    /// Returns true if the main GPU uses system memory.
    pub fn is_unified(&self) -> bool {
        self.main_gpu().is_some_and(|gpu| gpu.unified_memory)
    }
}

fn device_access(opened: std::io::Result<()>) -> DeviceAccess {
    match opened {
        Ok(()) => DeviceAccess::Usable,
        Err(error) => match error.kind() {
            std::io::ErrorKind::NotFound => DeviceAccess::Absent,
            std::io::ErrorKind::PermissionDenied => DeviceAccess::Denied,
            _ => DeviceAccess::Failed(error.to_string()),
        },
    }
}

fn read_kernel(files: &dyn HostFiles) -> KernelInfo {
    let release = read_text(files, "/proc/sys/kernel/osrelease").unwrap_or_default();
    let os = read_text(files, "/etc/os-release").unwrap_or_default();
    let os_field = |name: &str| {
        let line = os.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(|value| value.trim_matches('"').to_owned()).unwrap_or_default()
    };
    let vendor = read_text(files, "/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let virtual_machine = if release.to_lowercase().contains("microsoft") {
        Some("WSL".to_owned())
    } else {
        ["QEMU", "VMware", "innotek", "Xen"]
            .iter()
            .find(|name| vendor.contains(**name))
            .map(|_| vendor.clone())
    };
    KernelInfo {
        command_line: read_command_line(files),
        distribution: format!("{} {}", os_field("ID"), os_field("VERSION_ID")).trim().to_owned(),
        container: detect_container(files),
        virtual_machine,
        ttm_pages_limit: read_number(files, "/sys/module/ttm/parameters/pages_limit"),
        transparent_huge_pages: read_text(files, "/sys/kernel/mm/transparent_hugepage/enabled"),
        swappiness: read_number(files, "/proc/sys/vm/swappiness"),
        compaction_proactiveness: read_number(files, "/proc/sys/vm/compaction_proactiveness"),
        release,
    }
}

/// Keeps the graphics and memory parameters; the others may name disks.
fn read_command_line(files: &dyn HostFiles) -> String {
    let keep: ContentFilter = |bytes| {
        keep_parts(bytes.trim_ascii_end(), b' ', |word| {
            let known =
                ["amdgpu.", "ttm.", "amdttm.", "amd_iommu", "iommu", "pcie_aspm", "mitigations"];
            known.iter().any(|prefix| word.starts_with(prefix.as_bytes()))
        })
    };
    read_text_filtered(files, "/proc/cmdline", keep)
}

fn detect_container(files: &dyn HostFiles) -> Option<String> {
    if let Some(named) = read_text(files, "/run/systemd/container").filter(|name| !name.is_empty())
    {
        return Some(named);
    }
    let marks = [("/run/.containerenv", "podman"), ("/.dockerenv", "docker")];
    let mark = marks.into_iter().find(|(path, _)| files.read(path).is_ok());
    mark.map(|(_, name)| name.to_owned())
}

fn read_cpu(files: &dyn HostFiles) -> CpuInfo {
    // Some processors have a serial number there.
    let keep: ContentFilter = |bytes| {
        keep_parts(bytes, b'\n', |line| {
            let names: [&[u8]; 4] = [b"processor", b"vendor_id", b"model", b"flags"];
            names.iter().any(|name| line.starts_with(name))
        })
    };
    let info = read_text_filtered(files, "/proc/cpuinfo", keep);
    let field = |name: &str| {
        info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let logical = info.lines().filter(|line| line.starts_with("processor")).count();
    CpuInfo {
        model: field("model name").unwrap_or_default(),
        logical: u32::try_from(logical).unwrap_or(u32::MAX),
        invlpgb: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "invlpgb")),
    }
}

fn read_memory(files: &dyn HostFiles) -> MemoryInfo {
    let info = read_text(files, "/proc/meminfo").unwrap_or_default();
    let bytes = |name: &str| {
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kibibytes =
            value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
        kibibytes.unwrap_or(0).saturating_mul(1024)
    };
    MemoryInfo {
        total: bytes("MemTotal"),
        available: bytes("MemAvailable"),
        swap_total: bytes("SwapTotal"),
        swap_free: bytes("SwapFree"),
        swap_zram: read_zram_swap(files),
        limit: read_number(files, "/sys/fs/cgroup/memory.max"),
    }
}

/// The paths of swap files are private.
fn read_zram_swap(files: &dyn HostFiles) -> u64 {
    let keep: ContentFilter =
        |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"/dev/zram"));
    let devices = read_text_filtered(files, "/proc/swaps", keep);
    let kibibytes = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
    devices.lines().filter_map(kibibytes).fold(0, u64::saturating_add).saturating_mul(1024)
}

fn read_gpu_processes(files: &dyn HostFiles) -> Vec<GpuProcess> {
    let directory = "/sys/class/kfd/kfd/proc";
    let pids = files.list_names(directory).into_iter().filter_map(|name| name.parse::<u32>().ok());
    let process = |pid: u32| {
        let own = format!("{directory}/{pid}");
        let pools = files.list_names(&own).into_iter().filter(|name| name.starts_with("vram_"));
        let held = pools.filter_map(|name| read_number(files, &format!("{own}/{name}")));
        let name = read_text(files, &format!("/proc/{pid}/comm")).unwrap_or_default();
        let vram_bytes = held.fold(0, u64::saturating_add);
        GpuProcess { pid, name, vram_bytes, runtimes: read_runtimes(files, pid) }
    };
    pids.map(process).collect()
}

/// Processes of other users are unreadable, and the location of a private environment is not
/// recorded.
fn read_runtimes(files: &dyn HostFiles, pid: u32) -> BTreeSet<String> {
    let keep: ContentFilter = |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let found: BTreeSet<&str> = text.lines().filter_map(runtime_path).collect();
        found.into_iter().collect::<Vec<_>>().join("\n").into_bytes()
    };
    let found = read_text_filtered(files, &format!("/proc/{pid}/maps"), keep);
    let installation = |line: &str| match line.strip_prefix("/opt/") {
        Some(below) => format!("/opt/{}", below.split('/').next().unwrap_or_default()),
        None => "elsewhere".into(),
    };
    found.lines().map(installation).collect()
}

/// The replacement of a private library path.
const ELSEWHERE_LINE: &str = "elsewhere libamdhip64.so";

/// Returns the path of a ROCm runtime library below /opt/rocm in a line of mappings, or
/// `ELSEWHERE_LINE`. The result is stable when applied to itself.
fn runtime_path(line: &str) -> Option<&str> {
    if !["libamdhip64.so", "libhsa-runtime64.so"].iter().any(|name| line.contains(name)) {
        return None;
    }
    let Some(at) = line.find("/opt/rocm") else { return Some(ELSEWHERE_LINE) };
    Some(&line[at..])
}

fn read_groups(files: &dyn HostFiles) -> BTreeSet<u32> {
    let keep: ContentFilter = |bytes| keep_parts(bytes, b'\n', |line| line.starts_with(b"Groups:"));
    let line = read_text_filtered(files, "/proc/self/status", keep);
    let numbers = line.strip_prefix("Groups:").unwrap_or_default();
    numbers.split_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// Other groups and all members are private.
fn read_gpu_groups(files: &dyn HostFiles) -> BTreeMap<String, u32> {
    let keep: ContentFilter = |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let is_kept = |line: &&str| line.starts_with("render:") || line.starts_with("video:");
        let number = |line: &str| line.splitn(4, ':').take(3).collect::<Vec<_>>().join(":");
        text.lines().filter(is_kept).map(number).collect::<Vec<_>>().join("\n").into_bytes()
    };
    let group = read_text_filtered(files, "/etc/group", keep);
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let (name, number) = (fields.next()?, fields.nth(1)?);
        Some((name.to_owned(), number.parse().ok()?))
    };
    group.lines().filter_map(entry).collect()
}

/// Other variables may contain secrets.
fn read_environment(files: &dyn HostFiles) -> BTreeMap<String, String> {
    let keep: ContentFilter = |bytes| {
        keep_parts(bytes, 0, |entry| {
            let name = entry.split(|byte| *byte == b'=').next().unwrap_or_default();
            is_gpu_variable(&String::from_utf8_lossy(name))
        })
    };
    let text = read_text_filtered(files, "/proc/self/environ", keep);
    let pair = |entry: &str| {
        let (name, value) = entry.split_once('=')?;
        Some((name.to_owned(), value.to_owned()))
    };
    text.split('\0').filter_map(pair).collect()
}

fn is_gpu_variable(name: &str) -> bool {
    let of_one_gpu = name.strip_prefix(GFX_OVERRIDE).is_some_and(|rest| rest.starts_with('_'));
    of_one_gpu || GPU_VARIABLES.contains(&name)
}

fn read_rocm_versions(files: &dyn HostFiles) -> BTreeMap<String, String> {
    let directories = files.list_filtered("/opt", |name| name.starts_with("rocm")).into_iter();
    let version = |name: String| {
        let directory = format!("/opt/{name}");
        Some((directory.clone(), read_text(files, &format!("{directory}/.info/version"))?))
    };
    directories.filter_map(version).collect()
}

fn read_open_udev_rules(files: &dyn HostFiles) -> Vec<String> {
    let directory = "/etc/udev/rules.d";
    let keep: ContentFilter = |bytes| {
        let is_open = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            line.contains("0666") && line.contains("kfd") && !line.trim_start().starts_with('#')
        };
        keep_parts(bytes, b'\n', is_open)
    };
    let rules = files.read_all_filtered(directory, |name| name.ends_with(".rules"), keep);
    rules.into_iter().map(|(name, _)| format!("{directory}/{name}")).collect()
}

#[cfg(test)]
mod tests;
