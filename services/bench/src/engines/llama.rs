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
    TaskSpeed, generate_order, llama_build::LlamaBuild, path_text, task_process,
};
use crate::flotilla_program::find_flotilla;

/// Where `deploy/fetch-llama-cpp.sh --native` puts its build.
const NATIVE_BUILD: &str = ".tools/llama.cpp-native/bin";

pub(super) fn convert_model(
    model: &BenchModel,
    dtype: &str,
    out: &Path,
) -> anyhow::Result<ConversionSpeed> {
    output::print_message("engines: converting to GGUF …");
    let mut command = Command::new(find_flotilla()?);
    command.args(["convert", "model", "--dtype", dtype, "--model"]).arg(&model.directory);
    let ended = task_process::run_task(command.arg("--out").arg(out))?;
    Ok(ConversionSpeed {
        name: format!("flotilla convert model, {dtype}"),
        megabytes_per_s: model.weight_bytes as f64 / 1e6 / ended.wall.as_secs_f64(),
        peak_rss_bytes: ended.peak_rss_bytes,
    })
}

/// The model as GGUF files.
#[derive(Clone)]
pub(super) struct ModelFiles {
    pub(super) bf16: PathBuf,
    pub(super) quantized: PathBuf,
}

pub(super) struct LlamaRunner<'a> {
    name: String,
    build: LlamaBuild,
    installation: LlamaInstallation,
    model: &'a BenchModel,
    files: ModelFiles,
    threads: usize,
}

impl<'a> LlamaRunner<'a> {
    /// Opens the installation in a directory, or the fastest of those that are found. Returns `None`
    /// if no directory is given and llama.cpp is missing.
    pub(super) fn find_installation(
        directory: Option<&Path>,
        model: &'a BenchModel,
        files: &ModelFiles,
        threads: usize,
    ) -> anyhow::Result<Option<Self>> {
        let open = |directory: Option<&Path>| -> anyhow::Result<Self> {
            let installation = LlamaInstallation::find_installation(directory)?;
            let build = LlamaBuild::read(&installation)?;
            let name = format!("llama.cpp {}, {build}", installation.version);
            Ok(Self { name, build, installation, model, files: files.clone(), threads })
        };
        if directory.is_some() {
            return open(directory).map(Some);
        }
        let mut fastest: Option<(f64, Self)> = None;
        for place in [Some(Path::new(NATIVE_BUILD)), None] {
            let found = open(place).and_then(|runner| Ok((runner.measure_prefill(1)?.1, runner)));
            match found {
                Ok((speed, runner)) => {
                    output::print_message(&format!(
                        "engines: found {}: prefill {speed:.1} tokens/s",
                        runner.name
                    ));
                    if fastest.as_ref().is_none_or(|(best, _)| speed > *best) {
                        fastest = Some((speed, runner));
                    }
                }
                Err(error) => {
                    output::print_message(&format!("engines: llama.cpp left out: {error:#}"));
                }
            }
        }
        Ok(fastest.map(|(_, runner)| runner))
    }

    pub(super) fn program_directory(&self) -> PathBuf {
        let perplexity = self.installation.perplexity_path();
        perplexity.parent().map_or_else(PathBuf::new, Path::to_owned)
    }

    fn measure_prefill(&self, rounds: u32) -> anyhow::Result<(task_process::EndedTask, f64)> {
        let mut command = self.program_command("llama-bench", &self.files.bf16);
        command.args(["-p", &PREFILL.to_string(), "-n", "0", "-o", "json"]);
        let ended = task_process::run_task(command.args(["-r", &rounds.to_string()]))?;
        let report: Value =
            serde_json::from_str(&ended.stdout).context("read llama-bench's report")?;
        let speed = report[0]["avg_ts"].as_f64().context("llama-bench's report has no avg_ts")?;
        Ok((ended, speed))
    }

    /// Runs `llama-batched-bench`. Returns the tokens per second of prefill and of decoding.
    fn measure_batch(
        &self,
        file: &Path,
        arguments: &[&str],
        (prompt, new, sequences): (usize, usize, usize),
    ) -> anyhow::Result<(task_process::EndedTask, f64, f64)> {
        let context = sequences * (prompt + new).next_multiple_of(256);
        let mut command = self.program_command("llama-batched-bench", file);
        command.args(["-npp", &prompt.to_string(), "-ntg", &new.to_string()]);
        command.args(["-npl", &sequences.to_string(), "-c", &context.to_string()]);
        command.args(["--output-format", "jsonl"]).args(arguments);
        let ended = task_process::run_task(&mut command)?;
        let mut reports = ended.stdout.lines().filter_map(|line| serde_json::from_str(line).ok());
        let report: Value = reports.next_back().context("llama-batched-bench reported nothing")?;
        let speed = |field: &str| {
            let speed = report[field].as_f64();
            speed.with_context(|| format!("llama-batched-bench's report has no {field}"))
        };
        let (prefill, decode) = (speed("speed_pp")?, speed("speed_tg")?);
        Ok((ended, prefill, decode))
    }

    /// Returns the tokens per second of a generate order that llama.cpp's own speeds allow: each
    /// prompt is computed once, and all slots decode at once.
    pub(super) fn measure_order_limit(&self) -> anyhow::Result<f64> {
        let (prompt, new, slots) =
            (generate_order::PROMPT, generate_order::NEW as usize, generate_order::SLOTS as usize);
        let (_, prefill, decode) =
            self.measure_batch(&self.files.bf16, &["-pps"], (prompt, new, slots))?;
        Ok(generate_order::limit_speed(prefill, decode))
    }

    fn program_command(&self, program: &str, file: &Path) -> Command {
        let perplexity = self.installation.perplexity_path();
        let mut command = Command::new(perplexity.with_file_name(program));
        command.args(["-t", &self.threads.to_string(), "-m"]).arg(file);
        command
    }
}

impl EngineRunner for LlamaRunner<'_> {
    fn engine_name(&self) -> &str {
        &self.name
    }

    fn is_strong_peer(&self) -> bool {
        self.build.is_native()
    }

    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>> {
        let (ended, tokens_per_s) = match task {
            EngineTask::Prefill => self.measure_prefill(3)?,
            EngineTask::Decode(sequences) | EngineTask::DecodeQuantized(sequences) => {
                let file = match task {
                    EngineTask::DecodeQuantized(_) => &self.files.quantized,
                    _ => &self.files.bf16,
                };
                let (ended, _, decode) = self.measure_batch(file, &[], (PROMPT, NEW, sequences))?;
                (ended, decode)
            }
            EngineTask::Perplexity => {
                let began = Instant::now();
                let mut command = self.program_command("llama-perplexity", &self.files.bf16);
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
