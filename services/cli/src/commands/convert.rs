//! `flotilla convert`: conversions of models and adapters.

use std::{
    panic::resume_unwind,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use formats::convert::{self, ConvertError, ConvertProgress, FileListing};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    args::{ConvertCommand, ConvertOutputArgs},
    local_models, output, signals,
};

const LINE_INTERVAL: Duration = Duration::from_secs(5);
const SETTING_CHARS_MAX: usize = 100;

pub(crate) async fn run_convert_command(command: ConvertCommand, json: bool) -> anyhow::Result<()> {
    match command {
        ConvertCommand::Lora { model: base, adapter, dtype, out } => {
            let to = check_output(out)?;
            let doing = format!("convert the adapter {}", adapter.display());
            run_conversion(to.clone(), doing, json, move |_| {
                let base = local_models::find_local_model(&base)?;
                convert::convert_lora(&base, &adapter, &to, dtype.into())
            })
            .await?;
        }
        ConvertCommand::Model { model, dtype, out } => {
            let to = check_output(out)?;
            let doing = format!("convert the model {}", model.display());
            run_conversion(to.clone(), doing, json, move |progress| {
                let model = local_models::find_local_model(&model)?;
                convert::convert_model(&model, &to, dtype, progress)
            })
            .await?;
        }
        ConvertCommand::Merge { model: base, adapter, out } => {
            let doing = format!("merge the adapter {}", adapter.display());
            run_conversion(out.clone(), doing, json, move |progress| {
                let base = local_models::find_local_model(&base)?;
                convert::merge_adapter(&base, &adapter, &out, progress)
            })
            .await?;
        }
        ConvertCommand::Show { path } => {
            if !path.is_dir() {
                control::require_named_file(&path)?;
            }
            let listing = convert::list_contents(&path);
            print_listing(&listing.with_context(|| format!("list {}", path.display()))?, json)?;
        }
    }
    Ok(())
}

fn check_output(out: ConvertOutputArgs) -> anyhow::Result<PathBuf> {
    match out.out.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {
            bail!("--out {}: is a directory; name a file (A104)", out.out.display());
        }
        Ok(_) if !out.force => {
            bail!("--out {}: file exists; pass --force to overwrite it (A104)", out.out.display());
        }
        _ => Ok(out.out),
    }
}

/// The panic payload that unwinds a conversion after a stop signal, so that its partial output is
/// removed.
struct ConversionStopped;

async fn run_conversion(
    out: PathBuf,
    doing: String,
    json: bool,
    work: impl FnOnce(&mut ConvertProgress<'_>) -> Result<(), ConvertError> + Send + 'static,
) -> anyhow::Result<()> {
    let stop = signals::stop_token()?;
    let name = out.display().to_string();
    let mut meter = ConversionMeter::new(name, stop);
    let began = Instant::now();
    let done = tokio::task::spawn_blocking(move || {
        let done = work(&mut |done, total| meter.show_progress(done, total));
        meter.bar.finish_and_clear();
        done
    });
    match done.await {
        Ok(done) => done.context(doing)?,
        Err(error) => match error.try_into_panic() {
            Ok(panic) if panic.is::<ConversionStopped>() => {
                bail!("{doing}: interrupted; partial output removed (A108)")
            }
            Ok(panic) => resume_unwind(panic),
            Err(error) => return Err(error.into()),
        },
    }
    report_output(&out, began.elapsed(), json)
}

fn report_output(out: &Path, took: Duration, json: bool) -> anyhow::Result<()> {
    let bytes = output_size(out).with_context(|| format!("look at {}", out.display()))?;
    let seconds = took.as_secs_f64();
    if json {
        return output::print_json(&json!({"out": out, "bytes": bytes, "seconds": seconds}));
    }
    let size = output::format_bytes(bytes);
    output::print_message(&format!("{}: {size} in {seconds:.1} s", out.display()));
    Ok(())
}

fn output_size(path: &Path) -> std::io::Result<u64> {
    let metadata = path.metadata()?;
    if metadata.is_file() {
        return Ok(metadata.len());
    }
    std::fs::read_dir(path)?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}

struct ConversionMeter {
    name: String,
    bar: ProgressBar,
    stop: CancellationToken,
    last: Instant,
}

impl ConversionMeter {
    fn new(name: String, stop: CancellationToken) -> Self {
        let target = match output::stderr_is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let template = "{wide_bar:.green} {bytes} of {total_bytes}, {bytes_per_sec}";
        let style = ProgressStyle::with_template(template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(None, target).with_style(style);
        Self { name, bar, stop, last: Instant::now() }
    }

    /// Unwinds with `ConversionStopped` if a stop was requested.
    fn show_progress(&mut self, done: u64, total: u64) {
        if self.stop.is_cancelled() {
            resume_unwind(Box::new(ConversionStopped));
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !output::stderr_is_terminal() && self.last.elapsed() > LINE_INTERVAL {
            let (done, total) = (output::format_bytes(done), output::format_bytes(total));
            output::print_message(&format!("{}: {done} of {total}", self.name));
            self.last = Instant::now();
        }
    }
}

fn print_listing(listing: &FileListing, json: bool) -> anyhow::Result<()> {
    let total: u64 = listing.tensors.iter().map(|tensor| tensor.bytes).sum();
    let values = |shape: &[u64]| shape.iter().fold(1_u64, |all, size| all.saturating_mul(*size));
    let parameters: u64 = listing.tensors.iter().map(|tensor| values(&tensor.shape)).sum();
    if json {
        let fields: serde_json::Map<String, Value> = listing.fields.iter().cloned().collect();
        let tensor = |tensor: &convert::ListedTensor| {
            json!({"name": tensor.name, "kind": tensor.kind, "shape": tensor.shape,
                   "bytes": tensor.bytes})
        };
        let tensors: Vec<Value> = listing.tensors.iter().map(tensor).collect();
        return output::print_json(&json!({
            "format": listing.format, "fields": fields, "tensors": tensors,
            "parameters": parameters, "bytes": total,
        }));
    }
    let fields = listing.fields.iter().map(|(name, value)| [name.clone(), setting_text(value)]);
    output::print_table(["field", "value"], fields);
    output::print_line("");
    let rows = listing.tensors.iter().map(|tensor| {
        let (name, kind) = (tensor.name.clone(), tensor.kind.clone());
        [name, kind, format!("{:?}", tensor.shape), tensor.bytes.to_string()]
    });
    output::print_table(["tensor", "kind", "shape", ">bytes"], rows);
    output::print_line("");
    output::print_line(&format!(
        "{}: {} tensors, {parameters} parameters, {}",
        listing.format,
        listing.tensors.len(),
        output::format_bytes(total)
    ));
    Ok(())
}

fn setting_text(value: &Value) -> String {
    let list = value.get("count").zip(value.get("first"));
    let text = match (value, list) {
        (Value::String(text), _) => text.clone(),
        (_, Some((count, first))) => format!("{count} × {first}"),
        _ => value.to_string(),
    };
    match text.char_indices().nth(SETTING_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
