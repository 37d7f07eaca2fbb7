//! What Grafana and Prometheus are given: each query asks for what is served.

use std::{collections::BTreeSet, process::Command};

use deploy::{files, program, read, root, run, said};
use serde_json::Value;

/// As docs/METRICS.md has them, whose names a test of each process compares with what it serves.
fn served() -> BTreeSet<String> {
    let page = read("docs/METRICS.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.split('{').next().unwrap_or_default().to_owned()).collect()
}

/// The metrics a query is about: words that are no function, label or number.
fn metrics(query: &str) -> BTreeSet<String> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = query.split(|letter| !is_word(letter));
    let ours = ["flotilla_", "node_", "process_"];
    words
        .filter(|word| ours.iter().any(|begin| word.starts_with(begin)))
        .map(str::to_owned)
        .collect()
}

fn check(query: &str, served: &BTreeSet<String>) {
    let asked = metrics(query);
    assert!(!asked.is_empty() || query.starts_with("up "), "nothing of ours is asked for: {query}");
    let unknown: Vec<_> = asked.difference(served).collect();
    assert!(unknown.is_empty(), "{unknown:?} is served by nobody: {query}");
}

#[test]
fn every_panel_asks_for_what_is_served_and_stands_beside_the_others() {
    let served = served();
    for path in files("deploy/grafana", ".json") {
        let dashboard: Value = serde_json::from_str(&read(path)).expect("JSON");
        let panels = dashboard["panels"].as_array().expect("panels");
        let mut taken = BTreeSet::new();
        let mut ids = BTreeSet::new();
        for panel in panels {
            let at = &panel["gridPos"];
            let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| at[side].as_u64().expect("a place"));
            assert!(x + w <= 24, "{panel}");
            for place in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
                assert!(taken.insert(place), "{} lies on another", panel["title"]);
            }
            assert!(ids.insert(panel["id"].as_u64().expect("an id")), "{panel}");
            if panel["type"] == "row" {
                continue;
            }
            let targets = panel["targets"].as_array().expect("queries");
            assert!(!targets.is_empty(), "{panel}");
            for target in targets {
                check(target["expr"].as_str().expect("a query"), &served);
            }
        }
    }
}

#[test]
fn every_alert_asks_for_what_is_served_and_says_what_to_do() {
    let served = served();
    let rules: Value =
        serde_saphyr::from_str(&read("deploy/prometheus/flotilla.yml")).expect("YAML");
    let groups = rules["groups"].as_array().expect("groups");
    let alerts = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules"));
    let mut count = 0;
    for alert in alerts {
        check(alert["expr"].as_str().expect("a query"), &served);
        for said in ["summary", "description"] {
            let text = alert["annotations"][said].as_str().unwrap_or_default();
            assert!(text.len() > 20, "{}: {said} is missing", alert["alert"]);
        }
        assert!(alert["labels"]["severity"].is_string(), "{alert}");
        count += 1;
    }
    assert!(count >= 5);
}

#[test]
fn prometheus_takes_its_configuration_and_rules() {
    let Some(promtool) = program("FLOTILLA_PROMTOOL", &["promtool"]) else { return };
    let checked = run(Command::new(promtool)
        .args(["check", "config"])
        .arg(root().join("deploy/prometheus/prometheus.yml")));
    assert!(said(&checked).contains("SUCCESS"), "{}", said(&checked));
}

#[test]
fn alerts_are_given_when_they_are_due_and_not_before() {
    let Some(promtool) = program("FLOTILLA_PROMTOOL", &["promtool"]) else { return };
    let tested = run(Command::new(promtool)
        .args(["test", "rules", "alerts.yml"])
        .current_dir(root().join("tests/deploy/promtool")));
    assert!(tested.status.success(), "{}", said(&tested));
}
