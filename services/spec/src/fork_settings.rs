//! The spec of a fork: that of the forked run with changed settings.
//!
//! The changes are applied to a description of the forked run's spec in the form of a spec file, so
//! that they are read and checked as any spec. What the description lacks (files, digests, the
//! settings of verifiers) is that of the forked run.

use serde_json::{Map, Value, json};
use wire::v1;

use crate::{
    document::{as_section, set_value},
    error::{FieldError, SpecError},
    queue::QueueSpec,
    run_spec::RunSpec,
    yaml::parse_yaml,
};

/// The reason why a fork cannot have a setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForkSettingError {
    #[error("{0:?} is not KEY=VALUE, such as raft.training.learning_rate=1e-4 (R103)")]
    Form(String),
    #[error("setting {setting}")]
    Value {
        setting: String,
        #[source]
        source: SpecError,
    },
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The sections and settings of a spec beside `raft`.
const ROOT_KEYS: [&str; 9] =
    ["name", "seed", "pool", "base", "evals", "sft", "raft", "queue", "promote"];

/// The settings that cycles which are taken over depend on, or that name files.
const FIXED_KEYS: [&str; 9] = [
    "base",
    "evals",
    "sft",
    "raft.prompts",
    "raft.heldout",
    "raft.allow_overlap",
    "raft.chat",
    "raft.verifier",
    "raft.teacher",
];

/// The settings that the weights of an adapter have.
const ADAPTER_KEYS: [&str; 3] = ["raft.lora.r", "raft.lora.alpha", "raft.lora.target_modules"];

/// Returns the spec of a fork that continues a RAFT run after `cycle` with changed settings, each
/// `KEY=VALUE` with a dotted key of the spec file (with or without `raft.`) and a value in YAML.
/// `null` sets the default. `trains_on` says that the next cycle continues from an adapter, unless
/// the spec sets `from_base`. The run's id and time are left as they are.
///
/// # Errors
/// When a setting is unknown, invalid, or fixed by the cycles that are taken over.
pub fn apply_fork_settings(
    parent: &v1::Spec,
    cycle: u32,
    trains_on: bool,
    settings: &[String],
) -> Result<v1::Spec, ForkSettingError> {
    let Some(v1::spec::Kind::Raft(raft)) = &parent.kind else {
        return Err(not_raft().into());
    };
    let described = describe_spec(parent, raft);
    let mut changed = described.clone();
    let mut keys = Vec::new();
    for setting in settings {
        let (key, value) = parse_setting(setting)?;
        check_key(&key)?;
        set_value(&mut changed, &key, value);
        keys.push(key);
    }
    let [before, after] = [&described, &changed].map(resolve_spec);
    let spec = merge_changes(to_json(parent), Some(to_json(&before?)), Some(to_json(&after?)));
    let mut spec: v1::Spec =
        serde_json::from_value(spec.unwrap_or_default()).expect("it is made of specs");
    // A user starts the fork.
    spec.promotion.iter_mut().for_each(|promotion| promotion.learning = 0);
    let channel = |spec: &v1::Spec| spec.promotion.as_ref().map(|it| it.channel.clone());
    if channel(&spec) != channel(parent) {
        // The position is one on the other channel.
        spec.promotion.iter_mut().for_each(|promotion| promotion.feedback = 0);
    }
    if parent.other_model_type.is_empty() {
        let run = RunSpec::parse(&changed.to_string()).map_err(SpecError::without_place)?;
        run.check_usual_modules()?;
    }
    check_cycles(&spec, cycle, trains_on, &keys)?;
    Ok(spec)
}

fn not_raft() -> FieldError {
    FieldError { field: "raft".into(), remedy: "is missing: only RAFT runs have cycles".into() }
}

/// Returns the full key and the value of a setting.
fn parse_setting(setting: &str) -> Result<(String, Value), ForkSettingError> {
    let form = || ForkSettingError::Form(setting.to_owned());
    let (key, value) = setting.split_once('=').ok_or_else(form)?;
    let key = key.trim();
    if key.is_empty() || key.split('.').any(str::is_empty) {
        return Err(form());
    }
    let root = key.split('.').next().unwrap_or_default();
    let key = if ROOT_KEYS.contains(&root) { key.to_owned() } else { format!("raft.{key}") };
    let value = parse_yaml(value).map_err(|source: SpecError| ForkSettingError::Value {
        setting: setting.to_owned(),
        source: source.without_place(),
    })?;
    Ok((key, value))
}

