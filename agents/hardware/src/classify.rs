//! The classification of a worker's death by the text that it left in the kernel's log and in its
//! own. The known faults are data in `faults.yaml`.

use regex::Regex;
use serde::Deserialize;
use std::sync::LazyLock;

/// The kind of retry that makes sense after a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetryAdvice {
    /// The fault would occur again on this host.
    Never,
    /// From the last checkpoint; a second fault on the same host means that the host is broken.
    Once,
    /// Only with a smaller batch or shorter examples.
    Smaller,
    /// The fault passes by itself.
    Wait,
    /// There is no known reason against a retry.
    Again,
}

/// The classification of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownFault {
    pub class: &'static str,
    pub retry: RetryAdvice,
    /// True if the data or the model causes the fault, not the host.
    pub content: bool,
    pub remedy: &'static str,
}

/// The text that a dead worker left behind.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultEvidence<'a> {
    /// The kernel log since the work began.
    pub kernel: &'a str,
    /// The end of the worker's stderr.
    pub log: &'a str,
    /// The worker's refusal, or its exit status.
    pub exit: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EvidenceSource {
    Kernel,
    Log,
    Exit,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultRule {
    class: String,
    pattern: String,
    #[serde(rename = "in")]
    sources: Vec<EvidenceSource>,
    retry: RetryAdvice,
    #[serde(default)]
    content: bool,
    remedy: String,
    #[cfg_attr(not(test), expect(dead_code, reason = "read for people and tests"))]
    lines: Vec<String>,
}

/// The end of each text that is searched.
const EVIDENCE_BYTES_MAX: usize = 1 << 20;

static FAULT_RULES: LazyLock<Vec<(Regex, FaultRule)>> = LazyLock::new(|| {
    let rules: Vec<FaultRule> =
        serde_saphyr::from_str(include_str!("../faults.yaml")).expect("a test reads it");
    let compile = |rule: FaultRule| {
        let regex = Regex::new(&rule.pattern).expect("a test compiles every pattern");
        (regex, rule)
    };
    rules.into_iter().map(compile).collect()
});

/// Returns the first rule that matches the evidence.
pub fn classify_fault(evidence: &FaultEvidence<'_>) -> Option<KnownFault> {
    let kernel = text_end(evidence.kernel);
    let log = text_end(evidence.log);
    let exit = text_end(evidence.exit);
    let matches = |(regex, rule): &&(Regex, FaultRule)| {
        rule.sources.iter().any(|source| match source {
            EvidenceSource::Kernel => regex.is_match(kernel),
            // A refusal may quote what the worker's libraries wrote.
            EvidenceSource::Log => regex.is_match(log) || regex.is_match(exit),
            EvidenceSource::Exit => regex.is_match(exit),
        })
    };
    FAULT_RULES.iter().find(matches).map(|(_, rule)| KnownFault {
        class: &rule.class,
        retry: rule.retry,
        content: rule.content,
        remedy: &rule.remedy,
    })
}

fn text_end(text: &str) -> &str {
    let mut from = text.len().saturating_sub(EVIDENCE_BYTES_MAX);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn class(kernel: &str, log: &str, exit: &str) -> Option<&'static str> {
        classify_fault(&FaultEvidence { kernel, log, exit }).map(|known| known.class)
    }

    #[test]
    fn each_line_is_of_its_class_wherever_it_is_looked_for_and_nowhere_else() {
        for (_, rule) in FAULT_RULES.iter() {
            assert!(!rule.lines.is_empty() && !rule.sources.is_empty(), "{}", rule.class);
            assert!(!rule.remedy.is_empty(), "{}", rule.class);
            for line in &rule.lines {
                let among = format!("a line before\n{line}\na line after");
                let in_kernel = class(&among, "", "").filter(|found| *found == rule.class);
                let in_log = class("", &among, "").filter(|found| *found == rule.class);
                let in_exit = class("", "", line).filter(|found| *found == rule.class);
                let log = rule.sources.contains(&EvidenceSource::Log);
                let exit = log || rule.sources.contains(&EvidenceSource::Exit);
                let expected = [rule.sources.contains(&EvidenceSource::Kernel), log, exit];
                let found = [in_kernel.is_some(), in_log.is_some(), in_exit.is_some()];
                assert_eq!(found, expected, "{}: {line}", rule.class);
            }
        }
    }

    #[test]
    fn classes_have_one_entry_each() {
        let mut classes: Vec<&str> =
            FAULT_RULES.iter().map(|(_, rule)| rule.class.as_str()).collect();
        classes.sort_unstable();
        let all = classes.len();
        classes.dedup();
        assert_eq!(classes.len(), all);
        assert!(all >= 34, "{all}");
    }

    #[test]
    fn a_cause_is_found_before_its_effects() {
        let log = "no kernel image is available\nhipModuleUnload failed";
        assert_eq!(class("", log, "signal: 6 (SIGABRT)"), Some("no_kernel_image"));
        let out = "HIP out of memory. Tried to allocate";
        assert_eq!(class("", out, "signal: 9 (SIGKILL)"), Some("oom_gpu"));
        let killed = "Out of memory: Killed process 7 (python3)";
        assert_eq!(class(killed, "", "signal: 9 (SIGKILL)"), Some("oom_host"));
        let timeout = "ring sdma0 timeout, signaled seq=1\nGPU reset begin!";
        assert_eq!(class(timeout, "", ""), Some("gpu_reset_begin"));
        let reset = format!("{timeout}\nGPU reset(1) succeeded!");
        assert_eq!(class(&reset, "", "the worker was silent for 60s"), Some("gpu_reset_ok"));
    }

    #[test]
    fn a_fault_on_a_nil_address_differs_from_others_and_unknown_faults_stay_unknown() {
        let fault = |at: &str| format!("Memory access fault by GPU node-1 (Agent: 0x5) on {at}");
        assert_eq!(class("", &fault("address (nil). Reason: x"), ""), Some("isa_mismatch_fault"));
        assert_eq!(class("", &fault("address 0x7f1"), ""), Some("gpu_mem_fault"));
        let exit = "the worker died: exit status: 1";
        assert_eq!(class("usb 1-2: new device", "ValueError: something new", exit), None);
    }

    #[test]
    fn the_end_of_a_long_log_is_what_counts() {
        let fault = "Memory access fault by GPU node-1 on address (nil)";
        let noise = "é".repeat(EVIDENCE_BYTES_MAX);
        assert_eq!(class("", &format!("{noise}\n{fault}"), ""), Some("isa_mismatch_fault"));
        assert_eq!(class("", &format!("{fault}\n{noise}"), ""), None);
        // Repeated text: no pattern backtracks.
        let almost = "Memory access fault by GPU node-1 TensileLibrary oom-kil ".repeat(20_000);
        assert_eq!(class(&almost, "", ""), None);
    }

    proptest! {
        #[test]
        fn no_bytes_upset_it(
            kernel in proptest::collection::vec(any::<u8>(), 0..512),
            log in proptest::collection::vec(any::<u8>(), 0..512),
            exit in ".{0,64}",
        ) {
            let (kernel, log) = (String::from_utf8_lossy(&kernel), String::from_utf8_lossy(&log));
            classify_fault(&FaultEvidence { kernel: &kernel, log: &log, exit: &exit });
        }
    }
}
