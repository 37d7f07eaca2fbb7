//! The submission of a run: the spec and its files are read, checked and stored, and then the
//! `spec` fact is written. The run exists from that moment on.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use bus::{PublishError, PublishOutcome, ReadError};
use bytes::Bytes;
use spec::{
    BaseSpec, FieldError, InitSpec, RaftSpec, RunSpec, SpecError, SuiteMeasure, SuiteSpec,
    UploadSpec,
};
use store::{GetError, PutError, TreeMetadata, TreePlace};
use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::{
    FleetControl, StoreAccessError,
    base_model::{BaseError, TransferCallback},
    checkpoints::{self, CheckpointError},
    data::{BaseFilesError, DataError, DataReader, PreparedKind, PreparedRun, PreparedSuite},
    spec_files::{SpecFileError, SpecFiles},
};

/// Largest number of runs with one name.
const NUMBER_MAX: u32 = 1_000_000;

/// A submitted run, with the report on its files.
#[derive(Debug, Clone, PartialEq)]
pub struct SubmittedRun {
    pub run: RunId,
    pub report: v1::DataReport,
}

/// The reason why a run was not submitted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("field {field}")]
    File {
        field: String,
        #[source]
        source: SpecFileError,
    },
    #[error("field {field}")]
    Data {
        field: String,
        #[source]
        source: Box<DataError>,
    },
    #[error("field base")]
    Model(#[from] BaseFilesError),
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
    OpenStore(#[from] StoreAccessError),
    #[error("write the spec to the log")]
    Publish(#[from] PublishError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("{name} has been used for {NUMBER_MAX} runs; choose another name (R109)")]
    TooMany { name: String },
}

impl From<FieldError> for SubmitError {
    fn from(error: FieldError) -> Self {
        Self::Spec(error.into())
    }
}

impl SubmitError {
    /// Builds an error about the content of a file.
    pub(crate) fn data_error(field: &str, source: DataError) -> Self {
        Self::Data { field: field.into(), source: Box::new(source) }
    }

    /// Builds an error about the base.
    pub(crate) fn base_error(source: BaseError) -> Self {
        Self::Base(Box::new(source))
    }

    /// Returns true if the caller's spec or files are at fault, rather than the fleet.
    pub fn is_caller_fault(&self) -> bool {
        match self {
            Self::Base(error) => error.is_caller_fault(),
            Self::Model(BaseFilesError::Get(error)) => !error.is_transient(),
            Self::Model(BaseFilesError::Stage(_)) => false,
            Self::Stage(_)
            | Self::Manifest(_)
            | Self::Store(_)
            | Self::Publish(_)
            | Self::Read(_) => false,
            _ => true,
        }
    }
}

impl FleetControl {
    /// Submits the run that a YAML spec describes.
    ///
    /// # Errors
    /// Returns the first problem with the spec, its files or the fleet. The run does not exist
    /// then.
    pub async fn submit_run(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<SubmittedRun, SubmitError> {
        self.submit_with_progress(yaml, files, &(Arc::new(|_| ()) as TransferCallback)).await
    }

    /// Submits a run as [`FleetControl::submit_run`] does, and reports the progress of long
    /// transfers to `watch`.
    ///
    /// # Errors
    /// Returns the same errors as `submit_run`.
    pub async fn submit_with_progress(
        &self,
        yaml: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        let spec = RunSpec::parse(yaml)?;
        let PreparedRun { suites, kind, report } = self.prepare_run(&spec, files).await?;
        let texts = self.store_text_suites(&spec.evals, &suites).await?;
        let mut kind = self.store_training_data(&spec, kind, &suites).await?;
        // Last, because it may take long.
        let base = self.resolve_base(&spec.base, files, watch).await?;
        if let v1::spec::Kind::Raft(v1::spec::Raft { proof: Some(proof), .. }) = &mut kind {
            proof.tokenizer = self.tokenizer_digest(&base).await?;
        }
        let resolved = v1::Spec {
            run: String::new(),
            name: spec.name.clone(),
            submitted_at: Some(current_timestamp()),
            seed: spec.seed,
            base: Some(base),
            pool: spec.pool.clone(),
            suites: texts,
            kind: Some(kind),
        };
        Ok(SubmittedRun { run: self.write_spec_fact(&spec.name, resolved).await?, report })
    }

    /// Reads and checks a spec and its files as a submission does, and returns the report. Stores
    /// and starts nothing. Of the base, only the files that chat templates need are read, if the
    /// data contains conversations.
    ///
    /// # Errors
    /// Returns the same errors as `submit_run`.
    pub async fn check_spec(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<v1::DataReport, SubmitError> {
        let spec = RunSpec::parse(yaml)?;
        Ok(self.prepare_run(&spec, files).await?.report)
    }

    /// Reads the text suites of a spec and stores their files.
    pub(crate) async fn prepare_text_suites(
        &self,
        evals: &[SuiteSpec],
        files: &SpecFiles,
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let reader = DataReader::new(self, None, files);
        let suites = reader.read_suites(evals, None, &mut v1::DataReport::default()).await?;
        self.store_text_suites(evals, &suites).await
    }

    /// Stores the texts of all text suites, and returns the suites as the `spec` fact has them.
    async fn store_text_suites(
        &self,
        evals: &[SuiteSpec],
        prepared: &[PreparedSuite],
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, (suite, prepared)) in evals.iter().zip(prepared).enumerate() {
            let measure = suite.resolve_kind(&format!("evals[{index}]"))?;
            let (SuiteMeasure::Text(suite), PreparedSuite::Text { bytes, format }) =
                (measure, prepared)
            else {
                continue;
            };
            suites.push(v1::Suite {
                name: suite.name.to_owned(),
                text: Some(self.open_store().await?.put_blob(bytes.clone()).await?),
                format: (*format).into(),
                n_ctx: suite.n_ctx,
                stride: suite.stride,
                chunks: suite.chunks,
            });
        }
        Ok(suites)
    }

    /// Stores the prompts of all prompt suites, and returns the suites as the `spec` fact has them.
    async fn store_prompt_suites(
        &self,
        raft: &RaftSpec,
        evals: &[SuiteSpec],
        prepared: &[PreparedSuite],
    ) -> Result<Vec<v1::PromptSuite>, SubmitError> {
        let mut suites = Vec::new();
        for (index, (suite, prepared)) in evals.iter().zip(prepared).enumerate() {
            let measure = suite.resolve_kind(&format!("evals[{index}]"))?;
            let (SuiteMeasure::Prompts(suite), PreparedSuite::Prompts(prompts)) =
                (measure, prepared)
            else {
                continue;
            };
            suites.push(v1::PromptSuite {
                name: suite.name.to_owned(),
                prompts: Some(self.open_store().await?.put_blob(prompts.to_bytes()).await?),
                count: prompts.prompt_count(),
                verifier: suite.verifier.to_proto(),
                samples_per_prompt: suite.samples_per_prompt,
                sampling: Some(suite.sampling_to_proto(&raft.sampling)),
                pass_at: suite.pass_at,
            });
        }
        Ok(suites)
    }

    /// Returns the digest of a base's tokenizer from its manifest, or an empty text if the base has
    /// none.
    async fn tokenizer_digest(&self, base: &v1::Base) -> Result<String, SubmitError> {
        let Some(tree) = &base.tree else { return Ok(String::new()) };
        let manifest = self.open_store().await?.read_manifest(tree).await?;
        let file = manifest.find_file("tokenizer.json");
        Ok(file.map_or(String::new(), |file| file.digest.to_string()))
    }

    /// Stores the training data, and returns the SFT or RAFT section of the `spec` fact.
    async fn store_training_data(
        &self,
        spec: &RunSpec,
        kind: PreparedKind,
        suites: &[PreparedSuite],
    ) -> Result<v1::spec::Kind, SubmitError> {
        let store = self.open_store().await?;
        Ok(match (kind, &spec.sft, &spec.raft) {
            (PreparedKind::Sft { dataset }, Some(sft), _) => v1::spec::Kind::Sft(v1::spec::Sft {
                dataset: Some(store.put_blob(dataset).await?),
                training: Some(sft.training.to_proto(sft.lora.as_ref())),
            }),
            (PreparedKind::Raft { prompts, heldout }, _, Some(raft)) => {
                let mut resolved = raft.to_proto(&spec.measured_suites());
                resolved.prompt_suites =
                    self.store_prompt_suites(raft, &spec.evals, suites).await?;
                resolved.prompts = Some(store.put_blob(prompts.to_bytes()).await?);
                resolved.prompt_count = prompts.prompt_count();
                if let Some(heldout) = heldout {
                    resolved.heldout = Some(store.put_blob(heldout.to_bytes()).await?);
                    resolved.heldout_count = heldout.prompt_count();
                }
                v1::spec::Kind::Raft(resolved)
            }
            _ => unreachable!("prepared by the same section"),
        })
    }

    /// Resolves the `base` section to a tree in the store.
    ///
    /// # Errors
    /// Returns an error if the checkpoint is an adapter, or the base cannot be found or published.
    pub(crate) async fn resolve_base(
        &self,
        base: &BaseSpec,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::Base, SubmitError> {
        if let Some(name) = &base.checkpoint {
            let reference = checkpoints::parse_checkpoint_ref(name)?;
            let checkpoint = self.get_checkpoint(&reference).await?.checkpoint.unwrap_or_default();
            if checkpoint.content() == v1::checkpoint::Content::Adapter {
                return Err(SubmitError::AdapterBase { run: reference.run });
            }
            return Ok(v1::Base { tree: checkpoint.tree, random_init: false });
        }
        if let Some(name) = &base.model {
            let upload = base.upload.unwrap_or(UploadSpec::Auto);
            let found = self.resolve_model(name, upload, files, watch).await;
            return found.map_err(|source| SubmitError::Base(Box::new(source)));
        }
        let init = base.init.as_ref().expect("checked: one of the three is there");
        self.publish_init(init, files).await
    }

    /// Publishes the files of a base with random weights.
    async fn publish_init(
        &self,
        init: &InitSpec,
        files: &SpecFiles,
    ) -> Result<v1::Base, SubmitError> {
        let staged = tempfile::tempdir().map_err(SubmitError::Stage)?;
        for (field, file, name) in init.file_fields() {
            let bytes = read_spec_file(field, file, files).await?;
            check_text(field, file, &bytes)?;
            tokio::fs::write(staged.path().join(name), &bytes).await.map_err(SubmitError::Stage)?;
        }
        let place = TreePlace::for_model("init").expect("\"init\" is a legal name");
        let tree = self
            .open_store()
            .await?
            .publish_tree(staged.path(), &place, TreeMetadata::default())
            .await?;
        Ok(v1::Base { tree: Some(tree), random_init: true })
    }

    /// Writes the `spec` fact under the first free number of the name, and returns the run's id.
    ///
    /// The log accepts each id once. If the same spec with the same submission time is written
    /// already, returns that run.
    ///
    /// # Errors
    /// Returns [`SubmitError::TooMany`] if all [`NUMBER_MAX`] numbers are taken.
    pub(crate) async fn write_spec_fact(
        &self,
        name: &str,
        mut spec: v1::Spec,
    ) -> Result<RunId, SubmitError> {
        for number in 1..=NUMBER_MAX {
            let run = RunId::new(format!("{name}-{number}")).expect("checked: a short legal name");
            let place = match &spec.kind {
                Some(v1::spec::Kind::Watched(_)) => FactKey::WatchedSpec,
                _ => FactKey::Spec,
            };
            let subject = Subject::new(&run, place);
            spec.run = run.to_string();
            let fact = Fact { subject, body: FactBody::Spec(spec.clone()) };
            match self.bus.find_spec(&run).await {
                Ok(None) if !self.has_entries(&run).await? => {}
                Ok(None) => continue,
                Ok(Some(there)) if there.fact == fact => return Ok(run),
                // An entry that cannot be read occupies the number too.
                Ok(Some(_)) | Err(ReadError::Unreadable { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            match self.bus.publish_fact(&fact).await? {
                PublishOutcome::New { .. } | PublishOutcome::AlreadyWritten { same: true, .. } => {
                    return Ok(run);
                }
                PublishOutcome::AlreadyWritten { same: false, .. } => {}
            }
        }
        Err(SubmitError::TooMany { name: name.to_owned() })
    }

    /// Returns true if the log has any entry of a run. A member may write results before a spec
    /// exists; a run of that name would begin with places that are taken.
    async fn has_entries(&self, run: &RunId) -> Result<bool, ReadError> {
        match self.bus.get_fact(&format!("flotilla.{run}.>")).await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Returns the current time.
fn current_timestamp() -> wire::Timestamp {
    wire::to_timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Reads a file that a field of the spec names.
pub(crate) async fn read_spec_file(
    field: &str,
    file: &str,
    files: &SpecFiles,
) -> Result<Bytes, SubmitError> {
    let failed = |source| SubmitError::File { field: field.into(), source };
    files.read(file).await.map_err(failed)
}

/// Checks that a file is UTF-8 text and not empty.
pub(crate) fn check_text(field: &str, file: &str, bytes: &[u8]) -> Result<(), SubmitError> {
    let wrong = |error| Err(SubmitError::data_error(field, error));
    if bytes.is_empty() {
        return wrong(DataError::Empty { file: file.to_owned() });
    }
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(()),
        Err(_) => wrong(DataError::Encoding { file: file.to_owned() }),
    }
}
