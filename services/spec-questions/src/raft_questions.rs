//! The questions about reward-ranked fine-tuning.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use spec::{DraftBase, RunDraft, VerifierSpec};
use terminal_output::{Question, print_message};

use crate::answers::{
    ask_data, ask_model, check_model, find_dataset, has_chat_template, locate_base, locate_data,
    read_prompts,
};

const PROMPTS_QUESTION: &str = "Prompts (a file, or hub:org/name)";

/// The answers about a RAFT run that are known before any question.
#[derive(Debug, Clone)]
pub struct RaftAnswers {
    pub name: String,
    pub pool: String,
    pub cycles: u32,
    pub base: Option<DraftBase>,
    pub prompts: Option<PathBuf>,
    /// The name of a built-in verifier, or the YAML of one.
    pub verifier: Option<String>,
    /// If false, a missing answer is an error that names an option of `run new`.
    pub may_ask: bool,
}

impl RaftAnswers {
    /// Asks for base and prompts. The verifier that fits the prompts of a file is taken; prompts
    /// that none fits are refused.
    pub(crate) fn for_first_run() -> anyhow::Result<Self> {
        let base = Some(DraftBase::Model(ask_model()?));
        let check = |file: &Path| choose_verifier(file).map(drop);
        let prompts = ask_data(PROMPTS_QUESTION, "prompts.jsonl", check)?;
        let verifier = match find_dataset(&prompts)? {
            Some(_) => None,
            None => Some(choose_verifier(&prompts)?.to_owned()),
        };
        let (name, pool) = ("mine".into(), "default".into());
        Ok(Self { name, pool, cycles: 5, base, prompts: Some(prompts), verifier, may_ask: true })
    }

    /// Asks for the missing answers, and returns the draft of the spec that will be `file`.
    pub fn ask_draft(self, file: &Path) -> anyhow::Result<RunDraft> {
        let base = match &self.base {
            Some(base) => base.clone(),
            None => DraftBase::Model(self.ask(
                ("Model (a directory, or org/name)", None, "pass --model or --checkpoint"),
                check_model,
            )?),
        };
        let prompts: PathBuf = match &self.prompts {
            Some(prompts) => prompts.clone(),
            None => {
                let question = (PROMPTS_QUESTION, None, "pass --prompts");
                self.ask(question, |file| read_prompts(Path::new(file)).map(drop))?.into()
            }
        };
        let entries = read_prompts(&prompts)?;
        let verifier = match &self.verifier {
            Some(verifier) => verifier.clone(),
            None => {
                let question = format!("Verifier ({})", VerifierSpec::NAMES.join(", "));
                let suggested = entries.as_deref().and_then(RunDraft::suggest_verifier);
                let remedy = verifier_remedy(&prompts);
                let verifier = self.ask((&question, suggested, &remedy), check_verifier)?;
                if !self.may_ask {
                    print_message(&format!("verifier {verifier}, which fits these prompts"));
                }
                verifier
            }
        };
        check_verifier(&verifier)?;
        // A data set of the hub is taken to have enough.
        let count = entries.map_or(RunDraft::HELDOUT_FROM, |entries| entries.len());
        let heldout = RunDraft::count_heldout(count);
        if heldout.is_none() {
            print_message(&format!(
                "no pass rate will be measured: of {count} prompts none are held out; with {} \
                 there would be, or set raft.heldout in the spec",
                RunDraft::HELDOUT_FROM
            ));
        }
        let is_chat = matches!(&base, DraftBase::Model(model) if has_chat_template(model));
        let base = match base {
            DraftBase::Model(model) => locate_base(file, model),
            checkpoint @ DraftBase::Checkpoint(_) => checkpoint,
        };
        let (prompts, Self { name, pool, cycles, .. }) = (locate_data(file, &prompts), self);
        Ok(RunDraft { name, pool, base, prompts, verifier, heldout, is_chat, cycles })
    }

    fn ask(
        &self,
        (text, default, remedy): (&str, Option<&str>, &str),
        check: impl Fn(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        let question = Question { text, default, remedy };
        if self.may_ask { question.ask(check) } else { question.use_default() }
    }
}

/// Returns the verifier that fits the prompts of a file.
fn choose_verifier(prompts: &Path) -> anyhow::Result<&'static str> {
    let entries = read_prompts(prompts)?;
    let suggested = entries.as_deref().and_then(RunDraft::suggest_verifier);
    suggested.with_context(|| {
        format!(
            "not every prompt of {} has `answer`, so no verifier can be chosen; add it, or run \
             `flotilla run new` with --verifier (V103)",
            prompts.display()
        )
    })
}

