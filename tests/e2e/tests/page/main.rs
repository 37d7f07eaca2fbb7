//! The web page, in a real browser, on a fleet of real processes.

mod browser;

use std::time::Duration;

use e2e::{Files, Fleet, Sampling};
use serde_json::Value;

use browser::Browser;

const LIMIT: Duration = Duration::from_secs(120);
const AGENTS: &str = "trainer,generator,verifier,evaluator";

fn page(fleet: &Fleet) -> String {
    format!("http://{}/", fleet.file()["gateway"].as_str().expect("an address"))
}

fn state(fleet: &Fleet, run: &str) -> String {
    let run: Value = fleet.json(&["run", "show", run]).expect("a run");
    run["state"].as_str().expect("a state").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_the_fleet_and_steers_a_run_without_being_loaded_again() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::open("trainer,evaluator");
    browser.open(&page(&fleet)).await;
    browser.see("html[data-connected=yes]").await;
    for agent in ["trainer-1", "evaluator-1"] {
        browser.see(&format!("[data-agent={agent}]")).await;
    }
    // It came after the page.
    let files = Files::create(fleet.path());
    // Longer than anybody looks at it.
    let run = fleet.submit(&files.sft(200_000, 1000));
    let row = format!("[data-run='{run}']");
    browser.see(&row).await;
    browser.open(&format!("{}#/run/{run}", page(&fleet))).await;
    browser.see("[data-view=run]").await;
    let point = "return document.querySelector('[data-chart=loss] [data-x]') !== null";
    browser.until(point).await;

    browser.click("[data-action=pause]").await;
    browser.see("dialog[open]").await;
    assert_eq!(state(&fleet, &run), "RUNNING", "nothing is done before it is confirmed");
    browser.click("dialog[open] button[type=submit]").await;
    browser.see("[data-action=resume]").await;
    assert_eq!(state(&fleet, &run), "PAUSED");
    browser.click("[data-action=resume]").await;
    browser.click("dialog[open] button[type=submit]").await;
    browser.see("[data-action=pause]").await;
    browser.click("[data-action=cancel]").await;
    browser.click("dialog[open] button[type=submit]").await;
    browser.see("header[data-state=cancelled]").await;
    assert_eq!(state(&fleet, &run), "CANCELLED");
    assert_eq!(browser.complaints().await, Vec::<String>::new());
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_what_every_sample_came_to() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::open(AGENTS);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(30, 0));
    fleet.finish(&base, LIMIT);
    let sampling = Sampling { prompts: 10, per_prompt: 4, max_new_tokens: 24, cycles: 2 };
    let run = fleet.submit(&files.raft(&base, sampling));
    browser.open(&format!("{}#/run/{run}", page(&fleet))).await;
    fleet.finish(&run, LIMIT);
    browser.see("[data-state=succeeded]").await;
    let shown = fleet.json(&["run", "show", &run]).expect("a run");
    for chart in ["pass-rate", "perplexity", "loss", "rewards"] {
        browser.see(&format!("[data-chart={chart}]")).await;
    }
    // What is drawn is what was measured.
    let points = "return [...document.querySelectorAll('[data-chart=perplexity] [data-y]')] \
                  .map((it) => Number(it.dataset.y))";
    let drawn = browser.script(points).await;
    let drawn: Vec<f64> = drawn.as_array().unwrap().iter().filter_map(Value::as_f64).collect();
    let evals = shown["evals"].as_array().expect("evals");
    assert!(!evals.is_empty());
    for eval in evals {
        let measured = eval["perplexity"].as_f64().expect("a perplexity");
        assert!(
            drawn.iter().any(|y| (y - measured).abs() < 1e-6),
            "{measured} is not in {drawn:?}"
        );
    }
    browser.open(&format!("{}#/run/{run}/samples?cycle=1", page(&fleet))).await;
    browser.see("[data-view=samples]").await;
    browser.until("return document.querySelectorAll('article[data-fate]').length === 40").await;
    let kept = "return document.querySelectorAll('article[data-fate=kept]').length";
    let kept = browser.script(kept).await.as_u64().expect("a number");
    let done = &shown["cyclesDone"];
    assert_eq!(done[1]["kept"].as_u64(), Some(kept), "{done}");
    assert_eq!(browser.complaints().await, Vec::<String>::new());
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_fleets_page_shows_nothing_until_a_bearer_is_pasted() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::up("trainer,evaluator");
    let url = format!("https://{}/", fleet.file()["gateway"].as_str().expect("an address"));
    let kit = fleet.path().join("reader");
    let to = kit.display().to_string();
    fleet.run(&["user", "create", "reader", "--scope", "reader", "--out", &to]).succeeds();
    browser.open(&url).await;
    browser.see("dialog[open]").await;
    assert!(!browser.text().await.contains("trainer-1"));
    let bearer = std::fs::read_to_string(kit.join("bearer.jwt")).expect("a kit has a bearer");
    let field = browser.see("dialog[open] textarea, dialog[open] input").await;
    field.send_keys(bearer.trim()).await.expect("a field to paste into");
    browser.click("dialog[open] button[type=submit]").await;
    browser.see("[data-agent=trainer-1]").await;
    // A reader steers nothing, and is shown nothing to steer with, once it is known that it is one.
    browser.until("return document.getElementById('who').textContent.includes('reader')").await;
    let steers = "return document.querySelectorAll('[data-action]').length";
    assert_eq!(browser.script(steers).await, 0);
    assert_eq!(
        browser.script("return location.href").await.as_str().unwrap().trim_end_matches("#/"),
        url
    );
    browser.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_lost_its_gateway_says_so_and_comes_back() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::open("trainer,evaluator");
    browser.open(&page(&fleet)).await;
    browser.see("html[data-connected=yes] [data-agent=trainer-1]").await;
    fleet.kill("coordinator");
    browser.see("html[data-connected=no]").await;
    // What was known stays there to be read.
    browser.see("[data-agent=trainer-1]").await;
    browser.see("html[data-connected=yes]").await;
    browser.end().await;
}
