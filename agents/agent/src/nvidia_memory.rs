//! The memory of NVIDIA's GPUs as `nvidia-smi` reports it; the kernel's files lack it.

use std::{path::Path, process::Command, time::Duration};

use process::{RunLimits, run_program};

/// The first start of the driver takes seconds.
const LIMITS: RunLimits = RunLimits {
    time: Duration::from_secs(20),
    poll: Duration::from_millis(50),
    stdout_bytes: 64 << 10,
    ..RunLimits::INSTALLATION
};

const QUERY: [&str; 2] =
    ["--query-gpu=uuid,memory.total,memory.free", "--format=csv,noheader,nounits"];

/// As for cards of AMD, this is left to others.
const RESERVED_BYTES: u64 = 1 << 30;

/// A GPU as `nvidia-smi` lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NvidiaGpu {
    uuid: String,
    total_bytes: u64,
    free_bytes: u64,
}

/// Returns the bytes that a training may plan with on the first GPU that programs see: the free
/// memory less 1 GiB. `None` if `program` fails or that GPU is unknown.
///
/// A sleeping GPU is woken, so this is called rarely.
pub(crate) fn read_budget(
    program: &Path,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<u64> {
    let mut command = Command::new(program);
    let listed = run_program(command.args(QUERY), Vec::new(), LIMITS, |_| ());
    let listed = match listed {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) => {
            let problem = error.problem;
            tracing::warn!(problem, "the GPU's memory is unknown; set --training-gib");
            return None;
        }
    };
    let gpus: Vec<NvidiaGpu> = listed.lines().map(parse_gpu).collect::<Option<_>>()?;
    let in_list_order = variable("CUDA_DEVICE_ORDER").as_deref() == Some("PCI_BUS_ID");
    let gpu = choose_gpu(&gpus, variable("CUDA_VISIBLE_DEVICES").as_deref(), in_list_order)?;
    Some(gpu.free_bytes.saturating_sub(RESERVED_BYTES))
}

/// Parses a line with UUID, total and free memory in MiB; the latter may be `[N/A]`.
fn parse_gpu(line: &str) -> Option<NvidiaGpu> {
    let mut parts = line.split(',').map(str::trim);
    let uuid = parts.next()?.to_owned();
    let mut bytes = || parts.next()?.parse::<u64>().ok()?.checked_mul(1 << 20);
    Some(NvidiaGpu { uuid, total_bytes: bytes()?, free_bytes: bytes()? })
}

/// Returns the first GPU that programs see. `visible` are numbers or UUIDs, all GPUs if it is
/// `None`. CUDA counts the fastest first, unless a variable makes it count as `nvidia-smi` does, so
/// a number among GPUs that differ is unclear.
fn choose_gpu<'a>(
    gpus: &'a [NvidiaGpu],
    visible: Option<&str>,
    in_list_order: bool,
) -> Option<&'a NvidiaGpu> {
    let first = visible.unwrap_or("0").split(',').next()?.trim();
    if first.starts_with("GPU-") {
        return gpus.iter().find(|gpu| gpu.uuid.starts_with(first));
    }
    let named = gpus.get(first.parse::<usize>().ok()?)?;
    let is_clear = in_list_order || gpus.iter().all(|gpu| gpu.total_bytes == named.total_bytes);
    is_clear.then_some(named)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const TWO_CARDS: &str = "GPU-aa11, 24576, 24000\nGPU-bb22, 8192, 5120\n";

    /// Reads the budget, with a program that prints `listed`.
    fn budget(listed: &str, variables: &[(&str, &str)]) -> Option<u64> {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("nvidia-smi");
        let script = format!("#!/bin/sh\n[ $# = 2 ] || exit 1\nprintf '{listed}'\n");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        read_budget(&program, |name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_budget_is_what_the_named_gpu_has_free_less_one_gibibyte() {
        let visible = |value| ("CUDA_VISIBLE_DEVICES", value);
        let in_order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
        let one = "GPU-aa11, 24576, 24000\n";
        assert_eq!(budget(one, &[]), Some((24_000 - 1024) << 20));
        assert_eq!(budget(TWO_CARDS, &[visible("GPU-bb")]), Some(4 << 30));
        assert_eq!(budget(TWO_CARDS, &[visible("1, 0"), in_order]), Some(4 << 30));
        let equal = TWO_CARDS.replace("24576", "8192");
        assert_eq!(budget(&equal, &[visible("1")]), Some(4 << 30));
        assert_eq!(budget("GPU-aa11, 8192, 100\n", &[]), Some(0));
    }

    #[test]
    fn memory_that_is_not_known_for_sure_is_unknown() {
        let visible = |value| ("CUDA_VISIBLE_DEVICES", value);
        assert_eq!(budget(TWO_CARDS, &[]), None, "the fastest may be either");
        for other in ["", "2", "-1", "GPU-cc", "MIG-aa11"] {
            assert_eq!(budget(TWO_CARDS, &[visible(other)]), None, "{other}");
        }
        assert_eq!(budget("GPU-aa11, [N/A], [N/A]\n", &[]), None);
        assert_eq!(budget("", &[]), None);
        let absent = Path::new("/no/nvidia-smi");
        assert_eq!(read_budget(absent, |_| None), None);
    }
}
