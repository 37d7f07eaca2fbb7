//! Measures `flotilla-bench fleet`: a fleet compared with the sum of its boxes.
//!
//! * `balance`: how long boxes of different speeds take together, in virtual time.
//! * `load_test`: a coordinator with a thousand boxes and a million samples on a real bus.
//! * `overhead`: the time of the demo's cycles in which nothing is computed.

mod load_test;
mod overhead;

use super::{BenchFigure, balance};

pub(super) async fn measure_fleet() -> anyhow::Result<Vec<BenchFigure>> {
    let mut figures = tokio::task::spawn_blocking(balance::measure_balance).await??;
    figures.extend(overhead::measure_overhead().await?);
    figures.extend(load_test::measure_load().await?);
    Ok(figures)
}
