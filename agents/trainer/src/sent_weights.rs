//! What a box sends after a slice, in a training on several boxes.

use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::WeightChange;
use wire::v1;

use crate::{
    lineage,
    messages::{CHECKPOINT_DIR, STATE_DIR},
};

/// Returns the directory of what a box sends: the saved weights or, beside them, their change from
/// `start`. `left_out` is the state with what the change before left out; the new one is written into
/// the saved state.
pub(crate) async fn write_sent_weights(
    order: &v1::TrainOrder,
    start: &Path,
    saved: &Path,
    left_out: Option<PathBuf>,
) -> anyhow::Result<PathBuf> {
    let trained = saved.join(CHECKPOINT_DIR);
    let Some(keep) = lineage::send_share(order) else { return Ok(trained) };
    let change = WeightChange { start: start.to_owned(), trained, left_out, keep };
    let (sent, state) = (saved.join("change"), saved.join(STATE_DIR));
    let writing = move || change.write_change(&sent, &state).map(|()| sent);
    let written = tokio::task::spawn_blocking(writing).await?;
    written.context("write the change of the adapter's weights")
}
