//! The queue of runs: which of the runs that wait works now.
//!
//! Each pool has a queue, of which at most one run works. Runs outside of their daily window wait.
//! Of the others, the first by this order works:
//!
//! 1. the higher priority, which also pauses a working run of a lower one;
//! 2. the run that works already;
//! 3. fair shares: the run of the user whose turn was longest ago;
//! 4. the earlier submission.
//!
//! The queue's decisions are `control` facts. Their numbers are write-once, so a decision that was
//! made before another control was known is refused. The core knows no clock: the minute of the
//! coordinator's local day is an input.

use std::{cmp::Reverse, collections::BTreeMap};

use wire::{FactBody, FactKey, Record, RunId, control_user, v1};

use crate::{
    command::{WriteCommand, write_command},
    state::{QueueStatus, Run, clock_text, queue_window},
};

/// The last turn of each user in each queue.
#[derive(Debug, Clone, Default)]
pub struct QueueTurns {
    /// Sequences of the queue's resumes, by pool and user.
    turns: BTreeMap<(String, String), u64>,
}

impl QueueTurns {
    /// Records a fact that was folded into its run: a resume by the queue is a turn of its user.
    pub fn record_turn(&mut self, run: &Run, record: &Record) {
        if let FactBody::Control(control) = &record.fact.body
            && control.queue
            && control.action() == v1::control::Action::Resume
        {
            self.turns.insert(turn_key(run), record.sequence);
        }
    }

    fn last_turn(&self, run: &Run) -> u64 {
        self.turns.get(&turn_key(run)).copied().unwrap_or(0)
    }
}

fn turn_key(run: &Run) -> (String, String) {
    (run.spec.pool.clone(), run_user(run))
}

/// Returns the user who submitted a run; empty if unknown.
pub fn run_user(run: &Run) -> String {
    let named = v1::Control { user: run.spec.user.clone(), ..v1::Control::default() };
    control_user(&named, run.author.as_ref()).map_or_else(String::new, |user| user.to_string())
}

/// The place of a run in the queue of its pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePlace {
    pub run: RunId,
    /// Counted from 1.
    pub place: u32,
    /// Words such as `waits in the queue behind raft-2`; empty for the run that works.
    pub message: String,
}

/// Returns the controls that the queues need now, the pauses first.
pub(crate) fn queue_commands<'a>(
    runs: impl IntoIterator<Item = &'a Run>,
    turns: &QueueTurns,
    minute: u32,
) -> Vec<WriteCommand> {
    let (mut pauses, mut resumes) = (Vec::new(), Vec::new());
    for queued in runs_by_pool(runs).into_values() {
        let next = first_run(&queued, turns, minute);
        let is_next = |run: &Run| next.is_some_and(|next| next.id == run.id);
        for run in &queued {
            if run.queue == QueueStatus::Active && !is_next(run) {
                let reason = match (next, queue_window(&run.spec)) {
                    (_, Some((_, until))) if !is_open(run, minute) => {
                        format!("its window ended at {}", clock_text(until))
                    }
                    (Some(next), _) => format!("{} goes first in the queue", next.id),
                    (None, _) => String::new(),
                };
                pauses.push(queue_control(run, v1::control::Action::Pause, reason));
            }
        }
        if let Some(next) = next.filter(|next| next.queue.is_waiting()) {
            let reason = "its turn in the queue".to_owned();
            resumes.push(queue_control(next, v1::control::Action::Resume, reason));
        }
    }
    pauses.extend(resumes);
    pauses
}

/// Returns the places of all runs that wait or work in a queue, in the order of their turns as far
/// as it can be foreseen. Those outside of their windows come last.
pub fn queue_places<'a>(
    runs: impl IntoIterator<Item = &'a Run>,
    turns: &QueueTurns,
    minute: u32,
) -> Vec<QueuePlace> {
    let mut places = Vec::new();
    for mut queued in runs_by_pool(runs).into_values() {
        // A turn that is foreseen is later than all in the log.
        let (mut turns, mut ahead, mut place) = (turns.clone(), None::<RunId>, 0);
        while let Some(next) = first_run(&queued, &turns, minute) {
            place += 1;
            turns.turns.insert(turn_key(next), u64::MAX - u64::from(u32::MAX) + u64::from(place));
            let message = match &ahead {
                _ if next.queue == QueueStatus::Active => String::new(),
                None => "is next in the queue".to_owned(),
                Some(ahead) => format!("waits in the queue behind {ahead}"),
            };
            places.push(QueuePlace { run: next.id.clone(), place, message });
            ahead = Some(next.id.clone());
            queued.retain(|run| run.id != next.id);
        }
        queued.sort_by_key(|run| (Reverse(run_priority(run)), run.spec_sequence));
        for run in queued {
            place += 1;
            let from = queue_window(&run.spec).map_or(0, |(from, _)| from);
            let message = format!("waits until {}", clock_text(from));
            places.push(QueuePlace { run: run.id.clone(), place, message });
        }
    }
    places
}

fn runs_by_pool<'a>(runs: impl IntoIterator<Item = &'a Run>) -> BTreeMap<&'a str, Vec<&'a Run>> {
    let mut pools: BTreeMap<&str, Vec<&Run>> = BTreeMap::new();
    for run in runs {
        if run.is_queued() {
            pools.entry(run.spec.pool.as_str()).or_default().push(run);
        }
    }
    pools
}

/// Returns the run that has the turn; `None` if all are outside of their windows.
fn first_run<'a>(queued: &[&'a Run], turns: &QueueTurns, minute: u32) -> Option<&'a Run> {
    let open = queued.iter().filter(|run| is_open(run, minute));
    let rank = |run: &&&Run| {
        let works = run.queue == QueueStatus::Active;
        (Reverse(run_priority(run)), Reverse(works), turns.last_turn(run), run.spec_sequence)
    };
    open.min_by_key(rank).copied()
}

fn run_priority(run: &Run) -> i32 {
    run.spec.queue.as_ref().map_or(0, |queue| queue.priority)
}

fn is_open(run: &Run, minute: u32) -> bool {
    let Some((from, until)) = queue_window(&run.spec) else { return true };
    if from < until { (from..until).contains(&minute) } else { minute >= from || minute < until }
}

fn queue_control(run: &Run, action: v1::control::Action, reason: String) -> WriteCommand {
    let place = FactKey::Control { number: run.last_control.saturating_add(1) };
    let control = v1::Control { action: action.into(), reason, user: String::new(), queue: true };
    write_command(run, place, FactBody::Control(control))
}

#[cfg(test)]
mod tests;
