//! The plan of a training, read from a run spec or from Hugging Face TrainingArguments. The keys of
//! the file decide which of the two it is.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use control::BaseError;
use doctor::{
    TrainingArguments, TrainingPlan,
    estimate::{ModelShape, PlannedTraining, TrainingMethod},
};
use formats::FloatDtype;
use hardware::{AttentionKind, HardwareProfile, host_snapshot::HostSnapshot};
use serde_json::{Map, Value};
use spec::{BaseQuantizationSpec, RunSpec};

use super::estimate;
use crate::{args::DoctorArgs, fleet::FleetArgs, output};

/// Keys of a run spec that `TrainingArguments` never have.
const SPEC_KEYS: [&str; 3] = ["base", "sft", "raft"];

const TRAINING_ARGUMENTS_KEYS: [&str; 16] = [
    "bf16",
    "do_eval",
    "eval_strategy",
    "evaluation_strategy",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "learning_rate",
    "load_best_model_at_end",
    "max_steps",
    "num_train_epochs",
    "output_dir",
    "per_device_train_batch_size",
    "save_steps",
    "save_strategy",
    "dataloader_pin_memory",
];

const FILE_BYTES_MAX: u64 = 1 << 20;

const DATA_BYTES_MAX: u64 = 64 << 30;

/// A settings file with its text, which is read once: it may be a pipe.
pub(super) struct SettingsFile {
    pub(super) path: PathBuf,
    text: String,
}

/// Reads the plan of a settings file; `model` is that of settings which name none on this machine.
pub(super) fn read_plan(
    (SettingsFile { path: file, text }, model): (&SettingsFile, Option<&Path>),
    args: &DoctorArgs,
    seen: &HostSnapshot,
    profile: &HardwareProfile,
) -> anyhow::Result<TrainingPlan> {
    let named = || format!("--run {}", file.display());
    let keys: Map<String, Value> = spec::parse_yaml(text)
        .with_context(|| format!("--run {}: not a YAML or JSON mapping (A115)", file.display()))?;
    let has = |known: &[&str]| known.iter().any(|key| keys.contains_key(*key));
    let examples = args.examples.as_deref().map(count_examples).transpose()?;
    let mut plan = if has(&SPEC_KEYS) {
        let spec = RunSpec::parse(text).with_context(named)?;
        let directory = file.parent().unwrap_or(Path::new(""));
        plan_from_spec(&spec, text, (directory, model), examples, profile).with_context(named)?
    } else if has(&TRAINING_ARGUMENTS_KEYS) {
        let arguments = TrainingArguments::parse(text).with_context(named)?;
        let model = model.map(estimate::read_model_shape).transpose()?;
        arguments.to_plan(examples, model, seen)
    } else {
        bail!(
            "{} is neither a run spec (it would have `base:` and `sft:` or `raft:`) nor \
             TrainingArguments (such as save_steps, per_device_train_batch_size) (A115)",
            file.display()
        );
    };
    plan.seconds_per_step = args.step_seconds.filter(|seconds| *seconds > 0.0);
    Ok(plan)
}

/// Requires that the base of a run spec has the name of a model, or is a checkpoint of the fleet, if
/// one is given and answers. Other mistakes are left to [`read_plan`].
pub(super) async fn require_base(
    SettingsFile { path: file, text }: &SettingsFile,
    fleet: &FleetArgs,
) -> anyhow::Result<()> {
    let Ok(RunSpec { base, .. }) = RunSpec::parse(text) else { return Ok(()) };
    let directory = file.parent().unwrap_or(Path::new(""));
    let (field, checked) = match (&base.model, &base.checkpoint) {
        (Some(model), _) => ("base.model", check_model_name(model, directory)),
        (None, Some(name)) => ("base.checkpoint", find_checkpoint(name, fleet).await),
        (None, None) => return Ok(()),
    };
    let (line, column) = spec::find_place(text, field).unwrap_or((1, 1));
    checked
        .with_context(|| format!("--run {}: line {line}, column {column}: {field}", file.display()))
}

fn check_model_name(model: &str, directory: &Path) -> anyhow::Result<()> {
    if model.starts_with("store:") || directory.join(model).exists() {
        return Ok(());
    }
    let named = model.parse::<hub::ModelId>().map(drop);
    Ok(named.map_err(|reason| BaseError::NotFound { path: model.to_owned(), reason })?)
}

async fn find_checkpoint(name: &str, fleet: &FleetArgs) -> anyhow::Result<()> {
    let reference = control::parse_checkpoint_ref(name)?;
    if fleet.dir.is_none() && fleet.nats.is_empty() {
        return Ok(());
    }
    match fleet.connect_control().await {
        Ok(control) => Ok(control.get_checkpoint(&reference).await.map(drop)?),
        Err(error) => {
            output::print_message(&format!("checkpoint {name} is not looked up: {error:#}"));
            Ok(())
        }
    }
}

impl SettingsFile {
    /// Reads a file that exists and is not too large.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = read_settings(path).with_context(|| format!("--run {}", path.display()))?;
        Ok(Self { path: path.to_owned(), text })
    }
}

