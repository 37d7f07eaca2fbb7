//! Environments that replay episodes, in a real sandbox.

use requirements::require_namespaces;
use serde_json::json;
use verifier::{OwnerGrants, PlayedEpisode, PlayedTurn, Toolchain, VerifierTools, VerifyItem};
use wire::v1::{
    verdicts::Verdict,
    verifier::{Environment, How},
};

use crate::rig::{find_toolchain, item, judge_all, told};

/// Answers the first turn with `ok`, and ends the episode at the second one.
const HONEST: &str = r#"case $line in
    *'"history":[]'*) echo "{\"id\":$id,\"observation\":\"ok\",\"reward\":0.25}";;
    *) echo "{\"id\":$id,\"reward\":0.5,\"done\":true}";;
    esac"#;

fn host() -> Option<Toolchain> {
    if !require_namespaces() {
        return None;
    }
    let found =
        find_toolchain(VerifierTools::default(), Vec::new(), OwnerGrants::default()).test_host();
    assert!(found.1.contained.is_ok(), "there are namespaces, but no sandbox: {:?}", found.1);
    Some(found.0)
}

fn episode(turns: &[(&str, &str)]) -> VerifyItem {
    let turn = |(action, observation): &(&str, &str)| PlayedTurn {
        action: (*action).into(),
        observation: (*observation).into(),
    };
    let turns = turns.iter().map(turn).collect();
    let episode = Some(PlayedEpisode { seed: 7, turns, is_cut: false });
    VerifyItem { episode, ..item("2+2=", "two turns", json!({})) }
}

/// Judges with an environment that runs this script for each request; `$line` is the request, `$id`
/// its id.
fn judge(toolchain: &Toolchain, answer: &str, items: &[VerifyItem]) -> Vec<Verdict> {
    let script = format!(
        "while read -r line; do id=${{line##*\\\"id\\\":}}; id=${{id%%[,\\}}]*}}\n{answer}\ndone"
    );
    let argv = ["sh", "-c", &script].map(str::to_owned).to_vec();
    let settings =
        Environment { argv, timeout_s: 2.0, max_turns: 2, pass_at: 0.75, ..Environment::default() };
    judge_all(toolchain.clone(), How::Environment(settings), items)
}

#[test]
fn the_rewards_of_all_turns_are_those_of_the_replayed_episode() {
    let Some(toolchain) = host() else { return };
    let items = vec![episode(&[("a", "ok"), ("b", "")]); 5];
    for verdict in judge(&toolchain, HONEST, &items) {
        assert_eq!(told(&verdict), ("pass", 0.75, ""));
    }
}

#[test]
fn whatever_an_environment_does_wrong_is_an_error_never_a_reward_of_zero() {
    let Some(toolchain) = host() else { return };
    let (first, _) = HONEST.rsplit_once("*) ").expect("two turns");
    let later = |wrong: &str| format!("{first}*) {wrong};;\nesac");
    let cases = [
        (r#"echo "{\"id\":$id,\"observation\":\"ok\"}""#.to_owned(), "it did not end the episode"),
        (later("sleep 60"), "it did not answer within"),
        (later("head -c 200000 /dev/zero"), "more than"),
        (later("exit 3"), "it ended with"),
        (later("echo no"), "not a JSON object"),
        (later(r#"echo "{\"id\":$id,\"reward\":\"1\",\"done\":true}""#), "no observation, reward"),
        (later(r#"echo "{\"id\":$id,\"observation\":\"x\",\"done\":true}""#), "otherwise"),
    ];
    for (script, expected) in cases {
        let verdict = judge(&toolchain, &script, &[episode(&[("a", "ok"), ("b", "")])]).remove(0);
        let (outcome, reward, detail) = told(&verdict);
        assert_eq!((outcome, reward.to_bits()), ("error", 0), "{script}: {detail}");
        assert!(detail.contains(expected) && detail.contains("(V106)"), "{script}: {detail}");
    }
    let plain = judge(&toolchain, HONEST, &[item("2+2=", "4", json!({}))]).remove(0);
    assert!(told(&plain).2.contains("has no turns"), "{plain:?}");
}
