//! Progress of a task: a bar on a terminal, a line every few seconds elsewhere.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

const LINE_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct ProgressMeter {
    bar: Option<ProgressBar>,
    shown: Mutex<MeterState>,
}

struct MeterState {
    printed_at: Instant,
    step: (&'static str, &'static str, u64),
}

impl ProgressMeter {
    pub(crate) fn new() -> Self {
        let shown = MeterState { printed_at: Instant::now(), step: ("", "", 0) };
        Self {
            bar: output::stderr_is_terminal().then(ProgressBar::hidden),
            shown: Mutex::new(shown),
        }
    }

    /// Shows the progress of a step. `unit` is `bytes` or the noun of what is counted; a `total` of
    /// 0 is unknown.
    pub(crate) fn show_progress(
        &self,
        doing: &'static str,
        unit: &'static str,
        done: u64,
        total: u64,
    ) {
        let Ok(mut shown) = self.shown.lock() else { return };
        if let Some(bar) = &self.bar {
            if shown.step != (doing, unit, total) {
                shown.step = (doing, unit, total);
                bar.set_style(bar_style(doing, unit, total > 0));
                bar.set_length(total);
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            }
            return bar.set_position(done);
        }
        if shown.printed_at.elapsed() >= LINE_INTERVAL {
            shown.printed_at = Instant::now();
            let of = if total > 0 { format!(" of {total}") } else { String::new() };
            output::print_message(&format!("{doing}: {done}{of} {unit}"));
        }
    }

    pub(crate) fn finish_bar(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar_style(doing: &str, unit: &str, bounded: bool) -> ProgressStyle {
    let count = match (unit, bounded) {
        ("bytes", true) => "{bytes}/{total_bytes} {bytes_per_sec}".to_owned(),
        ("bytes", false) => "{bytes} {bytes_per_sec}".to_owned(),
        (unit, _) => format!("{{pos}}/{{len}} {unit}"),
    };
    let bar = if bounded { "{wide_bar:.green} " } else { "" };
    ProgressStyle::with_template(&format!("{doing:>18} {bar}{count}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
