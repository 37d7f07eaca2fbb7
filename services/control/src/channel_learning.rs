//! Runs from the feedback on a channel: their setup, and their start when enough has arrived.

use std::collections::BTreeMap;

use bus::ExchangeError;
use cycle::NEW_FEEDBACK_MIN;
use spec::{FEEDBACK_PREFIX, HUB_PREFIX, RunSpec};
use store::{GetError, PutError};
use wire::{RunId, v1};

use crate::{
    ChannelError, FleetControl, SpecFiles, StoreAccessError, SubmitError,
    base_model::unwatched,
    exchanges::write_examples,
    parse_channel_name,
    run_files::RunFiles,
    spec_files::{FILE_BYTES_MAX, SpecFileError},
    submission::SubmissionOrigin,
};

use v1::channel_move::Learning;

/// The reason why a channel does not learn.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
    #[error("field {field}: {remedy} (R102)")]
    Spec { field: &'static str, remedy: String },
    #[error("at least {NEW_FEEDBACK_MIN} new ratings must start a run, not {0} (A101)")]
    AtLeast(u32),
    #[error("file {name}")]
    File {
        name: String,
        #[source]
        source: SpecFileError,
    },
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("store what the spec names")]
    Put(#[from] PutError),
    #[error("read what the spec names")]
    Get(#[from] GetError),
    #[error(transparent)]
    Store(#[from] StoreAccessError),
}

impl LearnError {
    /// Returns true if trying again may succeed without a change of the spec.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Channel(error) => error.is_transient(),
            Self::Submit(error) => !error.is_caller_fault(),
            Self::Get(error) => error.is_transient(),
            Self::Exchange(_) | Self::Put(_) | Self::Store(_) => true,
            Self::Spec { .. } | Self::AtLeast(_) | Self::File { .. } => false,
        }
    }
}

impl FleetControl {
    /// Lets the coordinator submit a run of this spec whenever `at_least` requests to the channel
    /// have new feedback.
    ///
    /// # Errors
    /// The channel does not exist, a file is missing, or the spec does not learn from the feedback
    /// on the channel and move it.
    pub async fn learn_channel(
        &self,
        channel: &RunId,
        yaml: &str,
        files: &SpecFiles,
        at_least: u32,
        user: String,
    ) -> Result<v1::Channel, LearnError> {
        if at_least < NEW_FEEDBACK_MIN {
            return Err(LearnError::AtLeast(at_least));
        }
        let parsed = RunSpec::parse(yaml).map_err(SubmitError::from)?;
        check_learning_spec(channel, &parsed)?;
        // Without any feedback there is no file of it to check.
        let exchanges = self.list_exchanges(channel).await?;
        if !write_examples(&exchanges).is_empty() {
            self.check_spec(yaml, files).await?;
        }
        let store = self.open_store().await?;
        let (named, unwatched) = (parsed.data_names(), unwatched());
        let mut files = RunFiles::new(files);
        self.attach_hub_data(&named, &mut files, &unwatched).await?;
        let names = named.iter().map(|(_, name)| *name);
        let datasets = names.filter(|name| name.starts_with(HUB_PREFIX));
        let mut stored = BTreeMap::new();
        for name in parsed.file_names().into_iter().chain(datasets) {
            let failed = |source| LearnError::File { name: name.to_owned(), source };
            let content = files.files().read(name).await.map_err(failed)?;
            stored.insert(name.to_owned(), store.put_blob(content).await?);
        }
        let spec = Some(store.put_blob(yaml.to_owned().into()).await?);
        let learning = Some(Learning { spec, files: stored, at_least });
        Ok(self.set_learning(channel, learning, user).await?)
    }

    /// Starts no more runs from the feedback on a channel.
    ///
    /// # Errors
    /// The channel does not exist.
    pub async fn stop_learning(
        &self,
        channel: &RunId,
        user: String,
    ) -> Result<v1::Channel, ChannelError> {
        self.set_learning(channel, None, user).await
    }

