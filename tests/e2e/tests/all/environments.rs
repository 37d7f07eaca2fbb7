//! Episodes of several turns: equal wherever they are drawn, judged by a replay, and learned without
//! the environment's own words.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

use e2e::{Fleet, Sampling, SpecFiles, wait_until, write_executable};
use requirements::{require_namespaces, require_program};
use serde_json::Value;
use tempfile::TempDir;

use crate::page::{browser::Browser, page_url};

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 160, cycles: 1 };

/// Answers with the seed and the number of the turn, and pays for the second one.
pub(crate) const COUNTING: &str = r#"
turn = len(request["history"]) + 1
answer = {"observation": "<%d:%d>" % (request["seed"] % 1000, turn),
          "reward": 0.5 * (turn == 2), "done": request["last"]}
"#;

/// The same, but ends at some actions of the second turn.
const FRAGILE: &str = r#"
turn = len(request["history"]) + 1
if turn == 2 and sum(map(ord, request["action"])) % 4 == 0: sys.exit("an odd action")
answer = {"observation": "<%d:%d>" % (request["seed"] % 1000, turn),
          "reward": 0.5 * (turn == 2), "done": request["last"]}
"#;

/// Creates an environment in a directory that every user can read.
pub(crate) fn create_environment(directory: &Path, answer: &str) -> String {
    let body = answer.trim().replace('\n', "\n    ");
    let script = format!(
        "#!/usr/bin/env python3\nimport json, sys\nfor line in sys.stdin:\n    \
         request = json.loads(line)\n    {body}\n    \
         print(json.dumps({{\"id\": request[\"id\"], **answer}}), flush=True)\n"
    );
    write_executable(&directory.join("environment"), script)
}

pub(crate) fn create_public_directory() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).expect("its mode");
    directory
}

/// Starts a fleet of two generators, of which each draws one sample at a time, and a base that ends
/// its turns. Environments in `directory` may run, if their owner opened it.
fn start_fleet(directory: &Path, is_open: bool, arguments: &[&str]) -> (Fleet, SpecFiles, String) {
    let slow = ("FLOTILLA_SLOTS".to_owned(), "1".to_owned());
    let open = ("FLOTILLA_VERIFIER_PATH".to_owned(), directory.display().to_string());
    let environment = [slow].into_iter().chain(is_open.then_some(open));
    let fleet = Fleet::start_with("trainer,generator=2,verifier,evaluator", arguments, environment);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(150, 0));
    fleet.await_success(&base, LIMIT);
    (fleet, files, base)
}

/// Submits a run that keeps all judged episodes.
fn submit_run(
    fleet: &Fleet,
    files: &SpecFiles,
    base: &str,
    (environment, max_turns): (&str, u32),
) -> String {
    let spec = files.write_raft_spec(base, SAMPLING);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let played = text.replace(
        "verifier: { regex: { pattern: '[0-9]' } }",
        &format!(
            "verifier: {{ environment: {{ argv: ['{environment}'], max_turns: {max_turns} }} }}\n  \
             selection: {{ keep_per_prompt: 0, min_reward: -1, keep_duplicates: true }}"
        ),
    );
    assert_ne!(played, text);
    std::fs::write(&spec, played).expect("the spec");
    fleet.submit(&spec)
}

/// Returns the facts of a run whose subject contains this text.
pub(crate) fn facts_of_kind<'a>(
    facts: &'a [Value],
    kind: &'a str,
) -> impl Iterator<Item = &'a Value> {
    let is = move |fact: &&Value| fact["subject"].as_str().is_some_and(|it| it.contains(kind));
    facts.iter().filter(is).map(|fact| &fact["fact"])
}

/// The samples of a run by purpose, cycle, prompt and index, each with the agent that drew it.
fn samples_of(facts: &[Value]) -> BTreeMap<String, (String, Value)> {
    let mut all = BTreeMap::new();
    for job in facts_of_kind(facts, ".samples.") {
        for sample in job["samples"].as_array().expect("samples") {
            let index = sample["index"].as_u64().unwrap_or(0);
            let (cycle, prompt) = (&job["cycle"], &sample["promptId"]);
            let name = format!("{} {cycle} {prompt} {index}", job["purpose"]);
            let agent = job["agent"].as_str().expect("an agent").to_owned();
            all.insert(name, (agent, sample.clone()));
        }
    }
    all
}

