//! Runs llama.cpp's benchmark programs, and its perplexity as evaluators run it.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::Context;
use cli::output;
use llama::LlamaInstallation;
use serde_json::Value;

use super::{
    BenchModel, CHUNKS, CONTEXT, ConversionSpeed, EngineRunner, EngineTask, NEW, PREFILL, PROMPT,
    TaskSpeed, path_text, task_process,
};
use crate::flotilla_program::find_flotilla;

pub(super) fn convert_model(model: &BenchModel, out: &Path) -> anyhow::Result<ConversionSpeed> {
    output::print_message("engines: converting to GGUF …");
    let mut command = Command::new(find_flotilla()?);
    command.args(["convert", "model", "--dtype", "bf16", "--model"]).arg(&model.directory);
    let ended = task_process::run_task(command.arg("--out").arg(out))?;
    Ok(ConversionSpeed {
        name: "flotilla convert model".into(),
        megabytes_per_s: model.weight_bytes as f64 / 1e6 / ended.wall.as_secs_f64(),
        peak_rss_bytes: ended.peak_rss_bytes,
    })
}

pub(super) struct LlamaRunner<'a> {
    name: String,
    installation: LlamaInstallation,
    model: &'a BenchModel,
    gguf: PathBuf,
    threads: usize,
}

impl<'a> LlamaRunner<'a> {
    /// Finds an installation; returns `None` if no directory is given and llama.cpp is missing.
    pub(super) fn find_installation(
        directory: Option<&Path>,
        model: &'a BenchModel,
        gguf: &Path,
        threads: usize,
    ) -> anyhow::Result<Option<Self>> {
        let installation = match LlamaInstallation::find_installation(directory) {
            Ok(installation) => installation,
            Err(error) if directory.is_none() => {
                output::print_message(&format!("engines: llama.cpp left out: {error}"));
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let name = format!("llama.cpp {}", installation.version);
        Ok(Some(Self { name, installation, model, gguf: gguf.to_owned(), threads }))
    }

    fn program_command(&self, program: &str) -> Command {
        let perplexity = self.installation.perplexity_path();
        let mut command = Command::new(perplexity.with_file_name(program));
        command.args(["-t", &self.threads.to_string(), "-m"]).arg(&self.gguf);
        command
    }
}

impl EngineRunner for LlamaRunner<'_> {
    fn engine_name(&self) -> &str {
        &self.name
    }

    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>> {
        let (ended, tokens_per_s) = match task {
            EngineTask::Prefill => {
                let mut command = self.program_command("llama-bench");
                command.args(["-p", &PREFILL.to_string(), "-n", "0", "-r", "3", "-o", "json"]);
                let ended = task_process::run_task(&mut command)?;
                let report: Value =
                    serde_json::from_str(&ended.stdout).context("read llama-bench's report")?;
                let speed = report[0]["avg_ts"].as_f64();
                (ended, speed.context("llama-bench's report has no avg_ts")?)
            }
            EngineTask::Decode(sequences) => {
                let context = sequences * (PROMPT + NEW).next_multiple_of(256);
                let mut command = self.program_command("llama-batched-bench");
                command.args(["-npp", &PROMPT.to_string(), "-ntg", &NEW.to_string()]);
                command.args(["-npl", &sequences.to_string(), "-c", &context.to_string()]);
                command.args(["--output-format", "jsonl"]);
                let ended = task_process::run_task(&mut command)?;
                let mut reports = ended.stdout.lines().filter_map(|line| {
                    serde_json::from_str::<Value>(line).ok()?["speed_tg"].as_f64()
                });
                let speed = reports.next_back();
                (ended, speed.context("llama-batched-bench's report has no speed_tg")?)
            }
            EngineTask::Perplexity => {
                let began = Instant::now();
                let mut command = self.program_command("llama-perplexity");
                command.args(["-c", &CONTEXT.to_string(), "--chunks", &CHUNKS.to_string()]);
                let ended =
                    task_process::run_task(command.args(["-f", &path_text(&self.model.text)]))?;
                let said = format!("{}{}", ended.stdout, ended.stderr);
                anyhow::ensure!(said.contains("[8]"), "llama-perplexity scored no 8 chunks");
                (ended, (CHUNKS * CONTEXT) as f64 / began.elapsed().as_secs_f64())
            }
            // llama.cpp cannot train adapters.
            EngineTask::Train | EngineTask::TrainCheckpointed => return Ok(None),
        };
        Ok(Some(TaskSpeed { tokens_per_s, peak_rss_bytes: ended.peak_rss_bytes }))
    }
}
