//! `flotilla data` and `flotilla run import`, and reports about the files of a run.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use bytes::Bytes;
use serde_json::json;
use spec::{HeldoutSize, ImportNote, ImportedSpec};
use wire::v1::{DataFile, DataReport, data_file::Lengths};

use crate::{
    args::{DataCommand, HeldoutArgs},
    output,
};

pub(crate) fn run_data_command(command: DataCommand, json: bool) -> anyhow::Result<()> {
    match command {
        DataCommand::Stats { files } => {
            ensure!(!files.is_empty(), "name at least one file (A100)");
            let (report, mut errors) = report_data_files(&files);
            output::print_json_or(json, &report, || {
                report_lines(&report).iter().for_each(|line| output::print_line(line));
            })?;
            if let Some(last) = errors.pop() {
                errors.iter().for_each(output::print_error);
                return Err(last);
            }
        }
        DataCommand::Split { file, held, seed, out_train, out_heldout } => {
            let places = [("--out-train", &out_train), ("--out-heldout", &out_heldout)];
            for (place, (name, out)) in places.iter().enumerate() {
                let others = std::iter::once(&file).chain(places[..place].iter().map(|p| p.1));
                for other in others {
                    let other_is = other.display();
                    ensure!(
                        !is_same_file(out, other),
                        "{name} would overwrite {other_is}; choose another path (A104)"
                    );
                }
            }
            let (name, bytes) = read_data_file(&file)?;
            let held = parse_heldout_size(&held)?;
            let [(train, trained), (heldout, held_out)] =
                control::split_prompt_file(&name, &bytes, held, seed)?;
            write_atomically(&out_train, &train)?;
            write_atomically(&out_heldout, &heldout)?;
            output::print_json_or(json, &json!({"train": trained, "heldout": held_out}), || {
                output::print_line(&format!("{trained} prompts to train on, {held_out} held out"));
            })?;
        }
        DataCommand::Dedup { file, out } => {
            let (name, bytes) = read_data_file(&file)?;
            let (bytes, removed) = control::remove_duplicate_prompts(&name, &bytes)?;
            write_atomically(&out, &bytes)?;
            output::print_json_or(json, &json!({"removed": removed}), || {
                output::print_line(&format!("{removed} prompts removed"));
            })?;
        }
    }
    Ok(())
}

/// Returns a report on the files that can be read, and the errors of the others.
fn report_data_files(files: &[PathBuf]) -> (DataReport, Vec<anyhow::Error>) {
    let (mut report, mut errors) = (DataReport::default(), Vec::new());
    for path in files {
        let read = read_data_file(path)
            .and_then(|(name, bytes)| Ok(control::report_data_file(&name, &bytes)?));
        match read {
            Ok((file, warnings)) => {
                report.files.push(file);
                report.warnings.extend(warnings);
            }
            Err(error) => errors.push(error),
        }
    }
    (report, errors)
}

pub(super) fn import_config(
    config: &Path,
    prompts: Option<&str>,
    out: Option<&Path>,
    json: bool,
) -> anyhow::Result<()> {
    let what = || format!("import {}", config.display());
    control::require_named_file(config).with_context(what)?;
    let yaml = std::fs::read_to_string(config).with_context(what)?;
    let stem = config.file_stem().unwrap_or_default().to_string_lossy();
    let name = wire::make_slug(&stem).unwrap_or_else(|| "run".into());
    let ImportedSpec { spec, notes } =
        spec::import_halo_forge(&yaml, &name, prompts).with_context(what)?;
    if let Some(path) = out {
        write_atomically(path, spec.as_bytes())?;
    }
    if json {
        let notes = notes.iter().map(
            |note| json!({"key": note.key, "fate": note.status.as_str(), "said": note.explanation}),
        );
        let notes: Vec<_> = notes.collect();
        return output::print_json(&json!({"spec": spec, "notes": notes}));
    }
    for ImportNote { key, status: fate, explanation: said } in &notes {
        output::print_message(&format!("{} {key}: {said}", fate.as_str()));
    }
    if out.is_none() {
        output::print_text(spec.trim_end());
    }
    Ok(())
}

fn parse_heldout_size(held: &HeldoutArgs) -> anyhow::Result<HeldoutSize> {
    match (held.share, held.count) {
        (Some(share), _) => {
            ensure!(
                (0.0..=1.0).contains(&share),
                "--share must be from 0 to 1, not {share} (A101)"
            );
            Ok(HeldoutSize::Share(share))
        }
        (None, Some(count)) => Ok(HeldoutSize::Count(count)),
        (None, None) => anyhow::bail!("name --share or --count (A100)"),
    }
}

