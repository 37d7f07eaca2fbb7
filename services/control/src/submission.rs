//! The submission of a run: the spec and its files are read, checked and stored, and then the
//! `spec` fact is written. The run exists from that moment on.

use std::sync::Arc;

use bus::{PublishOutcome, ReadError};
use spec::{
    BaseSpec, InitSpec, RaftSpec, RunSpec, SuiteMeasure, SuiteSpec, UploadSpec, VerifierSpec,
};
use store::{TreeMetadata, TreePlace};
use tokio::sync::Semaphore;
use wire::{Fact, FactBody, FactKey, RunId, Subject, clock, v1};

use crate::{
    CheckpointError, FleetControl,
    base_model::{TransferCallback, run_blocking},
    checkpoints,
    data::{DataReader, PreparedKind, PreparedRun, PreparedSuite, stage_init_files},
    spec_files::SpecFiles,
    submit_error::{NUMBER_MAX, SubmitError},
};

/// A submitted run, with the report on its files.
#[derive(Debug, Clone, PartialEq)]
pub struct SubmittedRun {
    pub run: RunId,
    pub report: v1::DataReport,
}

const TEACHER_FIELD: &str = "raft.teacher";

/// Specs that are parsed at once: their patterns may take a second to compile.
static PARSERS: Semaphore = Semaphore::const_new(2);

/// Parses and checks a spec on a blocking thread.
async fn parse_spec(yaml: &str) -> Result<RunSpec, SubmitError> {
    // The semaphore is never closed.
    let _permit = PARSERS.acquire().await;
    let yaml = yaml.to_owned();
    Ok(run_blocking(move || RunSpec::parse(&yaml)).await?)
}

