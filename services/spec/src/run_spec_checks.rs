//! Checks a whole spec before anything is stored or started. The bounds of each section's fields
//! are in that section's own module.

use wire::SuiteName;

use crate::{
    across::MergeSpec,
    data_source::{check_columns, names_rows},
    error::{FieldError, SpecError},
    eval_suite::{SuiteMeasure, SuiteSpec},
    field_checks::{FieldResult, check_count, ensure_field},
    queue::QueueSpec,
    raft::RaftSpec,
    run_spec::{RunSpec, WatchSpec},
    sweep::check_sweep,
    yaml::parse_checked,
};

/// The resolved spec must fit in one fact, which has a smaller limit.
const SPEC_BYTES_MAX: usize = 1 << 20;

/// Leaves room for a number behind the name in the id of a run.
const RUN_NAME_BYTES_MAX: usize = 48;

/// Each suite is measured at every checkpoint.
const SUITES_MAX: usize = 64;

impl RunSpec {
    /// Parses a run spec from YAML, at most 1 MiB, and checks its fields, without reading the files
    /// it names. Fails as `check_fields` does, or if the YAML has another form.
    pub fn parse(yaml: &str) -> Result<Self, SpecError> {
        let bytes = yaml.len();
        let remedy =
            format!("it has {bytes} bytes, the limit is {SPEC_BYTES_MAX}; put texts in files");
        let sized = ensure_field(bytes <= SPEC_BYTES_MAX, "spec", remedy);
        sized.map_err(|error| SpecError::from_field("", &error))?;
        parse_checked(yaml, Self::check_fields)
    }

    /// Checks all fields of the spec. The error advises how to correct the first wrong one.
    pub fn check_fields(&self) -> FieldResult {
        check_run_name(&self.name)?;
        ensure_field(wire::Pool::new(self.pool.as_str()).is_ok(), "pool", "must be a short name")?;
        self.base.check_fields("base")?;
        // Suites inherit it, and errors must name where it is written.
        self.raft.as_ref().map_or(Ok(()), |raft| raft.sampling.check_fields(raft.cycles))?;
        check_suites(&self.evals, self.raft.as_ref())?;
        self.queue.as_ref().map_or(Ok(()), QueueSpec::check_fields)?;
        self.sweep.as_ref().map_or(Ok(()), check_sweep)?;
        self.check_merge()?;
        self.promote.as_ref().map_or(Ok(()), |it| it.check_fields(self.raft.as_ref()))?;
        match (&self.sft, &self.raft) {
            (Some(sft), None) => {
                let remedy = "is trained further by a raft run alone; omit it, or merge it first";
                ensure_field(self.base.adapter.is_none(), "base.adapter", remedy)?;
                check_columns("sft.columns", &sft.columns)?;
                sft.training.check_fields("sft.training", 1)?;
                let constant = sft.training.learning_rate.cycle_values(1).is_empty();
                let remedy = "is one number: supervised training has one cycle";
                ensure_field(constant, "sft.training.learning_rate", remedy)?;
                let is_adapter = sft.training.across.is_none() || sft.lora.is_some();
                let remedy = "needs `sft.lora`: only an adapter is trained on several boxes";
                ensure_field(is_adapter, "sft.training.across", remedy)?;
                sft.lora.as_ref().map_or(Ok(()), |lora| lora.check_fields("sft.lora"))
            }
            (None, Some(raft)) => {
                ensure_field(
                    self.base.init.is_none(),
                    "base.init",
                    "a raft run needs a model that can already do some of its prompts; \
                     use base.checkpoint or base.model",
                )?;
                raft.check_fields(&self.measured_suites())
            }
            (Some(_), Some(_)) => {
                ensure_field(false, "raft", "a run has a section sft or a section raft, not both")
            }
            (None, None) => ensure_field(
                false,
                "spec",
                "has neither a section raft nor a section sft; `flotilla run new` writes one",
            ),
        }
    }

