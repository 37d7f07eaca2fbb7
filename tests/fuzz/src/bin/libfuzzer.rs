//! Coverage-guided fuzzing of the target that `FUZZ_TARGET` names. See `docs/FUZZING.md`.

#![no_main]

use std::sync::OnceLock;

use fuzz::Run;
use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<Run> = OnceLock::new();

fn selected_target() -> Run {
    // libFuzzer's hook would end the process at panics of libraries that are caught here. Uncaught
    // panics still end it.
    drop(std::panic::take_hook());
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    fuzz::find_target(&name).unwrap_or_else(|| {
        let names: Vec<&str> = fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
        panic!("FUZZ_TARGET={name:?} is none of {}", names.join(", "))
    })
}

fuzz_target!(|input: &[u8]| {
    let (usage, ()) = fuzz::memory::peak_during(|| TARGET.get_or_init(selected_target)(input));
    let limit = fuzz::memory::memory_limit(input);
    assert!(usage <= limit, "it took {usage} bytes of memory, the limit is {limit}");
});
