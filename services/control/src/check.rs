//! Whether a spec makes sense, before anything is stored or started. What each section's fields
//! may be stands beside them.

use wire::SuiteName;

use crate::{
    spec::{BaseSpec, Measure, RaftSpec, RunSpec, SuiteSpec, WatchSpec},
    submit::SubmitError,
};

/// A field whose value cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {remedy} (R103)")]
pub struct FieldError {
    pub field: String,
    pub remedy: String,
}

pub(crate) type Checked = Result<(), FieldError>;

pub(crate) fn ensure(holds: bool, field: &str, remedy: impl Into<String>) -> Checked {
    if holds { Ok(()) } else { Err(FieldError { field: field.into(), remedy: remedy.into() }) }
}

pub(crate) fn within(field: &str, value: f64, low: f64, high: f64) -> Checked {
    ensure(
        value.is_finite() && (low..=high).contains(&value),
        field,
        format!("must be from {low} to {high}, not {value}"),
    )
}

pub(crate) fn count(field: &str, value: u32, low: u32, high: u32) -> Checked {
    within(field, f64::from(value), f64::from(low), f64::from(high))
}

/// A spec ends up in one fact, which is smaller.
const SPEC_BYTES_MAX: usize = 1 << 20;

/// Each is measured for every checkpoint.
const SUITES_MAX: usize = 64;

impl RunSpec {
    /// Reads a run spec and checks that it makes sense, as far as that shows without its files.
    ///
    /// # Errors
    /// When it is no YAML, has a key nobody knows, or a field cannot work.
    pub fn parse(yaml: &str) -> Result<Self, SubmitError> {
        let bytes = yaml.len();
        let remedy =
            format!("it has {bytes} bytes, the limit is {SPEC_BYTES_MAX}; put texts in files");
        ensure(bytes <= SPEC_BYTES_MAX, "spec", remedy)?;
        let spec: Self = serde_saphyr::from_str(yaml).map_err(SubmitError::Yaml)?;
        spec.check()?;
        Ok(spec)
    }

    /// # Errors
    /// The first field that cannot work, and what it should be.
    pub fn check(&self) -> Checked {
        check_name(&self.name)?;
        ensure(wire::Pool::new(self.pool.as_str()).is_ok(), "pool", "must be a short name")?;
        self.base.check()?;
        check_suites(&self.evals, self.raft.as_ref())?;
        match (&self.sft, &self.raft) {
            (Some(sft), None) => {
                sft.training.check("sft.training", 1)?;
                let constant = sft.training.learning_rate.values(1).is_empty();
                let remedy = "is one number: supervised training has one cycle";
                ensure(constant, "sft.training.learning_rate", remedy)?;
                sft.lora.as_ref().map_or(Ok(()), |lora| lora.check("sft.lora"))
            }
            (None, Some(raft)) => {
                ensure(
                    self.base.init.is_none(),
                    "base.init",
                    "a raft run needs a model that can already do some of its prompts; \
                     use base.checkpoint or base.model",
                )?;
                raft.check(&self.measured())
            }
            _ => ensure(false, "sft, raft", "write exactly one of the two sections"),
        }
    }
}

fn check_name(name: &str) -> Checked {
    let legal = wire::RunId::new(name).is_ok() && name.len() <= 48;
    ensure(legal, "name", "must be 1 to 48 of a-z, 0-9, '-' and '_'")
}

pub(crate) fn check_watch(spec: &WatchSpec) -> Checked {
    spec.name.as_deref().map_or(Ok(()), check_name)?;
    if let Some(base) = &spec.base {
        base.check()?;
        let remedy = "adapters belong to a model that is there; use base.model or base.checkpoint";
        ensure(base.init.is_none(), "base.init", remedy)?;
    }
    spec.until.map_or(Ok(()), |until| count("until", until, 1, u32::MAX))?;
    check_suites(&spec.evals, None)
}

impl BaseSpec {
    fn check(&self) -> Checked {
        let named = [self.checkpoint.is_some(), self.model.is_some(), self.init.is_some()];
        let one = named.into_iter().filter(|named| *named).count() == 1;
        ensure(one, "base", "write exactly one of checkpoint, model and init")?;
        let uploads = self.model.as_ref().is_some_and(|model| !model.starts_with("store:"));
        ensure(
            self.upload.is_none() || uploads,
            "base.upload",
            "is about a model that is not in the store yet; leave it away",
        )
    }
}

