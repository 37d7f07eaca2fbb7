//! Reads and checks all files of a spec, and reports on them. Nothing is stored yet.

use std::collections::BTreeMap;

use bytes::Bytes;
use chat_template::ChatTemplate;
use data_files::{ColumnMapping, DataPurpose, RowShape};
use spec::{
    BaseSpec, ChatSpec, HeldoutSpec, PromptSuiteSettings, RaftSpec, RunSpec, SftSpec, SuiteMeasure,
    SuiteSpec, TextSuiteSettings, VerifierSpec, names_rows,
};
use tokio::sync::OnceCell;
use wire::v1::{self, DataReport, data_file::Lengths};

use super::{
    error::DataError,
    examples::{self, ExampleFile},
    file_content::{check_text, read_spec_file},
    file_rows::{add_shapes, read_spec_rows, shape_warnings},
    heldout_split::{find_overlaps, split_prompts},
    model_dir::ModelDir,
    prompts::{ChatFormat, PromptFile, has_conversations},
    statistics, token_counts,
};
use crate::{FleetControl, SpecFiles, SubmitError, base_model::run_blocking};

pub(crate) struct PreparedRun {
    pub suites: Vec<PreparedSuite>,
    pub kind: PreparedKind,
    pub report: DataReport,
}

pub(crate) enum PreparedSuite {
    Text { bytes: Bytes, format: v1::suite::Format },
    Prompts(PromptFile),
}

/// The prompts of a file, and the number of its rows of each shape.
struct ReadPrompts {
    prompts: PromptFile,
    shapes: BTreeMap<RowShape, u64>,
}

pub(crate) enum PreparedKind {
    Sft { dataset: Bytes },
    Raft { prompts: PromptFile, heldout: Option<PromptFile> },
}

/// Loads the base's chat template at most once, when the first conversation needs it.
pub(crate) struct DataReader<'a> {
    control: &'a FleetControl,
    /// `None` if the caller gave none.
    base: Option<&'a BaseSpec>,
    files: &'a SpecFiles,
    /// The time that chat templates see.
    now: jiff::Zoned,
    model_dir: OnceCell<ModelDir>,
    template: OnceCell<ChatTemplate>,
}

const PROMPTS: &str = "raft.prompts";
const HELDOUT: &str = "raft.heldout";

/// The log-probabilities of three tokens: two bytes each, in base64.
const BYTES_PER_3_TOKENS: u64 = 8;

impl FleetControl {
    pub(crate) async fn prepare_run(
        &self,
        spec: &RunSpec,
        files: &SpecFiles,
    ) -> Result<PreparedRun, SubmitError> {
        self.check_target_modules(spec, files).await?;
        let reader = DataReader::new(self, Some(&spec.base), files);
        let mut report = DataReport::default();
        let kind = match (&spec.sft, &spec.raft) {
            (Some(sft), _) => reader.read_sft(sft, &mut report).await?,
            (None, Some(raft)) => reader.read_raft(raft, spec.seed, &mut report).await?,
            (None, None) => unreachable!("checked: one of the two is there"),
        };
        let trained = match (&kind, &spec.raft) {
            (PreparedKind::Raft { prompts, .. }, Some(raft)) => Some((raft, prompts)),
            _ => None,
        };
        let suites = reader.read_suites(&spec.evals, trained, &mut report).await?;
        let raft = spec.raft.iter().filter_map(|raft| raft.verifier.as_ref());
        let verifiers = raft.chain(spec.evals.iter().filter_map(|suite| suite.verifier.as_ref()));
        report.warnings.extend(warn_of_commands(verifiers));
        Ok(PreparedRun { suites, kind, report })
    }

    /// Checks the names of the modules that get an adapter. A model outside of the table of
    /// architectures has others, which its trainer knows.
    async fn check_target_modules(
        &self,
        spec: &RunSpec,
        files: &SpecFiles,
    ) -> Result<(), SubmitError> {
        let Err(unusual) = spec.check_usual_modules() else { return Ok(()) };
        let is_other = !self.find_other_model_type(&spec.base, files).await.is_empty();
        if is_other { Ok(()) } else { Err(unusual.into()) }
    }
}

