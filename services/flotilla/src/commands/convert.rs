//! `flotilla convert …`.

use std::{
    panic::resume_unwind,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use formats::convert::{self, ConvertError, Dtype, Listing, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    cli::{AdapterDtype, ConvertCommand, ModelDtype, OutArgs},
    local, output, signals,
};

/// Between lines where no bar can be shown.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Characters of a setting that are shown.
const SETTING_CHARS: usize = 100;

pub(crate) async fn convert(command: ConvertCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        ConvertCommand::Lora { base, adapter, dtype, out } => {
            let to = free(out)?;
            let doing = format!("convert the adapter {}", adapter.display());
            write(to.clone(), doing, json, move |_| {
                convert::lora(&local::model(&base)?, &adapter, &to, dtype.into())
            })
            .await?;
        }
        ConvertCommand::Model { model, dtype, out } => {
            let to = free(out)?;
            let doing = format!("convert the model {}", model.display());
            write(to.clone(), doing, json, move |progress| {
                convert::model(&local::model(&model)?, &to, dtype.into(), progress)
            })
            .await?;
        }
        ConvertCommand::Merge { base, adapter, out } => {
            let doing = format!("merge the adapter {}", adapter.display());
            write(out.clone(), doing, json, move |progress| {
                convert::merge(&local::model(&base)?, &adapter, &out, progress)
            })
            .await?;
        }
        ConvertCommand::Show { path } => {
            let listing = convert::show(&path);
            show(&listing.with_context(|| format!("list {}", path.display()))?, json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Nothing is overwritten unasked.
fn free(out: OutArgs) -> anyhow::Result<PathBuf> {
    match out.out.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => {
            bail!("--out {}: is a directory; name a file (A104)", out.out.display());
        }
        Ok(_) if !out.force => {
            bail!("--out {}: is there already; --force replaces it (A104)", out.out.display());
        }
        _ => Ok(out.out),
    }
}

/// What a conversion unwinds with when the process was told to stop; what it wrote so far goes
/// with it.
struct Stopped;

/// `doing` names the work in an error.
async fn write(
    out: PathBuf,
    doing: String,
    json: bool,
    work: impl FnOnce(&mut Progress<'_>) -> Result<(), ConvertError> + Send + 'static,
) -> anyhow::Result<()> {
    let stop = signals::stop_token()?;
    let name = out.display().to_string();
    let mut meter = Meter::new(name, stop);
    let began = Instant::now();
    let done = tokio::task::spawn_blocking(move || {
        let done = work(&mut |done, total| meter.show(done, total));
        meter.bar.finish_and_clear();
        done
    });
    match done.await {
        Ok(done) => done.context(doing)?,
        Err(error) => match error.try_into_panic() {
            Ok(panic) if panic.is::<Stopped>() => {
                bail!("{doing}: told to stop; nothing is left (A108)")
            }
            Ok(panic) => resume_unwind(panic),
            Err(error) => return Err(error.into()),
        },
    }
    report(&out, began.elapsed(), json)
}

fn report(out: &Path, took: Duration, json: bool) -> anyhow::Result<()> {
    let bytes = size(out).with_context(|| format!("look at {}", out.display()))?;
    let seconds = took.as_secs_f64();
    if json {
        return output::print_json(&json!({"out": out, "bytes": bytes, "seconds": seconds}));
    }
    let size = output::bytes(bytes);
    output::say(&format!("{}: {size} in {seconds:.1} s", out.display()));
    Ok(())
}

/// Of a file, or of those in a directory.
fn size(path: &Path) -> std::io::Result<u64> {
    let metadata = path.metadata()?;
    if metadata.is_file() {
        return Ok(metadata.len());
    }
    std::fs::read_dir(path)?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}

/// A bar on a terminal, lines elsewhere.
struct Meter {
    name: String,
    bar: ProgressBar,
    stop: CancellationToken,
    last: Instant,
}

impl Meter {
    fn new(name: String, stop: CancellationToken) -> Self {
        let target = match output::on_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let template = "{wide_bar:.green} {bytes} of {total_bytes}, {bytes_per_sec}";
        let style = ProgressStyle::with_template(template);
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(None, target).with_style(style);
        Self { name, bar, stop, last: Instant::now() }
    }

    fn show(&mut self, done: u64, total: u64) {
        if self.stop.is_cancelled() {
            resume_unwind(Box::new(Stopped));
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        if !output::on_terminal() && self.last.elapsed() > LINE_EVERY {
            let (done, total) = (output::bytes(done), output::bytes(total));
            output::say(&format!("{}: {done} of {total}", self.name));
            self.last = Instant::now();
        }
    }
}

fn show(listing: &Listing, json: bool) -> anyhow::Result<()> {
    let total: u64 = listing.tensors.iter().map(|tensor| tensor.bytes).sum();
    let values = |shape: &[u64]| shape.iter().fold(1_u64, |all, size| all.saturating_mul(*size));
    let parameters: u64 = listing.tensors.iter().map(|tensor| values(&tensor.shape)).sum();
    if json {
        let fields: serde_json::Map<String, Value> = listing.fields.iter().cloned().collect();
        let tensor = |tensor: &convert::Listed| {
            json!({"name": tensor.name, "kind": tensor.kind, "shape": tensor.shape,
                   "bytes": tensor.bytes})
        };
        let tensors: Vec<Value> = listing.tensors.iter().map(tensor).collect();
        return output::print_json(&json!({
            "format": listing.format, "fields": fields, "tensors": tensors,
            "parameters": parameters, "bytes": total,
        }));
    }
    let fields = listing.fields.iter().map(|(name, value)| [name.clone(), setting(value)]);
    output::print(&output::table(["field", "value"], fields));
    output::print("");
    let rows = listing.tensors.iter().map(|tensor| {
        let (name, kind) = (tensor.name.clone(), tensor.kind.clone());
        [name, kind, format!("{:?}", tensor.shape), tensor.bytes.to_string()]
    });
    output::print(&output::table(["tensor", "kind", "shape", ">bytes"], rows));
    output::print(&format!(
        "\n{}: {} tensors, {parameters} parameters, {}",
        listing.format,
        listing.tensors.len(),
        output::bytes(total)
    ));
    Ok(())
}

/// On one line, cut where it is long.
fn setting(value: &Value) -> String {
    let list = value.get("count").zip(value.get("first"));
    let text = match (value, list) {
        (Value::String(text), _) => text.replace('\n', "\\n"),
        (_, Some((count, first))) => format!("{count} × {first}"),
        _ => value.to_string(),
    };
    match text.char_indices().nth(SETTING_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

impl From<AdapterDtype> for Dtype {
    fn from(dtype: AdapterDtype) -> Self {
        match dtype {
            AdapterDtype::F32 => Self::F32,
            AdapterDtype::F16 => Self::F16,
            AdapterDtype::Bf16 => Self::Bf16,
        }
    }
}

impl From<ModelDtype> for Dtype {
    fn from(dtype: ModelDtype) -> Self {
        match dtype {
            ModelDtype::F32 => Self::F32,
            ModelDtype::F16 => Self::F16,
            ModelDtype::Bf16 => Self::Bf16,
            ModelDtype::Q8_0 => Self::Q8_0,
        }
    }
}
