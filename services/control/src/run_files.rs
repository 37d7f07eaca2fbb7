//! The data that the runs of a submission name: each file is read once, and feedback and data sets
//! of the hub are fetched once.

use std::collections::BTreeMap;

use bytes::Bytes;
use spec::{FEEDBACK_PREFIX, HUB_PREFIX, RunSpec};
use wire::{RunId, v1::spec::DataSource};

use crate::{
    FleetControl, SpecFiles, SubmitError,
    base_model::TransferCallback,
    data::{fetch_hub_data, read_spec_file},
    exchanges::write_examples,
};

/// The files of a submission, with what its runs so far have named.
#[derive(Debug, Clone)]
pub(crate) struct RunFiles {
    files: SpecFiles,
    /// The names of data sets with their commits, by the names in specs.
    pinned: BTreeMap<String, String>,
    /// Positions of the newest feedback, by channel.
    newest: BTreeMap<String, u64>,
}

impl RunFiles {
    pub(crate) fn new(files: &SpecFiles) -> Self {
        Self { files: files.clone(), pinned: BTreeMap::new(), newest: BTreeMap::new() }
    }

    pub(crate) fn files(&self) -> &SpecFiles {
        &self.files
    }

    /// Returns the data sets of the hub among the named data, each with its fields. Those that came
    /// with the call are left out.
    pub(crate) fn list_sources(&self, named: &[(String, &str)]) -> Vec<DataSource> {
        let mut sources = BTreeMap::<&str, DataSource>::new();
        for (field, name) in named {
            let Some(pinned) = self.pinned.get(*name) else { continue };
            let source = sources.entry(*name).or_default();
            (source.name, source.pinned) = ((*name).to_owned(), pinned.clone());
            source.fields.push(field.clone());
        }
        sources.into_values().collect()
    }

    /// Returns the position of the newest feedback in the data of a run on the channel that it
    /// moves; 0 if there is none, or if the feedback came with the call.
    pub(crate) fn newest_feedback(&self, spec: &RunSpec) -> u64 {
        let moved = spec.promote.as_ref().map(|promote| promote.channel.as_str());
        let moved = moved.filter(|channel| spec.feedback_channels().contains(channel));
        moved.and_then(|channel| self.newest.get(channel)).copied().unwrap_or(0)
    }

    /// Reads the files that a spec names as data, so that later runs find them.
    pub(crate) async fn read_files(&mut self, spec: &RunSpec) -> Result<(), SubmitError> {
        for (field, name) in spec.data_names() {
            if !self.files.has_attached(name) {
                let content = read_spec_file(&field, name, &self.files).await?;
                self.attach(name, content);
            }
        }
        Ok(())
    }

    fn attach(&mut self, name: &str, content: Bytes) {
        self.files = self.files.with_attached(BTreeMap::from([(name.to_owned(), content)]));
    }
}

impl FleetControl {
    /// Attaches the feedback and the data sets of the hub that a spec names as data, unless they are
    /// attached already.
    ///
    /// # Errors
    /// As [`FleetControl::attach_hub_data`], or the bus does not answer.
    pub(crate) async fn attach_data(
        &self,
        spec: &RunSpec,
        files: &mut RunFiles,
        watch: &TransferCallback,
    ) -> Result<(), SubmitError> {
        for name in spec.feedback_channels() {
            let file = format!("{FEEDBACK_PREFIX}{name}");
            // A name that is no channel's has none.
            let Ok(channel) = RunId::new(name) else { continue };
            if files.files.has_attached(&file) {
                continue;
            }
            let exchanges = self.list_exchanges(&channel).await?;
            let newest = exchanges.iter().map(|it| it.feedback_at).max().unwrap_or(0);
            files.newest.insert(name.to_owned(), newest);
            files.attach(&file, write_examples(&exchanges).into());
        }
        self.attach_hub_data(&spec.data_names(), files, watch).await
    }

    /// Attaches the rows of the data sets that fields name, unless they are attached already.
    ///
    /// # Errors
    /// Fails as a model of the hub does: if the files came with a call, or the data set is neither
    /// on the hub nor in this machine's cache.
    pub(crate) async fn attach_hub_data(
        &self,
        named: &[(String, &str)],
        files: &mut RunFiles,
        watch: &TransferCallback,
    ) -> Result<(), SubmitError> {
        for (field, name) in named.iter().filter(|(_, name)| name.starts_with(HUB_PREFIX)) {
            if files.files.has_attached(name) {
                continue;
            }
            let unavailable = |source| SubmitError::File { field: field.clone(), source };
            files.files.resolve_directory(name).map_err(unavailable)?;
            let data = fetch_hub_data(&self.hub, name, watch).await;
            let data = data.map_err(|source| SubmitError::data_error(field, source))?;
            files.pinned.insert((*name).to_owned(), data.pinned);
            files.attach(name, data.lines);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: &str = "\
base: { channel: stable }
promote: { channel: stable }
raft:
  prompts: 'feedback:stable'
  heldout: held.jsonl
  verifier: { numeric: {} }
evals: [{ name: a, text: 'hub:org/set' }, { name: b, text: 'hub:org/set' }]
";

    #[tokio::test]
    async fn a_file_of_a_sweep_is_read_once() {
        let directory = tempfile::tempdir().unwrap();
        let spec = RunSpec::parse(SPEC).unwrap();
        let mut files = RunFiles::new(&SpecFiles::Local(directory.path().to_owned()));
        files.attach("feedback:stable", Bytes::from_static(b"{}"));
        files.attach("hub:org/set", Bytes::from_static(b"{}"));
        let missing = files.read_files(&spec).await.unwrap_err();
        let field = matches!(&missing, SubmitError::File { field, .. } if field == "raft.heldout");
        assert!(field, "{missing:?}");
        std::fs::write(directory.path().join("held.jsonl"), "first").unwrap();
        files.read_files(&spec).await.unwrap();
        std::fs::write(directory.path().join("held.jsonl"), "second").unwrap();
        files.read_files(&spec).await.unwrap();
        assert_eq!(files.files().read("held.jsonl").await.unwrap(), "first");
    }

    #[test]
    fn every_run_of_a_sweep_has_the_sources_and_the_feedback_of_its_data() {
        let spec = RunSpec::parse(SPEC).unwrap();
        let mut files = RunFiles::new(&SpecFiles::Attached(BTreeMap::new()));
        assert_eq!(
            (files.list_sources(&spec.data_names()).len(), files.newest_feedback(&spec)),
            (0, 0)
        );
        files.pinned.insert("hub:org/set".into(), "hub:org/set@1:default/train".into());
        files.newest.insert("stable".into(), 7);
        let sources = files.list_sources(&spec.data_names());
        assert_eq!((sources.len(), files.newest_feedback(&spec)), (1, 7));
        assert_eq!(sources[0].pinned, "hub:org/set@1:default/train");
        assert_eq!(sources[0].fields, ["evals[0].text", "evals[1].text"]);
        let other = SPEC.replace("feedback:stable", "p.jsonl");
        assert_eq!(files.newest_feedback(&RunSpec::parse(&other).unwrap()), 0);
    }
}
