//! Failure modes of `llama-perplexity`: shell scripts in its place, real processes and pipes.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, Instant},
};

use llama::{
    ChunkSelection, LlamaPerplexity, LlamaPerplexityError, PerplexityRequest, PerplexityRunner,
    ProcessEnvironment, ProgramOptions,
};

/// Three chunks and one more, as rows are printed with `-c 512 -b 512`.
const ROWS: &str = "\
    printf '       0  190.1000  5.247550  0.060000\\n     512  180.2000  5.194067  0.050000\\n'\n\
    printf '    1024  187.2695  5.232549  0.040000\\n    1536  9.0000  2.197225  0.030000\\n'\n";

/// The output of every version since 2024-09: joined to the content of stdout, with a prefix.
const FINAL: &str = "printf '0.02 seconds per pass - ETA 0.17.041.539 I Final estimate: \
    PPL = 268.6434 +/- 5.77250\\n\\n' >&2\n";

const OVER: &str = "echo 'perplexity: calculating perplexity over 4 chunks, n_ctx=512' >&2\n";

struct Fake {
    directory: tempfile::TempDir,
}

impl Fake {
    fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("llama-perplexity");
        let count = directory.path().join("runs");
        let text = format!("#!/bin/sh\necho \"$@\" >>{}\n{script}", count.display());
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { directory }
    }

    fn measure(&self) -> Result<LlamaPerplexity, LlamaPerplexityError> {
        self.measure_with(ChunkSelection::AllButLast(3), Duration::from_secs(30))
    }

    fn measure_with(
        &self,
        chunks: ChunkSelection,
        silence: Duration,
    ) -> Result<LlamaPerplexity, LlamaPerplexityError> {
        let perplexity = PerplexityRunner {
            program: self.directory.path().join("llama-perplexity"),
            options: ProgramOptions::default(),
            device: None,
            environment: ProcessEnvironment::new(&BTreeMap::new(), &[]),
            mmap: true,
            threads: 1,
            silence,
            repeat: false,
        };
        let request = PerplexityRequest {
            base: Path::new("base.gguf"),
            adapter: None,
            text: Path::new("text"),
            n_ctx: 512,
            chunks,
            exact: false,
        };
        loop {
            match perplexity.measure_perplexity(&request, &mut |_, _| {}) {
                // Another test's child may still hold the script open for a moment.
                Err(LlamaPerplexityError::Start { source, .. })
                    if source.kind() == std::io::ErrorKind::ExecutableFileBusy => {}
                other => return other,
            }
        }
    }

    fn runs(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.path().join("runs")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn the_row_of_the_last_wanted_chunk_counts_though_the_final_line_is_lost() {
    let fake = Fake::new(&format!("{OVER}{ROWS}"));
    let scored = fake.measure().unwrap();
    assert_eq!(format!("{:.4}", scored.perplexity), "187.2695");
    assert_eq!(format!("{:.6}", scored.mean_nll), "5.232549");
    assert_eq!(format!("{:.5}", scored.stderr), format!("{:.5}", 0.04 * 187.2695));
    assert_eq!((scored.chunks, scored.tokens), (3, 3 * 255));
    let chunks: Vec<String> = scored.chunk_nlls.iter().map(|nll| format!("{nll:.3}")).collect();
    assert_eq!(chunks, ["5.248", "5.141", "5.310"], "a row has the mean up to its chunk");
    assert_eq!(fake.runs().len(), 1);
}

#[test]
fn a_final_line_glued_to_other_text_counts_when_rows_never_come() {
    let fake = Fake::new(FINAL);
    let scored = fake.measure().unwrap();
    assert_eq!(format!("{:.4} {:.5}", scored.perplexity, scored.stderr), "268.6434 5.77250");
    assert!(scored.chunk_nlls.is_empty(), "{scored:?}");
    let runs = fake.runs();
    assert_eq!(runs.len(), 5, "all but the last run must print rows");
    assert!(runs[4].contains("--chunks 3") && !runs[3].contains("--chunks"), "{runs:#?}");
}

#[test]
fn the_first_chunks_of_a_text_are_computed_with_more_after_each_lost_row() {
    // It loses the last four rows.
    let fake = Fake::new(
        "while [ \"$1\" != --chunks ]; do shift; done\n\
         echo \"calculating perplexity over $2 chunks\" >&2\n\
         i=0; while [ $i -lt $(($2 - 4)) ]; do\n\
         printf '%d  7.3891  2.000000  0.010000\\n' $((i * 512)); i=$((i + 1)); done\n",
    );
    let scored = fake.measure_with(ChunkSelection::First(2), Duration::from_secs(30)).unwrap();
    assert_eq!((scored.chunks, scored.tokens, scored.mean_nll), (2, 2 * 255, 2.0));
    let runs = fake.runs();
    assert!(runs[0].contains("--chunks 3") && runs[1].contains("--chunks 6"), "{runs:#?}");
    assert_eq!(runs.len(), 2);
}

#[test]
fn a_final_line_over_more_chunks_than_needed_is_no_result() {
    let fake = Fake::new(&format!("{OVER}{FINAL}"));
    let error = fake.measure_with(ChunkSelection::First(3), Duration::from_secs(30)).unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::NoResult { .. }), "{error}");
    let scored = fake.measure_with(ChunkSelection::First(8), Duration::from_secs(30)).unwrap();
    assert_eq!(scored.chunks, 4, "the text has no more");
}

