//! Data sets of the hub as the data of runs: downloaded, read and joined to JSON lines.

use std::{fs, path::PathBuf, sync::Arc};

use bytes::Bytes;
use data_files::{DataLimits, JsonRows};
use hub::{DatasetName, DatasetSplit, HubClient};
use spec::HUB_PREFIX;

use super::error::{DataError, HubDataError};
use crate::{
    base_model::{TransferCallback, TransferProgress, run_blocking},
    spec_files::FILE_BYTES_MAX,
};

/// The rows of a data set's split.
#[derive(Debug, Clone)]
pub(crate) struct HubData {
    /// The name with its commit.
    pub(crate) pinned: String,
    pub(crate) lines: Bytes,
}

/// Fetches the split that a name with its prefix stands for.
pub(crate) async fn fetch_hub_data(
    hub: &HubClient,
    name: &str,
    watch: &TransferCallback,
) -> Result<HubData, DataError> {
    let fetched = async {
        let dataset: DatasetName = name.strip_prefix(HUB_PREFIX).unwrap_or(name).parse()?;
        let watch = watch.clone();
        let seen = Arc::new(move |bytes| {
            watch(TransferProgress { activity: "downloading", bytes, total: 0 });
        });
        let DatasetSplit { pinned, files } =
            hub.download_split(&dataset, FILE_BYTES_MAX, seen).await?;
        let rows = run_blocking(move || join_files(files)).await?;
        Ok(HubData { pinned: format!("{HUB_PREFIX}{pinned}"), lines: rows.lines })
    };
    fetched.await.map_err(|source: HubDataError| DataError::Hub {
        file: name.to_owned(),
        source: Box::new(source),
    })
}

fn join_files(files: Vec<(String, PathBuf)>) -> Result<JsonRows, HubDataError> {
    let limits = DataLimits::default();
    let parts = files.into_iter().map(|(file, path)| {
        let content = fs::read(&path).map_err(|source| HubDataError::Read { path, source })?;
        let rows = JsonRows::read(&file, &content.into(), &limits);
        rows.map_err(|source| HubDataError::File { file, source })
    });
    let parts: Vec<JsonRows> = parts.collect::<Result<_, _>>()?;
    JsonRows::join_parts(parts, &limits).map_err(HubDataError::Join)
}
