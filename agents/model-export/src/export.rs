//! Merges, converts and quantizes a model, and checks the result.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use formats::{
    ConversionDtype, ModelConfig, ModelConfigError,
    convert::{self, ConvertError},
};
use llama::{
    InstallationError, LlamaInstallation, ProcessEnvironment, QuantizeError, quantize_model,
};

use crate::{
    format::{ExportFormat, WeightType},
    settings,
    verify::{self, ExportComparison, VerifyError},
};

/// A model to export.
#[derive(Debug, Clone, Copy)]
pub struct ExportRequest<'a> {
    pub base: &'a Path,
    pub adapter: Option<&'a Path>,
    /// The directory to write into.
    pub out: &'a Path,
    /// Name of the file, and of the model in other programs.
    pub name: &'a str,
    pub format: ExportFormat,
    /// Type of a GGUF file's weights. `Merged` ignores it and keeps the type of the base.
    pub weight_type: WeightType,
    /// The directory of llama.cpp's programs, if they are not on PATH.
    pub llama_cpp: Option<&'a Path>,
}

/// A model that was written and compared.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportedModel {
    /// The file, or the directory of a merged model.
    pub path: PathBuf,
    /// Mean distance from the trained model, in nats per token, and the largest accepted one.
    pub distance: f64,
    pub tolerance: f64,
    /// Commands that load it.
    pub commands: Vec<String>,
}

