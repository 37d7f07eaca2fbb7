//! What a worker's last words mean: known ways to die on these cards, by the text they leave in
//! the kernel's log and their own. The ways are data, in `faults.yaml`.

use regex::Regex;
use serde::Deserialize;
use std::sync::LazyLock;

/// What is known to help, or not to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Retry {
    /// The same would happen again on this box.
    Never,
    /// From the last checkpoint; a second time on one box is the box.
    Once,
    /// Only with less: a smaller batch, shorter examples.
    Smaller,
    /// It passes by itself.
    Wait,
    /// Nothing is known against it.
    Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    pub class: &'static str,
    pub retry: Retry,
    /// What is trained on or with is at fault, and no box.
    pub content: bool,
    pub remedy: &'static str,
}

/// What a death left behind.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence<'a> {
    /// Of the kernel's log, what was added since the work began.
    pub kernel: &'a str,
    /// The last the worker wrote to stderr.
    pub log: &'a str,
    /// What it said when it refused, or how it ended.
    pub exit: &'a str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    Kernel,
    Log,
    Exit,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    class: String,
    pattern: String,
    #[serde(rename = "in")]
    sources: Vec<Source>,
    retry: Retry,
    #[serde(default)]
    content: bool,
    remedy: String,
    /// What it looks like, for the tests.
    #[cfg_attr(not(test), expect(dead_code, reason = "read for people and tests"))]
    lines: Vec<String>,
}

/// Of each source, its end; a log is bounded where it is kept as well.
const BYTES_MAX: usize = 1 << 20;

static RULES: LazyLock<Vec<(Regex, Rule)>> = LazyLock::new(|| {
    let rules: Vec<Rule> =
        serde_saphyr::from_str(include_str!("../faults.yaml")).expect("a test reads it");
    let compile = |rule: Rule| {
        let regex = Regex::new(&rule.pattern).expect("a test compiles every pattern");
        (regex, rule)
    };
    rules.into_iter().map(compile).collect()
});

/// What is known of a death. The first way that matches is it.
pub fn classify(evidence: &Evidence<'_>) -> Option<Known> {
    let kernel = end(evidence.kernel);
    let log = end(evidence.log);
    let exit = end(evidence.exit);
    let matches = |(regex, rule): &&(Regex, Rule)| {
        rule.sources.iter().any(|source| match source {
            Source::Kernel => regex.is_match(kernel),
            // What it refuses with may be what its libraries wrote.
            Source::Log => regex.is_match(log) || regex.is_match(exit),
            Source::Exit => regex.is_match(exit),
        })
    };
    RULES.iter().find(matches).map(|(_, rule)| Known {
        class: &rule.class,
        retry: rule.retry,
        content: rule.content,
        remedy: &rule.remedy,
    })
}

fn end(text: &str) -> &str {
    let mut from = text.len().saturating_sub(BYTES_MAX);
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
        classify(&Evidence { kernel, log, exit }).map(|known| known.class)
    }

    #[test]
    fn each_line_is_of_its_class_wherever_it_is_looked_for_and_nowhere_else() {
        for (_, rule) in RULES.iter() {
            assert!(!rule.lines.is_empty() && !rule.sources.is_empty(), "{}", rule.class);
            assert!(!rule.remedy.is_empty(), "{}", rule.class);
            for line in &rule.lines {
                let among = format!("a line before\n{line}\na line after");
                let in_kernel = class(&among, "", "").filter(|found| *found == rule.class);
                let in_log = class("", &among, "").filter(|found| *found == rule.class);
                let in_exit = class("", "", line).filter(|found| *found == rule.class);
                let log = rule.sources.contains(&Source::Log);
                let exit = log || rule.sources.contains(&Source::Exit);
                let expected = [rule.sources.contains(&Source::Kernel), log, exit];
                let found = [in_kernel.is_some(), in_log.is_some(), in_exit.is_some()];
                assert_eq!(found, expected, "{}: {line}", rule.class);
            }
        }
    }

    #[test]
    fn classes_have_one_entry_each() {
        let mut classes: Vec<&str> = RULES.iter().map(|(_, rule)| rule.class.as_str()).collect();
        classes.sort_unstable();
        let all = classes.len();
        classes.dedup();
        assert_eq!(classes.len(), all);
        assert!(all >= 34, "{all}");
    }

    #[test]
    fn a_cause_is_found_before_what_it_leads_to() {
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
    fn a_fault_on_a_nil_address_is_told_from_others_and_the_unknown_stays_unknown() {
        let fault = |at: &str| format!("Memory access fault by GPU node-1 (Agent: 0x5) on {at}");
        assert_eq!(class("", &fault("address (nil). Reason: x"), ""), Some("isa_mismatch_fault"));
        assert_eq!(class("", &fault("address 0x7f1"), ""), Some("gpu_mem_fault"));
        let exit = "the worker died: exit status: 1";
        assert_eq!(class("usb 1-2: new device", "ValueError: something new", exit), None);
    }

    #[test]
    fn the_end_of_a_long_log_is_what_counts() {
        let fault = "Memory access fault by GPU node-1 on address (nil)";
        let noise = "é".repeat(BYTES_MAX);
        assert_eq!(class("", &format!("{noise}\n{fault}"), ""), Some("isa_mismatch_fault"));
        assert_eq!(class("", &format!("{fault}\n{noise}"), ""), None);
        // Whatever is repeated: no pattern backtracks.
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
            classify(&Evidence { kernel: &kernel, log: &log, exit: &exit });
        }
    }
}
