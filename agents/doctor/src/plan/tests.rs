use super::*;
use crate::{Severity, TrainingArguments, estimate::TrainingMethod};
use Severity::{Fail, Info, Warn};
use hardware::host_snapshot::{DeviceAccess, GpuInfo};
use hardware::torch_environment;

const SEVEN_B: ModelShape = ModelShape {
    layers: 28,
    hidden: 3584,
    intermediate: 18_944,
    heads: 28,
    kv_heads: 4,
    head_dim: 128,
    vocab: 152_064,
    tied: false,
    qkv_bias: true,
    qk_norm: false,
    other_parameters: 0,
    expert_parameters: 0,
};

/// A host with one card, as sysfs shows it.
fn box_with(gfx: &str) -> HostSnapshot {
    let unified_memory = gfx == "gfx1151";
    let gpu = GpuInfo {
        gfx: gfx.into(),
        unified_memory,
        render: DeviceAccess::Usable,
        vram_total: if unified_memory { 512 << 20 } else { 32 << 30 },
        gtt_total: 112 << 30,
        ..GpuInfo::default()
    };
    let mut box_ =
        HostSnapshot { kfd: DeviceAccess::Usable, gpus: vec![gpu], ..HostSnapshot::default() };
    (box_.memory.total, box_.memory.available) = (124 << 30, 118 << 30);
    box_
}

fn found(gfx: &str, plan: &TrainingPlan) -> Vec<(&'static str, Severity)> {
    let profile = HardwareProfile::load_named(gfx).unwrap();
    check_plan(&box_with(gfx), &profile, plan).into_iter().map(|it| (it.id, it.severity)).collect()
}

/// The findings for arguments in YAML and a number of examples.
fn of_arguments(
    gfx: &str,
    yaml: &str,
    examples: Option<u64>,
    model: Option<ModelShape>,
) -> Vec<(&'static str, Severity)> {
    let arguments = TrainingArguments::parse(yaml).unwrap();
    found(gfx, &arguments.to_plan(examples, model, &box_with(gfx)))
}

/// From an incident: 300 examples, and `save_steps` at 100.
const POST_MORTEM: &str = "\
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
num_train_epochs: 3
save_steps: 100
dataloader_pin_memory: true
bf16: true
gradient_checkpointing: true
max_seq_length: 256
lora_r: 32
";

#[test]
fn the_post_mortem_s_checkpoint_can_never_be_saved() {
    assert_eq!(TrainingPlan::count_steps(300, 2, 8, 3.0), 57);
    assert_eq!(of_arguments("gfx1201", POST_MORTEM, Some(300), Some(SEVEN_B)), [("C-60", Fail)]);
    let arguments = TrainingArguments::parse(POST_MORTEM).unwrap();
    let box_ = box_with("gfx1201");
    let plan = arguments.to_plan(Some(300), Some(SEVEN_B), &box_);
    let findings = check_plan(&box_, &HardwareProfile::load_named("gfx1201").unwrap(), &plan);
    assert_eq!(findings[0].seen, "a checkpoint every 100 steps of 57");
    assert!(findings[0].remedy.starts_with("save every 19 steps"), "{findings:?}");
    let better = POST_MORTEM.replace("save_steps: 100", "save_steps: 19");
    assert_eq!(of_arguments("gfx1201", &better, Some(300), Some(SEVEN_B)), []);
    assert_eq!(of_arguments("gfx1201", POST_MORTEM, None, None), [("C-60", Info)]);
}

#[test]
fn a_cadence_is_judged_by_steps_and_by_time() {
    let saving = |every, steps, seconds| {
        let (save_every, steps) = (Some(every), Some(steps));
        found(
            "gfx1201",
            &TrainingPlan {
                save_every,
                steps,
                seconds_per_step: seconds,
                ..TrainingPlan::default()
            },
        )
    };
    assert_eq!(saving(0, 57, None), [("C-60", Fail)]);
    assert_eq!(saving(58, 57, None), [("C-60", Fail)]);
    assert_eq!(saving(57, 57, None), [("C-60", Warn)]);
    assert_eq!(saving(19, 57, None), []);
    assert_eq!(saving(19, 57, Some(60.0)), [("C-60", Warn)]);
    assert_eq!(saving(10, 57, Some(60.0)), []);
    let ours = |every| TrainingPlan {
        save_every: Some(every),
        steps: Some(57),
        saves_by_time: true,
        ..TrainingPlan::default()
    };
    assert_eq!(found("gfx1201", &ours(100)), [("C-60", Warn)], "time saves it");
    assert_eq!(found("gfx1201", &ours(57)), []);
    assert_eq!(found("gfx1201", &ours(0)), []);
}

#[test]
fn precision_and_quantisation_follow_the_profile() {
    let of =
        |gfx, settings: &str| of_arguments(gfx, &format!("{SAVED}{settings}"), Some(300), None);
    const SAVED: &str = "save_steps: 10\ndataloader_pin_memory: false\n";
    assert_eq!(of("gfx906", "bf16: true"), [("C-51", Fail)]);
    assert_eq!(of("gfx906", "fp16: true"), [("C-51", Warn)]);
    assert_eq!(of("gfx906", ""), []);
    for gfx in ["gfx1151", "gfx1201"] {
        assert_eq!(of(gfx, "bf16: true"), [], "{gfx}");
        assert_eq!(of(gfx, "fp16: true"), [("C-51", Warn)], "{gfx}");
        assert_eq!(of(gfx, "load_in_4bit: true"), [("C-52", Warn)], "{gfx}");
    }
    assert_eq!(of("gfx906", "load_in_8bit: true"), [("C-52", Fail)]);
    let mut box_ = box_with("gfx1151");
    let packages = [("bitsandbytes".to_owned(), "0.48.2".to_owned())].into();
    box_.python = Some(torch_environment::TorchEnvironment {
        packages,
        ..torch_environment::TorchEnvironment::default()
    });
    let plan = TrainingPlan { quantised_bits: 4, ..TrainingPlan::default() };
    let findings = check_plan(&box_, &HardwareProfile::load_named("gfx1151").unwrap(), &plan);
    assert_eq!(findings[0].severity, Fail, "too old: {findings:?}");
}