fn read_settings(file: &Path) -> anyhow::Result<String> {
    control::require_named_file(file)?;
    let mut text = String::new();
    File::open(file)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        bail!("larger than {FILE_BYTES_MAX} bytes; pass a run spec (A115)");
    }
    Ok(text)
}

fn count_examples(examples: &str) -> anyhow::Result<u64> {
    if let Ok(number) = examples.parse() {
        return Ok(number);
    }
    count_lines(Path::new(examples)).with_context(|| {
        format!("--examples {examples}: neither a number nor a file that can be read")
    })
}

fn count_lines(file: &Path) -> anyhow::Result<u64> {
    let mut reader = BufReader::new(File::open(file)?.take(DATA_BYTES_MAX));
    let (mut count, mut line) = (0, Vec::new());
    while reader.read_until(b'\n', &mut line)? > 0 {
        count += u64::from(!line.trim_ascii().is_empty());
        line.clear();
    }
    Ok(count)
}

/// Returns the plan of a run spec. Our trainer also saves by time, never evaluates, and takes its
/// precision and batch size from the hardware profile.
fn plan_from_spec(
    spec: &RunSpec,
    text: &str,
    (directory, model): (&Path, Option<&Path>),
    examples: Option<u64>,
    profile: &HardwareProfile,
) -> anyhow::Result<TrainingPlan> {
    let data = |field: &str, name: &str| {
        let path = directory.join(name);
        let (line, column) = spec::find_place(text, field).unwrap_or((1, 1));
        let named = || format!("line {line}, column {column}: {field}");
        control::require_named_file(&path).with_context(named)?;
        count_lines(&path).with_context(|| format!("count the examples in {}", path.display()))
    };
    // A RAFT run trains on the samples it keeps; this is their maximum number.
    let (training, lora, most) = match (&spec.sft, &spec.raft) {
        (Some(sft), _) => {
            let lora = sft.lora.as_ref();
            (&sft.training, lora, examples.map_or_else(|| data("sft.data", &sft.data), Ok)?)
        }
        (None, Some(raft)) => {
            let prompts = examples.map_or_else(|| data("raft.prompts", &raft.prompts), Ok)?;
            let asked = match raft.prompts_per_cycle {
                0 => prompts,
                limit => prompts.min(u64::from(limit)),
            };
            let kept = asked.saturating_mul(u64::from(
                raft.selection.kept_samples_max(raft.samples_per_prompt),
            ));
            (&raft.training, Some(&raft.lora), kept)
        }
        (None, None) => bail!("a run spec has `sft:` or `raft:` (A115)"),
    };
    let steps = match training.max_steps {
        0 => TrainingPlan::count_steps(
            most,
            u64::from(training.batch_size),
            1,
            f64::from(training.epochs),
        ),
        steps => u64::from(steps),
    };
    let method =
        lora.map_or(TrainingMethod::Full, |lora| TrainingMethod::Lora { rank: u64::from(lora.r) });
    let quantized = lora.is_some_and(|lora| lora.quantize != BaseQuantizationSpec::None);
    let [tokens, micro] = [training.max_tokens, training.micro_batch_tokens].map(u64::from);
    let shape = local_model_shape(spec, directory)?;
    let shape = match (shape, model) {
        (None, Some(model)) => Some(estimate::read_model_shape(model)?),
        (shape, _) => shape,
    };
    let pass = PlannedTraining { quantized, ..trainer_pass(method, tokens, micro, profile) };
    let memory = shape.map(|shape| (shape, pass));
    Ok(TrainingPlan {
        steps: Some(steps),
        save_every: Some(u64::from(training.save_every)),
        saves_by_time: true,
        dtype: Some(profile.training.dtype),
        memory,
        quantised_bits: if quantized { 4 } else { 0 },
        ..TrainingPlan::default()
    })
}

/// Models of the hub or the store are not downloaded for this.
fn local_model_shape(spec: &RunSpec, directory: &Path) -> anyhow::Result<Option<ModelShape>> {
    let path = spec.base.model.as_ref().map(|model| directory.join(model));
    path.filter(|path| path.is_dir()).map(|path| estimate::read_model_shape(&path)).transpose()
}

