//! All files of a spec, read and checked, and what is to be told of them. Nothing is stored yet.

use bytes::Bytes;
use tokio::sync::OnceCell;
use wire::v1::{self, DataReport};

use super::{
    chat::Template,
    error::DataError,
    examples::{self, Examples},
    model::ModelDir,
    prompts::{Manner, Prompts, has_conversations},
    room,
    split::{overlaps, split},
    statistics,
};
use crate::{
    Control, Files, SubmitError,
    base::blocking,
    spec::{
        BaseSpec, ChatSpec, HeldoutSpec, Measure, PromptSuite, RaftSpec, RunSpec, SftSpec,
        SuiteSpec, VerifierSpec,
    },
    submit::{read, text},
};

pub(crate) struct Prepared {
    pub suites: Vec<PreparedSuite>,
    pub kind: PreparedKind,
    pub report: DataReport,
}

/// One of `evals`.
pub(crate) enum PreparedSuite {
    Text { bytes: Bytes, format: v1::suite::Format },
    Prompts(Prompts),
}

pub(crate) enum PreparedKind {
    Sft { dataset: Bytes },
    Raft { prompts: Prompts, heldout: Option<Prompts> },
}

/// Reads a run's files, and its base's chat template once if there is a conversation.
pub(crate) struct Reader<'a> {
    control: &'a Control,
    /// `None`: nobody said what it is.
    base: Option<&'a BaseSpec>,
    files: &'a Files,
    now: jiff::Zoned,
    model: OnceCell<ModelDir>,
    template: OnceCell<Template>,
}

impl Control {
    /// # Errors
    /// The first thing wrong with the files.
    pub(crate) async fn prepare(
        &self,
        spec: &RunSpec,
        files: &Files,
    ) -> Result<Prepared, SubmitError> {
        let reader = Reader::new(self, Some(&spec.base), files);
        let mut report = DataReport::default();
        let kind = match (&spec.sft, &spec.raft) {
            (Some(sft), _) => reader.sft(sft, &mut report).await?,
            (None, Some(raft)) => reader.raft(raft, spec.seed, &mut report).await?,
            (None, None) => unreachable!("checked: one of the two is there"),
        };
        let trained = match (&kind, &spec.raft) {
            (PreparedKind::Raft { prompts, .. }, Some(raft)) => Some((raft, prompts)),
            _ => None,
        };
        let suites = reader.suites(&spec.evals, trained, &mut report).await?;
        Ok(Prepared { suites, kind, report })
    }
}

impl<'a> Reader<'a> {
    pub(crate) fn new(control: &'a Control, base: Option<&'a BaseSpec>, files: &'a Files) -> Self {
        Self {
            control,
            base,
            files,
            now: jiff::Zoned::now(),
            model: OnceCell::new(),
            template: OnceCell::new(),
        }
    }