/// Names the boxes on which the executables of verifiers run.
fn warn_of_commands<'a>(verifiers: impl Iterator<Item = &'a VerifierSpec>) -> Option<String> {
    let mut programs: Vec<&str> = verifiers.flat_map(VerifierSpec::list_command_programs).collect();
    programs.sort_unstable();
    programs.dedup();
    (!programs.is_empty()).then(|| {
        format!(
            "the verifier runs {}: only on boxes that contain commands (verifier:command in \
             `flotilla agents list --json`), without a network and reading only what their owners \
             opened (--verifier-path), or whose owner allowed that executable (--allow-command); \
             until there is one, the run waits",
            programs.join(", ")
        )
    })
}

impl<'a> DataReader<'a> {
    pub(crate) fn new(
        control: &'a FleetControl,
        base: Option<&'a BaseSpec>,
        files: &'a SpecFiles,
    ) -> Self {
        Self {
            control,
            base,
            files,
            now: jiff::Zoned::now(),
            model_dir: OnceCell::new(),
            template: OnceCell::new(),
        }
    }

    /// Reads the files of all suites. `trained` is the training data of a RAFT run; a suite's
    /// prompts may not be in it unless the spec allows the overlap.
    pub(crate) async fn read_suites(
        &self,
        evals: &[SuiteSpec],
        trained: Option<(&RaftSpec, &PromptFile)>,
        report: &mut DataReport,
    ) -> Result<Vec<PreparedSuite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, suite) in evals.iter().enumerate() {
            let field = format!("evals[{index}]");
            suites.push(match (suite.resolve_kind(&field)?, trained) {
                (SuiteMeasure::Text(suite), _) => {
                    self.read_text_suite(&format!("{field}.text"), &suite, report).await?
                }
                (SuiteMeasure::Prompts(suite), Some(trained)) => {
                    let field = format!("{field}.prompts");
                    self.read_prompt_suite(&field, &suite, trained, report).await?
                }
                (SuiteMeasure::Prompts(_), None) => {
                    unreachable!("checked: suites of prompts are of RAFT runs")
                }
            });
        }
        Ok(suites)
    }

    /// Reports duplicates, overlaps with the training data, and the number of samples the suite
    /// adds to each cycle.
    async fn read_prompt_suite(
        &self,
        field: &str,
        suite: &PromptSuiteSettings<'_>,
        (raft, train): (&RaftSpec, &PromptFile),
        report: &mut DataReport,
    ) -> Result<PreparedSuite, SubmitError> {
        let read = self.read_prompts(field, suite.prompts, (&raft.chat, suite.columns)).await?;
        let ReadPrompts { mut prompts, shapes } = read;
        let verifier = Some(suite.verifier);
        self.add_turn_texts((field, suite.prompts), &mut prompts, verifier).await?;
        let file = (field, suite.prompts, &shapes);
        self.report_prompts(file, &prompts, Some(suite.verifier), report).await?;
        report.warnings.extend(check_overlap(raft, (field, suite.prompts), train, &prompts)?);
        report.heldout_samples_per_cycle +=
            u64::from(prompts.prompt_count()) * u64::from(suite.samples_per_prompt);
        Ok(PreparedSuite::Prompts(prompts))
    }

    /// Accepts rows of documents, or plain text.
    async fn read_text_suite(
        &self,
        field: &str,
        suite: &TextSuiteSettings<'_>,
        report: &mut DataReport,
    ) -> Result<PreparedSuite, SubmitError> {
        let file = suite.text;
        if names_rows(file) {
            let settings = (&ChatSpec::default(), suite.columns);
            let bytes = self.read_examples(field, file, settings, report).await?.to_bytes();
            return Ok(PreparedSuite::Text { bytes, format: v1::suite::Format::Documents });
        }
        let bytes = read_spec_file(field, file, self.files).await?;
        check_text(field, file, &bytes)?;
        Ok(PreparedSuite::Text { bytes, format: v1::suite::Format::Text })
    }

    async fn read_sft(
        &self,
        sft: &SftSpec,
        report: &mut DataReport,
    ) -> Result<PreparedKind, SubmitError> {
        let settings = (&sft.chat, &sft.columns);
        let examples = self.read_examples("sft.data", &sft.data, settings, report).await?;
        let duplicates = examples.duplicate_count();
        if duplicates > 0 {
            let (file, all) = (&sft.data, examples.examples.len());
            let warning = format!("{file}: {duplicates} of {all} examples appear more than once");
            report.warnings.push(warning);
        }
        Ok(PreparedKind::Sft { dataset: examples.to_bytes() })
    }

    /// Reads the prompts and the held-out prompts, which are a file of their own or split from the
    /// prompts. Warns about prompts that leave no room for a completion, and counts the samples of
    /// a cycle.
    async fn read_raft(
        &self,
        raft: &RaftSpec,
        seed: u64,
        report: &mut DataReport,
    ) -> Result<PreparedKind, SubmitError> {
        let file = &raft.prompts;
        let settings = (&raft.chat, &raft.columns);
        let ReadPrompts { prompts: all, shapes } =
            self.read_prompts(PROMPTS, file, settings).await?;
        let mut heldout_shapes = shapes.clone();
        let (mut train, mut heldout, heldout_file) = match &raft.heldout {
            None => (all, None, file),
            Some(HeldoutSpec::File(name)) => {
                let heldout = self.read_prompts(HELDOUT, name, settings).await?;
                heldout_shapes = heldout.shapes;
                (all, Some(heldout.prompts), name)
            }
            Some(HeldoutSpec::Split(by)) => {
                let held = by.heldout_size().expect("checked: a share or a count");
                let sides = split_prompts(&all, held, seed).map_err(|source| {
                    SubmitError::data_error(
                        HELDOUT,
                        DataError::Split { file: file.clone(), source },
                    )
                })?;
                (sides.0, Some(sides.1), file)
            }
        };
        let held = heldout.as_mut().map(|prompts| (heldout_file.as_str(), prompts));
        self.add_own_turn_texts(raft, &mut train, held).await?;
        let sides = [
            ((PROMPTS, file.as_str(), &shapes), Some(&train)),
            ((HELDOUT, heldout_file.as_str(), &heldout_shapes), heldout.as_ref()),
        ];
        for (named, prompts) in sides {
            let (Some(prompts), (field, file, _)) = (prompts, named) else { continue };
            let verifier = raft.verifier.as_ref();
            let tokens = self.report_prompts(named, prompts, verifier, report).await?;
            // Held-out prompts are not trained on, so their length does not matter.
            let Some(tokens) = tokens.filter(|_| field == PROMPTS) else { continue };
            let (max, made) = (raft.training.max_tokens, raft.sampling.max_new_tokens);
            let all = prompts.prompts.len();
            report.warnings.extend(token_counts::long_prompts_warning(
                file,
                (&tokens, all),
                max,
                made,
            ));
        }
        if let Some(heldout) = &heldout {
            let overlap = check_overlap(raft, (HELDOUT, heldout_file), &train, heldout)?;
            report.warnings.extend(overlap);
            let each = u64::from(raft.heldout_samples_per_prompt);
            report.heldout_samples_per_cycle = u64::from(heldout.prompt_count()) * each;
        }
        let prompts = match raft.prompts_per_cycle {
            0 => train.prompt_count(),
            some => some.min(train.prompt_count()),
        };
        report.samples_per_cycle = u64::from(prompts) * u64::from(raft.samples_per_prompt);
        if raft.token_logprobs {
            let tokens = report.samples_per_cycle * u64::from(raft.sampling.max_new_tokens);
            report.token_logprob_bytes = tokens * BYTES_PER_3_TOKENS / 3;
        }
        Ok(PreparedKind::Raft { prompts: train, heldout })
    }

    /// Adds the texts around observations to the run's own prompts. Fails if only the training
    /// prompts or only the held-out ones are conversations.
    async fn add_own_turn_texts(
        &self,
        raft: &RaftSpec,
        train: &mut PromptFile,
        heldout: Option<(&str, &mut PromptFile)>,
    ) -> Result<(), SubmitError> {
        let verifier = raft.verifier.as_ref();
        self.add_turn_texts((PROMPTS, &raft.prompts), train, verifier).await?;
        let Some((file, heldout)) = heldout else { return Ok(()) };
        self.add_turn_texts((HELDOUT, file), heldout, verifier).await?;
        match heldout.turn_texts == train.turn_texts {
            true => Ok(()),
            false => Err(mixed_prompts((HELDOUT, file))),
        }
    }

    /// Adds the texts that the chat template writes around the observations of an environment, if
    /// the verifier is one and the prompts are conversations.
    async fn add_turn_texts(
        &self,
        (field, file): (&str, &str),
        prompts: &mut PromptFile,
        verifier: Option<&VerifierSpec>,
    ) -> Result<(), SubmitError> {
        let environment = verifier.and_then(|verifier| verifier.environment.as_ref());
        let Some(environment) = environment.filter(|_| prompts.rendered_count() > 0) else {
            return Ok(());
        };
        if prompts.rendered_count() < prompts.prompts.len() {
            return Err(mixed_prompts((field, file)));
        }
        let Some(template) = self.load_template(field, file, true).await? else { return Ok(()) };
        let texts = template.render_turn_texts(environment.role.as_str());
        prompts.turn_texts = texts.map_err(|source| {
            SubmitError::data_error(field, DataError::Chat { file: file.into(), source })
        })?;
        Ok(())
    }

    /// Adds statistics and warnings to the report. Returns the token counts of the prompts, if the
    /// tokenizer is available. Fails if no prompt has what the verifier needs.
    async fn report_prompts(
        &self,
        (field, file, shapes): (&str, &str, &BTreeMap<RowShape, u64>),
        prompts: &PromptFile,
        verifier: Option<&VerifierSpec>,
        report: &mut DataReport,
    ) -> Result<Option<Vec<usize>>, SubmitError> {
        let mut file_report = statistics::prompt_statistics(field, file, prompts);
        add_shapes(&mut file_report, shapes);
        report.warnings.extend(shape_warnings(file, shapes, DataPurpose::Prompts));
        let tokens = self.token_counts(prompts).await;
        file_report.prompt_tokens =
            tokens.as_ref().and_then(|tokens| Lengths::measure(tokens.iter().copied()));
        report.files.push(file_report);
        report.warnings.extend(statistics::duplicates_warning(file, prompts));
        if let Some(verifier) = verifier {
            let warning = statistics::check_prompt_fields(verifier, file, prompts);
            report.warnings.extend(warning.map_err(|error| SubmitError::data_error(field, error))?);
        }
        Ok(tokens)
    }

    /// Fails, naming `field`, if the file cannot be read, a row is invalid, or the chat template
    /// does not end its turns with a stop token.
    async fn read_prompts(
        &self,
        field: &str,
        file: &str,
        (chat, columns): (&ChatSpec, &ColumnMapping),
    ) -> Result<ReadPrompts, SubmitError> {
        let settings = (columns, DataPurpose::Prompts);
        let shaped = read_spec_rows(field, file, self.files, settings).await?;
        let written = chat.wraps_texts() || has_conversations(&shaped.rows);
        let template = self.load_template(field, file, written).await?;
        if let Some(template) = template {
            template.check_end_token().map_err(|source| {
                SubmitError::data_error(field, DataError::Chat { file: file.into(), source })
            })?;
        }
        let prompts = PromptFile::read(&shaped.rows, chat_format(template, chat));
        let prompts = prompts.map_err(|source| {
            SubmitError::data_error(field, DataError::Prompts { file: file.into(), source })
        })?;
        Ok(ReadPrompts { prompts, shapes: shaped.shapes })
    }

    async fn read_examples(
        &self,
        field: &str,
        file: &str,
        (chat, columns): (&ChatSpec, &ColumnMapping),
        report: &mut DataReport,
    ) -> Result<ExampleFile, SubmitError> {
        let settings = (columns, DataPurpose::Examples);
        let shaped = read_spec_rows(field, file, self.files, settings).await?;
        let written = chat.wraps_texts() || examples::needs_template(&shaped.rows);
        let template = self.load_template(field, file, written).await?;
        let examples =
            ExampleFile::read(&shaped.rows, chat_format(template, chat)).map_err(|source| {
                SubmitError::data_error(field, DataError::Examples { file: file.into(), source })
            })?;
        let mut file_report = statistics::example_statistics(field, file, &examples);
        add_shapes(&mut file_report, &shaped.shapes);
        report.files.push(file_report);
        report.warnings.extend(shape_warnings(file, &shaped.shapes, DataPurpose::Examples));
        Ok(examples)
    }

    /// Returns `None` unless `written` (a line needs the template), or if the caller gave no base.
    async fn load_template(
        &self,
        field: &str,
        file: &str,
        written: bool,
    ) -> Result<Option<&ChatTemplate>, SubmitError> {
        if !written {
            return Ok(None);
        }
        let Some(base) = self.base else { return Ok(None) };
        let template = self.template.get_or_try_init(async || {
            let dir = self.get_model_dir(base).await?.dir_path().to_owned();
            let now = self.now.clone();
            run_blocking(move || ChatTemplate::load(&dir, move || now.clone())).await.map_err(
                |source| {
                    SubmitError::data_error(
                        field,
                        DataError::Template { file: file.into(), source },
                    )
                },
            )
        });
        template.await.map(Some)
    }

    async fn get_model_dir(&self, base: &BaseSpec) -> Result<&ModelDir, SubmitError> {
        self.model_dir.get_or_try_init(|| self.control.prepare_model_dir(base, self.files)).await
    }

    /// Returns `None` if the tokenizer is not available; its problems are reported when the base is
    /// stored.
    async fn token_counts(&self, prompts: &PromptFile) -> Option<Vec<usize>> {
        let dir = self.get_model_dir(self.base?).await.ok()?.dir_path().to_owned();
        let prompts = prompts.clone();
        run_blocking(move || token_counts::count_tokens(&dir, &prompts)).await
    }
}

