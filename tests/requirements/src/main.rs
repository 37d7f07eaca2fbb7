//! Lists the tests that were skipped since the last `skipped-tests clear`.

use std::process::ExitCode;

use anyhow::Context;
use requirements::{AllowedSkips, clear_skipped_tests, read_skipped_tests};

/// `skipped-tests clear` removes the records. `skipped-tests list` prints them, and with the file
/// of a list fails for a skip that is not on it.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["clear"] => clear_skipped_tests().context("remove the records of skipped tests"),
        ["list"] => list_skipped_tests(None),
        ["list", allowed] => list_skipped_tests(Some(allowed)),
        _ => Err(anyhow::anyhow!("use: skipped-tests clear | list [ALLOWED_SKIPS]")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn list_skipped_tests(allowed_path: Option<&str>) -> anyhow::Result<()> {
    let allowed = allowed_path.map(read_allowed_skips).transpose()?;
    let skipped = read_skipped_tests().context("read the records of skipped tests")?;
    println!("{} skipped tests or parts of tests", skipped.len());
    let mut refused = 0;
    for one in &skipped {
        let is_allowed = allowed.as_ref().is_none_or(|list| list.contains(one));
        println!("  {one}{}", if is_allowed { "" } else { " (not allowed)" });
        refused += usize::from(!is_allowed);
    }
    anyhow::ensure!(
        refused == 0,
        "{refused} skips are not in {}",
        allowed_path.unwrap_or_default()
    );
    Ok(())
}

fn read_allowed_skips(path: &str) -> anyhow::Result<AllowedSkips> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    AllowedSkips::parse(&text).map_err(anyhow::Error::msg).with_context(|| path.to_owned())
}
