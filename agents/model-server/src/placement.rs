//! Decides which channels an agent serves, from data that all agents have, so that they agree
//! without messages.

use std::collections::{BTreeMap, BTreeSet};

use wire::{AgentId, Pool, RunId, derive_seed, v1};

/// A channel's model, as its newest move names it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ChannelModel {
    /// Number of the move.
    pub number: u64,
    pub base: v1::Tree,
    pub adapter: Option<v1::Tree>,
}

impl ChannelModel {
    /// Returns true if the newest move names the same weights.
    pub(crate) fn is_named_by(&self, newest: Option<&(u64, v1::ChannelMove)>) -> bool {
        newest.is_some_and(|(_, found)| {
            let base = found.base.as_ref().map(|base| &base.manifest);
            base == Some(&self.base.manifest) && found.adapter == self.adapter
        })
    }

    fn has_weights_of(&self, other: &Self) -> bool {
        self.base.manifest == other.base.manifest && self.adapter == other.adapter
    }

    /// Returns true if a move names these weights and has agents of this pool serve them.
    pub(crate) fn is_served_by(
        &self,
        newest: Option<&(u64, v1::ChannelMove)>,
        pool: &Pool,
    ) -> bool {
        let serving = newest.and_then(|(_, found)| found.serving.as_ref());
        self.is_named_by(newest) && serving.is_some_and(|it| it.pool == pool.as_str())
    }
}

/// The channels of one base, by name, which one process serves.
pub(crate) type ServedModels = BTreeMap<RunId, ChannelModel>;

/// Returns true if a process with one set of models can serve the other, because only their moves
/// differ.
pub(crate) fn have_same_weights(one: &ServedModels, other: &ServedModels) -> bool {
    one.len() == other.len() && has_weights_of_all(one, other)
}

/// Returns true if a process with one set of models can serve each of the others.
pub(crate) fn has_weights_of_all(models: &ServedModels, others: &ServedModels) -> bool {
    let has = |(channel, other): (&RunId, &ChannelModel)| {
        models.get(channel).is_some_and(|model| model.has_weights_of(other))
    };
    others.iter().all(has)
}

/// Returns the models of a base that its process should have: those that are wanted, except those of
/// channels whose adapter cannot be loaded, which keep the `loaded` model, if any.
pub(crate) fn keep_served_models(
    wanted: &ServedModels,
    loaded: Option<&ServedModels>,
    is_left_out: impl Fn(&RunId) -> bool,
) -> ServedModels {
    let choose = |(channel, model): (&RunId, &ChannelModel)| {
        let model = if is_left_out(channel) { loaded?.get(channel)? } else { model };
        Some((channel.clone(), model.clone()))
    };
    wanted.iter().filter_map(choose).collect()
}

/// Returns true if the process of the base `old` is there only until the process of the base `new`
/// has loaded `models`: it has the same base, or models of the same channels and no wanted ones.
pub(crate) fn is_replaced(
    (old, old_models): (&str, &ServedModels),
    (new, models): (&str, &ServedModels),
    wanted: &BTreeMap<String, ServedModels>,
) -> bool {
    let has_moved = || models.keys().any(|channel| old_models.contains_key(channel));
    old == new || (!wanted.contains_key(old) && has_moved())
}

/// Returns true if only other agents are to serve the channels of a process.
pub(crate) fn is_for_others(
    models: &ServedModels,
    wanted: &BTreeMap<String, ServedModels>,
) -> bool {
    let is_wanted = |channel| wanted.values().any(|models| models.contains_key(channel));
    !models.keys().any(is_wanted)
}

/// An agent's announcement of the channels of its pool.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServingAgent {
    /// The channels that it failed to load.
    pub failed: BTreeSet<String>,
    /// The newest move whose model it has loaded, by channel.
    pub loaded: BTreeMap<String, u64>,
}

/// The agents of a pool that can serve, by name.
pub(crate) type ServingAgents = BTreeMap<String, ServingAgent>;

/// Returns the channels that this agent serves, by the manifest digest of their base. `agents` are
/// the pool's, including this one.
pub(crate) fn assign_models(
    moves: &BTreeMap<RunId, (u64, v1::ChannelMove)>,
    (own, pool): (&AgentId, &Pool),
    agents: &ServingAgents,
) -> BTreeMap<String, ServedModels> {
    let mut assigned: BTreeMap<String, ServedModels> = BTreeMap::new();
    for (channel, (number, found)) in moves {
        let (Some(serving), Some(base)) = (&found.serving, &found.base) else { continue };
        let is_chosen = || is_chosen(channel, serving.replicas, own.as_str(), agents);
        if serving.pool != pool.as_str() || !is_chosen() {
            continue;
        }
        let (base, adapter) = (base.clone(), found.adapter.clone());
        let models = assigned.entry(base.manifest.clone()).or_default();
        models.insert(channel.clone(), ChannelModel { number: *number, base, adapter });
    }
    assigned
}

