//! The submission of a run: the spec and its files are read, checked and stored, and then the
//! `spec` fact is written. The run exists from that moment on.

use bus::{PublishOutcome, ReadError};
use spec::{
    BaseSpec, FieldError, InitSpec, QueueSpec, RaftSpec, RunSpec, SuiteMeasure, SuiteSpec,
    SweepRun, UploadSpec,
};
use store::{TreeMetadata, TreePlace};
use tokio::sync::Semaphore;
use wire::{Fact, FactBody, FactKey, RunId, Subject, clock, v1};

use crate::{
    CheckpointError, FleetControl,
    base_model::{TransferCallback, run_blocking, unwatched},
    channels::parse_channel_name,
    checkpoints,
    data::{DataReader, PreparedKind, PreparedRun, PreparedSuite, stage_init_files},
    run_files::RunFiles,
    run_forecast::describe_spec,
    spec_files::SpecFiles,
    submit_error::{NUMBER_MAX, SubmitError},
};

/// A submitted run, with the report on its files.
#[derive(Debug, Clone, PartialEq)]
pub struct SubmittedRun {
    /// The first run of a sweep.
    pub run: RunId,
    /// All runs: several for a sweep.
    pub runs: Vec<RunId>,
    /// The report of the first run.
    pub report: v1::DataReport,
}

/// The submitter of a run, and the feedback in its data.
#[derive(Debug, Clone, Default)]
pub(crate) struct SubmissionOrigin {
    /// Empty: the log's author.
    pub user: String,
    /// Position of the newest feedback in the attached files; absent: they have none yet.
    pub feedback: Option<u64>,
    /// The channel's move whose learning starts the run; 0: a user does.
    pub learning: u64,
}

const TEACHER_FIELD: &str = "raft.teacher";

/// Adds the number of runs of a sweep.
fn count_runs(report: v1::DataReport, runs: usize) -> v1::DataReport {
    let sweep_runs = u32::try_from(runs).ok().filter(|runs| *runs > 1).unwrap_or(0);
    v1::DataReport { sweep_runs, ..report }
}

/// Specs that are parsed at once: their patterns may take a second to compile.
static PARSERS: Semaphore = Semaphore::const_new(2);

/// Parses and checks a spec, and the runs of its sweep, on a blocking thread.
async fn parse_runs(yaml: &str) -> Result<Vec<SweepRun>, SubmitError> {
    // The semaphore is never closed.
    let _permit = PARSERS.acquire().await;
    let yaml = yaml.to_owned();
    Ok(run_blocking(move || RunSpec::parse_runs(&yaml)).await?)
}

/// The bases that the runs of a submission share, once resolved.
pub(crate) type ResolvedBases = Vec<(BaseSpec, v1::Base)>;

impl FleetControl {
    /// Submits the run that a YAML spec describes, or the runs of its sweep, for a user; an empty
    /// name is that of the log's author. After an error none of them exists, unless the log failed
    /// in between, which the error says, or their base was removed meanwhile: then they are
    /// cancelled.
    pub async fn submit_run(
        &self,
        yaml: &str,
        files: &SpecFiles,
        user: &str,
    ) -> Result<SubmittedRun, SubmitError> {
        let origin = SubmissionOrigin { user: user.to_owned(), ..SubmissionOrigin::default() };
        self.submit_from(yaml, files, origin, &unwatched()).await
    }

    /// Submits runs as [`FleetControl::submit_run`] does, and reports the progress of long
    /// transfers to `watch`.
    pub async fn submit_with_progress(
        &self,
        yaml: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        self.submit_from(yaml, files, SubmissionOrigin::default(), watch).await
    }

    pub(crate) async fn submit_from(
        &self,
        yaml: &str,
        files: &SpecFiles,
        origin: SubmissionOrigin,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        // Boxed, because the compiler bounds how deeply types of futures nest.
        let submitted = Box::pin(self.submit_sweep(yaml, files, origin, watch)).await;
        submitted.map_err(|error| error.with_place(yaml))
    }

