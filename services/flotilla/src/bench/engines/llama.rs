//! llama.cpp's own benchmark programs, and its perplexity as an evaluator runs it.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::Context;
use llama::Installation;
use serde_json::Value;

use super::{
    CHUNKS, CONTEXT, Conversion, Model, NEW, PREFILL, PROMPT, Runner, Speed, Task, child, path_text,
};
use crate::output;

/// Ours, to bf16, for llama.cpp to run.
pub(super) fn convert(model: &Model, out: &Path) -> anyhow::Result<Conversion> {
    output::say("engines: converting to GGUF …");
    let program = std::env::current_exe().context("find this program")?;
    let mut command = Command::new(program);
    command.args(["convert", "model", "--dtype", "bf16", "--model"]).arg(&model.directory);
    let ended = child::run(command.arg("--out").arg(out))?;
    Ok(Conversion {
        name: "flotilla convert model".into(),
        megabytes_per_s: model.weight_bytes as f64 / 1e6 / ended.wall.as_secs_f64(),
        peak_rss_bytes: ended.peak_rss_bytes,
    })
}

pub(super) struct Programs<'a> {
    name: String,
    installation: Installation,
    model: &'a Model,
    gguf: PathBuf,
    threads: usize,
}

impl<'a> Programs<'a> {
    /// `None` where there is no llama.cpp.
    pub(super) fn find(
        directory: Option<&Path>,
        model: &'a Model,
        gguf: &Path,
        threads: usize,
    ) -> anyhow::Result<Option<Self>> {
        let installation = match Installation::find(directory) {
            Ok(installation) => installation,
            Err(error) if directory.is_none() => {
                output::say(&format!("engines: llama.cpp left out: {error}"));
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let name = format!("llama.cpp {}", installation.version);
        Ok(Some(Self { name, installation, model, gguf: gguf.to_owned(), threads }))
    }

    fn command(&self, program: &str) -> Command {
        let perplexity = self.installation.perplexity();
        let mut command = Command::new(perplexity.with_file_name(program));
        command.args(["-t", &self.threads.to_string(), "-m"]).arg(&self.gguf);
        command
    }
}

impl Runner for Programs<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn speed(&self, task: Task) -> anyhow::Result<Option<Speed>> {
        let (ended, tokens_per_s) = match task {
            Task::Prefill => {
                let mut command = self.command("llama-bench");
                command.args(["-p", &PREFILL.to_string(), "-n", "0", "-r", "3", "-o", "json"]);
                let ended = child::run(&mut command)?;
                let report: Value =
                    serde_json::from_str(&ended.stdout).context("read llama-bench's report")?;
                let speed = report[0]["avg_ts"].as_f64();
                (ended, speed.context("llama-bench's report has no avg_ts")?)
            }
            Task::Decode(sequences) => {
                let context = sequences * (PROMPT + NEW).next_multiple_of(256);
                let mut command = self.command("llama-batched-bench");
                command.args(["-npp", &PROMPT.to_string(), "-ntg", &NEW.to_string()]);
                command.args(["-npl", &sequences.to_string(), "-c", &context.to_string()]);
                command.args(["--output-format", "jsonl"]);
                let ended = child::run(&mut command)?;
                let mut reports = ended.stdout.lines().filter_map(|line| {
                    serde_json::from_str::<Value>(line).ok()?["speed_tg"].as_f64()
                });
                let speed = reports.next_back();
                (ended, speed.context("llama-batched-bench's report has no speed_tg")?)
            }
            Task::Perplexity => {
                let began = Instant::now();
                let mut command = self.command("llama-perplexity");
                command.args(["-c", &CONTEXT.to_string(), "--chunks", &CHUNKS.to_string()]);
                let ended = child::run(command.args(["-f", &path_text(&self.model.text)]))?;
                let said = format!("{}{}", ended.stdout, ended.stderr);
                anyhow::ensure!(said.contains("[8]"), "llama-perplexity scored no 8 chunks");
                (ended, (CHUNKS * CONTEXT) as f64 / began.elapsed().as_secs_f64())
            }
            // It trains no adapters.
            Task::Train | Task::TrainAnew => return Ok(None),
        };
        Ok(Some(Speed { tokens_per_s, peak_rss_bytes: ended.peak_rss_bytes }))
    }
}
