//! The spec of a first run, which `flotilla init` asks for at a terminal.

use std::path::{Path, PathBuf};

use anyhow::Context;
use spec_questions::FirstRun;
use wire::RunId;

use crate::{
    demo_task::{BaseRunFiles, DigitCount, RaftRunFiles},
    output,
    run_submission::write_spec,
};

/// Asks what to train, from which base and with which data, writes a spec into the fleet's directory
/// and prints the commands that start it. Asks nothing if there is one already.
pub(super) fn ask_first_spec(directory: &Path) -> anyhow::Result<()> {
    let (file, demo) = (directory.join("run.yaml"), directory.join("demo"));
    if file.try_exists()? || demo.try_exists()? {
        return Ok(());
    }
    let kind = FirstRun::ask()?;
    let specs = match kind.ask_spec(&file)? {
        Some(yaml) => {
            write_spec(&file, &yaml)?;
            vec![file]
        }
        None if kind == FirstRun::Demo => write_demo(&demo).context("write the demo's files")?,
        None => return Ok(()),
    };
    let shown = |path: &Path| output::escape_line(&path.display().to_string());
    let dir = shown(directory);
    let submit =
        |spec: &PathBuf| format!("\n  flotilla run submit {} --watch --dir {dir}", shown(spec));
    output::print_status_text(&format!(
        "wrote {}. Start the fleet, and in another terminal the run:\n  \
         flotilla up --dir {dir} --agents trainer,generator,verifier,evaluator{}",
        specs.iter().map(|spec| shown(spec)).collect::<Vec<_>>().join(" and "),
        specs.iter().map(submit).collect::<String>()
    ));
    Ok(())
}

fn write_demo(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    BaseRunFiles { seed: 1, digits: DigitCount::Two }.write_files(directory)?;
    let (base, selection) = (RunId::new("base-1")?, "{ keep_per_prompt: 1, min_reward: 1.0 }");
    RaftRunFiles { seed: 1, base: &base, cycles: 3, selection, extra_lines: "" }
        .write_spec(directory)?;
    Ok(["base.yaml", "raft.yaml"].map(|name| directory.join(name)).to_vec())
}
