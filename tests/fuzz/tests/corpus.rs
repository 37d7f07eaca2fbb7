//! Every target over its corpus and over mutations of it, the same ones each time.

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
    mutate::{Random, mutated},
};

/// An input that takes longer hangs, as far as whoever waits is concerned.
const SLOW: Duration = Duration::from_secs(10);

/// Bytes of input a target is given in all, and how many inputs at most: seconds each.
const BYTES: usize = 12 << 20;
const INPUTS: usize = 10_000;

/// Memory is counted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

macro_rules! survives {
    ($($name:ident: $target:literal,)*) => {
        $(#[test]
        fn $name() {
            survive($target);
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
    run_specs_are_read_or_refused: "specs",
    what_the_bucket_holds_is_read_or_refused: "bucket",
    addresses_of_stores_are_read_or_refused: "stores",
    tokens_are_read_or_refused: "tokens",
    any_log_can_be_folded_decided_on_and_audited: "fold",
    lines_between_agents_and_workers_are_read_or_refused: "lines",
    what_a_verifier_prints_is_read_or_refused: "verdicts",
    any_completion_can_be_judged: "judges",
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
fn a_reader_that_panics_or_takes_too_much_is_found() {
    fn falls(_: &[u8]) {
        panic!("as it must");
    }
    fn takes(input: &[u8]) {
        drop(Vec::<u8>::with_capacity(memory::limit(input) + (1 << 20)));
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    assert!(fault(falls, b"x").unwrap().contains("as it must"));
    assert!(fault(takes, b"x").unwrap().contains("bytes of memory"));
    assert_eq!(fault(|_| {}, b"x"), None);
}

#[test]
fn the_same_seed_gives_the_same_inputs() {
    let make = |seed| {
        let mut random = Random::new(seed);
        (0..500).map(|_| mutated(b"{\"a\": 12}", b"other", &mut random)).collect::<Vec<_>>()
    };
    assert_eq!(make(1), make(1));
    assert_ne!(make(1), make(2));
    let all = make(1).concat();
    assert!(all.windows(5).any(|part| part == b"null}"), "no number became something else");
}

fn survive(name: &str) {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let run = fuzz::target(name).expect("a target of this name");
    let corpus = corpus(name);
    let mut trial = Trial::new(name, run);
    // Libraries panic where we catch it; a printed backtrace takes more memory than any input.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for input in &corpus {
        trial.run(input);
    }
    let mut random = Random::new(name.bytes().fold(0, |seed, byte| seed * 31 + u64::from(byte)));
    while trial.inputs < INPUTS && trial.bytes < BYTES {
        let input = &corpus[random.below(corpus.len())];
        let other = &corpus[random.below(corpus.len())];
        trial.run(&mutated(input, other, &mut random));
    }
    std::panic::set_hook(hook);
    trial.end();
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let entries = fs::read_dir(&directory).unwrap_or_else(|_| panic!("{name} has no corpus"));
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert!(!paths.is_empty(), "the corpus of {name} is empty");
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// One target's inputs, one after the other.
struct Trial {
    name: String,
    run: Run,
    inputs: usize,
    bytes: usize,
    /// Holds the input at hand: one that ends the process at once is found there.
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
        if let Some(fault) = fault(self.run, input) {
            let hash = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let path = failures().join(format!("{}-{hash:016x}", self.name));
            fs::write(&path, input).unwrap();
            self.faults.push(format!("{}: {fault}", path.display()));
        }
    }

    fn end(self) {
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

/// What an input does that it must not.
fn fault(run: Run, input: &[u8]) -> Option<String> {
    let began = Instant::now();
    let (peak, outcome) =
        memory::peak_during(|| catch_unwind(AssertUnwindSafe(|| run(input))).map_err(said));
    let (took, limit) = (began.elapsed(), memory::limit(input));
    match outcome {
        Err(message) => Some(format!("panicked: {message}")),
        Ok(()) if peak > limit => Some(format!("{peak} bytes of memory, the limit is {limit}")),
        Ok(()) if took > SLOW => Some(format!("took {took:?}")),
        Ok(()) => None,
    }
}

fn said(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().map_or("?", |text| text).to_owned(),
    }
}
