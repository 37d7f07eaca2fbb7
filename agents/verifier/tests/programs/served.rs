//! Commands that keep running: in the sandbox, and allowed outside of it.

use std::{
    fs,
    time::{Duration, Instant},
};

use serde_json::json;
use verifier::{OfflineVerifier, Toolchain, VerifyItem};
use wire::v1::{
    Verifier,
    verdicts::Verdict,
    verifier::{Command, How},
};

use crate::{
    command::{Place, shell},
    rig::{item, judge_all, told},
};

const LONG_S: f64 = 60.0;

/// Reads lines into `$line`, with their id in `$id` and their completion in `$text`.
const READ_LINES: &str = r#"take() { read -r line || exit 0; id=${line##*\"id\":}; id=${id%%[,\}]*}; text=${line##*\"completion\":\"}; text=${text%%\"*}; }
n=0
"#;

/// Counts the completions of this process in the detail.
const COUNT: &str = r#"while take; do n=$((n+1)); echo "{\"id\":$id,\"outcome\":\"pass\",\"reward\":0.5,\"detail\":\"$n\"}"; done"#;

/// Returns the command in the sandbox and outside of it, each with its toolchain. Records this test
/// as skipped and returns `None` if the machine cannot contain programs.
fn both_places(place: &Place, script: &str) -> Option<[(Toolchain, Vec<String>); 2]> {
    let script = format!("{READ_LINES}{script}");
    let judge = place.write_judge(&script);
    let contained = place.tested(&[], &[])?;
    let allowed = place.tested(&[], &[judge.clone().into()])?;
    Some([(contained, shell(&script)), (allowed, vec![judge])])
}

fn served(argv: Vec<String>, timeout_s: f64) -> Command {
    Command { argv, timeout_s, serve: true, concurrent: 1, ..Command::default() }
}

fn completions(texts: impl IntoIterator<Item = impl Into<String>>) -> Vec<VerifyItem> {
    let texts = texts.into_iter().map(Into::<String>::into);
    texts.map(|text| item("2+2=", &text, json!({}))).collect()
}

fn judge(toolchain: &Toolchain, command: &Command, items: &[VerifyItem]) -> Vec<Verdict> {
    judge_all(toolchain.clone(), How::Command(command.clone()), items)
}

#[test]
fn a_process_judges_many_completions() {
    let place = Place::create();
    let Some(places) = both_places(&place, COUNT) else { return };
    for (toolchain, argv) in places {
        let verdicts = judge(&toolchain, &served(argv, LONG_S), &completions(vec!["4"; 40]));
        let counts = verdicts.iter().map(|verdict| {
            let (outcome, reward, detail) = told(verdict);
            assert_eq!((outcome, reward), ("pass", 0.5), "{detail}");
            detail.parse::<usize>().expect("a count")
        });
        // Two threads judge, so there are at most two processes.
        assert!(counts.max().expect("verdicts") >= 20);
    }
}