    /// Submits a run from all feedback on a channel, with the settings of the move of this number.
    ///
    /// # Errors
    /// As a submission by a user; or another run has been started from this feedback, or learns.
    pub(crate) async fn submit_learning_run(
        &self,
        channel: &RunId,
        learning: &Learning,
        number: u64,
    ) -> Result<RunId, LearnError> {
        let store = self.open_store().await?;
        let read = async |blob: &v1::Blob| store.get_blob(blob, FILE_BYTES_MAX).await;
        let yaml = read(&learning.spec.clone().unwrap_or_default()).await?;
        let mut files = BTreeMap::new();
        for (name, blob) in &learning.files {
            files.insert(name.clone(), read(blob).await?);
        }
        let exchanges = self.list_exchanges(channel).await?;
        let feedback = exchanges.iter().map(|it| it.feedback_at).max().unwrap_or(0);
        files.insert(format!("{FEEDBACK_PREFIX}{channel}"), write_examples(&exchanges).into());
        let feedback = Some(feedback);
        let origin = SubmissionOrigin { user: String::new(), feedback, learning: number };
        let (yaml, files) = (String::from_utf8_lossy(&yaml), SpecFiles::Attached(files));
        Ok(self.submit_from(&yaml, &files, origin, &unwatched()).await?.run)
    }
}

/// Requires that the spec learns from the feedback on the channel, and moves it.
fn check_learning_spec(channel: &RunId, spec: &RunSpec) -> Result<(), LearnError> {
    let refuse = |field, remedy: String| Err(LearnError::Spec { field, remedy });
    let moves = spec.promote.as_ref().map(|promote| promote.channel.as_str());
    if moves != Some(channel.as_str()) {
        return refuse("promote", format!("write `promote: {{ channel: {channel} }}`"));
    }
    if spec.base.channel.as_deref() != Some(channel.as_str()) {
        return refuse("base", format!("write `base: {{ channel: {channel} }}`"));
    }
    if spec.sweep.is_some() {
        return refuse("sweep", "leave it out: one run at a time learns from a channel".to_owned());
    }
    let teacher = spec.raft.as_ref().and_then(|raft| raft.teacher.as_ref());
    let is_local = |name: &String| !name.starts_with("store:");
    if teacher.is_some_and(|teacher| teacher.model.as_ref().is_some_and(is_local)) {
        let remedy = "name a model of the store as store:PATH, which the coordinator can read";
        return refuse("raft.teacher", remedy.to_owned());
    }
    if spec.feedback_channels() != [channel.as_str()] {
        let remedy = format!("name `{FEEDBACK_PREFIX}{channel}` as the file of prompts");
        return refuse("raft.prompts", remedy);
    }
    parse_channel_name(channel.as_str())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_learns_from_its_channel_and_moves_it() {
        let channel = "stable".parse().unwrap();
        let check = |yaml: &str| {
            let checked = check_learning_spec(&channel, &RunSpec::parse(yaml).unwrap());
            checked.map_err(|error| error.to_string())
        };
        let spec = "base: { channel: stable }
promote: { channel: stable }
raft: { prompts: 'feedback:stable', heldout: { share: 0.2 }, verifier: { numeric: {} } }
";
        check(spec).unwrap();
        let error = check(&spec.replace("promote: { channel: stable }\n", "")).unwrap_err();
        assert!(error.contains("promote: { channel: stable }"), "{error}");
        let error = check(&spec.replace("base: { channel: stable }", "base: { model: m }"));
        assert!(error.unwrap_err().contains("base: { channel: stable }"));
        let error = check(&format!("{spec}sweep: {{ seed: [1, 2] }}\n")).unwrap_err();
        assert!(error.starts_with("field sweep: ") && error.ends_with("(R102)"), "{error}");
        let error = check(&spec.replace("feedback:stable", "p.jsonl")).unwrap_err();
        assert!(error.contains("feedback:stable"), "{error}");
    }
}
