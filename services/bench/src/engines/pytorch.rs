//! Runs PyTorch with transformers and PEFT through a Python script, and llama.cpp's converter.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;
use cli::output;

use super::{
    BenchModel, ConversionSpeed, EngineRunner, EngineTask, TaskSpeed, path_text, task_process,
    task_speed,
};

/// The Python script that runs one task.
const SCRIPT: &str = include_str!("pytorch_tasks.py");

/// A Python script that runs llama.cpp's converter and accepts a tokenizer with an unknown digest.
const CONVERT: &str = "
import runpy, sys
from pathlib import Path
script = Path(sys.argv[1])
sys.path.insert(0, str(script.parent))
try:
    from conversion.base import TextModel
except ImportError:
    TextModel = None
if TextModel is not None:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'
sys.argv = sys.argv[1:]
runpy.run_path(str(script), run_name='__main__')
";

/// A Python script that prints the versions of the libraries.
const VERSIONS: &str = "
import torch, transformers, peft
print(f'PyTorch {torch.__version__}, transformers {transformers.__version__}, PEFT {peft.__version__}')
";

pub(super) struct PyTorchRunner<'a> {
    name: String,
    python: &'a Path,
    script: PathBuf,
    model: &'a BenchModel,
    threads: usize,
}

impl<'a> PyTorchRunner<'a> {
    pub(super) fn new(
        python: &'a Path,
        model: &'a BenchModel,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let script = write_script(&model.directory.with_file_name("pytorch_tasks.py"), SCRIPT)?;
        let versions = task_process::run_task(Command::new(python).args(["-c", VERSIONS]))?;
        let name = versions.stdout.trim().to_owned();
        Ok(Self { name, python, script, model, threads })
    }
}

impl EngineRunner for PyTorchRunner<'_> {
    fn engine_name(&self) -> &str {
        &self.name
    }

    fn measure_speed(&self, task: EngineTask) -> anyhow::Result<Option<TaskSpeed>> {
        // It has no weights in blocks of 8 bits.
        if let EngineTask::DecodeQuantized(_) = task {
            return Ok(None);
        }
        let BenchModel { directory, text, .. } = self.model;
        let threads = self.threads.to_string();
        let mut command = Command::new(self.python);
        command.arg(&self.script).arg(directory).args([&task.cli_name(), &threads]);
        command.arg(text).env("OMP_NUM_THREADS", &threads);
        task_speed(task, &task_process::run_task(&mut command)?).map(Some)
    }
}

pub(super) fn convert_with_python(
    python: &Path,
    converter: &Path,
    model: &BenchModel,
    scratch: &Path,
) -> anyhow::Result<ConversionSpeed> {
    output::print_message("engines: converting to GGUF with llama.cpp's converter …");
    let script = write_script(&scratch.join("convert.py"), CONVERT)?;
    let mut command = Command::new(python);
    command.arg(script).arg(converter).arg(&model.directory);
    command.args(["--outtype", "bf16", "--outfile", &path_text(&scratch.join("peer.gguf"))]);
    let ended = task_process::run_task(&mut command)?;
    Ok(ConversionSpeed {
        name: "llama.cpp's convert_hf_to_gguf.py".into(),
        megabytes_per_s: model.weight_bytes as f64 / 1e6 / ended.wall.as_secs_f64(),
        peak_rss_bytes: ended.peak_rss_bytes,
    })
}

fn write_script(path: &Path, text: &str) -> anyhow::Result<PathBuf> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path.to_owned())
}
