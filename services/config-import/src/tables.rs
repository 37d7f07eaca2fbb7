//! The tables of all programs.

mod axolotl;
mod halo_forge;
mod llama_factory;
mod reasons;
mod training_arguments;
mod trl;
mod unsloth;

use crate::{key_rules::ProgramTable, program::SourceProgram};

/// Returns the table of a program.
pub(crate) fn find_table(program: SourceProgram) -> &'static ProgramTable {
    match program {
        SourceProgram::Axolotl => &axolotl::TABLE,
        SourceProgram::Trl => &trl::TABLE,
        SourceProgram::LlamaFactory => &llama_factory::TABLE,
        SourceProgram::Unsloth => &unsloth::TABLE,
        SourceProgram::HaloForge => &halo_forge::TABLE,
    }
}

/// Returns the tables of all programs.
pub(crate) fn list_tables() -> impl Iterator<Item = &'static ProgramTable> {
    SourceProgram::ALL.into_iter().map(find_table)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::task::TrainingTask;

    #[test]
    fn every_default_has_a_key_and_the_form_of_its_setting() {
        for table in list_tables() {
            for task in TrainingTask::ALL {
                for (setting, text) in table.default_values(task) {
                    let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
                    let read = setting.parse_value(&value);
                    assert!(read.is_ok(), "{}: {setting:?}: {text}", table.program.title());
                    let key = table.main_key(setting);
                    assert!(key.is_some(), "{}: {setting:?}", table.program.title());
                }
            }
        }
    }

    #[test]
    fn every_key_has_one_rule() {
        for table in list_tables() {
            let mut seen = BTreeSet::new();
            for (pattern, _) in table.rules.iter().flat_map(|rules| rules.iter()) {
                let program = table.program.title();
                assert!(seen.insert(*pattern), "{program}: {pattern} is there twice");
                let (place, _) = table.find_rule(pattern.trim_end_matches('*')).unwrap();
                let place = table.rules.iter().flat_map(|rules| rules.iter()).nth(place).unwrap();
                assert_eq!(place.0, *pattern, "{program}: an earlier rule hides {pattern}");
            }
        }
    }
}
