//! `flotilla bench fleet`: a fleet beside the sum of its boxes.
//!
//! How long boxes of different speeds take together, in virtual time (`share`); a coordinator with
//! a thousand boxes and a million samples on a real bus (`crowd`); and what the demo's cycles take
//! beyond what is computed in them (`overhead`).

mod crowd;
mod overhead;

use super::{Figure, share};

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = tokio::task::spawn_blocking(share::measure).await??;
    figures.extend(overhead::measure().await?);
    figures.extend(crowd::measure().await?);
    Ok(figures)
}
