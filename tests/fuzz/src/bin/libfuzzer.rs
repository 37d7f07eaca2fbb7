//! Coverage-guided fuzzing of the target that `FUZZ_TARGET` names. See `docs/FUZZING.md`.

#![no_main]

use std::sync::OnceLock;

use fuzz::Run;
use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<Run> = OnceLock::new();

fn chosen() -> Run {
    // libFuzzer's hook would end the process at panics of libraries that we catch. Those that
    // nobody catches still do.
    drop(std::panic::take_hook());
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    fuzz::target(&name).unwrap_or_else(|| {
        let names: Vec<&str> = fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
        panic!("FUZZ_TARGET={name:?} is none of {}", names.join(", "))
    })
}

fuzz_target!(|input: &[u8]| {
    let (usage, ()) = fuzz::memory::peak_during(|| TARGET.get_or_init(chosen)(input));
    let limit = fuzz::memory::limit(input);
    assert!(usage <= limit, "it took {usage} bytes of memory, the limit is {limit}");
});
