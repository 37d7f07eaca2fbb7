//! How long the doctor looks at this box. It starts no process, so this is all of it.

use std::time::Instant;

use hardware::{Profile, doctor, files::Live, snapshot::Snapshot};

use super::Figure;

const TIMES: usize = 50;

const LIMIT_MS: f64 = 50.0;

pub(super) fn measure() -> anyhow::Result<Figure> {
    let mut taken = Vec::with_capacity(TIMES);
    let mut found = 0;
    for _ in 0..TIMES {
        let began = Instant::now();
        let seen = Snapshot::take(&Live::new("/"));
        let profile = Profile::of(&seen)?;
        found = doctor::check(&seen, &profile).len();
        taken.push(began.elapsed().as_secs_f64() * 1e3);
    }
    taken.sort_by(f64::total_cmp);
    Ok(Figure {
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