/// Returns true if this agent is among the `replicas` with the highest weights for the channel
/// (rendezvous hashing): if an agent leaves, only its channels move. Agents that failed to load it
/// come last.
fn is_chosen(channel: &RunId, replicas: u32, agent: &str, agents: &ServingAgents) -> bool {
    let weight = |agent: &str| {
        let failed = agents.get(agent).is_some_and(|it| it.failed.contains(channel.as_str()));
        (!failed, derive_seed(0, &["serve", channel.as_str(), agent]), agent.to_owned())
    };
    let own_weight = weight(agent);
    let before = agents.keys().filter(|agent| weight(agent) > own_weight).count();
    replicas == 0 || u64::try_from(before).is_ok_and(|before| before < u64::from(replicas))
}

/// Returns true until all agents that are to serve a channel have loaded its newest model, but for
/// those that failed to. An agent that is not one of them keeps its model until then.
pub(crate) fn is_awaited(
    channel: &RunId,
    newest: Option<&(u64, v1::ChannelMove)>,
    pool: &Pool,
    agents: &ServingAgents,
) -> bool {
    let Some((number, found)) = newest else { return false };
    let Some(serving) = found.serving.as_ref().filter(|it| it.pool == pool.as_str()) else {
        return false;
    };
    let chosen =
        agents.iter().filter(|(name, _)| is_chosen(channel, serving.replicas, name, agents));
    let (mut loaded, mut loading) = (0, 0);
    for (_, agent) in chosen {
        let has_loaded = agent.loaded.get(channel.as_str()).is_some_and(|it| it >= number);
        loaded += usize::from(has_loaded);
        loading += usize::from(!has_loaded && !agent.failed.contains(channel.as_str()));
    }
    loaded == 0 || loading > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel_move(pool: &str, replicas: u32, base: &str) -> v1::ChannelMove {
        let serving = v1::channel_move::Serving { pool: pool.into(), replicas };
        let base = v1::Tree { path: base.into(), manifest: base.into() };
        v1::ChannelMove { serving: Some(serving), base: Some(base), ..Default::default() }
    }

    fn agents(names: &[&str]) -> ServingAgents {
        names.iter().map(|name| ((*name).to_owned(), ServingAgent::default())).collect()
    }

    fn serving(replicas: u32, names: &[&str]) -> Vec<String> {
        let moves =
            [("stable".parse().unwrap(), (1, channel_move("default", replicas, "m")))].into();
        let pool = "default".parse().unwrap();
        let serves = |name: &&&str| {
            let own = name.parse().unwrap();
            !assign_models(&moves, (&own, &pool), &agents(names)).is_empty()
        };
        names.iter().filter(serves).map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn as_many_agents_as_wanted_serve_a_channel() {
        let names = ["a", "b", "c", "d"];
        assert_eq!(serving(0, &names), names);
        assert_eq!(serving(2, &names).len(), 2);
        assert_eq!(serving(9, &names), names);
    }

    #[test]
    fn an_agent_that_cannot_load_a_channel_is_replaced() {
        let moves: BTreeMap<_, _> =
            [("stable".parse().unwrap(), (1, channel_move("default", 1, "m")))].into();
        let (first, pool) = (serving(1, &["a", "b"])[0].clone(), "default".parse().unwrap());
        let mut known = agents(&["a", "b"]);
        known.get_mut(&first).unwrap().failed.insert("stable".into());
        let serves =
            |name: &str| !assign_models(&moves, (&name.parse().unwrap(), &pool), &known).is_empty();
        let other = if first == "a" { "b" } else { "a" };
        assert!(serves(other) && !serves(&first));
    }

    #[test]
    fn a_channel_is_awaited_until_an_agent_that_is_to_serve_it_has_its_newest_model() {
        let (channel, pool): (RunId, Pool) =
            ("stable".parse().unwrap(), "default".parse().unwrap());
        let newest = (2, channel_move("default", 1, "m"));
        let chosen = serving(1, &["a", "b"])[0].clone();
        let other = if chosen == "a" { "b" } else { "a" };
        let is_awaited = |newest: &(u64, v1::ChannelMove), loaded: &[(&str, u64)]| {
            let mut known = agents(&["a", "b"]);
            for (name, number) in loaded {
                known.get_mut(*name).unwrap().loaded.insert("stable".into(), *number);
            }
            is_awaited(&channel, Some(newest), &pool, &known)
        };
        assert!(is_awaited(&newest, &[]));
        assert!(is_awaited(&newest, &[(&chosen, 1)]), "the chosen agent has the old model");
        assert!(is_awaited(&newest, &[(other, 2)]), "it would end at both agents at once");
        assert!(!is_awaited(&newest, &[(&chosen, 2)]));
        let two = (2, channel_move("default", 2, "m"));
        assert!(is_awaited(&two, &[(other, 2)]) && !is_awaited(&two, &[("a", 2), ("b", 2)]));
        let stopped = v1::ChannelMove { serving: None, ..newest.1 };
        assert!(!is_awaited(&(3, stopped), &[]));
        assert!(!is_awaited(&(3, channel_move("other", 1, "m")), &[]));
    }

    #[test]
    fn if_an_agent_leaves_the_others_keep_the_channel() {
        let before = serving(2, &["a", "b", "c", "d"]);
        let left: Vec<&str> =
            ["a", "b", "c", "d"].into_iter().filter(|name| *name != before[0]).collect();
        let after = serving(2, &left);
        assert!(after.contains(&before[1]) && after.len() == 2, "{before:?} {after:?}");
    }

    #[test]
    fn a_failure_counts_until_the_channel_is_moved_or_not_served_here_any_more() {
        let pool: Pool = "default".parse().unwrap();
        let found = channel_move("default", 1, "m");
        let model = ChannelModel { number: 1, base: found.base.clone().unwrap(), adapter: None };
        let is_served = |newest| model.is_served_by(Some(&(2, newest)), &pool);
        assert!(is_served(found.clone()));
        assert!(!is_served(channel_move("default", 1, "n")));
        assert!(!is_served(channel_move("other", 1, "m")));
        assert!(!is_served(v1::ChannelMove { serving: None, ..found }));
        assert!(!model.is_served_by(None, &pool));
    }

    #[test]
    fn a_channel_whose_adapter_cannot_be_loaded_keeps_its_model_and_the_others_get_theirs() {
        let models = |numbers: &[(&str, u64)]| -> ServedModels {
            let model = |number| ChannelModel { number, base: v1::Tree::default(), adapter: None };
            numbers.iter().map(|(name, number)| (name.parse().unwrap(), model(*number))).collect()
        };
        let wanted = models(&[("bad", 2), ("good", 2)]);
        let is_bad = |channel: &RunId| channel.as_str() == "bad";
        assert_eq!(keep_served_models(&wanted, None, is_bad), models(&[("good", 2)]));
        let loaded = models(&[("bad", 1), ("good", 1), ("gone", 1)]);
        let kept = keep_served_models(&wanted, Some(&loaded), is_bad);
        assert_eq!(kept, models(&[("bad", 1), ("good", 2)]));
        assert_eq!(keep_served_models(&wanted, Some(&loaded), |_| false), wanted);
    }

    #[test]
    fn a_process_is_replaced_by_one_of_its_base_or_with_its_channels() {
        let models = |channels: &[&str]| -> ServedModels {
            let base = v1::Tree::default();
            let model = ChannelModel { number: 1, base, adapter: None };
            channels.iter().map(|name| (name.parse().unwrap(), model.clone())).collect()
        };
        let wanted = |bases: &[(&str, &[&str])]| -> BTreeMap<String, ServedModels> {
            bases.iter().map(|(base, names)| ((*base).to_owned(), models(names))).collect()
        };
        let (one, both) = (models(&["a"]), models(&["a", "b"]));
        let moved = wanted(&[("n", &["a"])]);
        assert!(is_replaced(("m", &one), ("m", &both), &wanted(&[("m", &["a", "b"])])));
        assert!(is_replaced(("m", &one), ("n", &one), &moved), "the channel has another base");
        assert!(!is_replaced(("m", &models(&["c"])), ("n", &one), &moved));
        assert!(is_for_others(&models(&["c"]), &moved) && !is_for_others(&both, &moved));
        let both_wanted = wanted(&[("m", &["b"]), ("n", &["a"])]);
        assert!(!is_replaced(("m", &both), ("n", &one), &both_wanted), "it serves another one");
    }

    #[test]
    fn channels_of_a_base_are_served_together_and_others_apart() {
        let mut moves: BTreeMap<RunId, (u64, v1::ChannelMove)> = BTreeMap::new();
        for (name, pool, base) in [
            ("a", "default", "m"),
            ("b", "default", "m"),
            ("c", "default", "n"),
            ("d", "other", "m"),
        ] {
            moves.insert(name.parse().unwrap(), (1, channel_move(pool, 0, base)));
        }
        moves.get_mut(&"b".parse().unwrap()).unwrap().1.serving = None;
        moves.insert("e".parse().unwrap(), (2, channel_move("default", 0, "m")));
        let own = "me".parse().unwrap();
        let assigned = assign_models(&moves, (&own, &"default".parse().unwrap()), &agents(&["me"]));
        let names =
            |base: &str| -> Vec<&str> { assigned[base].keys().map(RunId::as_str).collect() };
        assert_eq!(assigned.len(), 2);
        assert_eq!((names("m"), names("n")), (vec!["a", "e"], vec!["c"]));
    }
}
