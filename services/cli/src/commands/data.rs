//! `flotilla data`, and reports about the files of a run.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use control::{DataPreview, NamedRows, PreviewSettings};
use data_files::ColumnMapping;
use serde_json::json;
use spec::{HeldoutSize, RunSpec};
use wire::v1::{DataFile, DataReport, data_file::Lengths};

use super::generate_data::generate_data;
use crate::{
    args::{ColumnArgs, DataCommand, DataShowArgs, FeedbackDataArgs, GlobalArgs, HeldoutArgs},
    output,
    run_submission::{meter_transfers, read_spec},
};

/// Characters of a prompt or a completion that are shown.
const SHOWN_CHARS_MAX: usize = 2000;

pub(crate) async fn run_data_command(
    flags: &GlobalArgs,
    command: DataCommand,
) -> anyhow::Result<()> {
    let json = flags.json;
    match command {
        DataCommand::Generate(args) => generate_data(flags, &args).await?,
        DataCommand::FromFeedback(args) => write_feedback(flags, &args).await?,
        DataCommand::Show(args) => show_data(&args, json).await?,
        DataCommand::Stats { files, columns } => {
            ensure!(!files.is_empty(), "name at least one file (A100)");
            let (report, mut errors) = report_data_files(&files, &columns).await;
            output::print_json_or(json, &report, || {
                report_lines(&report).iter().for_each(|line| output::print_line(line));
            })?;
            if let Some(last) = errors.pop() {
                errors.iter().for_each(output::print_error);
                return Err(last);
            }
        }
        DataCommand::Split { file, columns, held, seed, out_train, out_heldout } => {
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
            let held = parse_heldout_size(&held)?;
            let rows = read_named_rows(&file, &columns).await?;
            let [(train, trained), (heldout, held_out)] =
                control::split_prompt_rows(&rows, held, seed)?;
            write_atomically(&out_train, &train)?;
            write_atomically(&out_heldout, &heldout)?;
            output::print_json_or(json, &json!({"train": trained, "heldout": held_out}), || {
                output::print_line(&format!("{trained} prompts to train on, {held_out} held out"));
            })?;
        }
        DataCommand::Dedup { file, columns, out } => {
            let rows = read_named_rows(&file, &columns).await?;
            let (bytes, removed) = control::remove_duplicate_prompts(&rows)?;
            write_atomically(&out, &bytes)?;
            output::print_json_or(json, &json!({"removed": removed}), || {
                output::print_line(&format!("{removed} prompts removed"));
            })?;
        }
    }
    Ok(())
}

async fn show_data(args: &DataShowArgs, json: bool) -> anyhow::Result<()> {
    let (mut settings, mut columns) = (PreviewSettings::default(), ColumnMapping::new());
    let mut directory = Path::new("");
    if let Some(file) = &args.spec {
        let (yaml, _) = read_spec(file).await?;
        let spec = RunSpec::parse(&yaml).with_context(|| file.display().to_string())?;
        (settings, columns) = PreviewSettings::from_spec(&spec);
        directory = file.parent().unwrap_or(directory);
    }
    if let Some(base) = &args.base {
        settings = settings.with_model(base);
        directory = Path::new("");
    }
    columns.extend(args.columns.mapping.iter().cloned());
    let rows = read_rows(&args.file, columns).await?;
    let preview = control::preview_rows(&rows, &settings, directory, args.rows).await?;
    output::print_json_or(json, &preview, || print_preview(&preview))
}

fn print_preview(preview: &DataPreview) {
    preview.pinned.iter().for_each(|pinned| output::print_line(&format!("read {pinned}")));
    file_lines(&preview.file).iter().for_each(|line| output::print_line(line));
    for (what, counts) in [("columns", &preview.columns), ("categories", &preview.categories)] {
        let counts = counts.iter().map(|(name, count)| format!("{name} ({count})"));
        let counts = counts.collect::<Vec<_>>().join(", ");
        if !counts.is_empty() {
            output::print_line(&format!("  {what} {counts}"));
        }
    }
    for warning in &preview.warnings {
        output::print_line(&format!("warning: {warning}"));
    }
    for row in &preview.rows {
        let prompt = Some(&row.prompt);
        let parts = [
            ("prompt", prompt),
            ("completion", row.completion.as_ref()),
            ("answer", row.answer.as_ref()),
        ];
        for (part, text) in parts {
            let Some(text) = text else { continue };
            output::print_line("");
            output::print_line(&format!("{}, {part}:", row.place));
            output::print_text(&clip_text(text));
        }
    }
}

/// Shortens a text that would fill the screen.
fn clip_text(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{} …", &text[..end]),
    }
}