fn check_key(key: &str) -> Result<(), FieldError> {
    let refuse = |remedy: &str| Err(FieldError { field: key.to_owned(), remedy: remedy.into() });
    if key == "name" {
        return refuse("cannot be set; name the fork with --name");
    }
    if key == "raft" {
        return refuse("is a section; set its keys, such as raft.cycles=6");
    }
    match FIXED_KEYS.iter().any(|fixed| is_below(key, fixed)) {
        true => refuse(
            "cannot change in a fork, because the cycles that it takes over depend on it; submit a \
             new run",
        ),
        false => Ok(()),
    }
}

/// Returns true for the key itself and the keys of its section.
fn is_below(key: &str, section: &str) -> bool {
    key.strip_prefix(section).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Requires a cycle after those taken over, and an adapter of the same form.
fn check_cycles(
    spec: &v1::Spec,
    cycle: u32,
    trains_on: bool,
    keys: &[String],
) -> Result<(), FieldError> {
    let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return Err(not_raft()) };
    if raft.cycles <= cycle {
        let remedy = format!(
            "must be above {cycle}, the last cycle that is taken over, not {}; set raft.cycles={}",
            raft.cycles,
            cycle + 1
        );
        return Err(FieldError { field: "raft.cycles".into(), remedy });
    }
    let shapes = |key: &&String| ADAPTER_KEYS.iter().any(|fixed| is_below(key, fixed));
    let key = keys.iter().find(|key| shapes(key) || *key == "raft.lora");
    match key.filter(|_| trains_on && !raft.from_base) {
        Some(key) => Err(FieldError {
            field: key.clone(),
            remedy: format!(
                "cannot change, because the adapter of cycle {cycle} is trained on; fork cycle 0, \
                 or set raft.from_base=true"
            ),
        }),
        None => Ok(()),
    }
}

/// Returns what a submission makes of the settings of a spec file.
fn resolve_spec(described: &Value) -> Result<v1::Spec, SpecError> {
    let spec = RunSpec::parse(&described.to_string()).map_err(SpecError::without_place)?;
    let raft = spec.raft.as_ref().map(|raft| raft.to_proto(&spec.measured_suites()));
    Ok(v1::Spec {
        queue: spec.queue.as_ref().map(QueueSpec::to_proto),
        promotion: spec.promote.map(|it| v1::spec::Promotion {
            channel: it.channel,
            alpha: it.alpha,
            ..v1::spec::Promotion::default()
        }),
        seed: spec.seed,
        pool: spec.pool,
        // Only the settings of a verifier are those of the forked run.
        kind: raft.map(|raft| v1::spec::Kind::Raft(v1::spec::Raft { verifier: None, ..raft })),
        ..v1::Spec::default()
    })
}

fn to_json(spec: &v1::Spec) -> Value {
    serde_json::to_value(spec).expect("a message can be written as JSON")
}

/// Returns `value` with the differences between `before` and `after`; `None` where they removed it.
fn merge_changes(value: Value, before: Option<Value>, after: Option<Value>) -> Option<Value> {
    if before == after {
        return Some(value);
    }
    let (Value::Object(mut fields), Some(Value::Object(mut after))) = (value, after.clone()) else {
        return after;
    };
    let Some(Value::Object(mut before)) = before else { return Some(Value::Object(after)) };
    let names: Vec<String> = before.keys().chain(after.keys()).cloned().collect();
    for name in names {
        let (was, is) = (before.remove(&name), after.remove(&name));
        if was == is {
            continue;
        }
        let merged = match fields.remove(&name) {
            Some(value) => merge_changes(value, was, is),
            None => is,
        };
        fields.extend(merged.map(|value| (name, value)));
    }
    Some(Value::Object(fields))
}

/// Describes the settings of a run as its spec file did. Files have placeholders.
fn describe_spec(spec: &v1::Spec, raft: &v1::spec::Raft) -> Value {
    let texts = spec.suites.iter().map(|suite| {
        let lines = suite.format() == v1::suite::Format::Documents;
        let text = if lines { "text.jsonl" } else { "text.txt" };
        json!({ "name": suite.name, "text": text })
    });
    let prompts = raft.prompt_suites.iter().map(|suite| {
        json!({ "name": suite.name, "prompts": "prompts.jsonl", "verifier": { "exact": {} } })
    });
    let evals: Vec<Value> = texts.chain(prompts).collect();
    let promote = spec.promotion.as_ref();
    json!({
        "seed": spec.seed,
        "pool": spec.pool,
        "base": { "checkpoint": "base" },
        "evals": evals,
        "raft": describe_raft(raft),
        "queue": spec.queue.as_ref().map(describe_queue),
        "promote": promote.map(|it| json!({ "channel": it.channel, "alpha": it.alpha })),
    })
}