/// Returns the name of the file and its content.
fn read_data_file(path: &Path) -> anyhow::Result<(String, Bytes)> {
    Ok((path.display().to_string(), control::read_named_file(path)?))
}

fn write_atomically(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    std::fs::write(&partial, bytes)
        .and_then(|()| std::fs::rename(&partial, path))
        .with_context(|| format!("write {}", path.display()))
}

/// Also through links, if the files exist.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    real(a) == real(b)
}

/// Returns the lines about a spec that passed all checks.
pub(super) fn verdict_lines(report: &DataReport) -> Vec<String> {
    std::iter::once("the spec is valid".to_owned()).chain(report_lines(report)).collect()
}

pub(crate) fn report_lines(report: &DataReport) -> Vec<String> {
    let mut lines: Vec<String> = report.files.iter().flat_map(file_lines).collect();
    if report.samples_per_cycle > 0 {
        let heldout = match report.heldout_samples_per_cycle {
            0 => String::new(),
            held => format!(", and {held} of held-out prompts"),
        };
        lines.push(format!("{} samples per cycle{heldout}", report.samples_per_cycle));
    }
    if report.token_logprob_bytes > 0 {
        let bytes = output::format_bytes(report.token_logprob_bytes);
        lines.push(format!("log-probabilities of tokens: at most {bytes} of log per cycle"));
    }
    lines.extend(report.warnings.iter().map(|warning| format!("warning: {warning}")));
    lines
}

fn file_lines(file: &DataFile) -> [String; 2] {
    let field = if file.field.is_empty() { "" } else { &format!("{}: ", file.field) };
    let what = if file.completion_bytes.is_some() { "examples" } else { "prompts" };
    let mut head = format!("{field}{}: {} {what}", file.file, file.lines);
    for (count, said) in
        [(file.rendered, "written by the chat template"), (file.duplicates, "duplicates")]
    {
        if count > 0 {
            head.push_str(&format!(", {count} {said}"));
        }
    }
    let lengths = [
        ("prompts of", "bytes", file.prompt_bytes.as_ref()),
        ("completions of", "bytes", file.completion_bytes.as_ref()),
        ("prompts of", "tokens", file.prompt_tokens.as_ref()),
    ];
    let lengths = lengths.into_iter().filter_map(|(of, unit, lengths)| {
        let Lengths { min, median, p95, max } = lengths?;
        Some(format!("{of} {min} to {max} {unit} (median {median}, 95 % up to {p95})"))
    });
    let mut fields: Vec<(&String, &u64)> = file.fields.iter().collect();
    fields.sort_unstable();
    let fields = fields.into_iter().map(|(name, count)| match *count {
        all if all == file.lines => name.clone(),
        some => format!("{name} ({some})"),
    });
    let fields = format!("fields {}", fields.collect::<Vec<_>>().join(", "));
    [head, format!("  {}", lengths.chain([fields]).collect::<Vec<_>>().join("; "))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_read_does_not_hide_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let [missing, good, bad] =
            ["missing", "good", "bad"].map(|name| directory.path().join(name));
        std::fs::write(&good, r#"{"prompt": "2 + 2 ="}"#).unwrap();
        std::fs::write(&bad, "no JSON").unwrap();
        let (report, errors) = report_data_files(&[missing, bad, good]);
        assert_eq!((report.files.len(), errors.len()), (1, 2), "{errors:?}");
    }

    #[test]
    fn a_file_is_told_of_in_two_lines_and_each_warning_in_one() {
        let file = DataFile {
            field: "raft.prompts".into(),
            file: "p.jsonl".into(),
            lines: 12,
            duplicates: 2,
            fields: [("prompt".to_owned(), 12), ("answer".to_owned(), 11)].into(),
            prompt_bytes: Some(Lengths { min: 3, median: 5, p95: 8, max: 9 }),
            ..DataFile::default()
        };
        let report = DataReport {
            files: vec![file],
            samples_per_cycle: 96,
            heldout_samples_per_cycle: 4,
            token_logprob_bytes: 12_288,
            warnings: vec!["w".into()],
        };
        assert_eq!(
            report_lines(&report),
            [
                "raft.prompts: p.jsonl: 12 prompts, 2 duplicates",
                "  prompts of 3 to 9 bytes (median 5, 95 % up to 8); fields answer (11), prompt",
                "96 samples per cycle, and 4 of held-out prompts",
                "log-probabilities of tokens: at most 12.00 KiB of log per cycle",
                "warning: w",
            ]
        );
        assert_eq!(verdict_lines(&report)[0], "the spec is valid");
    }
}