/// The reason why a model was not exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("write into {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read the base's config.json")]
    Config(#[from] ModelConfigError),
    #[error("convert the model")]
    Convert(#[from] Box<ConvertError>),
    #[error("quantize the model")]
    Installation(#[from] InstallationError),
    #[error("quantize the model")]
    Quantize(#[from] QuantizeError),
    #[error("compare the exported model with the trained one")]
    Verify(#[from] VerifyError),
    #[error(
        "the exported model would differ from the trained one by {distance:.3} nats per token, more \
         than {tolerance}, so {path} was not written (E106)"
    )]
    Differs { path: PathBuf, distance: f64, tolerance: f64 },
}

/// Writes a model for another program and compares it with the trained one: the log-probabilities of
/// a sample text, or, for models and types that only llama.cpp reads, the mean likelihood that it
/// measures.
/// `progress` is called with the activity, and the bytes done and in all.
///
/// # Errors
/// A file cannot be read or written, llama.cpp is needed and absent, or the written model differs
/// too much; it is removed then.
pub fn export_model(
    request: &ExportRequest<'_>,
    progress: &mut dyn FnMut(&'static str, u64, u64),
) -> Result<ExportedModel, ExportError> {
    let ExportRequest { base, adapter, out, name, format, weight_type, .. } = *request;
    // Before hours of work.
    let weights = match format {
        ExportFormat::Merged => None,
        ExportFormat::Gguf | ExportFormat::Ollama | ExportFormat::Lemonade => {
            Some(GgufWeights::find_quantizer(weight_type, request.llama_cpp)?)
        }
    };
    let comparison = ExportComparison::choose_program(base, weights.is_some(), request.llama_cpp)?;
    let failed = |source| ExportError::Write { path: out.to_owned(), source };
    fs::create_dir_all(out).map_err(failed)?;
    let scratch = tempfile::Builder::new().prefix(".export-").tempdir_in(out).map_err(failed)?;
    let merged = match adapter {
        Some(adapter) => {
            let merged = scratch.path().join("merged");
            let mut report = |done, total| progress("merge", done, total);
            convert::merge_adapter(base, adapter, &merged, &mut report).map_err(Box::new)?;
            merged
        }
        None => base.to_owned(),
    };
    let (path, distance, tolerance) = if let Some(weights) = &weights {
        let path = out.join(format!("{name}.gguf"));
        let partial = scratch.path().join("model.gguf");
        let distance = write_gguf(request, (weights, &comparison), (&merged, &partial), progress)?;
        let tolerance = weight_type.tolerance();
        check_distance(&path, distance, tolerance)?;
        fs::rename(&partial, &path)
            .map_err(|source| ExportError::Write { path: path.clone(), source })?;
        (path, distance, tolerance)
    } else {
        let path = out.join(name);
        let distance = comparison.measure_distance((base, adapter), &merged, scratch.path())?;
        let tolerance = WeightType::Converted(ConversionDtype::Bf16).tolerance();
        check_distance(&path, distance, tolerance)?;
        let failed = |source| ExportError::Write { path: path.clone(), source };
        let staged = match adapter {
            Some(_) => merged,
            None => copy_files(&merged, &scratch.path().join("copy")).map_err(failed)?,
        };
        replace_directory(&staged, &path, &scratch.path().join("old")).map_err(failed)?;
        (path, distance, tolerance)
    };
    if format == ExportFormat::Ollama {
        let text = settings::modelfile_text(&format!("{name}.gguf"), &ModelConfig::from_dir(base)?);
        fs::write(out.join("Modelfile"), text).map_err(failed)?;
    }
    let commands = settings::load_commands(format, name, &path);
    Ok(ExportedModel { path, distance, tolerance, commands })
}

fn check_distance(path: &Path, distance: f64, tolerance: f64) -> Result<(), ExportError> {
    // A distance that is not a number is none.
    if distance <= tolerance {
        return Ok(());
    }
    Err(ExportError::Differs { path: path.to_owned(), distance, tolerance })
}

/// The type of a GGUF file's weights, with the programs that make it.
enum GgufWeights {
    Converted(ConversionDtype),
    Quantized(String, LlamaInstallation),
}

impl GgufWeights {
    fn find_quantizer(
        weight_type: WeightType,
        llama_cpp: Option<&Path>,
    ) -> Result<Self, InstallationError> {
        Ok(match weight_type {
            WeightType::Converted(dtype) => Self::Converted(dtype),
            WeightType::Quantized(name) => Self::Quantized(
                name.to_uppercase(),
                LlamaInstallation::find_installation(llama_cpp)?,
            ),
        })
    }
}

/// Writes the GGUF file and returns its distance from the trained model.
fn write_gguf(
    request: &ExportRequest<'_>,
    (weights, comparison): (&GgufWeights, &ExportComparison),
    (merged, file): (&Path, &Path),
    progress: &mut dyn FnMut(&'static str, u64, u64),
) -> Result<f64, ExportError> {
    let ExportRequest { base, adapter, .. } = *request;
    let directory = file.parent().unwrap_or(file);
    let mut report = |done, total| progress("convert", done, total);
    let (name, installation) = match weights {
        GgufWeights::Converted(dtype) => {
            convert::convert_model(merged, file, *dtype, &mut report).map_err(Box::new)?;
            progress("compare", 0, 0);
            return Ok(comparison.measure_distance((base, adapter), file, directory)?);
        }
        GgufWeights::Quantized(name, installation) => (name, installation),
    };
    let environment = ProcessEnvironment::new(&Default::default(), &[]);
    let exact = file.with_file_name("exact.gguf");
    convert::convert_model(merged, &exact, ConversionDtype::Bf16, &mut report).map_err(Box::new)?;
    let program = installation.quantize_path();
    quantize_model(&program, (&exact, file), name, &environment, &mut || {
        progress("quantize", 0, 0);
    })?;
    progress("compare", 0, 0);
    let runner = verify::perplexity_runner(installation)?;
    // The 16-bit file is compared with the trained model, the small one with it.
    let first = comparison.measure_distance((base, adapter), &exact, directory)?;
    Ok(first + verify::compare_likelihoods(&runner, (&exact, None), file, directory)?)
}

/// Copies the files of a model that has no adapter, and returns the new directory.
fn copy_files(from: &Path, to: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(to.to_owned())
}

/// Moves a directory to `to`. An existing one is moved to `old`, so that files of two models never
/// mix.
fn replace_directory(from: &Path, to: &Path, old: &Path) -> io::Result<()> {
    if to.exists() {
        fs::rename(to, old)?;
    }
    fs::rename(from, to)
}
