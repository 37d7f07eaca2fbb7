//! The web page in a real browser, with a fleet of real processes.

pub(crate) mod browser;

use std::time::Duration;

use e2e::{Fleet, Sampling, SpecFiles, Terminal};
use serde_json::Value;

use browser::Browser;

const LIMIT: Duration = Duration::from_secs(120);
const AGENTS: &str = "trainer,generator,verifier,evaluator";

/// Returns the address of an open fleet's page.
pub(crate) fn page_url(fleet: &Fleet) -> String {
    format!("http://{}/", fleet.read_fleet_file()["gateway"].as_str().expect("an address"))
}

fn run_state(fleet: &Fleet, run: &str) -> String {
    let run: Value = fleet.run_json(&["run", "show", run]).expect("a run");
    run["state"].as_str().expect("a state").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_the_fleet_and_controls_a_run_without_a_reload() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    browser.open(&page_url(&fleet)).await;
    browser.wait_for("html[data-connected=yes]").await;
    for agent in ["trainer-1", "evaluator-1"] {
        browser.wait_for(&format!("[data-agent={agent}]")).await;
    }
    // The run starts after the page was loaded.
    let files = SpecFiles::create(fleet.path());
    // Longer than the test.
    let run = fleet.submit(&files.write_sft_spec(200_000, 1000));
    let row = format!("[data-run='{run}']");
    browser.wait_for(&row).await;
    browser.open(&format!("{}#/run/{run}", page_url(&fleet))).await;
    browser.wait_for("[data-view=run]").await;
    let point = "return document.querySelector('[data-chart=loss] [data-x]') !== null";
    browser.wait_until_true(point).await;

    browser.click("[data-action=pause]").await;
    browser.wait_for("dialog[open]").await;
    assert_eq!(run_state(&fleet, &run), "RUNNING", "nothing is done before it is confirmed");
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for("[data-action=resume]").await;
    assert_eq!(run_state(&fleet, &run), "PAUSED");
    browser.click("[data-action=resume]").await;
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for("[data-action=pause]").await;
    browser.click("[data-action=cancel]").await;
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for("header[data-state=cancelled]").await;
    assert_eq!(run_state(&fleet, &run), "CANCELLED");
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_the_outcome_of_every_sample() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start_open(AGENTS);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(30, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 10, per_prompt: 4, max_new_tokens: 24, cycles: 2 };
    let run = fleet.submit(&files.write_raft_spec(&base, sampling));
    browser.open(&format!("{}#/run/{run}", page_url(&fleet))).await;
    fleet.await_success(&run, LIMIT);
    browser.wait_for("[data-state=succeeded]").await;
    let shown = fleet.run_json(&["run", "show", &run]).expect("a run");
    for chart in ["pass-rate", "perplexity", "loss", "rewards"] {
        browser.wait_for(&format!("[data-chart={chart}]")).await;
    }
    // The chart shows the measured values.
    let points = "return [...document.querySelectorAll('[data-chart=perplexity] [data-y]')] \
                  .map((it) => Number(it.dataset.y))";
    let drawn = browser.evaluate(points).await;
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
    check_timeline(&browser).await;
    check_settings(&browser).await;
    browser.open(&format!("{}#/run/{run}/samples?cycle=1", page_url(&fleet))).await;
    browser.wait_for("[data-view=samples]").await;
    browser
        .wait_until_true("return document.querySelectorAll('article[data-fate]').length === 40")
        .await;
    let kept = "return document.querySelectorAll('article[data-fate=kept]').length";
    let kept = browser.evaluate(kept).await.as_u64().expect("a number");
    let done = &shown["cyclesDone"];
    assert_eq!(done[1]["kept"].as_u64(), Some(kept), "{done}");
    browser.open(&page_url(&fleet)).await;
    let rates = format!("[data-row][data-run='{run}'] .heldout");
    let rates = browser.wait_for(&rates).await.text().await.expect("a text");
    for word in ["held-out", "best", "last"] {
        assert!(rates.contains(word), "{rates}");
    }
    let broken = "return [...document.querySelectorAll('.heldout .figure')]
        .filter((it) => it.getClientRects().length > 1).length";
    assert_eq!(browser.evaluate(broken).await, 0, "a rate is on two lines");
    let forked = fleet.run(&["run", "fork", &format!("{run}@1")]);
    forked.assert_success();
    let named = format!("return document.body.innerText.includes('continues {run}@1')");
    browser.wait_until_true(&named).await;
    // The fields of a dialog shrink with it.
    browser.click("[data-action=start]").await;
    browser.wait_for("dialog[open] .spec").await;
    let inside = "const form = document.querySelector('dialog form');
        form.parentElement.style.width = '320px';
        const end = (it) => it.getBoundingClientRect().right;
        return [...form.querySelectorAll('input, textarea')].every((it) => end(it) <= end(form) + 1)";
    assert_eq!(browser.evaluate(inside).await, true);
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
    browser.close().await;
}

