//! The plan of a training, read from a run spec or from Hugging Face TrainingArguments. The keys of
//! the file decide which of the two it is.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use anyhow::{Context, bail};
use doctor::{
    TrainingArguments, TrainingPlan,
    estimate::{ModelShape, PlannedTraining, TrainingMethod},
};
use formats::FloatDtype;
use hardware::{AttentionKind, HardwareProfile, host_snapshot::HostSnapshot};
use serde_json::{Map, Value};
use spec::RunSpec;

use super::estimate;
use crate::args::DoctorArgs;

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

/// Returns one line about a plan: its steps, its saves and its memory, as far as they are known.
pub(super) fn describe_plan(file: &Path, plan: &TrainingPlan) -> String {
    let mut parts = Vec::new();
    parts.extend(plan.steps.map(|steps| format!("at most {steps} steps")));
    parts.extend(plan.save_every.map(|every| match (every, plan.saves_by_time) {
        (0, true) => "saved by time".to_owned(),
        (0, false) => "not saved before its end".to_owned(),
        (every, true) => format!("saved every {every} steps and by time"),
        (every, false) => format!("saved every {every} steps"),
    }));
    parts.extend(plan.dtype.map(|dtype| format!("in {}", dtype.name())));
    parts.push(match &plan.memory {
        Some((shape, training)) => {
            let peak = shape.estimate_training(training).peak_bytes;
            format!("about {} at its peak", estimate::format_gb(peak))
        }
        None => "memory unknown, because no model on this machine is named; pass --model DIR or \
                 --model org/name"
            .to_owned(),
    });
    format!("training of {}: {}", file.display(), parts.join(", "))
}

/// Reads the plan of a settings file; `model` is that of settings which name none on this machine.
pub(super) fn read_plan(
    (file, model): (&Path, Option<&Path>),
    args: &DoctorArgs,
    seen: &HostSnapshot,
    profile: &HardwareProfile,
) -> anyhow::Result<TrainingPlan> {
    let named = || format!("--run {}", file.display());
    let text = read_settings(file).with_context(named)?;
    let keys: Map<String, Value> = spec::parse_yaml(&text)
        .with_context(|| format!("--run {}: not a YAML or JSON mapping (A115)", file.display()))?;
    let has = |known: &[&str]| known.iter().any(|key| keys.contains_key(*key));
    let examples = args.examples.as_deref().map(count_examples).transpose()?;
    let mut plan = if has(&SPEC_KEYS) {
        let spec = RunSpec::parse(&text).with_context(named)?;
        let directory = file.parent().unwrap_or(Path::new(""));
        plan_from_spec(&spec, &text, (directory, model), examples, profile).with_context(named)?
    } else if has(&TRAINING_ARGUMENTS_KEYS) {
        let arguments = TrainingArguments::parse(&text).with_context(named)?;
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
        let line = spec::find_line(text, field).map_or(String::new(), |n| format!("line {n}: "));
        control::require_named_file(&path).with_context(|| format!("{line}{field}"))?;
        count_lines(&path).with_context(|| format!("count the examples in {}", path.display()))
    };
    // A RAFT run trains on the samples it keeps; this is their maximum number.
    let (training, rank, most) = match (&spec.sft, &spec.raft) {
        (Some(sft), _) => {
            let rank = sft.lora.as_ref().map(|lora| lora.r);
            (&sft.training, rank, examples.map_or_else(|| data("sft.data", &sft.data), Ok)?)
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
            (&raft.training, Some(raft.lora.r), kept)
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
        rank.map_or(TrainingMethod::Full, |rank| TrainingMethod::Lora { rank: u64::from(rank) });
    let [tokens, micro] = [training.max_tokens, training.micro_batch_tokens].map(u64::from);
    let shape = local_model_shape(spec, directory)?;
    let shape = match (shape, model) {
        (None, Some(model)) => Some(estimate::read_model_shape(model)?),
        (shape, _) => shape,
    };
    let memory = shape.map(|shape| (shape, trainer_pass(method, tokens, micro, profile)));
    Ok(TrainingPlan {
        steps: Some(steps),
        save_every: Some(u64::from(training.save_every)),
        saves_by_time: true,
        dtype: Some(profile.training.dtype),
        memory,
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
        let plan = read_plan((&file, args.model.as_deref()), &args, &seen, &profile)?;
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
        assert!(told.contains("line 3: sft.data: there is no file"), "{told}");
        assert!(told.contains("did you mean data.jsonl? (F101)"), "{told}");
    }

    const ARGUMENTS: &str = "{\"per_device_train_batch_size\": 2, \"save_steps\": 100, \
        \"gradient_accumulation_steps\": 8, \"num_train_epochs\": 3, \"unheard_of\": 1}";

    #[test]
    fn the_keys_tell_which_kind_of_file_it_is() {
        let flags = ["--examples", "300"];
        assert_eq!(found(ARGUMENTS, &flags).unwrap(), [("C-60", Severity::Fail)]);
        assert_eq!(found(SPEC, &[]).unwrap(), [("C-60", Severity::Warn)], "57 steps");
        assert_eq!(found(&SPEC.replace("100", "19"), &[]).unwrap(), []);
        assert_eq!(found(SPEC, &["--examples", "600000"]).unwrap(), []);
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
