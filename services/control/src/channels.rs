//! Channels: names that point to a model, such as `stable`. Each move is a fact, so that the history
//! of a channel and the reasons for it are kept.

use std::collections::BTreeMap;

use bus::{KEEP_DAYS_MAX, PresenceError, PublishError, PublishOutcome, ReadError};
use comparison::{DEFAULT_ALPHA, Decision};
use cycle::{
    ChannelSet, OutdatedMove, can_serve, move_to_base, move_to_checkpoint, move_to_model,
    promotion_move, require_move, unchanged_move,
};
use spec::UploadSpec;
use wire::{Fact, FactBody, FactKey, IdError, Pool, Record, RunId, Subject, v1};

use crate::{
    BaseError, CheckpointError, CompareError, FleetControl, RunError, SpecFiles, TransferCallback,
    to_timestamp,
};

/// The facts that say which channels there are and which runs move them, as subject patterns.
pub(crate) const CHANNEL_FACTS: [&str; 3] =
    ["flotilla.*.spec", "flotilla.*.channel.*", "flotilla.*.done"];

/// Attempts while other writers take the same number.
const MOVE_ATTEMPTS_MAX: u32 = 16;

/// A failure to read or move a channel.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    #[error(transparent)]
    Name(#[from] IdError),
    #[error("{0}: a channel's name must not end with a number, as the names of runs do (R115)")]
    RunName(String),
    #[error("there is no channel {0}; `flotilla channel list` lists all (R118)")]
    Unknown(RunId),
    #[error("channel {0} is new: name a checkpoint or a base (R118)")]
    NoModel(RunId),
    #[error("write either a checkpoint or a base, not both (R118)")]
    TwoModels,
    #[error("channel {0} has named no other model before (R118)")]
    NothingBefore(RunId),
    #[error("{new} is not shown to be better than {old}, which {channel} names: {why} (R119)")]
    NotBetter { channel: RunId, old: String, new: String, why: String },
    #[error("{0} names a base of no run, with which no checkpoint can be compared (R119)")]
    NotComparable(RunId),
    #[error("requests are kept for at most {KEEP_DAYS_MAX} days, not {0} (A101)")]
    KeepDays(u32),
    #[error("too many concurrent moves of {0}; try again (R105)")]
    Busy(RunId),
    #[error("channel {0} was moved meanwhile; look at its last move, and try again (R105)")]
    Moved(RunId),
    #[error("base {name:?}")]
    Base {
        name: String,
        #[source]
        source: Box<BaseError>,
    },
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("write to the log")]
    Publish(#[from] PublishError),
    #[error(transparent)]
    Presence(#[from] PresenceError),
}

/// Parses the name of a channel: an identifier that cannot be that of a run.
///
/// # Errors
/// The name is no identifier, or ends with `-` and a number.
pub fn parse_channel_name(name: &str) -> Result<RunId, ChannelError> {
    let channel = RunId::new(name)?;
    let number = name.rsplit_once('-').map(|(_, number)| number);
    if number.is_some_and(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err(ChannelError::RunName(name.to_owned()));
    }
    Ok(channel)
}

impl FleetControl {
    /// Returns the last move of every channel, by name, with the agents that serve it. Leaves out
    /// those that are forgotten.
    pub async fn list_channels(&self) -> Result<Vec<v1::Channel>, ChannelError> {
        let moves = self.read_all_moves().await?;
        let (agents, now_s) = (self.list_agents().await?, wire::clock::unix_seconds());
        let last = moves.into_values().filter_map(|mut moves| moves.pop());
        let mut channels: Vec<v1::Channel> = last.filter(names_model).collect();
        for channel in &mut channels {
            channel.agents = serving_agents(&agents, channel, now_s);
        }
        Ok(channels)
    }

    /// Returns all moves of a channel, oldest first, the last with the agents that serve it, and what
    /// a roll-back returns to; fails if there are no moves.
    pub async fn describe_channel_history(
        &self,
        channel: &RunId,
    ) -> Result<v1::ChannelHistory, ChannelError> {
        let mut moves = self.list_channel_moves(channel).await?;
        let roll_back_to = roll_back_target(&moves).map_or(0, |target| target.number);
        let agents = self.list_agents().await?;
        if let Some(last) = moves.last_mut() {
            last.agents = serving_agents(&agents, last, wire::clock::unix_seconds());
        }
        Ok(v1::ChannelHistory { moves, roll_back_to })
    }

    /// Returns all moves of a channel, oldest first, without agents; fails if there are none.
    pub async fn list_channel_moves(
        &self,
        channel: &RunId,
    ) -> Result<Vec<v1::Channel>, ChannelError> {
        let moves = self.read_moves(channel).await?;
        if moves.is_empty() { Err(ChannelError::Unknown(channel.clone())) } else { Ok(moves) }
    }

    /// Returns the last move of a channel; fails if there is none, or the channel is forgotten.
    pub(crate) async fn find_channel_model(
        &self,
        channel: &str,
    ) -> Result<v1::ChannelMove, ChannelError> {
        let channel = parse_channel_name(channel)?;
        let last = self.list_channel_moves(&channel).await?.pop().filter(names_model);
        last.and_then(|it| it.r#move).ok_or(ChannelError::Unknown(channel))
    }

    /// Returns the moves of all channels, oldest first.
    pub(crate) async fn read_all_moves(
        &self,
    ) -> Result<BTreeMap<RunId, Vec<v1::Channel>>, ReadError> {
        let records = self.read_records(vec!["flotilla.*.channel.*".to_owned()]).await?;
        let mut channels: BTreeMap<RunId, Vec<&Record>> = BTreeMap::new();
        for record in &records {
            channels.entry(record.fact.subject.run.clone()).or_default().push(record);
        }
        let moves = |(channel, records)| (channel, moves_from_records(records));
        Ok(channels.into_iter().map(moves).collect())
    }

    /// Returns the channels and the runs that move them.
    pub(crate) async fn read_channel_set(&self) -> Result<ChannelSet, ReadError> {
        let mut channels = ChannelSet::default();
        let records = self.read_records(CHANNEL_FACTS.map(str::to_owned).to_vec()).await?;
        records.iter().for_each(|record| channels.fold_record(record));
        Ok(channels)
    }

    async fn read_moves(&self, channel: &RunId) -> Result<Vec<v1::Channel>, ChannelError> {
        let records = self.read_records(vec![format!("flotilla.{channel}.channel.*")]).await?;
        Ok(moves_from_records(&records))
    }

    /// Moves a channel as requested; what the request leaves out stays as it is. `user` is the
    /// caller, if this process writes for one. `files` are where `base` names a local model.
    ///
    /// # Errors
    /// The model does not exist, or is not shown to be better although that is required.
    pub async fn move_channel(
        &self,
        request: v1::MoveChannelRequest,
        user: String,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::Channel, ChannelError> {
        let channel = &parse_channel_name(&request.channel)?;
        if request.forget {
            return self.forget_channel(channel, &request.reason, &user).await;
        }
        let model = match (&request.checkpoint, request.base.as_str()) {
            (Some(_), base) if !base.is_empty() => return Err(ChannelError::TwoModels),
            (Some(reference), _) => Some(self.find_checkpoint_model(reference).await?),
            (None, "") => None,
            (None, name) => Some(self.find_base_model(name, files, watch).await?),
        };
        let moved = self.write_move(channel, |last| {
            let (request, user, model) = (request.clone(), user.clone(), model.clone());
            async move {
                let before = last.and_then(|it| it.r#move).unwrap_or_default();
                let mut next = match model {
                    Some(model) => move_to_model(&before, model),
                    None if before.base.is_some() => unchanged_move(&before),
                    None => return Err(ChannelError::NoModel(channel.clone())),
                };
                match request.serving {
                    _ if request.stop_serving => next.serving = None,
                    Some(serving) => next.serving = Some(check_serving(serving)?),
                    None => {}
                }
                if let Some(days) = request.keep_days {
                    next.keeping = check_keeping(days)?;
                }
                next.roll_back = request.auto_roll_back.unwrap_or(next.roll_back);
                if request.if_better && before.base.is_some() {
                    // The request's reference, as a run's best was chosen by the same samples.
                    let candidate = request.checkpoint.clone();
                    let candidate = candidate.unwrap_or_else(|| checkpoint_ref(&next));
                    let alpha = DEFAULT_ALPHA;
                    next.evidence = Some(
                        self.require_better(channel, &before, &next, &candidate, alpha).await?,
                    );
                }
                Ok(v1::ChannelMove { reason: request.reason, user, ..next })
            }
        });
        self.require_stored(channel, moved.await?, user).await
    }

    /// Ends a channel. Its history stays, and a later move can name a model again.
    async fn forget_channel(
        &self,
        channel: &RunId,
        reason: &str,
        user: &str,
    ) -> Result<v1::Channel, ChannelError> {
        self.write_move(channel, |last| async move {
            last.filter(names_model).ok_or_else(|| ChannelError::Unknown(channel.clone()))?;
            let (reason, user) = (reason.to_owned(), user.to_owned());
            Ok(v1::ChannelMove { reason, user, ..Default::default() })
        })
        .await
    }

    /// Rolls a channel back if the model that it has just been moved to is removed at the same time.
    async fn require_stored(
        &self,
        channel: &RunId,
        moved: v1::Channel,
        user: String,
    ) -> Result<v1::Channel, ChannelError> {
        let Err(error) = self.require_trees(&moved.r#move).await else { return Ok(moved) };
        let reason = "the model is being removed from the store";
        // Without a model before, the channel keeps this one from a removal that follows.
        let _ = self.roll_back_channel(channel, Some(moved.number), reason, user).await;
        Err(CheckpointError::Get(error).into())
    }

    /// Points a channel to the best checkpoint of a run that has succeeded, if it is better than the
    /// channel's model. `number` is that of the channel's last move.
    ///
    /// # Errors
    /// The run does not exist, the channel has moved since, or the checkpoint is not shown to be
    /// better.
    pub(crate) async fn promote_run(
        &self,
        channel: &RunId,
        run: &RunId,
        alpha: f64,
        number: u64,
    ) -> Result<v1::Channel, ChannelError> {
        let candidate = v1::CheckpointRef { run: run.to_string(), ..Default::default() };
        let model = &self.find_checkpoint_model(&candidate).await?;
        let moved = self.write_move(channel, |last| {
            let candidate = candidate.clone();
            async move {
                let before = require_last(channel, last.as_ref(), number)?;
                let evidence =
                    self.require_better(channel, before, model, &candidate, alpha).await?;
                Ok(promotion_move(before, run, model.clone(), evidence))
            }
        });
        self.require_stored(channel, moved.await?, String::new()).await
    }

    /// Writes a move that changes only what is learned from feedback.
    pub(crate) async fn set_learning(
        &self,
        channel: &RunId,
        learning: Option<v1::channel_move::Learning>,
        user: String,
    ) -> Result<v1::Channel, ChannelError> {
        let reason = match learning {
            Some(_) => "learn from feedback",
            None => "learn no more from feedback",
        };
        self.write_move(channel, |last| {
            let (learning, user) = (learning.clone(), user.clone());
            async move {
                let before = last.filter(names_model).and_then(|it| it.r#move);
                let before = before.ok_or_else(|| ChannelError::Unknown(channel.clone()))?;
                let reason = reason.to_owned();
                Ok(v1::ChannelMove { learning, reason, user, ..unchanged_move(&before) })
            }
        })
        .await
    }

    /// Points a channel to the model before its present one. `number` is the last move that the
    /// caller knows, if a later one must not be rolled back.
    ///
    /// # Errors
    /// The channel does not exist, has named only one model, or has moved since.
    pub async fn roll_back_channel(
        &self,
        channel: &RunId,
        number: Option<u64>,
        reason: &str,
        user: String,
    ) -> Result<v1::Channel, ChannelError> {
        let said = v1::ChannelMove { reason: reason.to_owned(), user, ..Default::default() };
        self.roll_back(channel, number, said).await
    }

    /// Points a channel to the model before that of this move, as users rate it higher.
    pub(crate) async fn roll_back_worse(
        &self,
        channel: &RunId,
        number: u64,
        evidence: v1::channel_move::Evidence,
    ) -> Result<v1::Channel, ChannelError> {
        let (reason, evidence) = ("users rate it higher".to_owned(), Some(evidence));
        let said = v1::ChannelMove { reason, evidence, ..Default::default() };
        self.roll_back(channel, Some(number), said).await
    }

    /// Rolls back with the reason, user and evidence of `said`; from that move only, if `number` is
    /// given.
    async fn roll_back(
        &self,
        channel: &RunId,
        number: Option<u64>,
        said: v1::ChannelMove,
    ) -> Result<v1::Channel, ChannelError> {
        let moves = self.list_channel_moves(channel).await?;
        let number = number.or(moves.last().map(|last| last.number)).unwrap_or_default();
        require_last(channel, moves.last(), number)?;
        let before = roll_back_target(&moves).and_then(|it| it.r#move.clone());
        let before = before.ok_or_else(|| ChannelError::NothingBefore(channel.clone()))?;
        self.write_move(channel, |last| {
            let (before, said) = (before.clone(), said.clone());
            async move {
                // Another move came first: what is before it is another question.
                let next = move_to_model(require_last(channel, last.as_ref(), number)?, before);
                let v1::ChannelMove { reason, user, evidence, .. } = said;
                Ok(v1::ChannelMove { reason, user, evidence, ..next })
            }
        })
        .await
    }

    /// Writes the move that `next` makes of the last one, under the next free number.
    async fn write_move<F: Future<Output = Result<v1::ChannelMove, ChannelError>>>(
        &self,
        channel: &RunId,
        next: impl Fn(Option<v1::Channel>) -> F,
    ) -> Result<v1::Channel, ChannelError> {
        for _ in 0..MOVE_ATTEMPTS_MAX {
            let last = self.read_moves(channel).await?.pop();
            let number = last.as_ref().map_or(0, |it| it.number).saturating_add(1);
            let found = next(last).await?;
            let subject = Subject::new(channel, FactKey::Channel { number });
            let fact = Fact { subject, body: FactBody::Channel(found.clone()) };
            if let PublishOutcome::New { .. } = self.bus.publish_fact(&fact).await? {
                return Ok(v1::Channel {
                    channel: channel.to_string(),
                    number,
                    r#move: Some(found),
                    at: Some(wire::to_timestamp(wire::clock::unix_time())),
                    agents: Vec::new(),
                });
            }
        }
        Err(ChannelError::Busy(channel.clone()))
    }

    /// Returns a move to a checkpoint, or to the base of a run's cycle 0.
    pub(crate) async fn find_checkpoint_model(
        &self,
        reference: &v1::CheckpointRef,
    ) -> Result<v1::ChannelMove, CheckpointError> {
        let run = RunId::new(reference.run.as_str())
            .map_err(|_| CheckpointError::Reference(reference.run.clone()))?;
        let found = match self.get_checkpoint(reference).await {
            Err(CheckpointError::Unknown(_)) if reference.cycle == Some(0) => {
                move_to_base(run.as_str(), &self.get_run(&run).await?.spec)
            }
            found => move_to_checkpoint(&found?.checkpoint.unwrap_or_default()),
        };
        if found.base.is_none() {
            return Err(CheckpointError::Unknown(format!("{run}/0")));
        }
        Ok(found)
    }

    async fn find_base_model(
        &self,
        name: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::ChannelMove, ChannelError> {
        let found = self.resolve_model(name, UploadSpec::Auto, files, watch).await;
        let found = found.map_err(|source| {
            let (name, source) = (name.to_owned(), Box::new(source));
            ChannelError::Base { name, source }
        })?;
        Ok(v1::ChannelMove { base: found.tree, ..Default::default() })
    }

    async fn require_better(
        &self,
        channel: &RunId,
        before: &v1::ChannelMove,
        next: &v1::ChannelMove,
        candidate: &v1::CheckpointRef,
        alpha: f64,
    ) -> Result<v1::channel_move::Evidence, ChannelError> {
        if next.run.is_empty() {
            return Err(ChannelError::NotComparable(channel.clone()));
        }
        let (a, found) = self.compare_with_channel(channel, before, next, candidate, alpha).await?;
        let comparison::Comparison { decision, p, difference, interval, at, .. } = found.test;
        // The prompts after the decision may say otherwise.
        if decision != Decision::B || found.b.pass_rate <= found.a.pass_rate {
            let points = difference * 100.0;
            return Err(ChannelError::NotBetter {
                channel: channel.clone(),
                old: format!("{}/{}", before.run, before.cycle),
                new: format!("{}/{}", next.run, next.cycle),
                why: format!("it scores {points:+.1} points on {at} pairs, p = {p:.3}"),
            });
        }
        Ok(v1::channel_move::Evidence {
            run: a.run,
            cycle: a.cycle.unwrap_or_default(),
            pairs: u32::try_from(at).unwrap_or(u32::MAX),
            p,
            difference,
            interval: interval.to_vec(),
            live: false,
        })
    }
}

/// Returns the last move of a channel if it has this number and names a model.
fn require_last<'a>(
    channel: &RunId,
    last: Option<&'a v1::Channel>,
    number: u64,
) -> Result<&'a v1::ChannelMove, ChannelError> {
    let last = last.and_then(|last| Some((last.number, last.r#move.as_ref()?)));
    require_move(last, number).map_err(|outdated| match outdated {
        OutdatedMove::Moved => ChannelError::Moved(channel.clone()),
        OutdatedMove::Forgotten => ChannelError::Unknown(channel.clone()),
    })
}

fn checkpoint_ref(named: &v1::ChannelMove) -> v1::CheckpointRef {
    let (run, cycle) = (named.run.clone(), Some(named.cycle));
    v1::CheckpointRef { run, cycle, ..Default::default() }
}

fn check_keeping(days: u32) -> Result<Option<v1::channel_move::Keeping>, ChannelError> {
    match days {
        0 => Ok(None),
        1..=KEEP_DAYS_MAX => Ok(Some(v1::channel_move::Keeping { days })),
        _ => Err(ChannelError::KeepDays(days)),
    }
}

/// Returns true unless the channel was forgotten.
fn names_model(channel: &v1::Channel) -> bool {
    channel.r#move.as_ref().is_some_and(v1::ChannelMove::names_model)
}

/// Returns the last move to another model than the present one, given all moves in order, as
/// [`cycle::roll_back_target`] does.
pub(crate) fn roll_back_target(moves: &[v1::Channel]) -> Option<&v1::Channel> {
    let newest_first = moves.iter().rev().filter_map(|it| Some((it.number, it.r#move.as_ref()?)));
    let number = cycle::roll_back_target(newest_first)?;
    moves.iter().find(|it| it.number == number)
}

/// Returns a serving by all agents of a pool, or by some.
///
/// # Errors
/// The pool is no name.
pub fn build_serving(pool: &str, replicas: u32) -> Result<v1::channel_move::Serving, ChannelError> {
    Ok(v1::channel_move::Serving { pool: Pool::new(pool)?.to_string(), replicas })
}

/// An empty pool is the default one.
fn check_serving(
    serving: v1::channel_move::Serving,
) -> Result<v1::channel_move::Serving, ChannelError> {
    let pool = if serving.pool.is_empty() { "default" } else { &serving.pool };
    build_serving(pool, serving.replicas)
}

/// Returns the moves of one channel in their order. Of several with one number the first counts.
fn moves_from_records<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<v1::Channel> {
    let mut moves = BTreeMap::new();
    for found in records.into_iter().filter_map(channel_from_record) {
        moves.entry(found.number).or_insert(found);
    }
    moves.into_values().collect()
}

fn channel_from_record(record: &Record) -> Option<v1::Channel> {
    let (FactKey::Channel { number }, FactBody::Channel(found)) =
        (&record.fact.subject.key, &record.fact.body)
    else {
        return None;
    };
    // As for a control fact: the gateway writes in the coordinator's name, and names its caller.
    let written = v1::Control { user: found.user.clone(), ..Default::default() };
    let user = wire::control_user(&written, record.author.as_ref());
    let user = user.map(|user| user.to_string()).unwrap_or_default();
    Some(v1::Channel {
        channel: record.fact.subject.run.to_string(),
        number: *number,
        r#move: Some(v1::ChannelMove { user, ..found.clone() }),
        at: Some(to_timestamp(record.time_ms)),
        agents: Vec::new(),
    })
}

/// Returns the agents whose status says that they answer requests to this move's model. `now_s` is in
/// seconds since 1970.
fn serving_agents(agents: &[v1::AgentStatus], channel: &v1::Channel, now_s: u64) -> Vec<String> {
    let is_this =
        |it: &v1::ServedChannel| it.channel == channel.channel && it.number == channel.number;
    let serves =
        |agent: &&v1::AgentStatus| can_serve(agent, now_s) && agent.served.iter().any(is_this);
    agents.iter().filter(serves).map(|agent| agent.agent.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forgotten_channel_has_no_model_to_return_to_and_none_returns_to_it() {
        let moves = |models: &[&str]| -> Vec<v1::Channel> {
            let tree = |name: &str| v1::Tree { manifest: name.into(), ..Default::default() };
            let base = |name: &str| Some(name).filter(|name| !name.is_empty()).map(tree);
            let moves = (1..).zip(models).map(|(number, name)| v1::Channel {
                number,
                r#move: Some(v1::ChannelMove { base: base(name), ..Default::default() }),
                ..Default::default()
            });
            moves.collect()
        };
        let target = |models: &[&str]| roll_back_target(&moves(models)).map(|it| it.number);
        assert_eq!(target(&["a", "b"]), Some(1));
        assert_eq!(target(&["a", "b", ""]), None);
        assert_eq!(target(&["a", "", "b"]), None);
        assert_eq!(target(&["a", "", "a", "b", "b"]), Some(3));
        assert_eq!(target(&["", "b"]), None);
    }

    #[test]
    fn an_agent_that_is_silent_or_lost_the_role_serves_nothing() {
        let served =
            v1::ServedChannel { channel: "stable".into(), number: 2, ..Default::default() };
        let channel = v1::Channel { channel: "stable".into(), number: 2, ..Default::default() };
        let mut agent = v1::AgentStatus {
            agent: "server-1".into(),
            roles: vec!["server".into()],
            served: vec![served],
            seen_at: Some(wire::Timestamp { seconds: 1000, nanos: 0 }),
            ..Default::default()
        };
        agent.set_state(v1::agent_status::State::Ready);
        let serving = |agent: &v1::AgentStatus, channel: &v1::Channel, now_s| {
            serving_agents(std::slice::from_ref(agent), channel, now_s)
        };
        // Its clock may be behind.
        assert_eq!(serving(&agent, &channel, 1120), ["server-1"]);
        assert!(serving(&agent, &v1::Channel { number: 3, ..channel.clone() }, 1120).is_empty());
        assert!(serving(&agent, &channel, 1121).is_empty());
        agent.roles.clear();
        assert!(serving(&agent, &channel, 1120).is_empty());
    }

    #[test]
    fn a_channel_is_not_named_as_a_run() {
        assert!(parse_channel_name("stable").is_ok());
        assert!(parse_channel_name("qwen-7b").is_ok());
        assert!(parse_channel_name("v2").is_ok());
        for name in ["raft-1", "Stable", "", "a b"] {
            assert!(parse_channel_name(name).is_err(), "{name:?} was accepted");
        }
    }
}