fn describe_queue(queue: &v1::spec::Queue) -> Value {
    let time = |minute: Option<u32>| minute.map(|it| format!("{:02}:{:02}", it / 60, it % 60));
    json!({
        "priority": queue.priority,
        "from": time(queue.from_minute),
        "until": time(queue.until_minute),
    })
}

fn describe_raft(raft: &v1::spec::Raft) -> Value {
    let mut section = json!({
        "prompts": "prompts.jsonl",
        "cycles": raft.cycles,
        "prompts_per_cycle": raft.prompts_per_cycle,
        "samples_per_prompt": raft.samples_per_prompt,
        "heldout_samples_per_prompt": raft.heldout_samples_per_prompt,
        "accept_unverified_policy": raft.accept_unverified_policy,
        "from_base": raft.from_base,
        "staleness": raft.staleness,
        "entropy": raft.entropy,
        "token_logprobs": raft.token_logprobs,
    });
    let schedules = raft.schedules.clone().unwrap_or_default();
    let mut add = |name: &str, value: Option<Value>| {
        as_section(&mut section).extend(value.map(|value| (name.to_owned(), value)));
    };
    add("heldout", raft.heldout.as_ref().map(|_| json!("heldout.jsonl")));
    add(
        "verifier",
        raft.verifier.as_ref().map(|verifier| match allows_any_reward(verifier) {
            true => json!({ "command": { "argv": ["/verifier"] } }),
            false => json!({ "exact": {} }),
        }),
    );
    add("teacher", raft.teacher.as_ref().map(|_| json!({ "checkpoint": "teacher" })));
    // Otherwise they follow the number of samples.
    let usual = crate::eval_suite::default_pass_at(None, raft.heldout_samples_per_prompt);
    add("pass_at", (raft.pass_at != usual).then(|| json!(raft.pass_at)));
    add("sampling", raft.sampling.map(|it| describe_sampling(&it, &schedules)));
    add("selection", raft.selection.as_ref().map(|it| describe_selection(it, &schedules)));
    let training = raft.training.as_ref();
    add("training", training.map(|it| describe_training(it, &schedules)));
    add(
        "objective",
        training
            .and_then(|it| it.objective.as_ref())
            .map(|it| describe_objective(it, raft.sampling.map_or(0, |it| it.max_new_tokens))),
    );
    add(
        "lora",
        training.and_then(|it| it.lora.as_ref()).map(|it| {
            json!({
                "r": it.r,
                "alpha": it.alpha,
                "target_modules": it.target_modules,
                "dropout": it.dropout,
                "freeze_a": it.freeze_a,
                "quantize": match it.quantization() {
                    v1::lora::Quantization::None => "none",
                    v1::lora::Quantization::Nf4 => "nf4",
                },
            })
        }),
    );
    add("curriculum", raft.curriculum.as_ref().map(describe_curriculum));
    add("gates", raft.gates.as_ref().map(describe_gates));
    add(
        "proof",
        raft.proof.as_ref().map(|it| json!({ "canary": it.canary, "tolerance": it.tolerance })),
    );
    section
}

/// Returns true for programs and servers, which may give any reward.
fn allows_any_reward(verifier: &v1::Verifier) -> bool {
    use v1::verifier::How;
    match &verifier.how {
        Some(How::Command(_) | How::Http(_) | How::Environment(_)) => true,
        Some(How::Chain(chain)) => {
            let mut stages = chain.stages.iter().filter_map(|stage| stage.verifier.as_ref());
            stages.any(allows_any_reward)
        }
        _ => false,
    }
}

/// Returns the values of all cycles, or else the one value.
fn describe_schedule(values: &[f64], constant: f64) -> Value {
    if values.is_empty() { json!(constant) } else { json!(values) }
}

