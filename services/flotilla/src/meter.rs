//! How far something is: a bar on a terminal, now and then a line elsewhere.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;

/// Between lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows one thing after the other.
pub(crate) struct Meter {
    bar: Option<ProgressBar>,
    shown: Mutex<Shown>,
}

struct Shown {
    said: Instant,
    what: (&'static str, &'static str, u64),
}

impl Meter {
    pub(crate) fn new() -> Self {
        let shown = Shown { said: Instant::now(), what: ("", "", 0) };
        Self { bar: output::on_terminal().then(ProgressBar::hidden), shown: Mutex::new(shown) }
    }

    /// `unit` is `bytes` or what is counted; a total of 0 is not known.
    pub(crate) fn show(&self, doing: &'static str, unit: &'static str, done: u64, total: u64) {
        let Ok(mut shown) = self.shown.lock() else { return };
        if let Some(bar) = &self.bar {
            if shown.what != (doing, unit, total) {
                shown.what = (doing, unit, total);
                bar.set_style(style(doing, unit, total > 0));
                bar.set_length(total);
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            }
            return bar.set_position(done);
        }
        if shown.said.elapsed() >= LINE_EVERY {
            shown.said = Instant::now();
            let of = if total > 0 { format!(" of {total}") } else { String::new() };
            output::say(&format!("{doing}: {done}{of} {unit}"));
        }
    }

    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(doing: &str, unit: &str, bounded: bool) -> ProgressStyle {
    let count = match (unit, bounded) {
        ("bytes", true) => "{bytes}/{total_bytes} {bytes_per_sec}".to_owned(),
        ("bytes", false) => "{bytes} {bytes_per_sec}".to_owned(),
        (unit, _) => format!("{{pos}}/{{len}} {unit}"),
    };
    let bar = if bounded { "{wide_bar:.green} " } else { "" };
    ProgressStyle::with_template(&format!("{doing:>18} {bar}{count}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