#[test]
fn evals_inside_the_trainer_are_refused_where_they_freeze_the_box() {
    let of = |gfx, settings: &str| {
        let base = "save_steps: 10\nmax_steps: 60\ndataloader_pin_memory: false\n";
        of_arguments(gfx, &format!("{base}{settings}"), None, None)
    };
    for settings in [
        "eval_strategy: steps",
        "evaluation_strategy: epoch",
        "eval_strategy: IntervalStrategy.STEPS",
        "do_eval: true",
        "eval_on_start: true",
        "metric_for_best_model: loss",
        "early_stopping_patience: 3",
    ] {
        assert_eq!(of("gfx1151", settings), [("C-54", Fail)], "{settings}");
        assert_eq!(of("gfx1201", settings), [("C-54", Warn)], "{settings}");
        assert_eq!(of("cpu", settings), [], "{settings}");
    }
    assert_eq!(of("gfx1151", "eval_strategy: \"no\""), []);
    assert_eq!(of("gfx1201", "load_best_model_at_end: true"), [("C-54", Fail), ("C-54", Warn)]);
    let renamed = TrainingArguments::parse("evaluation_strategy: \"no\"").unwrap();
    let mut box_ = box_with("gfx1201");
    let packages = [("transformers".to_owned(), "5.2.0".to_owned())].into();
    box_.python = Some(torch_environment::TorchEnvironment {
        packages,
        ..torch_environment::TorchEnvironment::default()
    });
    assert_eq!(renamed.to_plan(None, None, &box_).refused.len(), 1);
    assert_eq!(renamed.to_plan(None, None, &HostSnapshot::default()).refused, []);
}

#[test]
fn loaders_that_compete_for_unified_memory_are_named() {
    let base = "save_steps: 10\nmax_steps: 60\n";
    let of = |gfx, settings: &str| of_arguments(gfx, &format!("{base}{settings}"), None, None);
    // transformers pins memory by default.
    assert_eq!(of("gfx1151", ""), [("C-53", Warn)]);
    assert_eq!(of("gfx1151", "dataloader_num_workers: 4"), [("C-53", Warn), ("C-53", Warn)]);
    assert_eq!(of("gfx1151", "dataloader_pin_memory: false"), []);
    assert_eq!(of("gfx1201", "dataloader_num_workers: 2"), []);
    assert_eq!(of("gfx1201", "padding: max_length"), [("C-64", Warn)]);
    assert_eq!(of("gfx1201", "padding: true"), []);
}

#[test]
fn a_training_that_does_not_fit_lists_the_changes_that_would() {
    let training = PlannedTraining {
        method: TrainingMethod::Lora { rank: 32 },
        batch: 16,
        sequence: 1024,
        bytes_per_weight: 2,
        checkpointing: true,
        eager_attention: false,
        dropout: false,
        quantized: false,
    };
    let plan =
        |training| TrainingPlan { memory: Some((SEVEN_B, training)), ..TrainingPlan::default() };
    let profile = HardwareProfile::load_named("gfx1201").unwrap();
    let findings = check_plan(&box_with("gfx1201"), &profile, &plan(training));
    assert_eq!((findings[0].id, findings[0].severity), ("C-62", Fail));
    assert!(findings[0].remedy.starts_with("batch 4, accumulated"), "{findings:?}");
    let smaller = PlannedTraining { batch: 2, ..training };
    assert_eq!(found("gfx1201", &plan(smaller)), []);
    let kept = PlannedTraining { checkpointing: false, ..smaller };
    assert!(found("gfx1201", &plan(kept)).contains(&("C-63", Warn)));
    assert_eq!(found("gfx1151", &plan(training)), [], "99 GiB hold it");
    let full = TrainingPlan { disk_free: Some(10 << 30), ..plan(smaller) };
    assert_eq!(found("gfx1201", &full), [("C-35", Fail)]);
    let mut small_host = box_with("gfx1201");
    small_host.memory.available = 7 << 30;
    let findings = check_plan(&small_host, &profile, &plan(smaller));
    assert_eq!((findings[0].id, findings[0].severity), ("C-61", Warn));
    let nobody = HostSnapshot::default();
    assert_eq!(check_plan(&nobody, &profile, &plan(training)), [], "nothing is known of the box");
}

#[test]
fn a_plan_is_described_as_far_as_it_is_known() {
    let file = std::path::Path::new("run.yaml");
    let plan = TrainingPlan {
        steps: Some(57),
        save_every: Some(0),
        saves_by_time: true,
        dtype: Some(FloatDtype::Bf16),
        ..TrainingPlan::default()
    };
    let text = plan.describe_plan(file);
    let expected = "training of run.yaml: at most 57 steps, saved by time, in bf16, memory unknown";
    assert!(text.starts_with(expected), "{text}");
    let steps = TrainingPlan { save_every: Some(100), ..TrainingPlan::default() };
    assert!(steps.describe_plan(file).contains(": saved every 100 steps, "));
}
