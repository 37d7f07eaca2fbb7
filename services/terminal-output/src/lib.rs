//! Prints data on stdout and messages on stderr, escaped: what others wrote cannot control a
//! terminal. Tables, progress bars, logs and errors included.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    fmt::{Debug, Write as _},
    io::{IsTerminal, Write},
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
};

use clap::error::{ContextKind, ErrorKind};
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle,
};
use indicatif::ProgressBar;
use ratatui::crossterm::terminal;
use serde::Serialize;
use tracing::field::Field;
use tracing_subscriber::{
    EnvFilter,
    field::MakeExt,
    fmt::{
        FormatFields,
        format::{self, Writer},
    },
};
use wire::ErrorCode;

pub use questions::{Question, confirm_question};

mod questions;

#[cfg(test)]
mod tests;

/// Separates the lines of one entry: no other line begins with this margin.
const CONTINUATION_MARGIN: &str = "\n    │ ";

/// Returns text that is safe to print on a terminal. Characters that control the terminal, change
/// the direction of text or are invisible are written as in `\u{1b}`. Line breaks and tabs stay.
pub fn escape_text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_control(letter) {
            shown.extend(letter.escape_unicode());
        } else {
            shown.push(letter);
        }
    }
    shown
}

/// Escapes text for a part of one line: as [`escape_text`], and line breaks and tabs too.
pub fn escape_line(text: &str) -> String {
    escape_text(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Escapes text that may have several lines, and indents all but the first with a margin, so that
/// they cannot be mistaken for lines of this program.
fn escape_entry(text: &str) -> String {
    escape_text(text).replace('\n', CONTINUATION_MARGIN)
}

/// Escapes characters that JSON allows unescaped in strings but that a terminal must not get.
/// Outside of strings JSON has no such characters.
fn escape_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for letter in json.chars() {
        if is_control(letter) {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(letter);
        }
    }
    shown
}

fn is_control(letter: char) -> bool {
    match letter {
        '\n' | '\t' => false,
        // Controls: C0, DEL and C1.
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' => true,
        // Bidirectional controls.
        '\u{61c}' | '\u{200e}' | '\u{200f}' => true,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        // Line and paragraph separators.
        '\u{2028}' | '\u{2029}' => true,
        // Invisible characters that belong to no script.
        '\u{ad}' | '\u{180e}' | '\u{200b}' | '\u{2060}'..='\u{2064}' | '\u{feff}' => true,
        // Tags, and the variation selectors that emoji do not use.
        '\u{e0000}'..='\u{e0fff}' => true,
        _ => false,
    }
}

/// Prints a message on stderr, escaped as one entry.
pub fn print_message(line: &str) {
    write_stderr(&escape_entry(line));
}

/// Prints lines of this program on stderr. Parts that come from elsewhere must have passed
/// [`escape_line`].
pub fn print_status_text(text: &str) {
    write_stderr(&escape_text(text));
}

/// Returns the exit code of an outcome, and prints the error of a failed one.
pub fn report_outcome(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        print_error(&error);
        ExitCode::FAILURE
    })
}

/// Prints an error on stderr with its causes and its code.
pub fn print_error(error: &anyhow::Error) {
    let is_json = JSON_ERRORS.load(Ordering::Relaxed);
    write_stderr(&if is_json { error_json(error) } else { describe_error(error) });
}

/// Returns the last error that was printed in a log, in one line, without its code's topic.
pub fn find_last_error(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let start = lines.iter().rposition(|line| line.starts_with("error:")).unwrap_or(0);
    let parts = lines[start..].iter().map(|line| line.trim_start());
    let parts = parts.filter(|line| !line.starts_with("more: "));
    let parts: Vec<&str> = parts
        .map(|line| line.trim_start_matches("error: ").trim_start_matches("because: "))
        .collect();
    parts.join(": ")
}

/// Code of arguments that are not understood.
const USAGE_ERROR: &str = "A100";

/// Set if the command was asked for JSON.
static JSON_ERRORS: AtomicBool = AtomicBool::new(false);

/// Prints errors as JSON from now on, one line each.
pub fn print_errors_as_json() {
    JSON_ERRORS.store(true, Ordering::Relaxed);
}