/// Checks that no label of a cycle crosses a line, that each cycle's shade ends before the next line,
/// and that wide cycles have a label, also on a narrow screen.
async fn check_timeline(browser: &Browser) {
    let script = "const svg = document.querySelector('.timeline');
        if (!svg || Math.abs(svg.width.baseVal.value - innerWidth) > 120) return null;
        const boxes = (kind) => [...document.querySelectorAll(`.timeline ${kind}`)]
            .map((it) => it.getBBox());
        const lines = boxes('line.begin').map((it) => it.x);
        const crossed = [...boxes('text.label'), ...boxes('rect.cycle')].filter((it) =>
            lines.some((line) => line > it.x + 1 && line < it.x + it.width - 1));
        const wide = lines.filter((line, at) => (lines[at + 1] ?? 0) - line > 70).length;
        return [lines.length, crossed.length, wide, boxes('text.label').length]";
    for width in [1280, 500] {
        browser.client.set_window_size(width, 900).await.expect("a size");
        let found = browser.wait_until_true(script).await;
        let [lines, crossed, wide, labels] =
            [0, 1, 2, 3].map(|at| found[at].as_u64().expect("a number"));
        assert!(lines > 1 && crossed == 0 && labels >= wide, "{width} px: {found}");
    }
    browser.client.set_window_size(1280, 900).await.expect("a size");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_the_selected_checkpoint_of_many_and_that_nothing_was_trained() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start_open(AGENTS);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(60, 2));
    fleet.await_success(&base, LIMIT);
    browser.open(&format!("{}#/run/{base}", page_url(&fleet))).await;
    browser.wait_for(".node.chosen").await;
    let in_view = "const box = document.querySelector('.scrolled:has(.node)'); \
                   const [outer, inner] = [box, box.querySelector('.chosen')] \
                       .map((it) => it.getBoundingClientRect()); \
                   return box.scrollWidth > box.clientWidth \
                       && inner.left >= outer.left && inner.right <= outer.right";
    browser.wait_until_true(in_view).await;

    let sampling = Sampling { prompts: 4, per_prompt: 2, max_new_tokens: 8, cycles: 1 };
    let spec = files.write_raft_spec(&base, sampling);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let hopeless = text.replace("pattern: '[0-9]'", "pattern: 'never so'");
    assert_ne!(hopeless, text);
    std::fs::write(&spec, hopeless).expect("the spec");
    let run = fleet.submit(&spec);
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["message"], "no cycle kept a sample, so nothing was trained", "{ended:#}");
    browser.open(&format!("{}#/run/{run}", page_url(&fleet))).await;
    browser.wait_for("[data-state=succeeded]").await;
    let told = "return document.body.textContent.includes('No checkpoints: nothing was trained.')";
    browser.wait_until_true(told).await;
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
    browser.close().await;
}

