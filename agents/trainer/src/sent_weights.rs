//! What a box sends after a slice, in a training on several boxes.

use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::{WeightChange, check_left_out};
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

/// Returns the optimizer's state with which a slice begins; `None` for a new one. If boxes send
/// changes, a state without the values that its last change left out is not used.
pub(crate) async fn find_usable_state(
    order: &v1::TrainOrder,
    start: &Path,
    state: Option<PathBuf>,
) -> Option<PathBuf> {
    let state = state?;
    if lineage::send_share(order).is_none() {
        return Some(state);
    }
    let (left_out, start) = (state.clone(), start.to_owned());
    let checking = move || check_left_out(&left_out, &start);
    let error = match tokio::task::spawn_blocking(checking).await {
        Ok(Ok(())) => return Some(state),
        Ok(Err(error)) => anyhow::Error::from(error),
        Err(error) => anyhow::Error::from(error),
    };
    let (path, error) = (state.display().to_string(), format!("{error:#}"));
    tracing::warn!(path, error, "an optimizer's state cannot be used; starting with a new one");
    None
}

#[cfg(test)]
mod tests {
    use formats::peft::TENSOR_FILE;

    use super::*;

    fn write_adapter(directory: &Path, values: &[f32]) {
        std::fs::create_dir_all(directory).unwrap();
        let end = 4 * values.len();
        let entry = serde_json::json!({
            "dtype": "F32", "shape": [values.len()], "data_offsets": [0, end],
        });
        let header = serde_json::json!({ "q.lora_B.weight": entry }).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.into_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        std::fs::write(directory.join(TENSOR_FILE), bytes).unwrap();
    }

    fn order(send_share: f64) -> v1::TrainOrder {
        let across = v1::Across { send_share, ..Default::default() };
        let training = v1::Training { across: Some(across), ..Default::default() };
        v1::TrainOrder { training: Some(training), ..Default::default() }
    }

    #[tokio::test]
    async fn a_state_whose_left_out_values_are_damaged_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (start, saved) = (dir.path().join("start"), dir.path().join("4"));
        write_adapter(&start, &[0.0; 4]);
        write_adapter(&saved.join(CHECKPOINT_DIR), &[1.0, -2.0, 3.0, 4.0]);
        let (order, weights) = (order(0.25), order(0.0));
        write_sent_weights(&order, &start, &saved, None).await.unwrap();
        let state = Some(saved.join(STATE_DIR));
        assert_eq!(find_usable_state(&order, &start, state.clone()).await, state);
        let left_out = saved.join(STATE_DIR).read_dir().unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(&left_out).unwrap();
        std::fs::write(&left_out, &bytes[..bytes.len() - 1]).unwrap();
        let sent = write_sent_weights(&order, &start, &saved, state.clone()).await;
        assert!(sent.is_err(), "it is needed after the training");
        assert_eq!(find_usable_state(&order, &start, state.clone()).await, None);
        std::fs::remove_file(&left_out).unwrap();
        assert_eq!(find_usable_state(&order, &start, state.clone()).await, None);
        assert_eq!(find_usable_state(&weights, &start, state.clone()).await, state);
    }
}
