//! llama.cpp's own converters: Python programs of its sources, for models outside of the table of
//! architectures that `formats` converts.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::{Duration, Instant},
};

use formats::{
    ModelConfigError, ModelOutline,
    convert::ConversionDtype,
    peft::{AdapterSettings, AdapterSettingsError},
};
use serde::{Deserialize, Serialize};

use crate::{LlamaProcess, ProcessEnvironment, ProcessEvent, ProgramOutput};

const MODEL_SCRIPT: &str = "convert_hf_to_gguf.py";
const ADAPTER_SCRIPT: &str = "convert_lora_to_gguf.py";

/// The directories of the sources that contain the converters.
const SCRIPT_DIRECTORIES: [&str; 3] = ["", "conversion", "gguf-py/gguf"];
const SCRIPTS_MAX: usize = 2000;
const SCRIPT_BYTES_MAX: u64 = 16 << 20;

/// For the imports of torch and transformers, however slow the disk.
const START_TIMEOUT: Duration = Duration::from_secs(900);
/// The slowest conversion that is waited for.
const BYTES_PER_SECOND_MIN: u64 = 10_000_000;
const BEAT_INTERVAL: Duration = Duration::from_secs(1);
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

const SHOWN_LINES_MAX: usize = 4;

/// llama.cpp's converters, and the interpreter that runs them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LlamaConverters {
    sources: PathBuf,
    python: PathBuf,
    /// The beginning of a digest of the converters.
    version: String,
}

/// The reason why a model or an adapter was not converted by llama.cpp's converters.
#[derive(Debug, thiserror::Error)]
pub enum ConverterError {
    #[error(
        "{directory} has no {missing}; --llama-cpp-sources (FLOTILLA_LLAMA_CPP_SOURCES) names the \
         directory of llama.cpp's sources (E119)"
    )]
    Incomplete { directory: PathBuf, missing: &'static str },
    #[error(
        "--llama-cpp-sources needs --python (FLOTILLA_PYTHON): an interpreter with torch, \
         transformers and sentencepiece (A102)"
    )]
    NoPython,
    #[error("could not read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "models of {model_type} need llama.cpp's own converters; pass --llama-cpp-sources DIR and \
         --python PYTHON to this command, or to the agent of the box (E119)"
    )]
    Absent { model_type: String },
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    #[error(transparent)]
    Settings(#[from] AdapterSettingsError),
    #[error(
        "{adapter} has rsLoRA or an alpha for each module, which llama.cpp's converter ignores; \
         save it as plain LoRA (M107)"
    )]
    Scales { adapter: PathBuf },
    #[error("start {python}")]
    Start { python: PathBuf, source: io::Error },
    #[error("learn how {script} ended")]
    Wait { script: &'static str, source: io::Error },
    #[error("llama.cpp's {script} was ended after {limit:?} (E104)")]
    TimedOut { script: &'static str, limit: Duration },
    #[error(
        "llama.cpp's {script} could not convert {input} ({status}): {last_output}; use newer \
         sources (--llama-cpp-sources) or another model (E119)"
    )]
    Failed { script: &'static str, input: PathBuf, status: ExitStatus, last_output: String },
}

/// The converter of a model's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelConverter<'a> {
    /// Of `formats`, for the architectures of its table.
    Native,
    Upstream(&'a LlamaConverters),
}

impl<'a> ModelConverter<'a> {
    /// Prefers the native converter, which also reports a configuration that cannot be read.
    pub(crate) fn choose(
        model: &Path,
        converters: Option<&'a LlamaConverters>,
    ) -> Result<Self, ConverterError> {
        match (ModelOutline::from_dir(model), converters) {
            (Ok(ModelOutline { config: None, .. }), Some(converters)) => {
                Ok(Self::Upstream(converters))
            }
            (Ok(ModelOutline { config: None, model_type, .. }), None) => {
                Err(ConverterError::Absent { model_type })
            }
            _ => Ok(Self::Native),
        }
    }
}

/// Fails if a model needs converters and there are none. A configuration that cannot be read
/// passes, because the converter reports it.
pub fn require_converters(
    model: &Path,
    converters: Option<&LlamaConverters>,
) -> Result<(), ConverterError> {
    ModelConverter::choose(model, converters).map(drop)
}

