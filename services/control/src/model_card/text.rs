//! The sections of a card on the origin of a model.

use std::fmt::Write;

use wire::v1;

use super::{CardFacts, ModelForm, ModelSource, inline_code};
use crate::explain::LineageStep;

pub(super) fn introduction(facts: &CardFacts<'_>) -> String {
    let v1::Checkpoint { run, cycle, .. } = &facts.checkpoint;
    let what = match facts.request.form {
        ModelForm::Gguf { weight_type } => format!("A GGUF file ({weight_type})"),
        _ if facts.is_adapter() => "A LoRA adapter".to_owned(),
        ModelForm::Stored | ModelForm::Merged => "A model".to_owned(),
    };
    let kind = match facts.run.kind_name() {
        "raft" => format!("cycle {cycle} of the RAFT run"),
        "sft" => "the supervised run".to_owned(),
        _ => "the training".to_owned(),
    };
    format!(
        "# {}\n\n{what} made by {kind} {} with Flotilla, from {}. This card is derived from the log \
         of the run.\n",
        facts.model_name(),
        inline_code(run),
        describe_source(&facts.origin.source)
    )
}

fn describe_source(source: &ModelSource) -> String {
    match source {
        ModelSource::Hub { revision, .. } => {
            format!("{} at commit {}", inline_code(&revision.repo), inline_code(&revision.commit))
        }
        ModelSource::Local(name) => format!("the local model {}", inline_code(name)),
        ModelSource::Random(seed) => format!("random weights of seed {seed}"),
        ModelSource::Unknown => "a model that the log does not name".to_owned(),
    }
}

pub(super) fn lineage_section(facts: &CardFacts<'_>) -> String {
    let v1::Checkpoint { run, cycle, step, steps, tree, engine, .. } = &facts.checkpoint;
    let mut text = "## Lineage\n\n".to_owned();
    let mut push = |name: &str, value: String| {
        let _ = writeln!(text, "- {name}: {value}");
    };
    let base = describe_source(&facts.origin.source);
    push("base", format!("{base}, manifest {}", inline_code(&facts.origin.base_manifest)));
    let ancestors = facts.origin.ancestors.iter().map(|name| inline_code(name));
    let ancestors: Vec<String> = ancestors.collect();
    if !ancestors.is_empty() {
        push("trained from the checkpoints", ancestors.join(", "));
    }
    if let Some(adapter) = &facts.origin.adapter {
        push("continues the adapter", inline_code(adapter));
    }
    let forked = facts.run.spec.forked_from();
    if !forked.is_empty() {
        push("forked from", inline_code(&forked));
    }
    let tried = facts.run.spec.trial_of();
    if !tried.is_empty() {
        push("trial of an objective on", inline_code(&tried));
    }
    let seed = facts.run.spec.seed;
    push("run", format!("{}, {}, seed {seed}", inline_code(run), facts.run.kind_name()));
    push("checkpoint", format!("cycle {cycle}, step {step} of {steps}"));
    push("manifest", inline_code(&tree.clone().unwrap_or_default().manifest));
    if !engine.is_empty() {
        push("trainer", inline_code(engine));
    }
    let trained = facts.trainings.iter().filter(|step| step.order.is_some());
    let rows: String = trained.map(training_row).collect();
    if !rows.is_empty() {
        text.push_str("\n| training | from | examples | data | steps | loss |\n");
        text.push_str("|---|---|---:|---|---:|---:|\n");
        text.push_str(&rows);
    }
    text
}

fn training_row(LineageStep { checkpoint, order, selected, from }: &LineageStep) -> String {
    let examples = match selected {
        Some(selected) => format!("{} of {} samples", selected.kept, selected.considered),
        None => "-".to_owned(),
    };
    let data = order.as_ref().and_then(|order| order.dataset.clone()).unwrap_or_default().digest;
    let v1::Checkpoint { cycle, step, loss, .. } = checkpoint;
    let data = inline_code(&data);
    format!("| cycle {cycle} | {from} | {examples} | {data} | {step} | {loss:.4} |\n")
}