/// Checks that the settings of a run are shown whole, not in a box that scrolls.
async fn check_settings(browser: &Browser) {
    browser.click("#settings ~ details summary").await;
    browser.wait_for(".settings").await;
    let hidden = "const box = document.querySelector('.wide:has(.settings)');
        return box.scrollHeight - box.clientHeight";
    assert_eq!(browser.evaluate(hidden).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_who_serves_a_channel_and_rolls_it_back() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start_open("trainer,evaluator,server");
    let files = SpecFiles::create(fleet.path());
    let [first, second] = [5, 6].map(|steps| {
        let run = fleet.submit(&files.write_sft_spec(steps, 0));
        fleet.await_success(&run, LIMIT);
        run
    });
    fleet.run(&["channel", "move", "stable", "--checkpoint", &first]).assert_success();
    browser.open(&page_url(&fleet)).await;
    // The channel of an open page is served later.
    browser.wait_for("[data-channel=stable]").await;
    let shown =
        |text: &str| format!("return document.querySelector('main').innerText.includes('{text}')");
    browser.wait_until_true(&shown("not served")).await;
    // There is nothing to return to before the second model.
    fleet.run(&["serve", "stable"]).assert_success();
    browser.click("[data-channel=stable]").await;
    browser.wait_for("header[data-channel=stable][data-move='2']").await;
    let buttons = "return document.querySelectorAll('[data-action=roll-back]').length";
    assert_eq!(browser.evaluate(buttons).await, 0);
    fleet.run(&["channel", "move", "stable", "--checkpoint", &second]).assert_success();
    browser.wait_for("header[data-channel=stable][data-move='3']").await;
    browser.wait_for("header a[href='#/box/server-1']").await;

    // A dialog about a move that is not the last any more changes nothing.
    browser.click("[data-action=roll-back]").await;
    browser.wait_for("dialog[open] input[name=reason]").await;
    fleet.run(&["channel", "roll-back", "stable"]).assert_success();
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for(".toast.bad").await;
    browser.wait_for("header[data-channel=stable][data-move='4']").await;
    let errors = browser.console_errors().await;
    assert!(errors.len() == 1 && errors[0].contains("RollBack"), "{errors:?}");
    fleet.run(&["channel", "move", "stable", "--checkpoint", &second]).assert_success();
    browser.wait_for("header[data-channel=stable][data-move='5']").await;

    browser.click("[data-action=roll-back]").await;
    browser.wait_for("dialog[open] input[name=reason]").await;
    let dialog = "return document.querySelector('dialog[open]').innerText";
    let text = browser.evaluate(dialog).await;
    assert!(text.as_str().expect("a text").contains(&format!("{first}/0")), "{text}");
    browser
        .wait_for("dialog[open] input[name=reason]")
        .await
        .send_keys("too slow")
        .await
        .expect("a field");
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for("header[data-channel=stable][data-move='6']").await;
    browser.wait_until_true(&shown("too slow")).await;
    let moves = fleet.run_json(&["channel", "history", "stable"]).expect("a history");
    assert_eq!(moves[5]["move"]["run"], first, "{moves:#}");
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_fleets_page_shows_nothing_until_a_bearer_is_pasted() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start("trainer,evaluator");
    let url =
        format!("https://{}/", fleet.read_fleet_file()["gateway"].as_str().expect("an address"));
    let credentials = fleet.path().join("reader");
    let to = credentials.display().to_string();
    fleet.run(&["user", "create", "reader", "--scope", "reader", "--out", &to]).assert_success();
    browser.open(&url).await;
    browser.wait_for("dialog[open]").await;
    assert!(!browser.visible_text().await.contains("trainer-1"));
    // Without a bearer, the page says what is missing, and asks again.
    browser.click("dialog[open] .quiet").await;
    browser.click("main > .empty button").await;
    browser.wait_for("dialog[open]").await;
    let bearer =
        std::fs::read_to_string(credentials.join("bearer.jwt")).expect("there is a bearer");
    let field = browser.wait_for("dialog[open] textarea, dialog[open] input").await;
    field.send_keys(bearer.trim()).await.expect("a field to paste into");
    browser.click("dialog[open] button[type=submit]").await;
    browser.wait_for("[data-agent=trainer-1]").await;
    // The page shows readers no buttons, as soon as it knows their scope.
    browser
        .wait_until_true("return document.getElementById('who').textContent.includes('reader')")
        .await;
    let steers = "return document.querySelectorAll('[data-action]').length";
    assert_eq!(browser.evaluate(steers).await, 0);
    assert_eq!(
        browser.evaluate("return location.href").await.as_str().unwrap().trim_end_matches("#/"),
        url
    );
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_click_on_the_link_of_a_new_fleet_shows_it_and_the_link_works_once() {
    let Some(browser) = Browser::start().await else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let up = ["up", "--dir", "fleet", "--agents", "evaluator"];
    let Some(mut terminal) = Terminal::start(&up, directory.path()) else { return };
    let link = terminal.wait_for_word("/#code=");
    let (url, code) = link.split_once("#code=").expect("a code");
    // Browsers warn about the fleet's certificate, which is not needed here.
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
    browser.open(&link).await;
    browser.wait_for("html[data-connected=yes] [data-agent=evaluator-1]").await;
    let who = "return document.getElementById('who').textContent.includes('admin')";
    browser.wait_until_true(who).await;
    // The code is in no address, neither of the page nor of what it loaded.
    assert_eq!(browser.evaluate("return location.href").await, format!("{url}#/"));
    let loaded = "return performance.getEntriesByType('resource').map((it) => it.name).join(' ')";
    assert!(!browser.evaluate(loaded).await.to_string().contains(code));
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
    // The tab stays signed in.
    browser.client.refresh().await.expect("a page");
    browser.wait_for("[data-agent=evaluator-1]").await;

    // Someone who finds the link later.
    browser.evaluate("sessionStorage.clear()").await;
    browser.open("about:blank").await;
    browser.open(&link).await;
    browser.wait_for("dialog[open]").await;
    let text = browser.visible_text().await;
    assert!(text.contains("it works once") && !text.contains("evaluator-1"), "{text}");
    // Another link, in the tab that shows this page.
    let dir = directory.path().join("fleet").display().to_string();
    let open = e2e::run_flotilla(&["open", "--print", "--dir", &dir], []);
    open.assert_success();
    browser.open(open.stdout.trim()).await;
    browser.wait_for("html[data-connected=yes] [data-agent=evaluator-1]").await;

    terminal.enter("\u{3}");
    assert!(terminal.wait_end().success(), "{}", terminal.text());
    let codes = [code, open.stdout.trim().split_once("#code=").expect("a code").1];
    for log in e2e::find_logs(directory.path()) {
        let text = std::fs::read_to_string(&log).expect("a log");
        assert!(!codes.iter().any(|code| text.contains(code)), "{}", log.display());
    }
    browser.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_lost_its_gateway_shows_it_and_reconnects() {
    let Some(browser) = Browser::start().await else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    browser.open(&page_url(&fleet)).await;
    browser.wait_for("html[data-connected=yes] [data-agent=trainer-1]").await;
    fleet.kill("coordinator");
    browser.wait_for("html[data-connected=no]").await;
    // The last known state stays visible.
    browser.wait_for("[data-agent=trainer-1]").await;
    browser.wait_for("html[data-connected=yes]").await;
    browser.close().await;
}