impl LlamaConverters {
    /// Finds the converters in a directory with llama.cpp's sources.
    ///
    /// # Errors
    /// When a script is missing or cannot be read, or there is no interpreter.
    pub fn find_converters(sources: &Path, python: Option<&Path>) -> Result<Self, ConverterError> {
        let python = python.ok_or(ConverterError::NoPython)?.to_owned();
        let has = |name: &&str| sources.join(name).is_file();
        if let Some(missing) = [MODEL_SCRIPT, ADAPTER_SCRIPT].into_iter().find(|name| !has(name)) {
            return Err(ConverterError::Incomplete { directory: sources.to_owned(), missing });
        }
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| ConverterError::Read { path, source }
        };
        let sources = sources.canonicalize().map_err(read(sources))?;
        let mut hasher = blake3::Hasher::new();
        for path in list_scripts(&sources).into_iter().take(SCRIPTS_MAX) {
            let data = fs::metadata(&path).map_err(read(&path))?;
            hasher.update(&data.len().to_le_bytes());
            if data.len() <= SCRIPT_BYTES_MAX {
                hasher.update(&fs::read(&path).map_err(read(&path))?);
            }
        }
        let version = format!("u{}", &hasher.finalize().to_hex()[..12]);
        Ok(Self { sources, python, version })
    }

    /// Returns a name of the converters' version, for files that they write.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Writes a model of `bytes` bytes as a GGUF file. `on_heartbeat` is called while this works.
    pub(crate) fn convert_model(
        &self,
        (model, to): (&Path, &Path),
        dtype: ConversionDtype,
        bytes: u64,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), ConverterError> {
        // Refuses code of the directory, which some of the converters would run.
        ModelOutline::from_dir(model)?;
        let arguments: [OsString; 5] =
            ["--outtype".into(), dtype.name().into(), "--outfile".into(), to.into(), model.into()];
        self.run_converter((MODEL_SCRIPT, model), arguments, time_limit(bytes), on_heartbeat)
    }

    /// Writes a PEFT adapter of a base's directory as a GGUF file.
    pub(crate) fn convert_adapter(
        &self,
        (base, adapter, to): (&Path, &Path, &Path),
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), ConverterError> {
        ModelOutline::from_dir(base)?;
        if !AdapterSettings::from_dir(adapter)?.has_one_scale() {
            return Err(ConverterError::Scales { adapter: adapter.to_owned() });
        }
        let arguments: [OsString; 7] = [
            "--base".into(),
            base.into(),
            "--outtype".into(),
            "f32".into(),
            "--outfile".into(),
            to.into(),
            adapter.into(),
        ];
        self.run_converter((ADAPTER_SCRIPT, adapter), arguments, time_limit(0), on_heartbeat)
    }

    fn run_converter(
        &self,
        (script, input): (&'static str, &Path),
        arguments: impl IntoIterator<Item = OsString>,
        limit: Duration,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), ConverterError> {
        // `-s` keeps packages of the user's own site directory out.
        let first = ["-s".into(), self.sources.join(script).into()];
        let environment = ProcessEnvironment::new(&BTreeMap::new(), &[])
            .with_variable("HF_HUB_OFFLINE", "1")
            .with_variable("TRANSFORMERS_OFFLINE", "1")
            // transformers copies code of a model there before it runs it: it cannot.
            .with_variable("HF_MODULES_CACHE", "/dev/null")
            .with_variable("PYTHONDONTWRITEBYTECODE", "1");
        let arguments = first.into_iter().chain(arguments);
        let mut process = LlamaProcess::spawn_program(
            &self.python,
            arguments,
            &environment,
            ProgramOutput::Lines,
        )
        .map_err(|source| ConverterError::Start { python: self.python.clone(), source })?;
        let until = Instant::now() + limit;
        // A progress bar writes no lines.
        while process.wait_event(BEAT_INTERVAL) != ProcessEvent::Closed {
            on_heartbeat();
            if Instant::now() >= until {
                // It is ended in any case; the time is the error.
                let _ = process.kill_and_wait();
                return Err(ConverterError::TimedOut { script, limit });
            }
        }
        let ended = process.wait_exit(EXIT_TIMEOUT).and_then(|_| process.kill_and_wait());
        let status = ended.map_err(|source| ConverterError::Wait { script, source })?;
        if status.success() {
            return Ok(());
        }
        let last_output = last_lines(&process.output_tail());
        Err(ConverterError::Failed { script, input: input.to_owned(), status, last_output })
    }
}

/// Lists the converters' files, sorted.
fn list_scripts(sources: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for directory in SCRIPT_DIRECTORIES {
        for entry in fs::read_dir(sources.join(directory)).into_iter().flatten().flatten() {
            let path = entry.path();
            found.extend(path.extension().is_some_and(|end| end == "py").then_some(path));
        }
    }
    found.sort();
    found
}

fn time_limit(bytes: u64) -> Duration {
    START_TIMEOUT + Duration::from_secs(bytes / BYTES_PER_SECOND_MIN)
}