fn check_suites(suites: &[SuiteSpec], raft: Option<&RaftSpec>) -> Checked {
    let given = suites.len();
    let remedy = format!("{given} suites are given, the limit is {SUITES_MAX}");
    ensure(given <= SUITES_MAX, "evals", remedy)?;
    for (index, suite) in suites.iter().enumerate() {
        let field = |name: &str| format!("evals[{index}].{name}");
        let legal = SuiteName::new(suite.name.as_str());
        ensure(legal.is_ok(), &field("name"), "must be 1 to 64 of a-z, 0-9, '-' and '_'")?;
        let twice = suites.iter().take(index).any(|other| other.name == suite.name);
        ensure(!twice, &field("name"), format!("{:?} is used twice", suite.name))?;
        let at = format!("evals[{index}]");
        match (suite.measure(&at)?, raft) {
            (Measure::Text(text), _) => text.check(&at)?,
            (Measure::Prompts(prompts), Some(raft)) => prompts.check(&at, &raft.sampling)?,
            (Measure::Prompts(_), None) => {
                let remedy = "are sampled in raft runs alone; measure a text here";
                ensure(false, &field("prompts"), remedy)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAFT: &str = "
name: sums
base: { checkpoint: base-1 }
raft:
  prompts: prompts.jsonl
  verifier: { exact: { extract: '#(\\d+)' } }
";

    fn parse(text: &str) -> RunSpec {
        serde_saphyr::from_str(text).unwrap()
    }

    #[test]
    fn a_short_spec_is_whole() {
        assert_eq!(parse(RAFT).check(), Ok(()));
    }

    #[test]
    fn prompts_are_held_out_by_file_share_or_count_and_chats_have_a_system_prompt() {
        for tail in [
            "heldout: h.jsonl",
            "heldout: { share: 0.1 }",
            "heldout: { count: 5 }",
            "chat: true",
            "chat: { system: Be kind. }",
            "allow_overlap: true",
        ] {
            assert_eq!(parse(&format!("{RAFT}  {tail}\n")).check(), Ok(()), "{tail}");
        }
        for (tail, expected) in
            [("heldout: { shar: 1 }", "{share: 0.1}"), ("chat: { sistem: a }", "{system: TEXT}")]
        {
            let error =
                serde_saphyr::from_str::<RunSpec>(&format!("{RAFT}  {tail}\n")).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_key_nobody_knows_is_an_error_that_names_it() {
        let error =
            serde_saphyr::from_str::<RunSpec>(&RAFT.replace("prompts:", "promts:")).unwrap_err();
        assert!(error.to_string().contains("promts"), "{error}");
    }

    #[test]
    fn a_file_alone_is_a_suite_whose_text_holds_two_contexts() {
        let n_ctx = |text: &str, bytes| SuiteSpec::of_file(text, bytes).n_ctx;
        let cases = [(0, 16), (600, 32), (8191, 256), (8192, 512), (1 << 40, 512)];
        for (bytes, expected) in cases {
            assert_eq!(n_ctx("a/held out.txt", bytes), Some(expected), "{bytes} bytes");
        }
        assert_eq!(n_ctx("pairs.jsonl", 100), Some(512), "a line is a context of its own");
        let suite = SuiteSpec::of_file("a/Held out.txt", 1);
        assert_eq!(suite.name, "held-out");
        let spec = crate::WatchSpec { evals: vec![suite.clone()], ..Default::default() };
        assert_eq!(check_watch(&spec), Ok(()));
        let twice = crate::WatchSpec { evals: vec![suite.clone(), suite], ..Default::default() };
        assert_eq!(check_watch(&twice).unwrap_err().field, "evals[1].name");
    }

    #[test]
    fn only_a_raft_run_samples_prompts() {
        let prompts = "evals: [{ name: a, prompts: a.jsonl, verifier: { exact: {} } }]\n";
        assert_eq!(parse(&format!("{prompts}{RAFT}")).check(), Ok(()));
        let sft = "base: { checkpoint: base-1 }\nsft: { data: data.jsonl }\n";
        let error = parse(&format!("{prompts}{sft}")).check().unwrap_err();
        assert_eq!(error.field, "evals[0].prompts", "{error}");
        let watched: crate::WatchSpec = serde_saphyr::from_str(prompts).unwrap();
        assert_eq!(check_watch(&watched).unwrap_err().field, "evals[0].prompts");
    }

    #[test]
    fn each_senseless_value_is_named_with_its_remedy() {
        let cases = [
            ("  verifier: { exact: {} }\n  cycles: 0", "raft.cycles"),
            ("  verifier: {}", "raft.verifier"),
            ("  verifier: { exact: {} }\n  heldout: { share: 1 }", "raft.heldout.share"),
            ("  verifier: { exact: {} }\n  heldout: { share: 0.1, count: 2 }", "raft.heldout"),
            ("  verifier: { exact: {}, numeric: {} }", "raft.verifier"),
            ("  verifier: { regex: { pattern: '(' } }", "raft.verifier.regex"),
            ("  verifier: { exact: {} }\n  sampling: { top_p: 2 }", "raft.sampling.top_p"),
            (
                "  verifier: { exact: {} }\n  sampling: { max_new_tokens: 1024 }",
                "raft.training.max_tokens",
            ),
            (
                "  verifier: { exact: {} }\n  lora: { target_modules: [lm_head] }",
                "raft.lora.target_modules",
            ),
            (
                "  verifier: { exact: {} }\n  training: { learning_rate: 0 }",
                "raft.training.learning_rate",
            ),
        ];
        let head = RAFT.split("  verifier").next().unwrap();
        for (tail, field) in cases {
            let error = parse(&format!("{head}{tail}\n")).check().unwrap_err();
            assert_eq!(error.field, field, "{error}");
        }
    }
}
