//! Measures how long the doctor takes to inspect this host. It starts no process, so this is its
//! whole cost.

use std::time::Instant;

use hardware::{HardwareProfile, host_files::LiveFiles, host_snapshot::HostSnapshot};

use super::BenchFigure;

/// Repetitions; the median counts.
const TIMES: usize = 50;

/// Accepted median, in milliseconds.
const LIMIT_MS: f64 = 50.0;

pub(super) fn measure_doctor() -> anyhow::Result<BenchFigure> {
    let mut taken = Vec::with_capacity(TIMES);
    let mut found = 0;
    for _ in 0..TIMES {
        let began = Instant::now();
        let seen = HostSnapshot::take_snapshot(&LiveFiles::new("/"));
        let profile = HardwareProfile::for_host(&seen)?;
        found = doctor::check_host(&seen, &profile).len();
        taken.push(began.elapsed().as_secs_f64() * 1e3);
    }
    taken.sort_by(f64::total_cmp);
    Ok(BenchFigure {
        name: "doctor: median",
        measured: taken[TIMES / 2],
        unit: "ms",
        limit: Some(LIMIT_MS),
        how: format!(
            "a snapshot of this box and {found} findings, {TIMES} times; the slowest took {:.1} ms",
            taken[TIMES - 1]
        ),
    })
}