    async fn submit_sweep(
        &self,
        yaml: &str,
        files: &SpecFiles,
        origin: SubmissionOrigin,
        watch: &TransferCallback,
    ) -> Result<SubmittedRun, SubmitError> {
        let sweep = parse_runs(yaml).await?;
        let (mut specs, mut report, mut bases) = (Vec::new(), None, ResolvedBases::new());
        let mut files = RunFiles::new(files);
        for SweepRun { settings, spec } in &sweep {
            self.attach_run_data(spec, &mut files, sweep.len(), watch).await?;
            let (resolved, own) = self.resolve_spec(spec, files.files(), &mut bases, watch).await?;
            let data_sources = files.list_sources(&spec.data_names());
            let name = String::new();
            let sweep = v1::spec::Sweep { name, settings: settings.clone() };
            let sweep = (!settings.is_empty()).then_some(sweep);
            let promotion = spec.promote.as_ref().map(|promote| v1::spec::Promotion {
                channel: promote.channel.clone(),
                alpha: promote.alpha,
                feedback: origin.feedback.unwrap_or_else(|| files.newest_feedback(spec)),
                learning: origin.learning,
            });
            let user = origin.user.clone();
            specs.push(v1::Spec { user, sweep, promotion, data_sources, ..resolved });
            report.get_or_insert(own);
        }
        let report = count_runs(report.unwrap_or_default(), sweep.len());
        let runs = self.write_spec_facts(specs.clone()).await?;
        for (run, spec) in runs.iter().zip(&specs) {
            self.require_stored_trees(run, spec).await?;
        }
        let run = runs.first().expect("a spec describes a run").clone();
        Ok(SubmittedRun { run, runs, report })
    }

    /// Attaches the data of one of `runs` runs. That of several is read once.
    async fn attach_run_data(
        &self,
        spec: &RunSpec,
        files: &mut RunFiles,
        runs: usize,
        watch: &TransferCallback,
    ) -> Result<(), SubmitError> {
        self.attach_data(spec, files, watch).await?;
        if runs > 1 { files.read_files(spec).await } else { Ok(()) }
    }

    /// Stores the files of a run and returns its spec as the `spec` fact has it, except for the
    /// run's id, user and sweep.
    pub(crate) async fn resolve_spec(
        &self,
        spec: &RunSpec,
        files: &SpecFiles,
        bases: &mut ResolvedBases,
        watch: &TransferCallback,
    ) -> Result<(v1::Spec, v1::DataReport), SubmitError> {
        let PreparedRun { suites, kind, report } = self.prepare_run(spec, files).await?;
        let texts = self.store_text_suites(&spec.evals, &suites).await?;
        let mut kind = self.store_training_data(spec, kind, &suites).await?;
        let teacher = self.check_own_teacher(spec, files).await?;
        // Last, because it may take long.
        let base = self.resolve_base_once(&spec.base, files, bases, watch).await?;
        if base.adapter.is_some() && spec.raft.is_none() {
            let remedy = "names an adapter, which only a raft run trains further";
            let (field, remedy) = ("base.channel".to_owned(), remedy.to_owned());
            return Err(FieldError { field, remedy }.into());
        }
        if let v1::spec::Kind::Raft(raft) = &mut kind {
            if let Some((teacher, end_token)) = teacher {
                let found = self.resolve_base_once(teacher, files, bases, watch).await;
                raft.teacher = found.map_err(|error| error.in_section(TEACHER_FIELD))?.tree;
                raft.end_token = end_token;
            }
            if let Some(proof) = &mut raft.proof {
                proof.tokenizer = self.tokenizer_digest(&base).await?;
            }
        }
        let other_model_type = self.find_other_model_type(&spec.base, files).await;
        let resolved = v1::Spec {
            other_model_type,
            run: String::new(),
            name: spec.name.clone(),
            submitted_at: Some(clock::now()),
            seed: spec.seed,
            base: Some(base),
            pool: spec.pool.clone(),
            suites: texts,
            kind: Some(kind),
            queue: spec.queue.as_ref().map(QueueSpec::to_proto),
            ..v1::Spec::default()
        };
        Ok((resolved, report))
    }

    /// Cancels a submitted run if a tree of these facts is being removed from the store.
    pub(crate) async fn require_stored_trees(
        &self,
        run: &RunId,
        facts: &impl serde::Serialize,
    ) -> Result<(), SubmitError> {
        let Err(error) = self.require_trees(facts).await else { return Ok(()) };
        let control = v1::Control {
            action: v1::control::Action::Cancel.into(),
            reason: "its base is being removed from the store".to_owned(),
            ..v1::Control::default()
        };
        if let Err(error) = self.control_run(run, control).await {
            // Its jobs fail with the same reason.
            tracing::warn!(%run, %error, "cannot cancel a run whose base is being removed");
        }
        Err(CheckpointError::Get(error).into())
    }