fn describe_sampling(sampling: &v1::Sampling, schedules: &v1::Schedules) -> Value {
    json!({
        "temperature": describe_schedule(&schedules.temperature, sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_new_tokens": sampling.max_new_tokens,
    })
}

fn describe_selection(selection: &v1::Selection, schedules: &v1::Schedules) -> Value {
    let v1::Selection { adaptive, replay, .. } = selection;
    let adaptive = adaptive
        .map(|it| json!({ "target": it.target, "step": it.step, "low": it.low, "high": it.high }));
    json!({
        "min_reward": describe_schedule(&schedules.min_reward, selection.min_reward),
        "adaptive": adaptive,
        "keep_per_prompt": selection.keep_per_prompt,
        "keep_share": describe_schedule(&schedules.keep_share, selection.keep_share),
        "mixed": selection.mixed,
        "keep_duplicates": selection.keep_duplicates,
        "similarity": selection.similarity,
        "min_tokens": selection.min_tokens,
        "max_tokens": selection.max_tokens,
        "finished": selection.finished,
        "at_least": selection.at_least,
        "floor": selection.floor,
        "replay": replay.map(|it| json!({ "cycles": it.cycles, "share": it.share })),
    })
}

fn describe_training(training: &v1::Training, schedules: &v1::Schedules) -> Value {
    let schedule = match training.schedule() {
        v1::Schedule::Constant => "constant",
        v1::Schedule::Linear => "linear",
        v1::Schedule::Cosine | v1::Schedule::Unspecified => "cosine",
    };
    json!({
        "epochs": training.epochs,
        "max_steps": training.max_steps,
        "batch_size": training.batch_size,
        "micro_batch_tokens": training.micro_batch_tokens,
        "learning_rate": describe_schedule(&schedules.learning_rate, training.learning_rate),
        "schedule": schedule,
        "warmup_ratio": training.warmup_ratio,
        "final_ratio": training.final_ratio,
        "weight_decay": training.weight_decay,
        "beta1": training.beta1,
        "beta2": training.beta2,
        "max_grad_norm": training.max_grad_norm,
        "max_tokens": training.max_tokens,
        "save_every": training.save_every,
        "packing": training.packing.unwrap_or(true),
        "across": training.across.as_ref().map(describe_across),
    })
}

fn describe_across(across: &v1::Across) -> Value {
    let is_mean = (across.outer_rate, across.outer_momentum) == (1.0, 0.0);
    let merge = match across.method() {
        v1::across::Method::Stack => "stack",
        v1::across::Method::Soup => "soup",
        v1::across::Method::Step if is_mean => "average",
        v1::across::Method::Step => "nesterov",
    };
    let mut section = json!({ "every": across.every, "merge": merge });
    let mut add = |name: &str, value: Option<Value>| {
        as_section(&mut section).extend(value.map(|value| (name.to_owned(), value)));
    };
    add("workers", (across.workers > 0).then(|| json!(across.workers)));
    add("send_share", (across.send_share > 0.0).then(|| json!(across.send_share)));
    let outer = json!({ "rate": across.outer_rate, "momentum": across.outer_momentum });
    add("outer", (merge == "nesterov").then_some(outer));
    section
}

/// Leaves the limit of tokens out if it is that of the samples, so that it follows them.
fn describe_objective(objective: &v1::Objective, max_new_tokens: u32) -> Value {
    let follows = |name: &str, value: f64| {
        name == objective::SettingKey::MaxTokens.as_str()
            && value.to_bits() == f64::from(max_new_tokens).to_bits()
    };
    let own = objective.settings.iter().filter(|(name, value)| !follows(name, **value));
    let settings: Map<String, Value> =
        own.map(|(name, value)| (name.clone(), json!(value))).collect();
    json!({ objective.name.clone(): settings })
}

fn describe_curriculum(curriculum: &v1::Curriculum) -> Value {
    let difficulty = curriculum.difficulty.as_ref().map(|it| {
        let target = match it.target[..] {
            [only] => json!(only),
            _ => json!(it.target),
        };
        json!({ "target": target, "explore": it.explore })
    });
    let budget = curriculum.budget.map(|it| json!({ "min": it.min, "max": it.max }));
    json!({ "difficulty": difficulty, "budget": budget })
}

fn describe_gates(gates: &v1::Gates) -> Value {
    let then = |gate: &v1::gates::Gate| match gate.then() {
        v1::gates::Then::Tell | v1::gates::Then::Unspecified => "tell",
        v1::gates::Then::RollBack => "roll_back",
        v1::gates::Then::Stop => "stop",
    };
    let of_suite = |gate: &v1::gates::Gate| {
        let suite = Some(&gate.suite).filter(|suite| !suite.is_empty());
        json!({ "suite": suite, "margin": gate.margin, "then": then(gate) })
    };
    let least = |gate: &Option<v1::gates::Gate>| {
        gate.as_ref().map(|gate| json!({ "least": gate.margin, "then": then(gate) }))
    };
    let most = |gate: &Option<v1::gates::Gate>| {
        gate.as_ref().map(|gate| json!({ "most": gate.margin, "then": then(gate) }))
    };
    let rates: Vec<Value> = gates.pass_rate.iter().chain(&gates.pass_rates).map(of_suite).collect();
    let mut section = json!({
        "perplexity": gates.perplexity.iter().map(of_suite).collect::<Vec<_>>(),
        "diversity": least(&gates.diversity),
        "entropy": least(&gates.entropy),
        "dropped_tokens": most(&gates.dropped_tokens),
        "divergence": most(&gates.divergence),
        "patience": gates.patience,
    });
    if !rates.is_empty() {
        as_section(&mut section).insert("pass_rate".into(), json!(rates));
    }
    section
}

#[cfg(test)]
mod tests;