fn error_json(error: &anyhow::Error) -> String {
    let (message, causes) = error_messages(error);
    let code = ErrorCode::from_error(error.as_ref()).unwrap_or(ErrorCode::UNCODED_ERROR);
    format_json_error(&message, &causes, &code.to_string())
}

fn format_json_error(message: &str, causes: &[String], code: &str) -> String {
    let error = serde_json::json!({ "error": message, "causes": causes, "code": code });
    escape_json(&error.to_string())
}

/// Returns the message and those of its causes. Skips causes that a message has already: some
/// libraries repeat their cause in their own message.
fn error_messages(error: &anyhow::Error) -> (String, Vec<String>) {
    let mut said = error.to_string();
    let message = said.clone();
    let mut causes = Vec::new();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push('\n');
            said.push_str(&cause);
            causes.push(cause);
        }
    }
    (message, causes)
}

fn describe_error(error: &anyhow::Error) -> String {
    let (message, causes) = error_messages(error);
    let mut lines = vec![format!("error: {}", escape_entry(&message))];
    lines.extend(causes.iter().map(|cause| format!("  because: {}", escape_entry(cause))));
    let code = ErrorCode::from_error(error.as_ref()).unwrap_or(ErrorCode::UNCODED_ERROR);
    lines.push(format!("  more: flotilla topics {code}"));
    lines.join("\n")
}

/// Prints help on stdout, or a usage error on stderr, and exits with the exit code of clap. A usage
/// error is JSON if `--json` is among the arguments, which were not understood as a whole.
pub fn exit_with_usage(error: &mut clap::Error) -> ! {
    remove_misleading_usage(error);
    let mut options = std::env::args_os().take_while(|argument| argument != "--");
    if error.use_stderr() && options.any(|argument| argument == "--json") {
        write_stderr(&usage_error_json(error));
        std::process::exit(error.exit_code())
    }
    match usage_text_to_escape(error) {
        // A failure to print cannot be reported anywhere.
        None => drop(error.print()),
        Some(text) if error.use_stderr() => print_status_text(&text),
        Some(text) => write_stdout(&escape_text(&text)),
    }
    if error.use_stderr() {
        print_status_text(&format!("\nmore: flotilla topics {USAGE_ERROR}"));
    }
    std::process::exit(error.exit_code())
}

/// Removes the usage from an error that lists missing arguments: clap adds the options that the
/// environment sets, as if they were required.
fn remove_misleading_usage(error: &mut clap::Error) {
    if error.kind() == ErrorKind::MissingRequiredArgument {
        error.remove(ContextKind::Usage);
    }
}

/// Returns a usage error with its tips and the usage as causes.
fn usage_error_json(error: &clap::Error) -> String {
    let text = strip_colours(&error.render().ansi().to_string());
    let mut paragraphs = text.trim().trim_start_matches("error: ").split("\n\n").map(str::trim);
    let message = paragraphs.next().unwrap_or_default();
    let causes: Vec<String> = paragraphs.map(str::to_owned).collect();
    format_json_error(message, &causes, USAGE_ERROR)
}

/// Returns the text of a usage error without colours if it contains characters to escape, otherwise
/// `None`. The coloured form is used because it quotes arguments unchanged, while the plain form of
/// clap omits their control characters.
fn usage_text_to_escape(error: &clap::Error) -> Option<String> {
    let plain = strip_colours(&error.render().ansi().to_string());
    plain.chars().any(is_control).then(|| plain.trim_end().to_owned())
}

/// Removes colour sequences, `ESC [ … m`, and no other escape sequences.
fn strip_colours(text: &str) -> String {
    let mut parts = text.split("\u{1b}[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == ';');
        match rest.strip_prefix('m') {
            Some(rest) => plain.push_str(rest),
            None => {
                plain.push_str("\u{1b}[");
                plain.push_str(part);
            }
        }
    }
    plain
}

/// Prints an entry of data on stdout, escaped.
pub fn print_line(line: &str) {
    write_stdout(&escape_entry(line));
}

/// Prints an entry of data on stdout, escaped, wrapped between words where the terminal is narrower.
/// Further lines are indented like the first, and a bit more.
pub fn print_wrapped(line: &str) {
    write_stdout(&wrap_words(&escape_entry(line), stdout_width().map_or(usize::MAX, usize::from)));
}