    /// Resolves a base as [`FleetControl::resolve_base`] does, once for all runs that share it.
    async fn resolve_base_once(
        &self,
        base: &BaseSpec,
        files: &SpecFiles,
        bases: &mut ResolvedBases,
        watch: &TransferCallback,
    ) -> Result<v1::Base, SubmitError> {
        if let Some((_, found)) = bases.iter().find(|(known, _)| known == base) {
            return Ok(found.clone());
        }
        let found = self.resolve_base(base, files, watch).await?;
        bases.push((base.clone(), found.clone()));
        Ok(found)
    }

    /// Writes the spec facts of a submission in their order. The runs of a sweep get the id of the
    /// first one as its name.
    async fn write_spec_facts(&self, specs: Vec<v1::Spec>) -> Result<Vec<RunId>, SubmitError> {
        let (mut runs, of) = (Vec::<RunId>::new(), specs.len());
        for mut spec in specs {
            if let (Some(sweep), Some(first)) = (&mut spec.sweep, runs.first()) {
                sweep.name = first.to_string();
            }
            let name = spec.name.clone();
            match (self.write_spec_fact(&name, spec).await, runs.first()) {
                (Ok(run), _) => runs.push(run),
                (Err(source), Some(first)) => {
                    let (sweep, written) = (first.clone(), runs.len());
                    let source = Box::new(source);
                    return Err(SubmitError::Unfinished { sweep, written, of, source });
                }
                (Err(error), None) => return Err(error),
            }
        }
        Ok(runs)
    }