#[test]
fn an_end_without_a_result_is_tried_five_times() {
    let fake = Fake::new("echo 'llama_perf: total time = 12 ms' >&2\n");
    let error = fake.measure().unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::NoResult { tries: 5, .. }), "{error}");
    assert!(error.to_string().contains("total time = 12 ms"), "{error}");
    assert_eq!(fake.runs().len(), 5);

    let garbage = Fake::new("head -c 300000 /dev/urandom; head -c 300000 /dev/urandom >&2\n");
    let error = garbage.measure().unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::NoResult { .. }), "{error}");
    assert!(error.to_string().len() < 4096);
}

#[test]
fn rows_that_contradict_themselves_are_no_result() {
    let fake = Fake::new(
        "printf '       0  1.0  1.0  1.0\\n     512  1.0  1.0  1.0\\n    1024  7.5  9.9  0.1\\n'",
    );
    let error = fake.measure().unwrap_err();
    assert!(error.to_string().contains("contradict"), "{error}");
}

#[test]
fn a_perplexity_that_is_no_number_is_refused_at_once() {
    for printed in ["nan  nan  nan", "-nan  -nan  -nan", "inf  inf  0.1"] {
        let fake = Fake::new(&format!("{OVER}printf '    1024  {printed}\\n'\n"));
        let error = fake.measure().unwrap_err();
        assert!(matches!(error, LlamaPerplexityError::NotFinite { .. }), "{printed}: {error}");
        assert_eq!(fake.runs().len(), 1);
    }
    let last = Fake::new("echo 'Final estimate: PPL = nan +/- nan' >&2\n");
    let error = last.measure().unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::NotFinite { .. }), "{error}");
}

#[test]
fn one_that_hangs_is_ended_after_the_silence_it_is_granted() {
    let began = Instant::now();
    let fake = Fake::new("echo loading >&2; exec sleep 1000\n");
    let error =
        fake.measure_with(ChunkSelection::AllButLast(3), Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::Silent { .. }), "{error}");
    assert!(error.to_string().contains("loading"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));

    // Once there were rows, only rows count as signs of life.
    let fake = Fake::new(&format!("{OVER}{ROWS}while :; do echo still here; sleep 0.2; done\n"));
    let error =
        fake.measure_with(ChunkSelection::AllButLast(3), Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::Silent { .. }), "{error}");
}

#[test]
fn a_flood_neither_blocks_nor_hides_the_result() {
    let flood = "head -c 104857600 /dev/zero | tr '\\0' x >&2\n";
    let fake = Fake::new(&format!("{OVER}{flood}{ROWS}"));
    assert_eq!(format!("{:.4}", fake.measure().unwrap().perplexity), "187.2695");
}

#[test]
fn failures_contain_the_exit_status_and_the_last_output() {
    for (script, status, said) in [
        (
            "echo 'GGML_ASSERT(!llama_vocab_get_add_eos(vocab)) failed' >&2; kill -ABRT $$",
            "signal: 6",
            "GGML_ASSERT",
        ),
        ("echo 'x.cpp:1: GGML_ASSERT(a) failed' >&2; exit 134", "134", "GGML_ASSERT"),
        (
            "echo 'error: invalid argument: --no-mmap' >&2; echo bye >&2; exit 1",
            "exit status: 1",
            "invalid argument: --no-mmap",
        ),
        (
            "echo 'llama_model_load: error loading model: tensor data is not within the file bounds' >&2; exit 1",
            "exit status: 1",
            "file bounds",
        ),
        ("kill -KILL $$", "signal: 9", "nothing"),
        ("echo 'perplexity : failed to decode' >&2; exit 0", "exit status: 0", "failed to decode"),
    ] {
        let fake = Fake::new(script);
        let error = fake.measure().unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, LlamaPerplexityError::Failed { .. }), "{script}: {text}");
        assert!(text.contains(status) && text.contains(said), "{script}: {text}");
        assert_eq!(fake.runs().len(), 1, "{script}");
    }
}

#[test]
fn a_text_that_is_too_short_for_it_is_named_as_such() {
    let fake = Fake::new(
        "echo 'perplexity: you need at least 1024 tokens to evaluate perplexity' >&2\n\
         echo 'perplexity: the data file you provided tokenizes to only 17 tokens' >&2\n",
    );
    let limit = Duration::from_secs(30);
    let text = fake.measure_with(ChunkSelection::All, limit).unwrap_err().to_string();
    assert!(text.contains("17 tokens") && text.contains("1024"), "{text}");
    let counted = fake.measure().unwrap_err();
    assert!(
        matches!(counted, LlamaPerplexityError::Tokenizers { expected: 4, found: 0 }),
        "{counted}"
    );
}

#[test]
fn another_tokenizer_is_noticed_before_the_measurement_is_over() {
    let began = Instant::now();
    let fake =
        Fake::new("echo 'calculating perplexity over 9 chunks, n_ctx=512' >&2; exec sleep 99");
    let error = fake.measure().unwrap_err();
    assert!(error.to_string().contains("tokenizer mismatch"), "{error}");
    assert!(matches!(error, LlamaPerplexityError::Tokenizers { expected: 4, found: 9 }));
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let fake = Fake::new("");
    std::fs::remove_file(fake.directory.path().join("llama-perplexity")).unwrap();
    let error = fake.measure().unwrap_err();
    assert!(matches!(error, LlamaPerplexityError::Start { .. }));
    assert!(error.to_string().contains("llama-perplexity"));
}