fn wrap_words(text: &str, width: usize) -> String {
    let indent = text.len() - text.trim_start_matches(' ').len();
    let mut wrapped = " ".repeat(indent);
    let mut column = indent;
    for (place, word) in text.trim_start_matches(' ').split(' ').enumerate() {
        let letters = word.chars().count();
        if place > 0 && column + 1 + letters > width {
            column = indent + 2;
            wrapped.push('\n');
            wrapped.push_str(&" ".repeat(column));
        } else if place > 0 {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += letters;
    }
    wrapped
}

/// Prints data of several lines. It is escaped only for a terminal.
pub fn print_text(text: &str) {
    if std::io::stdout().is_terminal() {
        write_stdout(&escape_text(text));
    } else {
        write_stdout(text);
    }
}

/// Prints a value as a JSON document on one line, escaped for a terminal.
pub fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let json = serde_json::to_string(value)?;
    if std::io::stdout().is_terminal() {
        write_stdout(&escape_json(&json));
    } else {
        write_stdout(&json);
    }
    Ok(())
}

pub fn print_json_or(
    json: bool,
    value: &impl Serialize,
    print_plain: impl FnOnce(),
) -> anyhow::Result<()> {
    if json {
        return print_json(value);
    }
    print_plain();
    Ok(())
}

fn write_stderr(escaped: &str) {
    let _ = writeln!(std::io::stderr(), "{escaped}");
}

/// Writes a line to stdout. Exits with code 0 if stdout is closed, as with `| head -1`.
fn write_stdout(escaped: &str) {
    if writeln!(std::io::stdout(), "{escaped}").is_err() {
        std::process::exit(0);
    }
}

/// Prints a line above a progress bar, which only a terminal shows.
pub fn print_above_bar(bar: &ProgressBar, line: &str) {
    if stderr_is_terminal() {
        bar.println(escape_entry(line));
    } else {
        print_message(line);
    }
}

pub fn set_bar_labels(bar: &ProgressBar, before: &str, after: &str) {
    bar.set_prefix(escape_line(before));
    bar.set_message(escape_line(after));
}

/// Starts the log on stderr. `RUST_LOG` overrides the default filter.
pub fn start_logging(default: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A log on a full disk cannot be written, and reporting that on stderr would panic.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .fmt_fields(log_fields())
        .init();
}

fn log_fields() -> impl for<'writer> FormatFields<'writer> + Send + Sync + 'static {
    format::debug_fn(write_field).delimited(" ")
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> std::fmt::Result {
    let value = escape_line(&format!("{value:?}"));
    match field.name() {
        "message" => writer.write_str(&value),
        name if writer.has_ansi_escapes() => {
            write!(writer, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m{value}")
        }
        name => write!(writer, "{name}={value}"),
    }
}

/// Installs a panic hook that escapes messages, because they may quote any text.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        print_message(&format!("thread '{}' {panic}", thread.name().unwrap_or("<unnamed>")));
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            print_status_text(&trace.to_string());
        }
    }));
}

const TABLE_STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// Formats a table with all columns.
///
/// Marks at the start of a heading: `>` aligns the column to the right; `?` hides it if all its
/// cells are `-`; `~` allows to leave it out where a terminal is too narrow.
pub fn format_table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    format_table_within(headings, rows, None).0
}

