//! From a spec file to a `spec` fact: everything is read, checked and stored first,
//! then the fact is written; until then there is no run.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bus::{PublishError, Published, ReadError};
use bytes::Bytes;
use store::{About, GetError, PutError, TreePlace};
use wire::{Body, Fact, Place, RunId, Subject, v1};

use crate::{
    Control, StoreError,
    base::{BaseError, Watch},
    check::FieldError,
    checkpoints::{self, CheckpointError},
    data::{DataError, ModelError, Prepared, PreparedKind, PreparedSuite, Reader},
    files::{FileError, Files},
    spec::{BaseSpec, InitSpec, Measure, Measured, RaftSpec, RunSpec, SuiteSpec, UploadSpec},
};

/// Runs of one name.
const NUMBER_MAX: u32 = 1_000_000;

/// A run that was started, and what it was given.
#[derive(Debug, Clone, PartialEq)]
pub struct Submitted {
    pub run: RunId,
    pub report: v1::DataReport,
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error("the spec cannot be read (R102): {}", .0.to_string().trim_start_matches("error: "))]
    Yaml(serde_saphyr::Error),
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("field {field}")]
    File {
        field: String,
        #[source]
        source: FileError,
    },
    #[error("field {field}")]
    Data {
        field: String,
        #[source]
        source: Box<DataError>,
    },
    #[error("field base")]
    Model(#[from] ModelError),
    #[error("field base.checkpoint")]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "field base.checkpoint: {run} made an adapter; a run starts from a model \
         (continue the RAFT run with more cycles, or merge the adapter) (R110)"
    )]
    AdapterBase { run: String },
    #[error("field base.model")]
    Base(#[source] Box<BaseError>),
    #[error("stage the model's files")]
    Stage(#[source] std::io::Error),
    #[error("read the base's manifest")]
    Manifest(#[from] GetError),
    #[error("store what the spec names")]
    Store(#[from] PutError),
    #[error(transparent)]
    OpenStore(#[from] StoreError),
    #[error("write the spec to the log")]
    Publish(#[from] PublishError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("{name} has been used for {NUMBER_MAX} runs; choose another name (R109)")]
    TooMany { name: String },
}

impl SubmitError {
    pub(crate) fn data(field: &str, source: DataError) -> Self {
        Self::Data { field: field.into(), source: Box::new(source) }
    }

    pub(crate) fn of_base(source: BaseError) -> Self {
        Self::Base(Box::new(source))
    }

    /// Whether the caller's spec or files are at fault, rather than the fleet.
    pub fn is_callers(&self) -> bool {
        match self {
            Self::Base(error) => error.is_callers(),
            Self::Model(ModelError::Get(error)) => !error.may_pass(),
            Self::Model(ModelError::Stage(_)) => false,
            Self::Stage(_)
            | Self::Manifest(_)
            | Self::Store(_)
            | Self::Publish(_)
            | Self::Read(_) => false,
            _ => true,
        }
    }
}

impl Control {
    /// Starts the run a YAML spec describes.
    ///
    /// # Errors
    /// The first thing wrong with the spec or its files, or with the fleet. Nothing has
    /// started then.
    pub async fn submit(&self, yaml: &str, files: &Files) -> Result<Submitted, SubmitError> {
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
    ) -> Result<Submitted, SubmitError> {
        let spec = RunSpec::parse(yaml)?;
        let Prepared { suites, kind, report } = self.prepare(&spec, files).await?;
        let texts = self.store_suites(&spec.evals, &suites).await?;
        let mut kind = self.store_kind(&spec, kind, &suites).await?;
        // Last, as it may take long.
        let base = self.base(&spec.base, files, watch).await?;
        if let v1::spec::Kind::Raft(v1::spec::Raft { proof: Some(proof), .. }) = &mut kind {
            proof.tokenizer = self.tokenizer(&base).await?;
        }
        let resolved = v1::Spec {
            run: String::new(),
            name: spec.name.clone(),
            submitted_at: Some(now()),
            seed: spec.seed,
            base: Some(base),
            pool: spec.pool.clone(),
            suites: texts,
            kind: Some(kind),
        };
        Ok(Submitted { run: self.write_spec(&spec.name, resolved).await?, report })
    }

    /// What a run would be given, if it were submitted: its files are read and checked, and
    /// nothing is stored or started. Of the base it reads what chats need, if there are any.
    ///
    /// # Errors
    /// As `submit`.
    pub async fn check(&self, yaml: &str, files: &Files) -> Result<v1::DataReport, SubmitError> {
        let spec = RunSpec::parse(yaml)?;
        Ok(self.prepare(&spec, files).await?.report)
    }

    pub(crate) async fn suites(
        &self,
        evals: &[SuiteSpec],
        files: &Files,
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let reader = Reader::new(self, None, files);
        let suites = reader.suites(evals, None, &mut v1::DataReport::default()).await?;
        self.store_suites(evals, &suites).await
    }

    async fn store_suites(
        &self,
        evals: &[SuiteSpec],
        prepared: &[PreparedSuite],
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, (suite, prepared)) in evals.iter().zip(prepared).enumerate() {
            let measure = suite.measure(&format!("evals[{index}]"))?;
            let (Measure::Text(suite), PreparedSuite::Text { bytes, format }) = (measure, prepared)
            else {
                continue;
            };
            suites.push(v1::Suite {
                name: suite.name.to_owned(),
                text: Some(self.store().await?.put_blob(bytes.clone()).await?),
                format: (*format).into(),
                n_ctx: suite.n_ctx,
                stride: suite.stride,
                chunks: suite.chunks,
            });
        }
        Ok(suites)
    }

    async fn store_prompt_suites(
        &self,
        raft: &RaftSpec,
        evals: &[SuiteSpec],
        prepared: &[PreparedSuite],
    ) -> Result<Vec<v1::PromptSuite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, (suite, prepared)) in evals.iter().zip(prepared).enumerate() {
            let measure = suite.measure(&format!("evals[{index}]"))?;
            let (Measure::Prompts(suite), PreparedSuite::Prompts(prompts)) = (measure, prepared)
            else {
                continue;
            };
            suites.push(v1::PromptSuite {
                name: suite.name.to_owned(),
                prompts: Some(self.store().await?.put_blob(prompts.bytes()).await?),
                count: prompts.count(),
                verifier: suite.verifier.resolve(),
                samples_per_prompt: suite.samples_per_prompt,
                sampling: Some(suite.sampling(&raft.sampling)),
                pass_at: suite.pass_at,
            });
        }
        Ok(suites)
    }

    /// Digest of a base's tokenizer, as its manifest has it; empty where it has none.
    async fn tokenizer(&self, base: &v1::Base) -> Result<String, SubmitError> {
        let Some(tree) = &base.tree else { return Ok(String::new()) };
        let manifest = self.store().await?.manifest(tree).await?;
        let file = manifest.file("tokenizer.json");
        Ok(file.map_or(String::new(), |file| file.digest.to_string()))
    }

    async fn store_kind(
        &self,
        spec: &RunSpec,
        kind: PreparedKind,
        suites: &[PreparedSuite],
    ) -> Result<v1::spec::Kind, SubmitError> {
        let store = self.store().await?;
        Ok(match (kind, &spec.sft, &spec.raft) {
            (PreparedKind::Sft { dataset }, Some(sft), _) => v1::spec::Kind::Sft(v1::spec::Sft {
                dataset: Some(store.put_blob(dataset).await?),
                training: Some(sft.training.resolve(sft.lora.as_ref())),
            }),
            (PreparedKind::Raft { prompts, heldout }, _, Some(raft)) => {
                let mut resolved = resolve(raft, &spec.measured());
                resolved.prompt_suites =
                    self.store_prompt_suites(raft, &spec.evals, suites).await?;
                resolved.prompts = Some(store.put_blob(prompts.bytes()).await?);
                resolved.prompt_count = prompts.count();
                if let Some(heldout) = heldout {
                    resolved.heldout = Some(store.put_blob(heldout.bytes()).await?);
                    resolved.heldout_count = heldout.count();
                }
                v1::spec::Kind::Raft(resolved)
            }
            _ => unreachable!("prepared by the same section"),
        })
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
        for (field, file, name) in init.parts() {
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

/// All but its files.
fn resolve(raft: &RaftSpec, measured: &Measured<'_>) -> v1::spec::Raft {
    v1::spec::Raft {
        prompts: None,
        prompt_count: 0,
        heldout: None,
        heldout_count: 0,
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
        gates: Some(raft.gates.resolve(measured)),
        from_base: raft.from_base,
        staleness: raft.staleness,
        pass_at: raft.pass_at(),
        prompt_suites: Vec::new(),
        entropy: raft.entropy || raft.gates.entropy.is_some(),
        proof: Some(raft.proof.resolve()),
    }
}

pub(crate) async fn read(field: &str, file: &str, files: &Files) -> Result<Bytes, SubmitError> {
    let failed = |source| SubmitError::File { field: field.into(), source };
    files.read(file).await.map_err(failed)
}

/// Nothing but text, and some of it.
pub(crate) fn text(field: &str, file: &str, bytes: &[u8]) -> Result<(), SubmitError> {
    let wrong = |error| Err(SubmitError::data(field, error));
    if bytes.is_empty() {
        return wrong(DataError::Empty { file: file.to_owned() });
    }
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(()),
        Err(_) => wrong(DataError::Encoding { file: file.to_owned() }),
    }
}