    /// Checks that there is a text by which a soup can be chosen, and that A is not frozen if it is
    /// replaced.
    fn check_merge(&self) -> FieldResult {
        let (section, training, lora) = match (&self.sft, &self.raft) {
            (Some(sft), _) => ("sft", &sft.training, sft.lora.as_ref()),
            (None, Some(raft)) => ("raft", &raft.training, Some(&raft.lora)),
            (None, None) => return Ok(()),
        };
        let merge = training.across.as_ref().map(|across| across.merge);
        let freezes_a = lora.is_some_and(|lora| lora.freeze_a);
        let field = format!("{section}.training.across.merge");
        let remedy =
            "stack replaces A, which `lora.freeze_a` keeps; use average, which is exact then";
        ensure_field(merge != Some(MergeSpec::Stack) || !freezes_a, &field, remedy)?;
        let is_soup = merge == Some(MergeSpec::Soup);
        let is_lines = |suite: &SuiteSpec| suite.text.as_deref().is_some_and(names_rows);
        ensure_field(
            !is_soup || self.evals.iter().any(is_lines),
            &field,
            "soup needs `evals` with a text of {\"prompt\", \"completion\"} lines (.jsonl), by \
             whose likelihood it chooses",
        )
    }
}

/// Returns true for a name that can begin ids.
pub(crate) fn is_run_name(name: &str) -> bool {
    wire::RunId::new(name).is_ok() && name.len() <= RUN_NAME_BYTES_MAX
}

/// Requires a name that can begin the ids of runs.
pub fn check_run_name(name: &str) -> Result<(), FieldError> {
    let remedy = format!(
        "must be 1 to {RUN_NAME_BYTES_MAX} of a-z, 0-9, '-' and '_', and start with a letter or \
         digit"
    );
    ensure_field(is_run_name(name), "name", remedy)
}

impl WatchSpec {
    /// Parses a watch spec from YAML and checks its fields, without reading the files it names.
    /// Fails as `check_fields` does, or if the YAML has another form.
    pub fn parse(yaml: &str) -> Result<Self, SpecError> {
        parse_checked(yaml, Self::check_fields)
    }

    /// Checks all fields of the spec. The error advises how to correct the first wrong one.
    pub fn check_fields(&self) -> FieldResult {
        self.name.as_deref().map_or(Ok(()), check_run_name)?;
        if let Some(base) = &self.base {
            base.check_fields("base")?;
            let remedy = "adapters need an existing model; use base.model or base.checkpoint";
            ensure_field(base.init.is_none(), "base.init", remedy)?;
        }
        self.until.map_or(Ok(()), |until| check_count("until", until, 1, u32::MAX))?;
        check_suites(&self.evals, None)
    }
}

