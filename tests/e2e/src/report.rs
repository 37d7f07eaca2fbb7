//! What a campaign measured: how soon work that was held by the dead is held by the living,
//! and how soon somebody leads again.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    journal::{Begin, Lead},
    storm::{Kind, Strike},
};

/// From strikes, logs and facts.
pub struct Evidence<'a> {
    pub strikes: &'a [Strike],
    pub begins: &'a [Begin],
    pub leads: &'a [Lead],
    /// When each fact was written, in seconds since 1970, by subject.
    pub written: &'a BTreeMap<String, f64>,
}

/// A job that an agent held when it was killed.
struct Held<'a> {
    begin: &'a Begin,
    /// When it began again, at whichever agent.
    again_s: Option<f64>,
}

impl Evidence<'_> {
    pub fn figures(&self) -> Value {
        let (mut again, mut undisturbed, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        let mut each = Vec::new();
        for strike in self.kills(Kind::Agent) {
            let held = self.held(strike);
            for again_s in held.iter().filter_map(|held| held.again_s) {
                again.push(again_s - strike.at_s);
                each.push(json!([
                    strike.name,
                    again_s - strike.at_s,
                    self.between(strike.at_s, again_s)
                ]));
                if !self.bus_was_struck(strike.at_s, again_s) {
                    undisturbed.push(again_s - strike.at_s);
                }
            }
            if strike.name.starts_with("generator") {
                let began = held.iter().map(|held| held.begin.at_s).reduce(f64::min);
                lost.push(began.map_or(0.0, |began| strike.at_s - began));
            }
        }
        let takeovers = self.kills(Kind::Coordinator).filter_map(|strike| self.takeover(strike));
        json!({
            "seconds_from_agent_kill_to_its_jobs_next_delivery": summary(again),
            "each_agent_kill_seconds_and_what_was_struck_meanwhile": each,
            "the_same_where_the_bus_was_not_struck_meanwhile": summary(undisturbed),
            "generation_seconds_lost_a_generator_kill": summary(lost),
            "seconds_from_leader_kill_to_next_leader": summary(takeovers.collect()),
        })
    }

    fn kills(&self, kind: Kind) -> impl Iterator<Item = &Strike> {
        self.strikes.iter().filter(move |one| one.kind == kind && one.stopped_s.is_none())
    }

    fn between(&self, from_s: f64, to_s: f64) -> Vec<String> {
        let struck = self.strikes.iter().filter(|one| one.at_s > from_s - 8.0 && one.at_s < to_s);
        struck
            .map(|one| match one.stopped_s {
                None => format!("{} killed at {:.1}", one.name, one.at_s - from_s),
                Some(s) => format!("{} stopped at {:.1} for {s:.1}", one.name, one.at_s - from_s),
            })
            .collect()
    }

    fn bus_was_struck(&self, from_s: f64, to_s: f64) -> bool {
        let bus = |one: &&Strike| matches!(one.kind, Kind::NatsServer | Kind::Up);
        self.strikes.iter().filter(bus).any(|one| {
            let over_s = one.at_s + one.stopped_s.unwrap_or(1.0);
            one.at_s < to_s && over_s > from_s
        })
    }

    /// What began at the killed agent, was not done, and began again.
    fn held(&self, strike: &Strike) -> Vec<Held<'_>> {
        let mut last: BTreeMap<&str, &Begin> = BTreeMap::new();
        for begin in self.begins.iter().filter(|begin| begin.at_s < strike.at_s) {
            last.insert(&begin.subject, begin);
        }
        let held = last.into_values().filter(|begin| begin.agent == strike.name);
        let done = |begin: &Begin| {
            let result = result_of(&begin.subject).and_then(|result| self.written.get(&result));
            result.is_some_and(|at_s| *at_s < strike.at_s)
        };
        let again = |begin: &Begin| {
            let later = |one: &&Begin| one.subject == begin.subject && one.at_s > strike.at_s;
            self.begins.iter().find(later).map(|one| one.at_s)
        };
        held.filter(|begin| !done(begin))
            .map(|begin| Held { begin, again_s: again(begin) })
            .filter(|held| held.again_s.is_some())
            .collect()
    }

    /// Seconds until somebody led, if the killed coordinator did.
    fn takeover(&self, strike: &Strike) -> Option<f64> {
        let before = |at_s: f64| at_s < strike.at_s;
        let ours = self.leads.iter().rfind(|one| before(one.at_s))?;
        let killed_since = self
            .kills(Kind::Coordinator)
            .any(|one| one.name == strike.name && before(one.at_s) && one.at_s > ours.at_s);
        if !ours.leads || ours.coordinator != strike.name || killed_since {
            return None;
        }
        let next = self.leads.iter().find(|one| one.leads && !before(one.at_s))?;
        Some(next.at_s - strike.at_s)
    }
}

/// The fact that says that a job is done, where the job's own subject tells it.
fn result_of(subject: &str) -> Option<String> {
    let words: Vec<&str> = subject.split('.').collect();
    match words[..] {
        [_, run, "order", "generate", _, cycle, job, _] => {
            Some(format!("flotilla.{run}.samples.{cycle}.{job}"))
        }
        [_, run, "samples", cycle, job] => Some(format!("flotilla.{run}.verdicts.{cycle}.{job}")),
        _ => None,
    }
}

fn summary(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let rounded = |value: &f64| (value * 1000.0).round() / 1000.0;
    json!({
        "count": values.len(),
        "median": values.get(values.len() / 2).map(rounded),
        "max": values.last().map(rounded),
    })
}
