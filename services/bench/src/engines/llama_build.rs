//! The processor features that a llama.cpp was built with. A build without those of this machine is
//! no peer to compare with.

use std::{collections::BTreeSet, fmt, process::Command};

use anyhow::Context;
use llama::LlamaInstallation;

/// Processor features in `/proc/cpuinfo`, and their names in llama.cpp's `system_info`.
const FEATURES: [(&str, &str); 8] = [
    ("avx2", "AVX2"),
    ("fma", "FMA"),
    ("f16c", "F16C"),
    ("avx512f", "AVX512"),
    ("avx512_vnni", "AVX512_VNNI"),
    ("avx512_bf16", "AVX512_BF16"),
    ("avx512_vbmi", "AVX512_VBMI"),
    ("amx_int8", "AMX_INT8"),
];

/// The matrix kernels that llama.cpp's own CMake builds by default and distributions leave out.
const MATRIX_KERNELS: &str = "LLAMAFILE";

/// A build of llama.cpp, compared with this machine.
pub(super) struct LlamaBuild {
    features: BTreeSet<String>,
    missing: Vec<&'static str>,
}

impl LlamaBuild {
    /// Asks `llama-server` for the features it was built with.
    pub(super) fn read(installation: &LlamaInstallation) -> anyhow::Result<Self> {
        // It reports them before it finds that there is no model.
        let mut command = Command::new(installation.server_path());
        let ended = command.args(["-lv", "5", "--port", "1", "-m", "/no-model"]).output();
        let ended = ended.context("ask llama-server for its build")?;
        let said = [ended.stdout, ended.stderr].concat();
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Ok(Self::compare(&String::from_utf8_lossy(&said), &cpuinfo))
    }

    fn compare(said: &str, cpuinfo: &str) -> Self {
        let line = said.lines().find_map(|line| line.split_once("system_info:"));
        let named = line
            .map_or("", |(_, rest)| rest)
            .split(['|', ':'])
            .filter_map(|part| part.trim().strip_suffix("= 1").map(|name| name.trim().to_owned()));
        let features: BTreeSet<String> = named.collect();
        let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
        let flags: BTreeSet<&str> = flags.split_whitespace().collect();
        let here = FEATURES.iter().filter(|(flag, _)| flags.contains(flag)).map(|(_, name)| *name);
        let missing = here.chain([MATRIX_KERNELS]).filter(|name| !features.contains(*name));
        Self { missing: missing.collect(), features }
    }

    /// Returns true if the build uses all that this machine's processor can do.
    pub(super) fn is_native(&self) -> bool {
        self.missing.is_empty()
    }
}

impl fmt::Display for LlamaBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let features: Vec<&str> = self.features.iter().map(String::as_str).collect();
        if self.is_native() {
            return write!(f, "a native build ({})", features.join(", "));
        }
        write!(f, "a generic build without {}", self.missing.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZEN4: &str = "processor : 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512_bf16\n";

    #[test]
    fn a_build_without_the_machine_s_features_is_generic() {
        let said = "0.00 I system_info: n_threads = 2 / 2 | CPU : AVX2 = 1 | F16C = 1 | FMA = 1 | \
                    AVX512 = 1 | AVX512_BF16 = 1 | LLAMAFILE = 1 | REPACK = 1 | \n";
        let native = LlamaBuild::compare(said, ZEN4);
        assert!(native.is_native() && native.to_string().contains("AVX512_BF16"), "{native}");
        let generic = LlamaBuild::compare(&said.replace("LLAMAFILE = 1", "LLAMAFILE = 0"), ZEN4);
        assert_eq!(generic.to_string(), "a generic build without LLAMAFILE");
        assert!(LlamaBuild::compare(said, "flags : amx_int8\n").to_string().contains("AMX_INT8"));
        assert!(!LlamaBuild::compare("nothing", ZEN4).is_native(), "an unknown build is no peer");
    }
}