#[test]
fn a_process_stays_between_two_jobs_and_ends_with_the_verifier() {
    let place = Place::create();
    let Some(places) = both_places(&place, COUNT) else { return };
    let marker = place.path("").display().to_string();
    for (toolchain, mut argv) in places {
        // Ignored, but in the process list.
        argv.push(marker.clone());
        let verifier = Verifier { how: Some(How::Command(served(argv, LONG_S))) };
        let verifier = OfflineVerifier::new(verifier, toolchain, 1).expect("the settings work");
        for expected in ["1", "2", "3"] {
            let verdict = verifier.judge_items(&completions(["4"])).remove(0).verdict;
            assert_eq!(told(&verdict).2, expected);
        }
        assert!(is_running(&marker));
        drop(verifier);
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_running(&marker) {
            assert!(Instant::now() < deadline, "it still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns true if a process has an argument with this text.
fn is_running(text: &str) -> bool {
    fs::read_dir("/proc").expect("the processes").flatten().any(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text)
    })
}

#[test]
fn whatever_it_does_wrong_is_an_error_never_a_reward_of_zero() {
    let place = Place::create();
    let cases = [
        ("take; sleep 60", 2.0, "it did not answer within 2s"),
        ("take; sleep 60 & echo waiting >&2; wait", 2.0, "waiting"),
        ("take; exec >&-; sleep 60", 2.0, "it"),
        ("take; exit 3", LONG_S, "it ended with exit status: 3"),
        ("take; echo oops >&2; exit 3", LONG_S, "oops"),
        ("take; kill -9 $$", LONG_S, "it ended with"),
        ("take; echo hello; sleep 60", LONG_S, "it wrote a line that is no answer"),
        (r#"take; echo '{"id":9,"outcome":"pass"}'; sleep 60"#, LONG_S, "id 9, which is unknown"),
        (r#"take; echo '{"outcome":"pass"}'; sleep 60"#, LONG_S, r#"no "id""#),
        (r#"take; echo "{\"id\":$id,\"outcome\":\"won\"}"; sleep 60"#, LONG_S, "no verdict"),
        (r#"take; echo "{\"id\":$id}"; sleep 60"#, LONG_S, "no verdict"),
        ("take; yes | tr -d '\\n'", LONG_S, "a line of more than 65536 bytes"),
        ("yes", LONG_S, "it"),
    ];
    let began = Instant::now();
    for (script, timeout_s, expected) in cases {
        let Some(places) = both_places(&place, script) else { return };
        for (toolchain, argv) in places {
            let command = served(argv, timeout_s);
            let verdict = judge(&toolchain, &command, &completions(["4"])).remove(0);
            let (outcome, _, detail) = told(&verdict);
            assert_eq!(outcome, "error", "{script}: {detail}");
            assert!(detail.contains(expected), "{script}: {detail}");
        }
    }
    assert!(began.elapsed() < Duration::from_secs(120));
    let missing = served(vec!["/nonexistent/judge".into()], 1.0);
    let Some(toolchain) = place.tested(&[], &[]) else { return };
    let verdict = judge(&toolchain, &missing, &completions(["4"])).remove(0);
    assert!(told(&verdict).2.contains("the executable /nonexistent/judge"), "{verdict:?}");
}

#[test]
fn a_program_that_always_fails_ends_a_job_soon() {
    let place = Place::create();
    let Some(places) = both_places(&place, "take; echo broken >&2; exit 9") else { return };
    for (toolchain, argv) in places {
        let began = Instant::now();
        let verdicts = judge(&toolchain, &served(argv, LONG_S), &completions(vec!["4"; 300]));
        assert!(verdicts.iter().all(|verdict| told(verdict).0 == "error"));
        let last = told(&verdicts[299]).2;
        assert!(last.contains("broken") && last.contains("times in a row"), "{last}");
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn an_end_costs_the_completions_of_one_process_at_most() {
    let place = Place::create();
    let script = r#"while take; do case $text in die) exit 9;; hang) sleep 60;; *) echo "{\"id\":$id,\"outcome\":\"pass\"}";; esac; done"#;
    let Some(places) = both_places(&place, script) else { return };
    let texts = ["4", "4", "die", "4", "4", "4", "hang", "4", "4", "4", "4", "4"];
    for (toolchain, argv) in places {
        let verdicts = judge(&toolchain, &served(argv, 2.0), &completions(texts));
        for (text, verdict) in texts.iter().zip(&verdicts) {
            let expected = if *text == "4" { "pass" } else { "error" };
            assert_eq!(told(verdict).0, expected, "{text}: {verdict:?}");
        }
    }
}

#[test]
fn a_process_may_answer_in_another_order() {
    let place = Place::create();
    let script = r#"say() { echo "{\"id\":$1,\"outcome\":\"pass\",\"detail\":\"$2\"}"; }
while take; do first=$id; word=$text; take; say "$id" "$text"; say "$first" "$word"; done"#;
    let Some(places) = both_places(&place, script) else { return };
    let items = completions((0..20).map(|number| number.to_string()));
    for (toolchain, argv) in places {
        let command = Command { processes: 1, concurrent: 2, ..served(argv, LONG_S) };
        let verdicts = judge(&toolchain, &command, &items);
        for (item, verdict) in items.iter().zip(&verdicts) {
            assert_eq!(told(verdict), ("pass", 1.0, item.completion.as_str()));
        }
    }
}

#[test]
fn the_first_verdict_may_take_longer() {
    let place = Place::create();
    let Some(places) = both_places(&place, &format!("sleep 2; {COUNT}")) else { return };
    for (toolchain, argv) in places {
        let command = Command { start_timeout_s: 60.0, ..served(argv.clone(), 0.5) };
        assert_eq!(told(&judge(&toolchain, &command, &completions(["4"]))[0]).0, "pass");
        let verdict = judge(&toolchain, &served(argv, 0.5), &completions(["4"])).remove(0);
        assert!(told(&verdict).2.contains("it did not answer within 500ms"), "{verdict:?}");
    }
}

#[test]
fn one_that_keeps_running_reads_neither_the_kit_nor_the_agent() {
    let place = Place::create();
    let key = place.path("credentials/key.nk").display().to_string();
    let own = std::process::id();
    let script = format!(
        "while take; do found=$(cat {key} /proc/{own}/environ /proc/{own}/cmdline 2>/dev/null; \
         env | grep FLOTILLA_); echo \"{{\\\"id\\\":$id,\\\"outcome\\\":\\\"pass\\\",\\\"detail\\\":\\\"$found\\\"}}\"; done"
    );
    let Some(places) = both_places(&place, &script) else { return };
    for (toolchain, argv) in places {
        let verdict = judge(&toolchain, &served(argv, LONG_S), &completions(["4"])).remove(0);
        assert_eq!(told(&verdict), ("pass", 1.0, ""));
    }
}
