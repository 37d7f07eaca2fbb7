//! The Grafana dashboards and Prometheus rules: each query uses existing metrics.

use std::{collections::BTreeSet, process::Command};

use deploy::{list_files, output_text, read_file, root, run_command};
use requirements::require_program;
use serde_json::Value;

/// Returns the metrics of docs/METRICS.md. A test of each process compares them with its endpoint.
fn served_metrics() -> BTreeSet<String> {
    let page = read_file("docs/METRICS.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.split('{').next().unwrap_or_default().to_owned()).collect()
}

/// Returns the metrics in a query: the words that are no function, label or number.
fn metrics_in(query: &str) -> BTreeSet<String> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = query.split(|letter| !is_word(letter));
    let prefixes = ["flotilla_", "node_", "process_"];
    words
        .filter(|word| prefixes.iter().any(|begin| word.starts_with(begin)))
        .map(str::to_owned)
        .collect()
}

fn check_query(query: &str, served: &BTreeSet<String>) {
    let used = metrics_in(query);
    assert!(!used.is_empty() || query.starts_with("up "), "nothing of ours is asked for: {query}");
    let unknown: Vec<_> = used.difference(served).collect();
    assert!(unknown.is_empty(), "{unknown:?} is served by nobody: {query}");
}

#[test]
fn every_panel_queries_existing_metrics_and_overlaps_no_other() {
    let served = served_metrics();
    for path in list_files("deploy/grafana", ".json") {
        let dashboard: Value = serde_json::from_str(&read_file(path)).expect("JSON");
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
                check_query(target["expr"].as_str().expect("a query"), &served);
            }
        }
    }
}

#[test]
fn every_alert_queries_existing_metrics_and_has_a_description() {
    let served = served_metrics();
    let rules: Value =
        serde_saphyr::from_str(&read_file("deploy/prometheus/flotilla.yml")).expect("YAML");
    let groups = rules["groups"].as_array().expect("groups");
    let alerts = groups.iter().flat_map(|group| group["rules"].as_array().expect("rules"));
    let mut count = 0;
    for alert in alerts {
        check_query(alert["expr"].as_str().expect("a query"), &served);
        for annotation in ["summary", "description"] {
            let text = alert["annotations"][annotation].as_str().unwrap_or_default();
            assert!(text.len() > 20, "{}: {annotation} is missing", alert["alert"]);
        }
        assert!(alert["labels"]["severity"].is_string(), "{alert}");
        count += 1;
    }
    assert!(count >= 5);
}

#[test]
fn every_alert_has_a_test_of_when_it_fires_and_when_it_does_not() {
    let read_yaml =
        |path: &str| -> Value { serde_saphyr::from_str(&read_file(path)).expect("YAML") };
    let lists = |yaml: &Value, outer: &str, inner: &str| -> Vec<Value> {
        let outer = yaml[outer].as_array().expect("a list").iter();
        outer.flat_map(|one| one[inner].as_array().expect("a list").clone()).collect()
    };
    let rules = lists(&read_yaml("deploy/prometheus/flotilla.yml"), "groups", "rules");
    let tests = lists(&read_yaml("tests/deploy/promtool/alerts.yml"), "tests", "alert_rule_test");
    for rule in rules {
        let is_own = |test: &&Value| test["alertname"] == rule["alert"];
        let expected =
            tests.iter().filter(is_own).map(|test| test["exp_alerts"] == Value::Array(Vec::new()));
        let expected: BTreeSet<bool> = expected.collect();
        assert_eq!(expected, [false, true].into(), "{}", rule["alert"]);
    }
}

#[test]
fn prometheus_accepts_its_configuration_and_rules() {
    let Some(promtool) = require_program("promtool") else { return };
    let checked = run_command(
        Command::new(promtool)
            .args(["check", "config"])
            .arg(root().join("deploy/prometheus/prometheus.yml")),
    );
    assert!(output_text(&checked).contains("SUCCESS"), "{}", output_text(&checked));
}

#[test]
fn alerts_fire_when_they_are_due_and_not_before() {
    let Some(promtool) = require_program("promtool") else { return };
    let tested = run_command(
        Command::new(promtool)
            .args(["test", "rules", "alerts.yml"])
            .current_dir(root().join("tests/deploy/promtool")),
    );
    assert!(tested.status.success(), "{}", output_text(&tested));
}
