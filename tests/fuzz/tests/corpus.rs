//! Runs every target on its corpus and on mutations of it, the same ones each time.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeSet,
    fs,
    io::{Seek, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use fuzz::{
    Run, TARGETS, memory,
    mutate::{Random, mutate_input},
};

/// An input that takes longer counts as a hang.
const HANG_LIMIT: Duration = Duration::from_secs(10);

/// Limits per target, so that each takes seconds: bytes of input in total, and number of inputs.
const INPUT_BYTES_MAX: usize = 12 << 20;
const INPUTS_MAX: usize = 10_000;

/// Memory is counted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

macro_rules! survives {
    ($($name:ident: $target:literal,)*) => {
        $(#[test]
        fn $name() {
            run_target($target);
        })*

        #[test]
        fn every_target_is_run() {
            let run: BTreeSet<&str> = [$($target),*].into();
            let known: BTreeSet<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(run, known);
        }
    };
}

survives! {
    facts_are_read_or_refused: "facts",
    names_are_read_or_refused: "names",
    manifests_are_read_or_refused_and_stay_inside: "manifests",
    prompts_are_read_or_refused: "prompts",
    examples_are_read_or_refused: "examples",
    tables_are_read_or_refused: "tables",
    run_specs_are_read_or_refused: "specs",
    answers_of_chat_models_are_read_or_refused: "replies",
    bucket_values_are_read_or_refused: "bucket",
    addresses_of_stores_are_read_or_refused: "stores",
    tokens_are_read_or_refused: "tokens",
    any_log_can_be_folded_decided_on_and_audited: "fold",
    lines_between_agents_and_workers_are_read_or_refused: "lines",
    verifier_output_is_read_or_refused: "verdicts",
    any_completion_can_be_judged: "judges",
    requests_to_served_models_are_read_or_refused: "requests",
    model_configurations_are_read_or_refused: "configs",
    weights_are_read_or_refused: "weights",
    lists_of_shards_are_read_or_refused: "shards",
    tokenizers_are_read_or_refused: "tokenizers",
    adapter_configurations_are_read_or_refused: "adapters",
    adapter_weights_are_read_or_refused: "pairs",
    gguf_files_are_read_or_refused: "gguf",
    lists_of_tensors_are_read_or_refused: "safetensors",
}

#[test]
fn a_parser_that_panics_or_uses_too_much_memory_is_found() {
    fn panics(_: &[u8]) {
        panic!("as it must");
    }
    fn allocates(input: &[u8]) {
        drop(Vec::<u8>::with_capacity(memory::memory_limit(input) + (1 << 20)));
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(find_fault(panics, b"x").unwrap().contains("as it must"));
    assert!(find_fault(allocates, b"x").unwrap().contains("bytes of memory"));
    assert_eq!(find_fault(|_| {}, b"x"), None);
}

#[test]
fn the_same_seed_gives_the_same_inputs() {
    let make = |seed| {
        let mut random = Random::new(seed);
        (0..500).map(|_| mutate_input(b"{\"a\": 12}", b"other", &mut random)).collect::<Vec<_>>()
    };
    assert_eq!(make(1), make(1));
    assert_ne!(make(1), make(2));
    let all = make(1).concat();
    assert!(all.windows(5).any(|part| part == b"null}"), "no number became something else");
}

fn run_target(name: &str) {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let run = fuzz::find_target(name).expect("a target of this name");
    let corpus = corpus(name);
    let mut trial = Trial::new(name, run);
    // Panics of libraries are caught here. A printed backtrace would need more memory than any
    // input.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for input in &corpus {
        trial.run(input);
    }
    let mut random = Random::new(name.bytes().fold(0, |seed, byte| seed * 31 + u64::from(byte)));
    while trial.inputs < INPUTS_MAX && trial.bytes < INPUT_BYTES_MAX {
        let input = &corpus[random.below(corpus.len())];
        let other = &corpus[random.below(corpus.len())];
        trial.run(&mutate_input(input, other, &mut random));
    }
    std::panic::set_hook(hook);
    trial.finish();
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let entries = fs::read_dir(&directory).unwrap_or_else(|_| panic!("{name} has no corpus"));
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert!(!paths.is_empty(), "the corpus of {name} is empty");
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Runs the inputs of one target in sequence.
struct Trial {
    name: String,
    run: Run,
    inputs: usize,
    bytes: usize,
    /// The file with the current input, for inputs that end the process.
    current: (PathBuf, fs::File),
    faults: Vec<String>,
}

impl Trial {
    fn new(name: &str, run: Run) -> Self {
        let path = failures().join(format!("{name}-current"));
        let file = fs::File::create(&path).unwrap();
        let name = name.to_owned();
        Self { name, run, inputs: 0, bytes: 0, current: (path, file), faults: Vec::new() }
    }

    fn run(&mut self, input: &[u8]) {
        let file = &mut self.current.1;
        file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(input)).unwrap();
        self.inputs += 1;
        self.bytes += input.len();
        if let Some(fault) = find_fault(self.run, input) {
            let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let path = failures().join(format!("{}-{hash:016x}", self.name));
            fs::write(&path, input).unwrap();
            self.faults.push(format!("{}: {fault}", path.display()));
        }
    }

    fn finish(self) {
        fs::remove_file(self.current.0).unwrap();
        let first: Vec<&String> = self.faults.iter().take(10).collect();
        let (faults, inputs) = (self.faults.len(), self.inputs);
        println!("{}: {inputs} inputs of {} bytes", self.name, self.bytes);
        assert!(first.is_empty(), "{faults} of {inputs} inputs are not survived: {first:#?}");
    }
}

fn failures() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("target/tmp");
    let directory = target.join("fuzz-failures");
    fs::create_dir_all(&directory).unwrap();
    directory
}

/// Returns what is wrong with the behavior of a target for an input.
fn find_fault(run: Run, input: &[u8]) -> Option<String> {
    let began = Instant::now();
    let (peak, outcome) = memory::peak_during(|| {
        catch_unwind(AssertUnwindSafe(|| run(input))).map_err(panic_message)
    });
    let (took, limit) = (began.elapsed(), memory::memory_limit(input));
    match outcome {
        Err(message) => Some(format!("panicked: {message}")),
        Ok(()) if peak > limit => Some(format!("{peak} bytes of memory, the limit is {limit}")),
        Ok(()) if took > HANG_LIMIT => Some(format!("took {took:?}")),
        Ok(()) => None,
    }
}

fn panic_message(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or("?", |text| text).to_owned(),
    }
}
