//! PyTorch with transformers and PEFT, by a script of our own; and llama.cpp's converter, which
//! is Python too.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;

use super::{Conversion, Model, Runner, Speed, Task, child, path_text, speed};
use crate::output;

const SCRIPT: &str = include_str!("pytorch_tasks.py");

/// Runs llama.cpp's converter for a tokenizer whose digest it does not know.
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

const VERSIONS: &str = "
import torch, transformers, peft
print(f'PyTorch {torch.__version__}, transformers {transformers.__version__}, PEFT {peft.__version__}')
";

pub(super) struct Script<'a> {
    name: String,
    python: &'a Path,
    script: PathBuf,
    model: &'a Model,
    threads: usize,
}

impl<'a> Script<'a> {
    pub(super) fn new(python: &'a Path, model: &'a Model, threads: usize) -> anyhow::Result<Self> {
        let script = write_script(&model.directory.with_file_name("pytorch_tasks.py"), SCRIPT)?;
        let versions = child::run(Command::new(python).args(["-c", VERSIONS]))?;
        let name = versions.stdout.trim().to_owned();
        Ok(Self { name, python, script, model, threads })
    }
}

impl Runner for Script<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn speed(&self, task: Task) -> anyhow::Result<Option<Speed>> {
        let Model { directory, text, .. } = self.model;
        let threads = self.threads.to_string();
        let mut command = Command::new(self.python);
        command.arg(&self.script).arg(directory).args([&task.name(), &threads]);
        command.arg(text).env("OMP_NUM_THREADS", &threads);
        speed(task, &child::run(&mut command)?).map(Some)
    }
}

pub(super) fn convert(
    python: &Path,
    converter: &Path,
    model: &Model,
    scratch: &Path,
) -> anyhow::Result<Conversion> {
    output::say("engines: converting to GGUF with llama.cpp's converter …");
    let script = write_script(&scratch.join("convert.py"), CONVERT)?;
    let mut command = Command::new(python);
    command.arg(script).arg(converter).arg(&model.directory);
    command.args(["--outtype", "bf16", "--outfile", &path_text(&scratch.join("peer.gguf"))]);
    let ended = child::run(&mut command)?;
    Ok(Conversion {
        name: "llama.cpp's convert_hf_to_gguf.py".into(),
        megabytes_per_s: model.weight_bytes as f64 / 1e6 / ended.wall.as_secs_f64(),
        peak_rss_bytes: ended.peak_rss_bytes,
    })
}

fn write_script(path: &Path, text: &str) -> anyhow::Result<PathBuf> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(path.to_owned())
}