    /// Reads and checks a spec, its files and its base as a submission does, and returns the report
    /// of its first run. Stores and starts nothing, and downloads no weights.
    pub async fn check_spec(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<v1::DataReport, SubmitError> {
        let (mut report, spec, prepared) = Box::pin(self.check_runs(yaml, files)).await?;
        report.warnings.extend(self.missing_roles_warning(&spec, &prepared, files).await);
        Ok(report)
    }

    /// Checks the runs of a spec and returns the first one, with its files and their report.
    pub(crate) async fn check_runs(
        &self,
        yaml: &str,
        files: &SpecFiles,
    ) -> Result<(v1::DataReport, RunSpec, PreparedRun), SubmitError> {
        let sweep = parse_runs(yaml).await?;
        let checked = async {
            let (mut first, mut bases) = (None, Vec::new());
            let (mut files, watch) = (RunFiles::new(files), unwatched());
            for SweepRun { spec, .. } in &sweep {
                self.attach_run_data(spec, &mut files, sweep.len(), &watch).await?;
                let prepared = self.check_run_spec(spec, files.files(), &mut bases).await?;
                first.get_or_insert((spec.clone(), prepared));
            }
            let (spec, prepared) = first.expect("a spec describes a run");
            Ok((count_runs(prepared.report.clone(), sweep.len()), spec, prepared))
        };
        checked.await.map_err(|error: SubmitError| error.with_place(yaml))
    }

    async fn check_run_spec<'a>(
        &self,
        spec: &'a RunSpec,
        files: &SpecFiles,
        checked_bases: &mut Vec<&'a BaseSpec>,
    ) -> Result<PreparedRun, SubmitError> {
        let prepared = self.prepare_run(spec, files).await?;
        if !checked_bases.contains(&&spec.base) {
            self.check_base(&spec.base, files).await?;
            checked_bases.push(&spec.base);
        }
        if let Some(teacher) = spec.raft.as_ref().and_then(|raft| raft.teacher.as_ref()) {
            let checked = self.check_base(teacher, files).await;
            checked.map_err(|error| error.in_section(TEACHER_FIELD))?;
            self.check_own_teacher(spec, files).await?;
        }
        Ok(prepared)
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
    async fn missing_roles_warning(
        &self,
        spec: &RunSpec,
        prepared: &PreparedRun,
        files: &SpecFiles,
    ) -> Option<String> {
        let other_model_type = self.find_other_model_type(&spec.base, files).await;
        let needed = v1::Spec { other_model_type, ..describe_spec(spec, prepared) };
        let agents = self.list_agents().await.ok()?;
        let missing = cycle::describe_missing_roles(&needed, &agents, wire::clock::unix_seconds());
        (!missing.is_empty()).then(|| format!("the run {missing}"))
    }

    pub(crate) async fn prepare_text_suites(
        &self,
        evals: &[SuiteSpec],
        files: &SpecFiles,
    ) -> Result<Vec<v1::Suite>, SubmitError> {
        let texts = evals.iter().enumerate().filter_map(|(index, suite)| {
            Some((format!("evals[{index}].text"), suite.text.as_deref()?))
        });
        let (texts, watch) = (texts.collect::<Vec<_>>(), unwatched());
        let mut files = RunFiles::new(files);
        self.attach_hub_data(&texts, &mut files, &watch).await?;
        let reader = DataReader::new(self, None, files.files());
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
                verifier: prompts.turn_texts.add_to_verifier(suite.verifier.to_proto()),
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
                resolved.verifier = prompts.turn_texts.add_to_verifier(resolved.verifier);
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
        if let Some(name) = &base.channel {
            let v1::ChannelMove { base: tree, adapter, .. } = self.find_channel_model(name).await?;
            return Ok(v1::Base { tree, random_init: false, adapter });
        }
        if let Some(name) = &base.model {
            let upload = base.upload.unwrap_or(UploadSpec::Auto);
            let found = self.resolve_model(name, upload, files, watch).await;
            let mut found = found.map_err(SubmitError::base_error)?;
            if let (Some(adapter), Some(tree)) = (&base.adapter, &found.tree) {
                let resolved = self.resolve_adapter(adapter, tree, files, watch).await;
                found.adapter = Some(resolved.map_err(SubmitError::adapter_error)?);
            }
            return Ok(found);
        }
        let init = base.init.as_ref().expect("checked: one of the three is there");
        self.publish_init(init, files).await
    }

    /// Fails as [`FleetControl::resolve_base`] does. Stores nothing and downloads no weights.
    async fn check_base(&self, base: &BaseSpec, files: &SpecFiles) -> Result<(), SubmitError> {
        if let Some(name) = &base.checkpoint {
            self.find_base_checkpoint(name).await?;
        }
        if let Some(name) = &base.channel {
            self.find_channel_model(name).await?;
        }
        if let Some(name) = &base.model {
            self.check_model(name, files).await.map_err(SubmitError::base_error)?;
        }
        if let Some(adapter) = &base.adapter {
            let checked = self.check_adapter(adapter, files, &unwatched()).await;
            checked.map_err(SubmitError::adapter_error)?;
        }
        if let Some(init) = &base.init {
            stage_init_files(init, files).await?;
        }
        Ok(())
    }

    /// Fails if the checkpoint is an adapter.
    pub(crate) async fn find_base_checkpoint(
        &self,
        name: &str,
    ) -> Result<v1::Checkpoint, SubmitError> {
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
    /// already, returns that run. A sweep without a name gets that id.
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
            let mut written = spec.clone();
            if let Some(sweep) = written.sweep.as_mut().filter(|sweep| sweep.name.is_empty()) {
                sweep.name = run.to_string();
            }
            let fact = Fact { subject, body: FactBody::Spec(written) };
            match self.bus.find_spec(&run).await {
                Ok(None) if !self.has_entries(&run).await? => {}
                Ok(None) => continue,
                Ok(Some(there)) if there.fact == fact => return Ok(run),
                // An entry that cannot be read occupies the number too.
                Ok(Some(_)) | Err(ReadError::Unreadable { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            // After the look for a free number: another coordinator that starts a run of this name
            // meanwhile takes the same one.
            self.require_new_feedback(&spec).await?;
            match self.bus.publish_fact(&fact).await? {
                PublishOutcome::New { .. } | PublishOutcome::AlreadyWritten { same: true, .. } => {
                    return Ok(run);
                }
                PublishOutcome::AlreadyWritten { same: false, .. } => {}
            }
        }
        Err(SubmitError::TooMany { name: name.to_owned() })
    }

    /// Refuses a run that a channel's learning starts if another one learns from the channel, or has
    /// learned from the same feedback.
    async fn require_new_feedback(&self, spec: &v1::Spec) -> Result<(), SubmitError> {
        let Some(promotion) = spec.promotion.as_ref().filter(|it| it.learning > 0) else {
            return Ok(());
        };
        let channel = parse_channel_name(&promotion.channel)?;
        let learned = self.read_channel_set().await?.learned_feedback(&channel);
        let is_allowed = learned.allows_run(promotion.feedback);
        if is_allowed { Ok(()) } else { Err(SubmitError::Learning(channel)) }
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