    /// `trained`: what a RAFT run trains on, of which suites of prompts hold none.
    pub(crate) async fn suites(
        &self,
        evals: &[SuiteSpec],
        trained: Option<(&RaftSpec, &Prompts)>,
        report: &mut DataReport,
    ) -> Result<Vec<PreparedSuite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, suite) in evals.iter().enumerate() {
            let field = format!("evals[{index}]");
            suites.push(match (suite.measure(&field)?, trained) {
                (Measure::Text(suite), _) => {
                    self.text_suite(&format!("{field}.text"), suite.text, report).await?
                }
                (Measure::Prompts(suite), Some(trained)) => {
                    let field = format!("{field}.prompts");
                    self.prompt_suite(&field, &suite, trained, report).await?
                }
                (Measure::Prompts(_), None) => {
                    unreachable!("checked: suites of prompts are of RAFT runs")
                }
            });
        }
        Ok(suites)
    }

    async fn prompt_suite(
        &self,
        field: &str,
        suite: &PromptSuite<'_>,
        (raft, train): (&RaftSpec, &Prompts),
        report: &mut DataReport,
    ) -> Result<PreparedSuite, SubmitError> {
        let prompts = self.prompts(field, suite.prompts, &raft.chat).await?;
        self.tell(field, suite.prompts, &prompts, suite.verifier, report).await;
        report.warnings.extend(overlap(raft, (field, suite.prompts), train, &prompts)?);
        report.heldout_samples_per_cycle +=
            u64::from(prompts.count()) * u64::from(suite.samples_per_prompt);
        Ok(PreparedSuite::Prompts(prompts))
    }

    async fn text_suite(
        &self,
        field: &str,
        file: &str,
        report: &mut DataReport,
    ) -> Result<PreparedSuite, SubmitError> {
        if std::path::Path::new(file).extension().is_some_and(|extension| extension == "jsonl") {
            let bytes = self.examples(field, file, &ChatSpec::default(), report).await?.bytes();
            return Ok(PreparedSuite::Text { bytes, format: v1::suite::Format::Documents });
        }
        let bytes = read(field, file, self.files).await?;
        text(field, file, &bytes)?;
        Ok(PreparedSuite::Text { bytes, format: v1::suite::Format::Text })
    }

    async fn sft(
        &self,
        sft: &SftSpec,
        report: &mut DataReport,
    ) -> Result<PreparedKind, SubmitError> {
        let examples = self.examples("sft.data", &sft.data, &sft.chat, report).await?;
        let again = examples.duplicates();
        if again > 0 {
            let (file, all) = (&sft.data, examples.examples.len());
            let warning = format!("{file}: {again} of {all} examples stand in it more than once");
            report.warnings.push(warning);
        }
        Ok(PreparedKind::Sft { dataset: examples.bytes() })
    }

    async fn raft(
        &self,
        raft: &RaftSpec,
        seed: u64,
        report: &mut DataReport,
    ) -> Result<PreparedKind, SubmitError> {
        const PROMPTS: &str = "raft.prompts";
        const HELDOUT: &str = "raft.heldout";
        let file = &raft.prompts;
        let all = self.prompts(PROMPTS, file, &raft.chat).await?;
        let (train, heldout, heldout_file) = match &raft.heldout {
            None => (all, None, file),
            Some(HeldoutSpec::File(name)) => {
                let heldout = self.prompts(HELDOUT, name, &raft.chat).await?;
                (all, Some(heldout), name)
            }
            Some(HeldoutSpec::Split(by)) => {
                let held = by.held().expect("checked: a share or a count");
                let sides = split(&all, held, seed).map_err(|source| {
                    SubmitError::data(HELDOUT, DataError::Split { file: file.clone(), source })
                })?;
                (sides.0, Some(sides.1), file)
            }
        };
        let sides = [(PROMPTS, file, Some(&train)), (HELDOUT, heldout_file, heldout.as_ref())];
        for (field, file, prompts) in sides {
            let Some(prompts) = prompts else { continue };
            let tokens = self.tell(field, file, prompts, &raft.verifier, report).await;
            // What is held out is not trained on, however long.
            let Some(tokens) = tokens.filter(|_| field == PROMPTS) else { continue };
            let (max, made) = (raft.training.max_tokens, raft.sampling.max_new_tokens);
            let all = prompts.prompts.len();
            report.warnings.extend(room::crowded(file, (&tokens, all), max, made));
        }
        if let Some(heldout) = &heldout {
            let overlap = overlap(raft, (HELDOUT, heldout_file), &train, heldout)?;
            report.warnings.extend(overlap);
            let each = u64::from(raft.heldout_samples_per_prompt);
            report.heldout_samples_per_cycle = u64::from(heldout.count()) * each;
        }
        let prompts = match raft.prompts_per_cycle {
            0 => train.count(),
            some => some.min(train.count()),
        };
        report.samples_per_cycle = u64::from(prompts) * u64::from(raft.samples_per_prompt);
        Ok(PreparedKind::Raft { prompts: train, heldout })
    }

    /// What there is to be told of a file of prompts; the tokens of each, as far as they are known.
    async fn tell(
        &self,
        field: &str,
        file: &str,
        prompts: &Prompts,
        verifier: &VerifierSpec,
        report: &mut DataReport,
    ) -> Option<Vec<usize>> {
        let mut told = statistics::of_prompts(field, file, prompts);
        let tokens = self.tokens(prompts).await;
        told.prompt_tokens =
            tokens.as_ref().and_then(|tokens| statistics::lengths(tokens.iter().copied()));
        report.files.push(told);
        report.warnings.extend(statistics::repeated(file, prompts));
        report.warnings.extend(statistics::unjudgeable(verifier, file, prompts));
        tokens
    }

    /// Of any file of prompts that a spec names.
    pub(crate) async fn prompts(
        &self,
        field: &str,
        file: &str,
        chat: &ChatSpec,
    ) -> Result<Prompts, SubmitError> {
        let bytes = read(field, file, self.files).await?;
        let written = chat.wraps() || has_conversations(&bytes);
        let template = self.template_for(field, file, written).await?;
        if let Some(template) = template {
            template.check_end().map_err(|source| {
                SubmitError::data(field, DataError::Chat { file: file.into(), source })
            })?;
        }
        Prompts::read(&bytes, manner(template, chat)).map_err(|source| {
            SubmitError::data(field, DataError::Prompts { file: file.into(), source })
        })
    }

    async fn examples(
        &self,
        field: &str,
        file: &str,
        chat: &ChatSpec,
        report: &mut DataReport,
    ) -> Result<Examples, SubmitError> {
        let bytes = read(field, file, self.files).await?;
        let written = chat.wraps() || examples::have_conversations(&bytes);
        let template = self.template_for(field, file, written).await?;
        let examples = Examples::read(&bytes, manner(template, chat)).map_err(|source| {
            SubmitError::data(field, DataError::Examples { file: file.into(), source })
        })?;
        report.files.push(statistics::of_examples(field, file, &examples));
        Ok(examples)
    }

    /// `written`: whether some line needs it.
    async fn template_for(
        &self,
        field: &str,
        file: &str,
        written: bool,
    ) -> Result<Option<&Template>, SubmitError> {
        if !written {
            return Ok(None);
        }
        let Some(base) = self.base else { return Ok(None) };
        let template = self.template.get_or_try_init(async || {
            let dir = self.model(base).await?.path().to_owned();
            let now = self.now.clone();
            blocking(move || Template::load(&dir, &now)).await.map_err(|source| {
                SubmitError::data(field, DataError::Template { file: file.into(), source })
            })
        });
        template.await.map(Some)
    }

    async fn model(&self, base: &BaseSpec) -> Result<&ModelDir, SubmitError> {
        self.model.get_or_try_init(|| self.control.model_dir(base, self.files)).await
    }

    /// Tokens of each prompt, where the base's tokenizer is at hand; what is wrong with it shows
    /// when the base is stored.
    async fn tokens(&self, prompts: &Prompts) -> Option<Vec<usize>> {
        let dir = self.model(self.base?).await.ok()?.path().to_owned();
        let prompts = prompts.clone();
        blocking(move || room::tokens(&dir, &prompts)).await
    }
}

/// What is told of prompts that are held out and trained on, if that is allowed.
fn overlap(
    raft: &RaftSpec,
    (field, file): (&str, &str),
    train: &Prompts,
    heldout: &Prompts,
) -> Result<Option<String>, SubmitError> {
    let found = overlaps(train, heldout);
    if found.is_empty() {
        return Ok(None);
    }
    let (count, lines) = (found.len(), statistics::told(&found, &raft.prompts));
    if raft.allow_overlap {
        return Ok(Some(format!("{file}: {count} prompts are also trained on ({lines})")));
    }
    let file = file.to_owned();
    Err(SubmitError::data(field, DataError::Overlap { file, count, lines }))
}

fn manner<'a>(template: Option<&'a Template>, chat: &'a ChatSpec) -> Manner<'a> {
    Manner { template, wrap: chat.wraps(), system: chat.system() }
}