/// Formats a table of at most `width` characters and returns the headings that it lacks. Columns
/// marked with `~` are left out first, the last one first; then cells are wrapped.
fn format_table_within<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    width: Option<u16>,
) -> (String, Vec<String>) {
    const MARKS: [char; 3] = ['>', '?', '~'];
    let is_marked = |heading: &str, mark: char| {
        heading.chars().take_while(|sign| MARKS.contains(sign)).any(|sign| sign == mark)
    };
    let rows: Vec<[String; N]> = rows.into_iter().collect();
    let mut table = Table::new();
    table.load_style(TABLE_STYLE);
    let shown = |heading: &str| escape_line(heading.trim_start_matches(MARKS));
    table.set_header(headings.map(shown));
    for row in &rows {
        table.add_row(row.each_ref().map(|cell| escape_line(cell)));
    }
    let is_empty = |n: usize| is_marked(headings[n], '?') && rows.iter().all(|row| row[n] == "-");
    for (n, (heading, column)) in headings.iter().zip(table.column_iter_mut()).enumerate() {
        if is_marked(heading, '>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if is_empty(n) {
            column.set_constraint(ColumnConstraint::Hidden);
        }
    }
    let mut left_out = Vec::new();
    let Some(width) = width else { return (table.trim_fmt(), left_out) };
    let is_wide = |table: &Table| {
        let longest = table.trim_fmt().lines().map(|line| line.trim_end().chars().count()).max();
        longest.unwrap_or(0) > usize::from(width)
    };
    let optional = (0..N).rev().filter(|n| is_marked(headings[*n], '~') && !is_empty(*n));
    for n in optional {
        if !is_wide(&table) {
            break;
        }
        if let Some(column) = table.column_mut(n) {
            column.set_constraint(ColumnConstraint::Hidden);
            left_out.insert(0, shown(headings[n]));
        }
    }
    if is_wide(&table) {
        // Numbers are not wrapped, and neither are names, unless they leave too little to the rest.
        let longest_name =
            rows.iter().filter_map(|row| row.first()).map(|name| name.chars().count());
        let are_names_short = longest_name.max().unwrap_or(0) <= usize::from(width) / 2;
        for (n, column) in table.column_iter_mut().enumerate() {
            let is_whole = is_marked(headings[n], '>') || (n == 0 && are_names_short);
            if is_whole && column.constraint().is_none() {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    (table.trim_fmt(), left_out)
}

const HELP_COLUMNS_MIN: u16 = 40;
const HELP_COLUMNS_MAX: u16 = 100;

/// Set if tables show all columns, however narrow the terminal is.
static WIDE_TABLES: AtomicBool = AtomicBool::new(false);

/// Shows all columns of tables from now on.
pub fn show_all_columns() {
    WIDE_TABLES.store(true, Ordering::Relaxed);
}

/// Returns the columns of the terminal on stdout; `None` if tables need not fit.
pub fn stdout_width() -> Option<u16> {
    let is_fitted = std::io::stdout().is_terminal() && !WIDE_TABLES.load(Ordering::Relaxed);
    let width = is_fitted.then(|| terminal::size().ok()).flatten();
    width.map(|(columns, _)| columns).filter(|columns| *columns > 0)
}

/// Returns the columns that help is wrapped to: those of the terminal, at most 100, because longer
/// lines are hard to read; without a terminal, those of the variable `COLUMNS`.
pub fn help_width() -> usize {
    let columns = || std::env::var("COLUMNS").ok()?.parse().ok();
    let width = stdout_width().or_else(columns).unwrap_or(HELP_COLUMNS_MAX);
    width.clamp(HELP_COLUMNS_MIN, HELP_COLUMNS_MAX).into()
}

/// Begins the last lines of a table without all columns.
pub const HIDDEN_COLUMNS: &str = "not shown: ";

/// Formats a table for this many columns. Columns marked with `~` that do not fit are left out, and
/// named in a last line.
pub fn fit_table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    width: Option<u16>,
) -> String {
    let (mut text, left_out) = format_table_within(headings, rows, width);
    if !left_out.is_empty() {
        let hint = format!("{HIDDEN_COLUMNS}{}; --wide shows all columns", left_out.join(", "));
        text.push('\n');
        text.push_str(&wrap_words(&hint, width.map_or(usize::MAX, usize::from)));
    }
    text
}

pub fn print_table<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) {
    print_text(&fit_table(headings, rows, stdout_width()));
}

/// Prints a table, or a message if it has no rows.
pub fn print_list<const N: usize>(
    headings: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    empty: &str,
) {
    let rows: Vec<[String; N]> = rows.into_iter().collect();
    if rows.is_empty() { print_message(empty) } else { print_table(headings, rows) }
}

pub fn text_or_dash(text: String) -> String {
    if text.is_empty() { "-".into() } else { text }
}

pub fn stderr_is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

pub fn is_interactive_terminal() -> bool {
    std::io::stdout().is_terminal() && std::io::stdin().is_terminal()
}

/// Formats a size with its unit: `1.5 GiB`.
pub fn format_bytes(count: u64) -> String {
    indicatif::HumanBytes(count).to_string()
}

/// `2026-11-20 14:03:05Z`, in UTC; `-` if the time is missing.
pub fn format_time(at: Option<&wire::Timestamp>) -> String {
    let time = at.and_then(|at| jiff::Timestamp::from_second(at.seconds).ok());
    time.map_or("-".into(), |time| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string())
}
