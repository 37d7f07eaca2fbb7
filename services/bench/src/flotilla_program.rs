//! The program that the benchmarks measure.

use std::path::PathBuf;

use anyhow::{Context, ensure};

pub(super) fn find_flotilla() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find this program")?;
    let flotilla = own.with_file_name("flotilla");
    ensure!(
        flotilla.is_file(),
        "{} is not there; build it beside this program with `cargo build --bins`, and with \
         `--release` for figures",
        flotilla.display()
    );
    Ok(flotilla)
}