fn trainer_pass(
    method: TrainingMethod,
    tokens: u64,
    micro: u64,
    profile: &HardwareProfile,
) -> PlannedTraining {
    let own = &profile.training;
    let micro = if micro == 0 { u64::from(own.micro_batch_tokens) } else { micro };
    PlannedTraining {
        method,
        batch: (micro / tokens.max(1)).max(1),
        sequence: tokens,
        // Weights that are trained are held in f32.
        bytes_per_weight: if own.dtype == FloatDtype::F32 || method == TrainingMethod::Full {
            4
        } else {
            2
        },
        checkpointing: own.gradient_checkpointing,
        eager_attention: own.attention == AttentionKind::Eager,
        dropout: false,
        quantized: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use doctor::{Severity, check_plan};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DoctorArgs,
    }

    fn found(text: &str, flags: &[&str]) -> anyhow::Result<Vec<(&'static str, Severity)>> {
        let directory = tempfile::tempdir()?;
        std::fs::write(directory.path().join("data.jsonl"), "{}\n".repeat(300) + "\n")?;
        let file = directory.path().join("run.yaml");
        std::fs::write(&file, text)?;
        let all = ["doctor", "--run", "-"].iter().chain(flags);
        let args = Line::parse_from(all).args;
        let (seen, profile) = (HostSnapshot::default(), HardwareProfile::load_named("gfx1201")?);
        let settings = SettingsFile::read(&file)?;
        let plan = read_plan((&settings, args.model.as_deref()), &args, &seen, &profile)?;
        let findings = check_plan(&seen, &profile, &plan);
        Ok(findings.iter().map(|finding| (finding.id, finding.severity)).collect())
    }

    const SPEC: &str = "\
base: { model: org/name }
sft:
  data: data.jsonl
  training: { batch_size: 16, epochs: 3, save_every: 100 }
  lora: { r: 32 }
";

    #[test]
    fn a_missing_file_is_named_with_its_line_and_a_similar_one() {
        let wrong = SPEC.replace("data.jsonl", "dat.jsonl");
        let told = format!("{:#}", found(&wrong, &[]).unwrap_err());
        assert!(told.contains("line 3, column 9: sft.data: there is no file"), "{told}");
        assert!(told.contains("did you mean data.jsonl? (F101)"), "{told}");
    }

    const ARGUMENTS: &str = "{\"per_device_train_batch_size\": 2, \"save_steps\": 100, \
        \"gradient_accumulation_steps\": 8, \"num_train_epochs\": 3, \"unheard_of\": 1}";

    #[tokio::test]
    async fn a_base_that_names_nothing_is_an_error_with_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("run.yaml");
        std::fs::create_dir(directory.path().join("tiny")).unwrap();
        let told = async |base: &str| {
            std::fs::write(&file, SPEC.replace("model: org/name", base)).unwrap();
            let settings = SettingsFile::read(&file).unwrap();
            let checked = require_base(&settings, &FleetArgs::default()).await;
            checked.map_err(|error| format!("{error:#}"))
        };
        for base in ["model: org/name", "model: tiny", "model: store:models/a", "checkpoint: a-1"] {
            assert_eq!(told(base).await, Ok(()), "{base}");
        }
        let wrong = told("model: tinny").await.unwrap_err();
        assert!(wrong.contains("run.yaml: line 1, column "), "{wrong}");
        assert!(wrong.contains("base.model: tinny is not a directory (M101)"), "{wrong}");
        let wrong = told("checkpoint: a-1/x").await.unwrap_err();
        assert!(wrong.contains("base.checkpoint: ") && wrong.contains("a-1/x"), "{wrong}");
    }

    #[tokio::test]
    async fn settings_are_read_once_so_that_they_may_come_from_a_pipe() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut writer, SPEC.as_bytes()).unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&reader));
        let settings = SettingsFile::read(Path::new(&path)).unwrap();
        drop(reader);
        require_base(&settings, &FleetArgs::default()).await.unwrap();
        let args = Line::parse_from(["doctor", "--run", "-", "--examples", "300"]).args;
        let profile = HardwareProfile::load_named("gfx1201").unwrap();
        let seen = HostSnapshot::default();
        let plan = read_plan((&settings, None), &args, &seen, &profile).unwrap();
        assert_eq!(plan.steps, Some(57));
    }

    #[test]
    fn the_keys_tell_which_kind_of_file_it_is() {
        let flags = ["--examples", "300"];
        assert_eq!(found(ARGUMENTS, &flags).unwrap(), [("C-60", Severity::Fail)]);
        assert_eq!(found(SPEC, &[]).unwrap(), [("C-60", Severity::Warn)], "57 steps");
        assert_eq!(found(&SPEC.replace("100", "19"), &[]).unwrap(), []);
        assert_eq!(found(SPEC, &["--examples", "600000"]).unwrap(), []);
        let quantized = SPEC.replace("save_every: 100", "save_every: 19");
        let quantized = quantized.replace("{ r: 32 }", "{ r: 32, quantize: nf4 }");
        let ids: Vec<_> = found(&quantized, &[]).unwrap().iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, ["C-52"], "no bitsandbytes is seen");
    }

    #[test]
    fn files_that_are_neither_are_refused_with_the_reason() {
        let refused = |text: &str, flags: &[&str]| format!("{:#}", found(text, flags).unwrap_err());
        assert!(refused("colour: red\n", &[]).contains("neither a run spec"));
        assert!(refused("- a\n- b\n", &[]).contains("not a YAML or JSON mapping"));
        assert!(refused(&SPEC.replace("epochs", "epoch"), &[]).contains("epoch"));
        assert!(refused("save_steps: many\n", &[]).contains("run.yaml"));
        assert!(refused(ARGUMENTS, &["--examples", "nowhere"]).contains("--examples nowhere"));
        let gone = SPEC.replace("data.jsonl", "gone.jsonl");
        assert!(refused(&gone, &[]).contains("gone.jsonl"));
    }
}