pub(super) fn data_section(facts: &CardFacts<'_>) -> String {
    let mut text = "## Data\n\nBLAKE3 digests of the files that the run has read:\n\n".to_owned();
    let mut push = |name: &str, blob: Option<&v1::Blob>, count: u32| {
        let Some(blob) = blob else { return };
        let count = if count > 0 { format!(", {count} lines") } else { String::new() };
        let _ = writeln!(text, "- {name}: {}{count}", inline_code(&blob.digest));
    };
    match &facts.run.spec.kind {
        Some(v1::spec::Kind::Sft(sft)) => push("examples", sft.dataset.as_ref(), 0),
        Some(v1::spec::Kind::Raft(raft)) => {
            push("prompts", raft.prompts.as_ref(), raft.prompt_count);
            push("held-out prompts", raft.heldout.as_ref(), raft.heldout_count);
            for suite in &raft.prompt_suites {
                push(&format!("prompts of {}", suite.name), suite.prompts.as_ref(), suite.count);
            }
            let trial = raft.dataset.as_ref();
            push("samples of another run", trial.and_then(|it| it.lines.as_ref()), 0);
        }
        Some(v1::spec::Kind::Watched(_)) | None => {}
    }
    for suite in &facts.run.spec.suites {
        push(&format!("text of {}", suite.name), suite.text.as_ref(), 0);
    }
    for source in &facts.run.spec.data_sources {
        let fields = if source.fields.is_empty() {
            String::new()
        } else {
            format!(", for {}", source.fields.join(" and "))
        };
        let _ = writeln!(text, "- data set: {}{fields}", inline_code(&source.pinned));
    }
    text
}

pub(super) fn training_section(facts: &CardFacts<'_>) -> String {
    let mut text = "## Training\n\n".to_owned();
    let mut push = |name: &str, value: String| {
        let _ = writeln!(text, "- {name}: {value}");
    };
    let training = facts.training();
    if let Some(raft) = facts.run.raft_spec() {
        let objective = training.and_then(|training| training.objective.as_ref());
        push("objective", objective_text(objective));
        if let Some(verifier) = &raft.verifier {
            push("verifier", verifier_text(verifier));
        }
        let cycle = facts.checkpoint.cycle;
        let sampling = cycle::sampling_settings(raft, cycle, v1::Purpose::Train, "");
        if let Some(sampling) = sampling.filter(|_| raft.dataset.is_none()) {
            let count = raft.samples_per_prompt;
            push("samples", format!("{count} of each prompt; {}", sampling_text(&sampling)));
        }
        push("cycles planned", raft.cycles.to_string());
    }
    if let Some(training) = training {
        push("optimizer", optimizer_text(training));
        if let Some(lora) = &training.lora {
            let v1::Lora { r, alpha, target_modules, dropout, .. } = lora;
            let modules = target_modules.join(", ");
            let base = match lora.quantization() {
                v1::lora::Quantization::None => "",
                v1::lora::Quantization::Nf4 => ", base in nf4",
            };
            push("LoRA", format!("r {r}, alpha {alpha}, dropout {dropout}, on {modules}{base}"));
        }
    } else {
        push("settings", "not in the log; another program has trained it".to_owned());
    }
    text
}

fn objective_text(objective: Option<&v1::Objective>) -> String {
    let Some(objective) = objective else {
        return "likelihood of the selected samples".to_owned();
    };
    let settings = objective.settings.iter().map(|(name, value)| format!(", {name} {value}"));
    format!("{}{}", inline_code(&objective.name), settings.collect::<String>())
}

/// Names the kinds alone: settings may have paths and addresses.
fn verifier_text(verifier: &v1::Verifier) -> String {
    let name = inline_code(verifier.kind_name());
    let Some(v1::verifier::How::Chain(chain)) = &verifier.how else { return name };
    let stages = chain.stages.iter().filter_map(|stage| stage.verifier.as_ref());
    let stages: Vec<String> = stages.map(|stage| inline_code(stage.kind_name())).collect();
    format!("{name} of {}", stages.join(", "))
}

fn sampling_text(sampling: &v1::Sampling) -> String {
    let v1::Sampling { temperature, top_k, top_p, max_new_tokens } = sampling;
    format!(
        "temperature {temperature}, top_p {top_p}, top_k {top_k}, at most {max_new_tokens} tokens"
    )
}

fn optimizer_text(training: &v1::Training) -> String {
    let v1::Training { epochs, max_steps, batch_size, learning_rate, max_tokens, .. } = training;
    let length = match max_steps {
        0 => format!("{epochs} epochs"),
        steps => format!("at most {steps} steps"),
    };
    let schedule = training.schedule().as_str_name().to_lowercase();
    format!(
        "AdamW, learning rate {learning_rate} ({schedule}), batches of {batch_size}, {length}, \
         examples of at most {max_tokens} tokens"
    )
}