/// Checks number, unique names and fields. Suites of prompts need a RAFT run.
fn check_suites(suites: &[SuiteSpec], raft: Option<&RaftSpec>) -> FieldResult {
    let given = suites.len();
    let remedy = format!("{given} suites are given, the limit is {SUITES_MAX}");
    ensure_field(given <= SUITES_MAX, "evals", remedy)?;
    for (index, suite) in suites.iter().enumerate() {
        let field = |name: &str| format!("evals[{index}].{name}");
        let legal = SuiteName::new(suite.name.as_str());
        let remedy = "must be 1 to 64 of a-z, 0-9, '-' and '_', and start with a letter or digit";
        ensure_field(legal.is_ok(), &field("name"), remedy)?;
        let twice = suites.iter().take(index).any(|other| other.name == suite.name);
        ensure_field(!twice, &field("name"), format!("{:?} is used twice", suite.name))?;
        let at = format!("evals[{index}]");
        check_columns(&field("columns"), &suite.columns)?;
        match (suite.resolve_kind(&at)?, raft) {
            (SuiteMeasure::Text(text), _) => text.check_fields(&at)?,
            (SuiteMeasure::Prompts(prompts), Some(raft)) => {
                prompts.check_fields(&at, &raft.sampling)?;
            }
            (SuiteMeasure::Prompts(_), None) => {
                let remedy = "are sampled only in raft runs; measure a text here";
                ensure_field(false, &field("prompts"), remedy)?;
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
    fn a_run_name_is_short_and_starts_with_a_letter_or_digit() {
        for name in ["-x", "_x", "Bad Name", "", &"x".repeat(49)] {
            let remedy = check_run_name(name).unwrap_err().remedy;
            assert!(remedy.contains("1 to 48") && remedy.contains("start with"), "{remedy}");
        }
        assert_eq!(check_run_name(&"0".repeat(48)), Ok(()));
    }

    #[test]
    fn a_short_spec_is_whole() {
        assert_eq!(parse(RAFT).check_fields(), Ok(()));
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
            assert_eq!(parse(&format!("{RAFT}  {tail}\n")).check_fields(), Ok(()), "{tail}");
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
        let n_ctx = |text: &str, bytes| SuiteSpec::for_file(text, bytes).n_ctx;
        let cases = [(0, 16), (600, 32), (8191, 256), (8192, 512), (1 << 40, 512)];
        for (bytes, expected) in cases {
            assert_eq!(n_ctx("a/held out.txt", bytes), Some(expected), "{bytes} bytes");
        }
        assert_eq!(n_ctx("pairs.jsonl", 100), Some(512), "a line is a context of its own");
        let suite = SuiteSpec::for_file("a/Held out.txt", 1);
        assert_eq!(suite.name, "held-out");
        let spec = WatchSpec { evals: vec![suite.clone()], ..Default::default() };
        assert_eq!(spec.check_fields(), Ok(()));
        let twice = WatchSpec { evals: vec![suite.clone(), suite], ..Default::default() };
        assert_eq!(twice.check_fields().unwrap_err().field, "evals[1].name");
    }

    #[test]
    fn only_models_outside_of_the_table_have_other_modules() {
        let own = parse(&format!("{RAFT}  lora: {{ target_modules: [q_proj, v_prj] }}\n"));
        assert_eq!(own.check_fields(), Ok(()));
        let error = own.check_usual_modules().unwrap_err();
        assert_eq!(error.field, "raft.lora.target_modules[1]");
        assert!(error.remedy.ends_with("did you mean v_proj?"), "{error}");
        let sft =
            "base: { checkpoint: base-1 }\nsft: { data: a.jsonl, lora: { target_modules: [x] } }";
        let error = parse(sft).check_usual_modules().unwrap_err();
        assert_eq!(error.field, "sft.lora.target_modules[0]");
        assert_eq!(parse(RAFT).check_usual_modules(), Ok(()));
    }

    #[test]
    fn only_a_raft_run_samples_prompts() {
        let prompts = "evals: [{ name: a, prompts: a.jsonl, verifier: { exact: {} } }]\n";
        assert_eq!(parse(&format!("{prompts}{RAFT}")).check_fields(), Ok(()));
        let cold = format!("{prompts}{RAFT}  sampling: {{ temperature: -1 }}\n");
        let error = parse(&cold).check_fields().unwrap_err();
        assert_eq!(error.field, "raft.sampling.temperature", "not the suite that inherits it");
        let sft = "base: { checkpoint: base-1 }\nsft: { data: data.jsonl }\n";
        let error = parse(&format!("{prompts}{sft}")).check_fields().unwrap_err();
        assert_eq!(error.field, "evals[0].prompts", "{error}");
        let watched: WatchSpec = serde_saphyr::from_str(prompts).unwrap();
        assert_eq!(watched.check_fields().unwrap_err().field, "evals[0].prompts");
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
                "  verifier: { exact: {} }\n  lora: { target_modules: [q proj] }",
                "raft.lora.target_modules[0]",
            ),
            (
                "  verifier: { exact: {} }\n  training: { learning_rate: 0 }",
                "raft.training.learning_rate",
            ),
            (
                "  verifier: { exact: {} }\n  objective: rloo\n  training: { across: {} }",
                "raft.training.across",
            ),
            (
                "  verifier: { exact: {} }\n  training: { across: { merge: soup } }",
                "raft.training.across.merge",
            ),
            (
                "  verifier: { exact: {} }\n  lora: { freeze_a: true }\n  training: { across: { merge: \
                 stack } }",
                "raft.training.across.merge",
            ),
            (
                "  verifier: { exact: {} }\n  lora: { quantize: nf4 }\n  proof: { canary: true }",
                "raft.lora.quantize",
            ),
            ("  objective: ssd\n  heldout: a.jsonl", "raft.heldout"),
            ("  objective: ssd\n  curriculum: { budget: { max: 16 } }", "raft.curriculum"),
            ("  objective: ssd\n  selection: { min_reward: 1 }", "raft.selection.min_reward"),
            ("  objective: ssd\n  selection: { adaptive: {} }", "raft.selection.min_reward"),
            ("  objective: ssd\n  selection: { mixed: true }", "raft.selection.mixed"),
        ];
        let head = RAFT.split("  verifier").next().unwrap();
        for (tail, field) in cases {
            let error = parse(&format!("{head}{tail}\n")).check_fields().unwrap_err();
            assert_eq!(error.field, field, "{error}");
            let says_why = error.remedy.contains("how hard a prompt is");
            assert_eq!(says_why, field == "raft.curriculum", "{error}");
        }
    }
}