pub(crate) async fn read_named_rows(
    file: &Path,
    columns: &ColumnArgs,
) -> anyhow::Result<NamedRows> {
    read_rows(file, columns.mapping.iter().cloned().collect()).await
}

/// Reads a file, or downloads the data set that a name stands for, and shows the progress.
async fn read_rows(file: &Path, columns: ColumnMapping) -> anyhow::Result<NamedRows> {
    let (meter, watch) = meter_transfers();
    let rows = NamedRows::read(file, columns, &watch).await;
    meter.finish_bar();
    Ok(rows?)
}

async fn write_feedback(flags: &GlobalArgs, args: &FeedbackDataArgs) -> anyhow::Result<()> {
    let channel = control::parse_channel_name(&args.channel)?;
    let control = flags.fleet.connect_control().await?;
    control.list_channel_moves(&channel).await?;
    let exchanges = control.list_exchanges(&channel).await?;
    let rated = exchanges.iter().filter(|it| it.feedback.is_some()).count();
    let mut examples = control::build_examples(&exchanges);
    examples.retain(|example| !args.pairs || example.get("rejected").is_some());
    let lines: String = examples.iter().map(|example| format!("{example}\n")).collect();
    write_atomically(&args.out, lines.as_bytes())?;
    let (kept, written) = (exchanges.len(), examples.len());
    output::print_json_or(
        flags.json,
        &json!({ "kept": kept, "rated": rated, "lines": written }),
        || {
            let file = args.out.display();
            output::print_line(&format!(
                "{written} prompts in {file}, of {kept} kept requests, {rated} with feedback"
            ));
        },
    )
}

/// Returns a report on the files that can be read, and the errors of the others.
async fn report_data_files(
    files: &[PathBuf],
    columns: &ColumnArgs,
) -> (DataReport, Vec<anyhow::Error>) {
    let (mut report, mut errors) = (DataReport::default(), Vec::new());
    for path in files {
        let read = read_named_rows(path, columns).await;
        match read.and_then(|rows| Ok(control::report_rows(&rows)?)) {
            Ok((file, warnings)) => {
                report.files.push(file);
                report.warnings.extend(warnings);
            }
            Err(error) => errors.push(error),
        }
    }
    (report, errors)
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
    if report.sweep_runs > 0 {
        lines.insert(0, format!("a sweep of {} runs; of the first:", report.sweep_runs));
    }
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
        Some(match min == max {
            true => format!("{of} {min} {unit}"),
            false => format!("{of} {min} to {max} {unit} (median {median}, 95 % up to {p95})"),
        })
    });
    let mut fields: Vec<(&String, &u64)> = file.fields.iter().collect();
    fields.sort_unstable();
    let fields = fields.into_iter().map(|(name, count)| match *count {
        all if all == file.lines => name.clone(),
        some => format!("{name} ({some})"),
    });
    let tells_more = !file.shapes.is_empty() && file.shapes != ["prompt"];
    let shapes = tells_more.then(|| format!("shapes {}", file.shapes.join(", ")));
    let fields = format!("fields {}", fields.collect::<Vec<_>>().join(", "));
    [head, format!("  {}", lengths.chain(shapes).chain([fields]).collect::<Vec<_>>().join("; "))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_cannot_be_read_does_not_hide_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let [missing, good, bad] =
            ["missing", "good", "bad"].map(|name| directory.path().join(name));
        std::fs::write(&good, r#"{"prompt": "2 + 2 ="}"#).unwrap();
        std::fs::write(&bad, "no JSON").unwrap();
        let columns = ColumnArgs { mapping: Vec::new() };
        let (report, errors) = report_data_files(&[missing, bad, good], &columns).await;
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
            prompt_tokens: Some(Lengths { min: 4, median: 4, p95: 4, max: 4 }),
            shapes: vec!["prompt".into()],
            ..DataFile::default()
        };
        let report = DataReport {
            files: vec![file],
            samples_per_cycle: 96,
            heldout_samples_per_cycle: 4,
            token_logprob_bytes: 12_288,
            sweep_runs: 0,
            warnings: vec!["w".into()],
        };
        assert_eq!(
            report_lines(&report),
            [
                "raft.prompts: p.jsonl: 12 prompts, 2 duplicates",
                "  prompts of 3 to 9 bytes (median 5, 95 % up to 8); prompts of 4 tokens; fields \
                 answer (11), prompt",
                "96 samples per cycle, and 4 of held-out prompts",
                "log-probabilities of tokens: at most 12.00 KiB of log per cycle",
                "warning: w",
            ]
        );
        assert_eq!(verdict_lines(&report)[0], "the spec is valid");
    }
}