/// Returns the last lines of an output; of a progress bar, its last state.
fn last_lines(output: &str) -> String {
    let lines = output.lines().map(|line| line.trim_end().rsplit('\r').next().unwrap_or(line));
    let lines: Vec<&str> = lines.map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN_LINES_MAX)..].join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A directory with sources, an interpreter that runs a shell script, and a model.
    struct Rig(tempfile::TempDir);

    impl Rig {
        fn new(model_type: &str, program: &str) -> Self {
            let rig = Self(tempfile::tempdir().unwrap());
            for script in [MODEL_SCRIPT, ADAPTER_SCRIPT] {
                write(&rig.path("sources").join(script), "print()");
            }
            let python = rig.path("python");
            write(&python, &format!("#!/bin/sh\n{program}\n"));
            fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
            let config = serde_json::json!({
                "model_type": model_type, "architectures": ["OtherForCausalLM"],
                "vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 4,
            });
            write(&rig.path("model/config.json"), &config.to_string());
            rig
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn converters(&self) -> LlamaConverters {
            let python = self.path("python");
            LlamaConverters::find_converters(&self.path("sources"), Some(&python)).unwrap()
        }

        fn convert(&self) -> Result<(), ConverterError> {
            let (model, out) = (self.path("model"), self.path("out"));
            self.converters().convert_model((&model, &out), ConversionDtype::F16, 0, &mut || ())
        }
    }

    #[test]
    fn only_models_outside_of_the_table_need_converters() {
        let rig = Rig::new("other", "");
        let converters = rig.converters();
        let model = rig.path("model");
        let choose = |converters| ModelConverter::choose(&model, converters);
        assert_eq!(choose(Some(&converters)).unwrap(), ModelConverter::Upstream(&converters));
        let absent = choose(None).unwrap_err().to_string();
        assert!(absent.contains("models of other") && absent.contains("--llama-cpp-sources DIR"));
        let biased = serde_json::json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": true,
            "vocab_size": 260, "hidden_size": 128, "intermediate_size": 352,
            "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512,
        });
        write(&model.join("config.json"), &biased.to_string());
        assert_eq!(choose(Some(&converters)).unwrap(), ModelConverter::Upstream(&converters));
        let absent = choose(None).unwrap_err().to_string();
        assert!(absent.contains("models of llama (mlp_bias true)"), "{absent}");
        write(&model.join("config.json"), "{}");
        assert_eq!(choose(Some(&converters)).unwrap(), ModelConverter::Native, "it reports it");
    }

    #[test]
    fn the_converter_is_offline_and_its_last_lines_are_shown() {
        let rig = Rig::new("other", "echo $HF_HUB_OFFLINE $HF_MODULES_CACHE $2 $3 $4 > \"$6\"");
        rig.convert().unwrap();
        let said = fs::read_to_string(rig.path("out")).unwrap();
        let sources = rig.path("sources").canonicalize().unwrap();
        let expected = format!("1 /dev/null {}/{MODEL_SCRIPT} --outtype f16", sources.display());
        assert_eq!(said.trim(), expected);
        let failing =
            "echo one; printf '1%%\\r2%%\\n' >&2; echo NotImplementedError: other >&2; exit 3";
        let said = Rig::new("other", failing).convert().unwrap_err().to_string();
        assert!(
            said.contains("(exit status: 3)") && said.contains("NotImplementedError"),
            "{said}"
        );
        assert_eq!(last_lines("a\nb\nc\n\n1%\r99%\nd\n"), "b | c | 99% | d");
    }

    #[test]
    fn code_of_a_model_s_directory_is_never_given_to_a_converter() {
        let rig = Rig::new("other", "touch \"$6\"");
        write(
            &rig.path("model/tokenizer_config.json"),
            r#"{"auto_map": {"AutoTokenizer": "a.B"}}"#,
        );
        assert!(rig.convert().unwrap_err().to_string().contains("a.py"));
        write(&rig.path("model/tokenizer_config.json"), "{}");
        // transformers would read the other file, which may name code.
        let config = r#"{"model_type": "other", "architectures": ["OtherForCausalLM"],
            "configuration_files": ["config.4.0.0.json"]}"#;
        write(&rig.path("model/config.json"), config);
        let refused = rig.convert().unwrap_err().to_string();
        assert!(refused.contains("configuration_files"), "{refused}");
        assert!(!rig.path("out").exists());
    }

    #[test]
    fn other_sources_are_another_version_and_incomplete_ones_are_refused() {
        let rig = Rig::new("other", "");
        let before = rig.converters();
        assert_eq!(before, rig.converters());
        write(&rig.path("sources/conversion/other.py"), "pass");
        assert_ne!(before.version, rig.converters().version);
        let sources = rig.path("sources");
        let without = LlamaConverters::find_converters(&sources, None).unwrap_err().to_string();
        assert!(without.contains("--python"), "{without}");
        let python = rig.path("python");
        fs::remove_file(sources.join(ADAPTER_SCRIPT)).unwrap();
        let found = LlamaConverters::find_converters(&sources, Some(&python)).unwrap_err();
        assert!(found.to_string().contains("has no convert_lora_to_gguf.py"), "{found}");
    }
}