impl FleetControl {
    /// Submits the run that a YAML spec describes. After an error the run does not exist.
    pub async fn submit_run(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<SubmittedRun, SubmitError> {
        self.submit_with_progress(yaml, files, &(Arc::new(|_| ()) as TransferCallback)).await
    }

    /// Submits a run as [`FleetControl::submit_run`] does, and reports the progress of long
    /// transfers to `watch`.
    pub async fn submit_with_progress(
        &self,
        yaml: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        let submitted = self.submit_spec(yaml, files, watch).await;
        submitted.map_err(|error| error.with_line(yaml))
    }

    async fn submit_spec(
        &self,
        yaml: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        let spec = parse_spec(yaml).await?;
        let PreparedRun { suites, kind, report } = self.prepare_run(&spec, files).await?;
        let texts = self.store_text_suites(&spec.evals, &suites).await?;
        let mut kind = self.store_training_data(&spec, kind, &suites).await?;
        let teacher = self.check_own_teacher(&spec, files).await?;
        // Last, because it may take long.
        let base = self.resolve_base(&spec.base, files, watch).await?;
        if let v1::spec::Kind::Raft(raft) = &mut kind {
            if let Some((teacher, end_token)) = teacher {
                let found = self.resolve_base(teacher, files, watch).await;
                raft.teacher = found.map_err(|error| error.in_section(TEACHER_FIELD))?.tree;
                raft.end_token = end_token;
            }
            if let Some(proof) = &mut raft.proof {
                proof.tokenizer = self.tokenizer_digest(&base).await?;
            }
        }
        let resolved = v1::Spec {
            run: String::new(),
            name: spec.name.clone(),
            submitted_at: Some(clock::now()),
            seed: spec.seed,
            base: Some(base),
            pool: spec.pool.clone(),
            suites: texts,
            kind: Some(kind),
        };
        Ok(SubmittedRun { run: self.write_spec_fact(&spec.name, resolved).await?, report })
    }

    /// Reads and checks a spec, its files and its base as a submission does, and returns the report.
    /// Stores and starts nothing, and downloads no weights.
    pub async fn check_spec(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<v1::DataReport, SubmitError> {
        let spec = parse_spec(yaml).await?;
        let checked = async {
            let mut report = self.prepare_run(&spec, files).await?.report;
            self.check_base(&spec.base, files).await?;
            if let Some(teacher) = spec.raft.as_ref().and_then(|raft| raft.teacher.as_ref()) {
                let checked = self.check_base(teacher, files).await;
                checked.map_err(|error| error.in_section(TEACHER_FIELD))?;
                self.check_own_teacher(&spec, files).await?;
            }
            report.warnings.extend(self.missing_roles_warning(&spec).await);
            Ok(report)
        };
        checked.await.map_err(|error: SubmitError| error.with_line(yaml))
    }

    /// Returns the teacher of the spec, if it has one, and the token with which the base ends a
    /// sample. Fails as [`FleetControl::check_teacher`] does.
    async fn check_own_teacher<'a>(
        &self,
        spec: &'a RunSpec,
        files: &SpecFiles,
    ) -> Result<Option<(&'a BaseSpec, u32)>, SubmitError> {
        let teacher = spec.raft.as_ref().and_then(|raft| raft.teacher.as_ref());
        let Some(teacher) = teacher else { return Ok(None) };
        Ok(Some((teacher, self.check_teacher(&spec.base, teacher, files).await?)))
    }

    /// Returns what a run of the spec would wait for; `None` for nothing, or if it is unknown.
    async fn missing_roles_warning(&self, spec: &RunSpec) -> Option<String> {
        let texts = spec.evals.iter().filter(|suite| suite.text.is_some());
        let kind = match &spec.raft {
            Some(raft) => v1::spec::Kind::Raft(v1::spec::Raft {
                verifier: raft.verifier.as_ref().and_then(VerifierSpec::to_proto),
                teacher: raft.teacher.as_ref().map(|_| v1::Tree::default()),
                ..v1::spec::Raft::default()
            }),
            None => v1::spec::Kind::Sft(v1::spec::Sft::default()),
        };
        let needed = v1::Spec {
            pool: spec.pool.clone(),
            suites: texts.map(|_| v1::Suite::default()).collect(),
            kind: Some(kind),
            ..v1::Spec::default()
        };
        let agents = self.list_agents().await.ok()?;
        let missing = cycle::describe_missing_roles(&needed, &agents, wire::clock::unix_seconds());
        (!missing.is_empty()).then(|| format!("the run {missing}"))
    }

    pub(crate) async fn prepare_text_suites(
        &self,
        evals: &[SuiteSpec],
        files: &SpecFiles,
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let reader = DataReader::new(self, None, files);
        let suites = reader.read_suites(evals, None, &mut v1::DataReport::default()).await?;
        self.store_text_suites(evals, &suites).await
    }

    /// Returns the suites as the `spec` fact has them.
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

    /// Returns the suites as the `spec` fact has them.
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

    /// Returns the digest from the manifest, or an empty text if the base has no tokenizer.
    async fn tokenizer_digest(&self, base: &v1::Base) -> Result<String, SubmitError> {
        let Some(tree) = &base.tree else { return Ok(String::new()) };
        let manifest = self.open_store().await?.read_manifest(tree).await?;
        let file = manifest.find_file("tokenizer.json");
        Ok(file.map_or(String::new(), |file| file.digest.to_string()))
    }

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

    /// Resolves the `base` section to a tree in the store. Fails if the checkpoint is an adapter.
    pub(crate) async fn resolve_base(
        &self,
        base: &BaseSpec,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::Base, SubmitError> {
        if let Some(name) = &base.checkpoint {
            let tree = self.find_base_checkpoint(name).await?.tree;
            return Ok(v1::Base { tree, random_init: false, adapter: None });
        }
        if let Some(name) = &base.model {
            let upload = base.upload.unwrap_or(UploadSpec::Auto);
            let found = self.resolve_model(name, upload, files, watch).await;
            return found.map_err(SubmitError::base_error);
        }
        let init = base.init.as_ref().expect("checked: one of the three is there");
        self.publish_init(init, files).await
    }

    /// Fails as [`FleetControl::resolve_base`] does. Stores nothing and downloads no weights.
    async fn check_base(&self, base: &BaseSpec, files: &SpecFiles) -> Result<(), SubmitError> {
        if let Some(name) = &base.checkpoint {
            self.find_base_checkpoint(name).await?;
        }
        if let Some(name) = &base.model {
            self.check_model(name, files).await.map_err(SubmitError::base_error)?;
        }
        if let Some(init) = &base.init {
            stage_init_files(init, files).await?;
        }
        Ok(())
    }

    /// Fails if the checkpoint is an adapter.
    async fn find_base_checkpoint(&self, name: &str) -> Result<v1::Checkpoint, SubmitError> {
        let reference = checkpoints::parse_checkpoint_ref(name)?;
        let checkpoint = self.get_checkpoint(&reference).await?.checkpoint.unwrap_or_default();
        if checkpoint.content() == v1::checkpoint::Content::Adapter {
            return Err(CheckpointError::Adapter { run: reference.run }.into());
        }
        Ok(checkpoint)
    }

    async fn publish_init(
        &self,
        init: &InitSpec,
        files: &SpecFiles,
    ) -> Result<v1::Base, SubmitError> {
        let staged = stage_init_files(init, files).await?;
        let place = TreePlace::for_model("init").expect("\"init\" is a legal name");
        let tree = self
            .open_store()
            .await?
            .publish_tree(staged.path(), &place, TreeMetadata::default())
            .await?;
        Ok(v1::Base { tree: Some(tree), random_init: true, adapter: None })
    }

    /// Writes the `spec` fact under the first free number of the name, and returns the run's id.
    /// The log accepts each id once. If the same spec with the same submission time is written
    /// already, returns that run.
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

    /// A member may write results before a spec exists; a run of that name would begin with places
    /// that are taken.
    async fn has_entries(&self, run: &RunId) -> Result<bool, ReadError> {
        match self.bus.get_fact(&format!("flotilla.{run}.>")).await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }
}
