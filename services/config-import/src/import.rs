//! Turns a configuration into a spec, and checks it.

use serde_json::json;
use spec::{FieldError, RunSpec};

use crate::{
    data_files,
    flat_config::FlatConfig,
    import_options::ImportOptions,
    key_rules::ProgramTable,
    program::SourceProgram,
    raft_section,
    report::{ImportError, ImportedSpec},
    setting::Setting,
    settings::ConfigSettings,
    spec_draft::SpecDraft,
    spec_tree::{MissingForm, SpecTree, write_value},
    tables::{find_table, list_tables},
    task::TrainingTask,
    training_section::{self, COPY_IN_4_BITS},
};

/// Converts a configuration into a spec, with a note on each key. Fails if the configuration cannot
/// be read, its program is not recognised or a value cannot be used. Fields that the configuration
/// does not determine are not a failure; the result lists them.
pub fn import_config(text: &str, options: &ImportOptions<'_>) -> Result<ImportedSpec, ImportError> {
    let config = FlatConfig::parse(text)?;
    let table = match options.program {
        Some(program) => find_table(program),
        None => recognize_program(&config)?,
    };
    let mut settings = ConfigSettings::read(&config, table)?;
    let task = resolve_task(&config, &settings, table, options)?;
    settings.add_defaults(table, task);
    let mut draft = SpecDraft { options, task, settings, tree: SpecTree::default() };
    draft.tree.set_value("name", options.name);
    add_base(&mut draft);
    data_files::add_data(&mut draft);
    if task != TrainingTask::Sft {
        raft_section::add_raft(&mut draft)?;
    }
    training_section::add_training(&mut draft);
    check_draft(&config, &draft)?;
    let program = table.program;
    let head = format!("# Imported from a configuration of {}.\n", program.title());
    Ok(ImportedSpec {
        program: program.as_str(),
        task: task.as_str(),
        spec: head + &draft.tree.to_yaml(MissingForm::Comment),
        missing: draft.tree.missing_fields(),
        notes: draft.settings.into_notes(),
    })
}

/// Finds the program whose table knows most of the keys.
fn recognize_program(config: &FlatConfig<'_>) -> Result<&'static ProgramTable, ImportError> {
    let known = |table: &ProgramTable| {
        config.keys.keys().filter(|key| table.find_rule(key).is_some()).count()
    };
    let most = list_tables().map(known).max().unwrap_or(0);
    let best: Vec<_> = list_tables().filter(|table| known(table) == most).collect();
    match best[..] {
        _ if most == 0 => {
            let known = SourceProgram::ALL.map(SourceProgram::as_str).join(", ");
            Err(ImportError::Unrecognized { known })
        }
        [table] => Ok(table),
        _ => {
            let names: Vec<&str> = best.iter().map(|table| table.program.as_str()).collect();
            Err(ImportError::Ambiguous { programs: names.join(", ") })
        }
    }
}

fn resolve_task(
    config: &FlatConfig<'_>,
    settings: &ConfigSettings,
    table: &ProgramTable,
    options: &ImportOptions<'_>,
) -> Result<TrainingTask, ImportError> {
    if let Some(task) = options.task {
        return Ok(task);
    }
    let Some(word) = settings.text_of(Setting::Task) else {
        let mut marks = table.task_keys.iter();
        let mark = marks.find(|(key, _)| settings.has_key(key));
        return Ok(mark.map_or(table.task, |(_, task)| *task));
    };
    // LLaMA-Factory names only the kind of data in `stage`, and the loss apart.
    let loss = settings.words_of(Setting::Loss).unwrap_or_default();
    let by_loss = loss.first().and_then(|loss| TrainingTask::from_word(loss));
    let by_loss = by_loss.filter(|task| task.learns_preferences());
    match TrainingTask::from_word(&word) {
        Some(TrainingTask::Dpo) => Ok(by_loss.unwrap_or(TrainingTask::Dpo)),
        Some(task) => Ok(task),
        None => {
            let place = config.describe_place(settings.key_of(Setting::Task).unwrap_or_default());
            let known = TrainingTask::ALL.map(TrainingTask::as_str).join(", ");
            Err(ImportError::Task { place, task: word, known })
        }
    }
}

fn add_base(draft: &mut SpecDraft<'_>) {
    const FIELD: &str = "base.model";
    if let Some(seed) = draft.settings.number_of(Setting::Seed) {
        draft.set_field(Setting::Seed, "seed", seed);
    }
    let Some(written) = draft.settings.text_of(Setting::BaseModel) else {
        let remedy = "the configuration names no model to train";
        draft.tree.set_missing(FIELD, json!("org/name"), remedy);
        return;
    };
    let original = match written.strip_suffix(COPY_IN_4_BITS) {
        Some(original) => original.strip_suffix("-unsloth").unwrap_or(original),
        None => written.as_str(),
    };
    let revision = draft.settings.text_of(Setting::BaseRevision).filter(|it| it != "main");
    let model = match revision {
        Some(revision) => format!("{original}@{revision}"),
        None => original.to_owned(),
    };
    let advice = if original == written {
        ""
    } else {
        "the original of the 4-bit copy, which cannot be trained here; check that it exists; \
         `lora.quantize: nf4` holds it in 4 bits"
    };
    draft.settings.note_used(Setting::BaseRevision, FIELD, &write_value(&json!(model)));
    draft.set_with_advice(Setting::BaseModel, FIELD, model.as_str(), advice);
}

/// Checks all fields but the missing ones. An error names the key that the field came from.
fn check_draft(config: &FlatConfig<'_>, draft: &SpecDraft<'_>) -> Result<(), ImportError> {
    let yaml = draft.tree.to_yaml(MissingForm::Example);
    let parsed: RunSpec = spec::parse_yaml(&yaml).map_err(ImportError::Spec)?;
    let Err(source) = parsed.check_fields() else { return Ok(()) };
    let FieldError { field, .. } = &source;
    match draft.settings.field_key(field) {
        Some(key) => Err(ImportError::Field { place: config.describe_place(key), source }),
        None => Err(ImportError::Spec(spec::SpecError::from_field(&yaml, &source))),
    }
}
