//! Whether a model can be in memory at all, asked before the operating system is.

use super::{Dtype, ModelError};
use candle_core::Device;
use formats::Config;

/// Where the system does not say what is available.
const ASSUMED_BYTES: u128 = 1 << 37;
const GIB: u128 = 1 << 30;

/// Devices other than the CPU know their own memory.
pub(super) fn check(config: &Config, dtype: Dtype, device: &Device) -> Result<(), ModelError> {
    let available = if device.is_cpu() { available() } else { None };
    check_against(config, dtype, available.unwrap_or(ASSUMED_BYTES))
}

fn check_against(config: &Config, dtype: Dtype, available: u128) -> Result<(), ModelError> {
    let parameters = config.parameter_count();
    let bytes = match dtype {
        Dtype::F32 => 4,
        Dtype::Bf16 => 2,
    };
    let needed = parameters * bytes;
    if needed <= available {
        return Ok(());
    }
    Err(ModelError::TooLarge {
        parameters,
        needed_gib: needed.div_ceil(GIB),
        available_gib: available / GIB,
        dtype: dtype.name(),
    })
}

/// Memory and swap that Linux would hand out, in bytes.
fn available() -> Option<u128> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u128>().ok()
    };
    Some((kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Shape, write_scratch};

    #[test]
    fn a_model_beyond_all_memory_is_refused_with_an_estimate() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape { hidden_size: 1 << 18, layers: 1 << 12, ..Shape::default() };
        let config = write_scratch(dir.path(), &shape).unwrap();
        let error = Model::init(config, 1, &Device::Cpu).unwrap_err();
        assert!(matches!(error, ModelError::TooLarge { needed_gib: 1_000_000.., .. }), "{error}");
        let small = write_scratch(dir.path(), &Shape::default()).unwrap();
        let bytes = small.parameter_count() * 2;
        check_against(&small, Dtype::Bf16, bytes).unwrap();
        check_against(&small, Dtype::Bf16, bytes - 1).unwrap_err();
        check_against(&small, Dtype::F32, bytes).unwrap_err();
        let counted = Model::init(small.clone(), 1, &Device::Cpu).unwrap().parameter_count();
        assert_eq!(counted as u128, small.parameter_count());
    }
}
