//! Checks that a model fits in memory before any memory is requested.

use super::{MatrixDtype, ModelError};
use candle_core::Device;
use formats::ModelConfig;

/// 128 GiB, assumed if the system does not report its memory.
const ASSUMED_BYTES: u128 = 1 << 37;
const GIB: u128 = 1 << 30;

/// Checks the memory of the host, or `ASSUMED_BYTES` for another device, which reports its own
/// shortage.
pub(super) fn check_memory(
    config: &ModelConfig,
    dtype: MatrixDtype,
    device: &Device,
) -> Result<(), ModelError> {
    let available = if device.is_cpu() { available_bytes() } else { None };
    check_against(config, dtype, available.unwrap_or(ASSUMED_BYTES))
}

fn check_against(
    config: &ModelConfig,
    dtype: MatrixDtype,
    available: u128,
) -> Result<(), ModelError> {
    let parameters = config.count_parameters();
    // 32 elements in 8 bits and their scale have 34 bytes.
    let needed = match dtype {
        MatrixDtype::F32 => parameters * 4,
        MatrixDtype::Bf16 => parameters * 2,
        MatrixDtype::Q8_0 => (parameters * 34).div_ceil(32),
    };
    if needed <= available {
        return Ok(());
    }
    Err(ModelError::TooLarge {
        parameters,
        needed_gib: needed.div_ceil(GIB),
        available_gib: available / GIB,
        dtype: dtype.type_name(),
    })
}

/// Returns the available memory and swap, in bytes.
pub(super) fn available_bytes() -> Option<u128> {
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
    use crate::{LanguageModel, ScratchShape, write_scratch_model};

    #[test]
    fn a_model_beyond_all_memory_is_refused_with_an_estimate() {
        let dir = tempfile::tempdir().unwrap();
        let shape =
            ScratchShape { hidden_size: 1 << 18, layers: 1 << 12, ..ScratchShape::default() };
        let config = write_scratch_model(dir.path(), &shape).unwrap();
        let error = LanguageModel::init_random(config, 1, &Device::Cpu).unwrap_err();
        assert!(matches!(error, ModelError::TooLarge { needed_gib: 1_000_000.., .. }), "{error}");
        let small = write_scratch_model(dir.path(), &ScratchShape::default()).unwrap();
        let bytes = small.count_parameters() * 2;
        check_against(&small, MatrixDtype::Bf16, bytes).unwrap();
        check_against(&small, MatrixDtype::Bf16, bytes - 1).unwrap_err();
        check_against(&small, MatrixDtype::F32, bytes).unwrap_err();
        let counted =
            LanguageModel::init_random(small.clone(), 1, &Device::Cpu).unwrap().parameter_count();
        assert_eq!(counted as u128, small.count_parameters());
    }
}