fn count_tokens(samples: &BTreeMap<String, (String, Value)>, purpose: &str) -> u64 {
    let of = samples.iter().filter(|(name, _)| name.starts_with(purpose));
    of.map(|(_, (_, sample))| sample["tokens"].as_u64().expect("tokens")).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn episodes_are_equal_on_two_boxes_and_only_what_the_model_wrote_is_learned() {
    if require_program("python3").is_none() || !require_namespaces() {
        return;
    }
    let directory = create_public_directory();
    let environment = create_environment(directory.path(), COUNTING);
    let (fleet, files, base) = start_fleet(directory.path(), true, &["--open"]);
    let runs = [(); 2].map(|()| {
        let run = submit_run(&fleet, &files, &base, (&environment, 3));
        fleet.await_success(&run, LIMIT);
        fleet.assert_clean_audit(&run);
        let facts = fleet.read_facts(&run);
        (run, samples_of(&facts), facts)
    });
    let [(run, first, facts), (_, second, _)] = &runs;
    assert_eq!(first.len(), 24 * 4 + 2 * 8, "training samples, and held-out ones in two cycles");
    let mut on_other_boxes = 0;
    for (name, (agent, sample)) in first {
        let (other, again) = &second[name];
        assert_eq!(sample, again, "{name}, drawn by {agent} and by {other}");
        on_other_boxes += usize::from(agent != other);
    }
    assert!(on_other_boxes > 0, "each sample was drawn by the same box twice");

    let turns: BTreeSet<usize> = first
        .values()
        .map(|(_, sample)| sample["turns"].as_array().expect("turns").len())
        .collect();
    assert!(turns.contains(&3), "some episodes have all turns: {turns:?}");
    for (_, sample) in first.values() {
        let turns = sample["turns"].as_array().expect("turns");
        let drawn: usize =
            turns.iter().map(|it| it["tokenIds"].as_array().map_or(0, Vec::len)).sum();
        assert_eq!(sample["tokens"], drawn, "{sample:#}");
        for (turn, number) in turns.iter().zip(1..) {
            let observation = turn["observation"].as_str().expect("an observation");
            assert!(observation.ends_with(&format!(":{number}>")), "{turn:#}");
            // The model has one token for each byte.
            if number < turns.len() {
                let ids = turn["observationIds"].as_array().expect("tokens");
                assert_eq!(ids.len(), observation.len(), "{turn:#}");
            }
        }
    }
    let selection = facts_of_kind(facts, ".selection.1").next().expect("a selection");
    assert_eq!(selection["kept"], 96, "{selection:#}");
    let trained = facts_of_kind(facts, ".checkpoint.1.").last().expect("a checkpoint");
    let tokens = |key: &str| trained[key].as_str().expect("a count").parse::<u64>().expect("it");
    assert_eq!(tokens("trainedTokens"), count_tokens(first, "\"TRAIN\""), "{trained:#}");
    assert!(tokens("tokens") > tokens("trainedTokens") + 96, "{trained:#}");
    let verdicts = facts_of_kind(facts, ".verdicts.1.").flat_map(|it| it["verdicts"].as_array());
    let rewards: BTreeSet<String> =
        verdicts.flatten().map(|verdict| verdict["reward"].to_string()).collect();
    assert!(rewards.iter().any(|it| it == "0.5"), "the second turn pays: {rewards:?}");

    let shown = fleet.run(&["run", "samples", run]).stdout;
    assert!(shown.lines().any(|line| line.trim().starts_with("> <")), "{shown}");
    if let Some(browser) = Browser::start().await {
        check_page(&browser, &format!("{}#/run/{run}/samples?cycle=1", page_url(&fleet))).await;
        browser.close().await;
    }
}

/// Checks that the page of samples shows each turn of an episode with its observation.
async fn check_page(browser: &Browser, url: &str) {
    browser.open(url).await;
    let script = "const count = (sample, part) => sample.querySelectorAll(part).length;
        const turns = [...document.querySelectorAll('article.sample')]
            .map((it) => [count(it, 'pre.turn'), count(it, 'pre.observation')]);
        const first = document.querySelector('pre.observation')?.innerText ?? '';
        return /^<[0-9]+:1>$/.test(first) && turns.some(([said]) => said === 3)
            && turns.every(([said, answered]) => said === answered)";
    browser.wait_until_true(script).await;
    assert_eq!(browser.console_errors().await, Vec::<String>::new());
}

#[test]
fn an_action_that_an_environment_does_not_answer_costs_its_own_episode_alone() {
    if require_program("python3").is_none() || !require_namespaces() {
        return;
    }
    let directory = create_public_directory();
    let fragile = create_environment(directory.path(), FRAGILE);
    let (fleet, files, base) = start_fleet(directory.path(), true, &[]);
    let run = submit_run(&fleet, &files, &base, (&fragile, 3));
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let facts = fleet.read_facts(&run);
    let judged = facts_of_kind(&facts, ".verdicts.1.").filter(|it| it["purpose"] == "TRAIN");
    let verdicts: Vec<&Value> =
        judged.filter_map(|it| it["verdicts"].as_array()).flatten().collect();
    let failed: Vec<&&Value> = verdicts.iter().filter(|it| it["outcome"] == "ERROR").collect();
    assert!(!failed.is_empty() && verdicts.len() == 96, "{verdicts:#?}");
    for verdict in &failed {
        let detail = verdict["detail"].as_str().expect("a detail");
        assert!(detail.contains("(V106)") && detail.contains("an odd action"), "{detail}");
    }
    let selection = facts_of_kind(&facts, ".selection.1").next().expect("a selection");
    assert_eq!(selection["kept"], 96 - failed.len(), "{selection:#}");
}

#[test]
fn an_environment_that_never_ends_or_is_not_allowed_gives_no_samples() {
    if require_program("python3").is_none() || !require_namespaces() {
        return;
    }
    let directory = create_public_directory();
    let endless = create_environment(directory.path(), "answer = {\"observation\": \"more\"}");
    let (fleet, files, base) = start_fleet(directory.path(), true, &[]);
    // Its first turn is the last one, so that it fails in all episodes.
    let run = submit_run(&fleet, &files, &base, (&endless, 1));
    let ended = fleet.await_state(&run, "FAILED", LIMIT).to_string();
    assert!(ended.contains("did not end the episode") && ended.contains("(V106)"), "{ended}");
    assert!(samples_of(&fleet.read_facts(&run)).is_empty());
    drop(fleet);

    let (fleet, files, base) = start_fleet(directory.path(), false, &[]);
    let run = submit_run(&fleet, &files, &base, (&endless, 1));
    wait_until("a generator reports what it lacks", LIMIT, || {
        let listed = fleet.run_json(&["agents", "list"]).ok()?;
        let troubles = listed.as_array()?.iter().filter_map(|agent| agent["trouble"].as_str());
        troubles.map(str::to_owned).find(|trouble| trouble.contains("(V104)"))
    });
    // Then its facts have an end.
    fleet.run(&["run", "cancel", &run]).assert_success();
    assert!(samples_of(&fleet.read_facts(&run)).is_empty());
}
