//! Lists the tests that were skipped since the last `skipped-tests clear`.

use anyhow::Context;
use requirements::{AllowedSkips, clear_skipped_tests, read_skipped_tests};

/// `skipped-tests clear` removes the records. `skipped-tests list` prints them, and with the file
/// of a list fails for a skip that is not on it.
fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["clear"] => clear_skipped_tests().context("remove the records of skipped tests"),
        ["list"] => list_skipped_tests(None),
        ["list", allowed] => list_skipped_tests(Some(allowed)),
        _ => anyhow::bail!("use: skipped-tests clear | list [ALLOWED_SKIPS]"),
    }
}

fn list_skipped_tests(allowed: Option<&str>) -> anyhow::Result<()> {
    let skipped = read_skipped_tests().context("read the records of skipped tests")?;
    println!("{} skipped tests or parts of tests", skipped.len());
    for one in &skipped {
        println!("  {one}");
    }
    let Some(path) = allowed else { return Ok(()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let allowed =
        AllowedSkips::parse(&text).map_err(anyhow::Error::msg).context(path.to_owned())?;
    let refused: Vec<_> = skipped.iter().filter(|one| !allowed.contains(one)).collect();
    for one in &refused {
        println!("not allowed by {path}: {one}");
    }
    anyhow::ensure!(refused.is_empty(), "{} skips are not on the list {path}", refused.len());
    Ok(())
}
