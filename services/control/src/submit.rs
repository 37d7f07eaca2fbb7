//! From a spec file to a `spec` fact: everything is read, checked and stored first,
//! then the fact is written; until then there is no run.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bus::{PublishError, Published, ReadError};
use bytes::Bytes;
use store::{About, PutError, TreePlace};
use wire::{Body, Example, ExamplesError, Fact, Place, Prompt, PromptsError, RunId, Subject, v1};

use crate::{
    Control, StoreError,
    base::{BaseError, Watch},
    check::FieldError,
    checkpoints::{self, CheckpointError},
    files::{FileError, Files},
    spec::{
        BaseSpec, InitSpec, Measure, RaftSpec, RunSpec, SftSpec, SuiteSpec, TextSuite, UploadSpec,
    },
};

/// Runs of one name.
const NUMBER_MAX: u32 = 1_000_000;

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("the spec cannot be read: {}", .0.to_string().trim_start_matches("error: "))]
    Yaml(serde_saphyr::Error),
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("field {field}")]
    File {
        field: String,
        #[source]
        source: FileError,
    },
    #[error("field {field}: {file}")]
    Prompts {
        field: String,
        file: String,
        #[source]
        source: PromptsError,
    },
    #[error("field {field}: {file}")]
    Examples {
        field: String,
        file: String,
        #[source]
        source: ExamplesError,
    },
    #[error("field {field}: {file} is not UTF-8 text")]
    Encoding { field: String, file: String },
    #[error("field {field}: {file} is empty")]
    Empty { field: String, file: String },
    #[error("field base.checkpoint")]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "field base.checkpoint: {run} made an adapter; a run starts from a model \
         (continue the RAFT run with more cycles, or merge the adapter)"
    )]
    AdapterBase { run: String },
    #[error("field base.model")]
    Base(#[source] Box<BaseError>),
    #[error("stage the model's files")]
    Stage(#[source] std::io::Error),
    #[error("store what the spec names")]
    Store(#[from] PutError),
    #[error(transparent)]
    OpenStore(#[from] StoreError),
    #[error("write the spec to the log")]
    Publish(#[from] PublishError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("{name} has been used for {NUMBER_MAX} runs; choose another name")]
    TooMany { name: String },
}

impl SubmitError {
    /// Whether the caller's spec or files are at fault, rather than the fleet.
    pub fn is_callers(&self) -> bool {
        match self {
            Self::Base(error) => error.is_callers(),
            Self::Stage(_) | Self::Store(_) | Self::Publish(_) | Self::Read(_) => false,
            _ => true,
        }
    }
}

impl Control {
    /// Starts the run a YAML spec describes, and returns its id.
    ///
    /// # Errors
    /// The first thing wrong with the spec or its files, or with the fleet. Nothing has
    /// started then.
    pub async fn submit(&self, yaml: &str, files: &Files) -> Result<RunId, SubmitError> {
        self.submit_watched(yaml, files, &(Arc::new(|_| ()) as Watch)).await
    }

    /// As [`Control::submit`], telling of what takes long.
    ///
    /// # Errors
    /// As `submit`.
    pub async fn submit_watched(
        &self,
        yaml: &str,
        files: &Files,
        watch: &Watch,
    ) -> Result<RunId, SubmitError> {
        let spec = RunSpec::parse(yaml)?;
        let resolved = self.resolve(&spec, files, watch).await?;
        self.write_spec(&spec.name, resolved).await
    }

    async fn resolve(
        &self,
        spec: &RunSpec,
        files: &Files,
        watch: &Watch,
    ) -> Result<v1::Spec, SubmitError> {
        let suites = self.suites(&spec.evals, files).await?;
        let kind = match (&spec.sft, &spec.raft) {
            (Some(sft), _) => v1::spec::Kind::Sft(self.sft(sft, files).await?),
            (None, Some(raft)) => v1::spec::Kind::Raft(self.raft(raft, spec, files).await?),
            (None, None) => unreachable!("checked: one of the two is there"),
        };
        Ok(v1::Spec {
            run: String::new(),
            name: spec.name.clone(),
            submitted_at: Some(now()),
            seed: spec.seed,
            base: Some(self.base(&spec.base, files, watch).await?),
            pool: spec.pool.clone(),
            suites,
            kind: Some(kind),
        })
    }

    pub(crate) async fn suites(
        &self,
        evals: &[SuiteSpec],
        files: &Files,
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, suite) in evals.iter().enumerate() {
            if let Measure::Text(text) = suite.measure(&format!("evals[{index}]"))? {
                suites.push(self.suite(index, &text, files).await?);
            }
        }
        Ok(suites)
    }

    async fn suite(
        &self,
        index: usize,
        suite: &TextSuite<'_>,
        files: &Files,
    ) -> Result<v1::Suite, SubmitError> {
        let field = format!("evals[{index}].text");
        let bytes = read(&field, suite.text, files).await?;
        let lines = std::path::Path::new(suite.text).extension().is_some_and(|e| e == "jsonl");
        let format = if lines {
            examples(&field, suite.text, &bytes)?;
            v1::suite::Format::Documents
        } else {
            text(&field, suite.text, &bytes)?;
            v1::suite::Format::Text
        };
        Ok(v1::Suite {
            name: suite.name.to_owned(),
            text: Some(self.store().await?.put_blob(bytes).await?),
            format: format.into(),
            n_ctx: suite.n_ctx,
            stride: suite.stride,
            chunks: suite.chunks,
        })
    }

    async fn sft(&self, sft: &SftSpec, files: &Files) -> Result<v1::spec::Sft, SubmitError> {
        let bytes = read("sft.data", &sft.data, files).await?;
        examples("sft.data", &sft.data, &bytes)?;
        Ok(v1::spec::Sft {
            dataset: Some(self.store().await?.put_blob(bytes).await?),
            training: Some(sft.training.resolve(sft.lora.as_ref())),
        })
    }

    async fn raft(
        &self,
        raft: &RaftSpec,
        spec: &RunSpec,
        files: &Files,
    ) -> Result<v1::spec::Raft, SubmitError> {
        let (prompts, prompt_count) = self.prompts("raft.prompts", &raft.prompts, files).await?;
        let (heldout, heldout_count) = match &raft.heldout {
            Some(file) => {
                let (blob, count) = self.prompts("raft.heldout", file, files).await?;
                (Some(blob), count)
            }
            None => (None, 0),
        };
        Ok(v1::spec::Raft {
            prompts: Some(prompts),
            prompt_count,
            heldout,
            heldout_count,
            cycles: raft.cycles,
            prompts_per_cycle: raft.prompts_per_cycle,
            samples_per_prompt: raft.samples_per_prompt,
            heldout_samples_per_prompt: raft.heldout_samples_per_prompt,
            sampling: Some((&raft.sampling).into()),
            verifier: raft.verifier.resolve(),
            selection: Some(raft.selection.resolve()),
            training: Some(raft.training.resolve(Some(&raft.lora))),
            accept_unverified_policy: raft.accept_unverified_policy,
            schedules: Some(raft.schedules()),
            curriculum: Some(raft.curriculum.resolve(raft.cycles)),
            gates: Some(raft.gates.resolve(&spec.measured())),
            from_base: raft.from_base,
            staleness: raft.staleness,
            pass_at: raft.pass_at(),
            prompt_suites: self.prompt_suites(raft, &spec.evals, files).await?,
            entropy: raft.entropy || raft.gates.entropy.is_some(),
        })
    }

    async fn prompt_suites(
        &self,
        raft: &RaftSpec,
        evals: &[SuiteSpec],
        files: &Files,
    ) -> Result<Vec<v1::PromptSuite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, suite) in evals.iter().enumerate() {
            let field = format!("evals[{index}]");
            let Measure::Prompts(suite) = suite.measure(&field)? else { continue };
            let (prompts, count) =
                self.prompts(&format!("{field}.prompts"), suite.prompts, files).await?;
            suites.push(v1::PromptSuite {
                name: suite.name.to_owned(),
                prompts: Some(prompts),
                count,
                verifier: suite.verifier.resolve(),
                samples_per_prompt: suite.samples_per_prompt,
                sampling: Some(suite.sampling(&raft.sampling)),
                pass_at: suite.pass_at,
            });
        }
        Ok(suites)
    }

    async fn prompts(
        &self,
        field: &str,
        file: &str,
        files: &Files,
    ) -> Result<(v1::Blob, u32), SubmitError> {
        let bytes = read(field, file, files).await?;
        let prompts = Prompt::parse_all(&bytes).map_err(|source| SubmitError::Prompts {
            field: field.into(),
            file: file.into(),
            source,
        })?;
        let count = u32::try_from(prompts.len()).unwrap_or(u32::MAX);
        Ok((self.store().await?.put_blob(bytes).await?, count))
    }

    pub(crate) async fn base(
        &self,
        base: &BaseSpec,
        files: &Files,
        watch: &Watch,
    ) -> Result<v1::Base, SubmitError> {
        if let Some(name) = &base.checkpoint {
            let reference = checkpoints::parse_checkpoint_ref(name)?;
            let checkpoint = self.checkpoint(&reference).await?.checkpoint.unwrap_or_default();
            if checkpoint.content() == v1::checkpoint::Content::Adapter {
                return Err(SubmitError::AdapterBase { run: reference.run });
            }
            return Ok(v1::Base { tree: checkpoint.tree, random_init: false });
        }
        if let Some(name) = &base.model {
            let upload = base.upload.unwrap_or(UploadSpec::Auto);
            let found = self.model(name, upload, files, watch).await;
            return found.map_err(|source| SubmitError::Base(Box::new(source)));
        }
        let init = base.init.as_ref().expect("checked: one of the three is there");
        self.init(init, files).await
    }

    async fn init(&self, init: &InitSpec, files: &Files) -> Result<v1::Base, SubmitError> {
        let staged = tempfile::tempdir().map_err(SubmitError::Stage)?;
        let parts = [
            ("base.init.config", &init.config, "config.json"),
            ("base.init.tokenizer", &init.tokenizer, "tokenizer.json"),
        ];
        for (field, file, name) in parts {
            let bytes = read(field, file, files).await?;
            text(field, file, &bytes)?;
            tokio::fs::write(staged.path().join(name), &bytes).await.map_err(SubmitError::Stage)?;
        }
        let place = TreePlace::model("init").expect("\"init\" is a legal name");
        let tree =
            self.store().await?.publish_tree(staged.path(), &place, About::default()).await?;
        Ok(v1::Base { tree: Some(tree), random_init: true })
    }

    /// Takes the first free number of the name: the log accepts each id once. The same spec,
    /// submitted at the same time, is the same run.
    pub(crate) async fn write_spec(
        &self,
        name: &str,
        mut spec: v1::Spec,
    ) -> Result<RunId, SubmitError> {
        for number in 1..=NUMBER_MAX {
            let run = RunId::new(format!("{name}-{number}")).expect("checked: a short legal name");
            let subject = Subject::new(&run, Place::Spec);
            spec.run = run.to_string();
            let fact = Fact { subject, body: Body::Spec(spec.clone()) };
            match self.bus.get(&fact.subject.to_string()).await {
                Ok(None) => {}
                Ok(Some(there)) if there.fact == fact => return Ok(run),
                // What cannot be read takes the name just as well.
                Ok(Some(_)) | Err(ReadError::Unreadable { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            match self.bus.publish(&fact).await? {
                Published::New { .. } | Published::AlreadyThere { same: true, .. } => {
                    return Ok(run);
                }
                Published::AlreadyThere { same: false, .. } => {}
            }
        }
        Err(SubmitError::TooMany { name: name.to_owned() })
    }
}

fn now() -> wire::Timestamp {
    wire::timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn file_error(field: &str, source: FileError) -> SubmitError {
    SubmitError::File { field: field.into(), source }
}

async fn read(field: &str, file: &str, files: &Files) -> Result<Bytes, SubmitError> {
    files.read(file).await.map_err(|source| file_error(field, source))
}

fn examples(field: &str, file: &str, bytes: &[u8]) -> Result<Vec<Example>, SubmitError> {
    Example::parse_all(bytes).map_err(|source| SubmitError::Examples {
        field: field.into(),
        file: file.into(),
        source,
    })
}

fn text(field: &str, file: &str, bytes: &[u8]) -> Result<(), SubmitError> {
    let (field, file) = (field.to_owned(), file.to_owned());
    if bytes.is_empty() {
        return Err(SubmitError::Empty { field, file });
    }
    std::str::from_utf8(bytes).map_err(|_| SubmitError::Encoding { field, file })?;
    Ok(())
}