/// Returns the remedy for prompts that suggest no verifier.
fn verifier_remedy(prompts: &Path) -> String {
    let (shown, names) = (prompts.display(), VerifierSpec::NAMES.join(", "));
    let reason = match find_dataset(prompts) {
        Ok(Some(_)) => format!("the prompts of {shown} are not read yet"),
        _ => format!("not every prompt of {shown} has `answer`"),
    };
    format!("{reason}, so no verifier can be chosen; pass --verifier NAME (one of {names})")
}

/// Checks that it is a built-in verifier or the YAML of one.
fn check_verifier(given: &str) -> anyhow::Result<()> {
    if !given.contains([':', '{']) && !VerifierSpec::NAMES.contains(&given) {
        let similar = spec::find_similar(given, VerifierSpec::NAMES.iter().copied());
        let similar = similar.map_or(String::new(), |name| format!(", did you mean {name}?"));
        bail!(
            "{given}: no such verifier{similar}; the built-in ones are {} (V103)",
            VerifierSpec::NAMES.join(", ")
        );
    }
    let parsed: VerifierSpec = spec::parse_yaml(&RunDraft::verifier_section(given))?;
    parsed.to_checked_proto("verifier").map(drop).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_is_checked_before_a_spec_is_written() {
        let refused = |given: &str| format!("{:#}", check_verifier(given).unwrap_err());
        assert!(refused("numerc").contains("did you mean numeric?"));
        assert!(refused("exact: { extrac: a }").contains("extrac"));
        assert!(check_verifier("exact: { extract: '(a)' }").is_ok());
        let remedy = verifier_remedy(Path::new("sft.jsonl"));
        assert!(remedy.starts_with("not every prompt of sft.jsonl has `answer`"), "{remedy}");
        assert!(remedy.contains("pass --verifier NAME (one of exact, "), "{remedy}");
    }

    #[test]
    fn a_first_run_has_prompts_that_a_verifier_fits() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("p.jsonl");
        std::fs::write(&file, "{\"prompt\": \"1+1=\", \"answer\": 2}").unwrap();
        assert_eq!(choose_verifier(&file).unwrap(), "numeric");
        std::fs::write(&file, "{\"prompt\": \"1+1=\"}").unwrap();
        let refused = choose_verifier(&file).unwrap_err().to_string();
        assert!(refused.contains("p.jsonl has `answer`") && refused.contains("V103"), "{refused}");
    }

    #[test]
    fn without_questions_a_missing_answer_names_its_option() {
        let directory = tempfile::tempdir().unwrap();
        let prompts = directory.path().join("p.jsonl");
        std::fs::write(&prompts, "{\"prompt\": \"1+1=\", \"answer\": 2}").unwrap();
        let known = RaftAnswers {
            name: "mine".into(),
            pool: "default".into(),
            cycles: 3,
            base: Some(DraftBase::Model("org/name".into())),
            prompts: Some(prompts),
            verifier: None,
            may_ask: false,
        };
        let file = directory.path().join("mine.yaml");
        let draft = known.clone().ask_draft(&file).unwrap();
        assert_eq!((draft.prompts.as_str(), draft.verifier.as_str()), ("p.jsonl", "numeric"));
        let dataset =
            RaftAnswers { prompts: Some("hub:org/set:main/train".into()), ..known.clone() };
        let refused = dataset.clone().ask_draft(&file).unwrap_err().to_string();
        assert!(
            refused.starts_with("the prompts of hub:org/set:main/train are not read"),
            "{refused}"
        );
        let judged = RaftAnswers { verifier: Some("numeric".into()), ..dataset };
        let draft = judged.ask_draft(&file).unwrap();
        assert_eq!((draft.prompts.as_str(), draft.heldout), ("hub:org/set:main/train", Some(20)));
        let refused = RaftAnswers { base: None, ..known }.ask_draft(&file).unwrap_err();
        assert_eq!(refused.to_string(), "pass --model or --checkpoint (A102)");
    }
}