fn mixed_prompts((field, file): (&str, &str)) -> SubmitError {
    SubmitError::data_error(field, DataError::MixedPrompts { file: file.to_owned() })
}

/// Returns a warning if a prompt is both held out and trained on and the spec allows it; otherwise
/// fails with [`DataError::Overlap`].
fn check_overlap(
    raft: &RaftSpec,
    (field, file): (&str, &str),
    train: &PromptFile,
    heldout: &PromptFile,
) -> Result<Option<String>, SubmitError> {
    let found = find_overlaps(train, heldout);
    if found.is_empty() {
        return Ok(None);
    }
    let (count, lines) = (found.len(), statistics::format_overlaps(&found, &raft.prompts));
    if raft.allow_overlap {
        return Ok(Some(format!("{file}: {count} prompts are also trained on ({lines})")));
    }
    let file = file.to_owned();
    Err(SubmitError::data_error(field, DataError::Overlap { file, count, lines }))
}

pub(super) fn chat_format<'a>(
    template: Option<&'a ChatTemplate>,
    chat: &'a ChatSpec,
) -> ChatFormat<'a> {
    ChatFormat { template, wrap_texts: chat.wraps_texts(), system: chat.system_message() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_with_a_command_is_told_where_it_runs() {
        let warn = |yaml: &str| {
            let spec: VerifierSpec = serde_saphyr::from_str(yaml).unwrap();
            warn_of_commands([&spec].into_iter())
        };
        assert_eq!(warn("numeric: {}"), None);
        let chain = "chain: { stages: [{ verifier: { command: { argv: [/opt/judge, -x] } } }] }";
        for yaml in ["command: { argv: [/opt/judge] }", chain] {
            let warning = warn(yaml).unwrap();
            assert!(warning.starts_with("the verifier runs /opt/judge: only"), "{warning}");
        }
    }
}
