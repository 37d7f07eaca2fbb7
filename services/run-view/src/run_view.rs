//! The view of one run while it proceeds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cycle::{Run, RunPhase};
use wire::{FactBody, FactKey, Record, v1};

use crate::{
    eta,
    sample_counts::{SampleCounts, add_saturating},
    timeline::Timeline,
};

use v1::board::{Cycle, Eta, Figure, Head, Point, Selected, Steered, Trouble};

/// Failures and quarantines; the newest stay.
const TROUBLES_MAX: usize = 50;
/// Control actions (pause, resume, cancel); the newest stay.
const CONTROLS_MAX: usize = 50;

/// Cycles of one message, a few hundred kilobytes.
const CYCLES_PER_MESSAGE: usize = 16;

/// A projection of one run, built from its facts in log order.
///
/// It contains the run's state (from the crate `cycle`) and, for each cycle, the sample counts,
/// rewards, timeline and checkpoints. Every fact increases the revision; readers request changes by
/// revision.
///
/// ```text
/// let mut view = RunView::start(&spec_record)?;
/// view.apply_fact(record);
/// let (message, reached) = view.changes_since(revision)?;
/// ```
///
/// For an archived cycle the log no longer has the samples: load the archives that
/// [`RunView::missing_archives`] returns, and pass their records to [`RunView::restore_cycle`].
#[derive(Debug, Clone)]
pub struct RunView {
    run: Run,
    cycles: BTreeMap<u32, CycleDetails>,
    steered: VecDeque<Steered>,
    troubles: VecDeque<Trouble>,
    trouble_count: u32,
    clock: RunClock,
    phase_start: PhaseStart,
    /// End of each completed cycle, in active seconds of the clock.
    cycle_ends: Vec<f64>,
    revision: u64,
}

/// Data about a cycle that the view needs in addition to the run's state.
#[derive(Debug, Clone, Default)]
struct CycleDetails {
    revision: u64,
    train: SampleCounts,
    heldout: SampleCounts,
    timeline: Timeline,
    /// Publication time of each checkpoint by step, in seconds since the run was submitted.
    published: BTreeMap<u32, f64>,
}

/// A clock that stops while the run is paused.
#[derive(Debug, Clone, Default)]
struct RunClock {
    /// Seconds from the submission of the run to the last fact.
    at_s: f64,
    paused_s: f64,
    paused: bool,
}

/// Begin of the present phase in active seconds, and the number of results since.
#[derive(Debug, Clone, Copy)]
struct PhaseStart {
    phase: (u32, RunPhase),
    at: f64,
    results: u32,
}

/// `done` of `total` units.
#[derive(Debug, Clone, Copy, Default)]
struct PhaseProgress {
    done: u64,
    total: u64,
    unit: &'static str,
}

impl RunView {
    /// Creates the view of the run that a `spec` fact defines. Returns `None` for any other fact.
    pub fn start(record: &Record) -> Option<Self> {
        let run = Run::start(record)?;
        let phase = (run.active_cycle(), run.current_phase());
        let phase = PhaseStart { phase, at: 0.0, results: 0 };
        // Of the cycles of a forked run, the view has the results alone.
        let forked = run.cycles.range(..run.first_cycle);
        let cycles = forked.map(|(number, cycle)| (*number, CycleDetails::from_results(cycle)));
        let cycles = cycles.collect();
        Some(Self {
            run,
            cycles,
            steered: VecDeque::new(),
            troubles: VecDeque::new(),
            trouble_count: 0,
            clock: RunClock::default(),
            phase_start: phase,
            cycle_ends: Vec::new(),
            revision: 1,
        })
    }

    /// Returns the number of changes applied so far.
    pub fn current_revision(&self) -> u64 {
        self.revision
    }

    /// Returns true if the run is done.
    pub fn has_ended(&self) -> bool {
        self.run.done.is_some()
    }

    /// Applies one fact of this run. Ignores facts that were applied before (at or below the last
    /// sequence).
    pub fn apply_fact(&mut self, mut record: Record) {
        if record.sequence <= self.run.sequence {
            return;
        }
        let at_s = self.seconds_since_submission(record.time_ms);
        self.clock.advance_to(at_s, self.run.is_halted());
        drop_texts(&mut record.fact.body);
        self.revision += 1;
        self.run.fold_record(&record);
        self.update_details(&record, at_s);
        let phase = (self.run.active_cycle(), self.run.current_phase());
        if self.phase_start.phase != phase {
            self.phase_start = PhaseStart { phase, at: self.clock.active_seconds(), results: 0 };
        } else if is_result(&record.fact.body) {
            self.phase_start.results = self.phase_start.results.saturating_add(1);
        }
    }

    /// `time_ms` is in milliseconds since 1970.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds far below 2^52")]
    fn seconds_since_submission(&self, time_ms: u64) -> f64 {
        time_ms.saturating_sub(self.run.submitted_ms) as f64 / 1000.0
    }

    /// Updates the details after the run's state includes the fact.
    fn update_details(&mut self, record: &Record, at_s: f64) {
        let place = &record.fact.subject.key;
        if let Some(number) = place.cycle_number() {
            self.cycles.entry(number).or_default().revision = self.revision;
        }
        match (place, &record.fact.body) {
            (_, FactBody::Control(control)) => {
                let action = control.action().as_str_name().to_lowercase();
                let user = wire::control_user(control, record.author.as_ref());
                let by = user.map_or_else(String::new, |user| user.to_string());
                let steered = Steered { at_s, action, reason: control.reason.clone(), by };
                push_bounded(&mut self.steered, steered, CONTROLS_MAX);
            }
            (FactKey::Plan { cycle }, FactBody::Plan(_)) => self.recount_samples(*cycle),
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.timeline.add_work(&samples.agent, "generate", samples.wall_s, at_s);
                if let Some(job) = self.run.cycles.get(cycle).and_then(|it| it.jobs.get(job)) {
                    shown.counts_for(job.purpose).count_drawn(job);
                }
            }
            (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.timeline.add_work(&verdicts.agent, "verify", verdicts.wall_s, at_s);
                if let Some(job) = self.run.cycles.get(cycle).and_then(|it| it.jobs.get(job)) {
                    shown.counts_for(job.purpose).count_judged(job);
                }
            }
            (FactKey::Scores { cycle, .. }, FactBody::Scores(scores)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.timeline.add_work(&scores.agent, "score", scores.wall_s, at_s);
            }
            (place, FactBody::Checkpoint(checkpoint)) => {
                let Some((cycle, step)) = place.checkpoint_position() else { return };
                let shown = self.cycles.entry(cycle).or_default();
                shown.published.insert(step, at_s);
                // Merged weights were trained by others, before.
                let merged = self.run.cycles.get(&cycle).map(|cycle| &cycle.split_training);
                if merged.is_none_or(|training| training.outer_steps.is_empty()) {
                    let wall_s = checkpoint.wall_s;
                    shown.timeline.add_work(&checkpoint.agent, "train", wall_s, at_s);
                }
            }
            (FactKey::Delta { cycle, outer, .. }, FactBody::Delta(delta)) => {
                let timeline = &mut self.cycles.entry(*cycle).or_default().timeline;
                timeline.add_part(&delta.agent, "train", Some(*outer), (delta.wall_s, at_s));
            }
            (FactKey::Merge { cycle, outer }, FactBody::Merge(merge)) => {
                let timeline = &mut self.cycles.entry(*cycle).or_default().timeline;
                timeline.add_part(&merge.agent, "merge", Some(*outer), (merge.wall_s, at_s));
            }
            (FactKey::Eval { cycle, .. }, FactBody::Eval(eval)) => {
                let wall_s = eval.process.map_or(0.0, |process| process.wall_s);
                let shown = self.cycles.entry(*cycle).or_default();
                shown.timeline.add_work(&eval.agent, "evaluate", wall_s, at_s);
            }
            (_, FactBody::CycleDone(_)) => self.cycle_ends.push(self.clock.active_seconds()),
            (_, FactBody::Failure(failure)) => self.add_trouble(Trouble {
                at_s,
                what: format!("{} {}", failure.kind, failure.id),
                agent: failure.agent.clone(),
                message: failure.message.clone(),
                r#final: failure.r#final,
            }),
            (_, FactBody::Quarantine(quarantine)) => self.add_quarantine(quarantine, at_s),
            _ => {}
        }
    }

    /// Counts the samples of the affected cycles again.
    fn add_quarantine(&mut self, quarantine: &v1::Quarantine, at_s: f64) {
        for job in &quarantine.jobs {
            self.recount_samples(job.cycle);
        }
        let message = format!(
            "{} jobs are redrawn: it sampled with other weights than were ordered",
            quarantine.jobs.len()
        );
        let (what, agent) = ("quarantine".to_owned(), quarantine.agent.clone());
        self.add_trouble(Trouble { at_s, what, agent, message, r#final: true });
    }

    fn add_trouble(&mut self, trouble: Trouble) {
        self.trouble_count = self.trouble_count.saturating_add(1);
        push_bounded(&mut self.troubles, trouble, TROUBLES_MAX);
    }

    /// Counts again after jobs were added or made void.
    fn recount_samples(&mut self, number: u32) {
        let Some(cycle) = self.run.cycles.get(&number) else { return };
        let shown = self.cycles.entry(number).or_default();
        shown.revision = self.revision;
        let of = |purpose| SampleCounts::from_jobs(cycle.jobs_for(purpose).map(|(_, job)| job));
        shown.train = of(v1::Purpose::Train);
        shown.heldout = of(v1::Purpose::Heldout);
    }

    /// Returns the archives of cycles whose samples the log has purged before this view saw them,
    /// the newest cycle first. Pass their records to [`RunView::restore_cycle`].
    pub fn missing_archives(&self) -> Vec<v1::Archived> {
        let unseen = |number: &u32| {
            let shown = self.cycles.get(number);
            let [train, heldout] =
                [|it: &CycleDetails| it.train.samples, |it: &CycleDetails| it.heldout.samples]
                    .map(|of| shown.map(of).unwrap_or_default());
            train.drawn + heldout.drawn == 0 && train.planned + heldout.planned > 0
        };
        let forgotten = self.run.cycles.iter().rev().filter(|(number, _)| unseen(number));
        forgotten.filter_map(|(_, cycle)| cycle.archived.clone()).collect()
    }

    /// Adds the samples and verdicts of an archived cycle, except those of quarantined jobs.
    pub fn restore_cycle(&mut self, number: u32, records: &[Record]) {
        self.revision += 1;
        let void =
            self.run.quarantines.iter().flat_map(|quarantine| quarantine.jobs_in_cycle(number));
        let void: BTreeSet<String> = void.map(str::to_owned).collect();
        for record in records {
            if let FactKey::Samples { job, .. }
            | FactKey::Verdicts { job, .. }
            | FactKey::Scores { job, .. } = &record.fact.subject.key
                && void.contains(job.as_str())
            {
                continue;
            }
            let at_s = self.seconds_since_submission(record.time_ms);
            let shown = self.cycles.entry(number).or_default();
            shown.revision = self.revision;
            match &record.fact.body {
                FactBody::Samples(samples) => {
                    let drawn = u32::try_from(samples.samples.len()).unwrap_or(u32::MAX);
                    let tally = shown.counts_for(samples.purpose());
                    add_saturating(&mut tally.samples.drawn, drawn);
                    shown.timeline.add_work(&samples.agent, "generate", samples.wall_s, at_s);
                }
                FactBody::Verdicts(verdicts) => {
                    shown.counts_for(verdicts.purpose()).add_verdicts(verdicts);
                    shown.timeline.add_work(&verdicts.agent, "verify", verdicts.wall_s, at_s);
                }
                FactBody::Scores(scores) => {
                    shown.timeline.add_work(&scores.agent, "score", scores.wall_s, at_s);
                }
                _ => {}
            }
        }
    }

    /// Returns what changed after a revision (everything after 0), and the revision that this
    /// reaches, which is not the last one if there is too much for one message. Returns `None`
    /// without changes.
    pub fn changes_since(&self, revision: u64) -> Option<(v1::Board, u64)> {
        if self.revision <= revision {
            return None;
        }
        let changed = self.cycles.iter().filter(|(_, shown)| shown.revision > revision);
        let mut changed: Vec<(u32, &CycleDetails)> =
            changed.map(|(number, it)| (*number, it)).collect();
        // Cycles of one revision stay together.
        changed.sort_by_key(|(_, shown)| shown.revision);
        let reached = match changed.get(CYCLES_PER_MESSAGE) {
            Some((_, next)) if next.revision > changed[0].1.revision => next.revision - 1,
            _ => self.revision,
        };
        changed.retain(|(_, shown)| shown.revision <= reached);
        let board = v1::Board {
            cursor: self.run.sequence,
            head: Some(self.run_head()),
            cycles: changed
                .into_iter()
                .map(|(number, shown)| self.cycle_message(number, shown))
                .collect(),
            spec: (revision == 0).then(|| self.run.spec.clone()),
        };
        Some((board, reached))
    }

    /// Returns the state and progress of the run.
    pub(crate) fn run_head(&self) -> Head {
        let run = &self.run;
        let progress = self.phase_progress();
        let (phase_ends, run_ends) = self.estimate_ends(progress);
        Head {
            run: run.id.to_string(),
            name: run.spec.name.clone(),
            kind: run.kind_name().into(),
            state: run.current_state().as_str_name().to_lowercase(),
            message: run.state_reason(),
            submitted_at: Some(wire::to_timestamp(std::time::Duration::from_millis(
                run.submitted_ms,
            ))),
            ended_s: run.ended_ms.map(|ended| self.seconds_since_submission(ended)),
            cycle: run.active_cycle(),
            cycles: run.last_cycle(),
            phase: run.current_phase().as_str().into(),
            done: progress.done,
            total: progress.total,
            unit: progress.unit.into(),
            phase_ends,
            run_ends,
            troubles: self.troubles.iter().cloned().collect(),
            troubles_in_all: self.trouble_count,
            steered: self.steered.iter().cloned().collect(),
            at_s: self.clock.at_s,
        }
    }

    /// Returns samples, steps or evals.
    fn phase_progress(&self) -> PhaseProgress {
        let number = self.run.active_cycle();
        let (Some(cycle), Some(shown)) = (self.run.cycles.get(&number), self.cycles.get(&number))
        else {
            return PhaseProgress::default();
        };
        let samples = |done: u32, total: u32| PhaseProgress {
            done: done.into(),
            total: total.max(done).into(),
            unit: "samples",
        };
        match self.run.current_phase() {
            RunPhase::Generate => samples(shown.train.samples.drawn, shown.train.samples.planned),
            RunPhase::Verify => {
                // Judged, and scored by the teacher.
                let jobs = cycle.jobs_for(v1::Purpose::Train).map(|(_, job)| job);
                let settled = jobs.filter(|job| job.is_settled());
                let done = settled.map(cycle::PlannedJob::planned_samples);
                samples(done.fold(0, u32::saturating_add), shown.train.samples.drawn)
            }
            RunPhase::Train => {
                let last = cycle.checkpoints.values().next_back();
                let (done, total) = last.map_or((0, 0), |last| (last.step, last.steps));
                PhaseProgress { done: done.into(), total: total.into(), unit: "steps" }
            }
            RunPhase::Evaluate => {
                let v1::board::Samples { planned, judged, errors, .. } = shown.heldout.samples;
                let measured = judged.saturating_add(errors);
                if planned > measured {
                    return samples(measured, planned);
                }
                let suites = self.run.spec.suites.len();
                let total = (suites * cycle.checkpoints.len()) as u64;
                PhaseProgress { done: cycle.evals.len() as u64, total, unit: "evals" }
            }
            RunPhase::Plan | RunPhase::Select | RunPhase::Done => PhaseProgress::default(),
        }
    }

    /// Estimates the ends of the phase and the run; not for a run that is paused, queued, cancelled,
    /// done, or an adopted external training.
    fn estimate_ends(&self, progress: PhaseProgress) -> (Option<Eta>, Option<Eta>) {
        if self.run.is_halted() || self.run.cancelled || self.has_ended() || self.run.is_watched() {
            return (None, None);
        }
        let now = self.clock.active_seconds();
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let share = progress.done as f64 / progress.total.max(1) as f64;
        let phase =
            eta::estimate_phase_end(self.phase_start.at, now, share, self.phase_start.results);
        let done = self.cycle_ends.len();
        let all = (self.run.last_cycle() + 1).saturating_sub(self.run.first_cycle) as usize;
        let left = u32::try_from(all.saturating_sub(done)).unwrap_or(u32::MAX);
        let run = match self.run.raft_spec() {
            Some(_) => eta::estimate_run_end(&self.cycle_ends, left, now),
            // The training is nearly the whole run.
            None => phase,
        };
        let wall = |eta: Eta| self.clock.to_wall_time(eta);
        (phase.map(wall), run.map(wall))
    }

    fn cycle_message(&self, number: u32, shown: &CycleDetails) -> Cycle {
        let cycle = self.run.cycles.get(&number);
        let point = |checkpoint| to_point(checkpoint, shown);
        Cycle {
            cycle: number,
            train: Some(shown.train.samples),
            heldout: Some(shown.heldout.samples),
            rewards: shown.train.rewards.to_proto(),
            selected: cycle.and_then(|cycle| cycle.selected.as_ref()).map(to_selected),
            done: cycle.and_then(|cycle| cycle.done.clone()),
            spans: shown.timeline.to_spans(),
            checkpoints: cycle.map_or(vec![], |it| it.checkpoints.values().map(point).collect()),
            evals: cycle.map_or(vec![], |it| it.evals.values().map(to_figure).collect()),
        }
    }
}

impl CycleDetails {
    fn from_results(cycle: &cycle::Cycle) -> Self {
        let done = cycle.done.clone().unwrap_or_default();
        let train = SampleCounts::from_rates(done.sampled, [done.train.as_ref()]);
        let rates = done.suites.iter().map(|suite| suite.rate.as_ref());
        let rates = rates.chain([done.heldout.as_ref()]);
        let heldout = SampleCounts::from_rates(0, rates);
        Self { revision: 1, train, heldout, ..Self::default() }
    }

    fn counts_for(&mut self, purpose: v1::Purpose) -> &mut SampleCounts {
        match purpose {
            v1::Purpose::Heldout => &mut self.heldout,
            v1::Purpose::Train | v1::Purpose::Unspecified => &mut self.train,
        }
    }
}

impl RunClock {
    /// `paused` is the run's state since the previous call.
    fn advance_to(&mut self, at_s: f64, paused: bool) {
        let passed = (at_s - self.at_s).max(0.0);
        if paused {
            self.paused_s += passed;
        }
        (self.at_s, self.paused) = (self.at_s + passed, paused);
    }

    /// Returns the seconds since submission without pauses.
    fn active_seconds(&self) -> f64 {
        self.at_s - self.paused_s
    }

    /// Converts active seconds to seconds since submission.
    fn to_wall_time(&self, eta: Eta) -> Eta {
        let Eta { early_s, likely_s, late_s } = eta;
        let later = self.paused_s;
        Eta { early_s: early_s + later, likely_s: likely_s + later, late_s: late_s + later }
    }
}

/// Texts and tokens are most of a run's size, and the view does not show them.
fn drop_texts(body: &mut FactBody) {
    match body {
        FactBody::Samples(samples) => {
            for sample in &mut samples.samples {
                sample.text = String::new();
                sample.token_logprobs = Vec::new();
                sample.token_ids = Vec::new();
                sample.turns = Vec::new();
            }
        }
        FactBody::GenerateOrder(order) => {
            order.requests.iter_mut().for_each(|request| request.text = String::new());
        }
        FactBody::Verdicts(verdicts) => {
            verdicts.verdicts.iter_mut().for_each(|verdict| verdict.detail = String::new());
        }
        FactBody::Scores(scores) => scores.scores = Vec::new(),
        _ => {}
    }
}

fn is_result(body: &FactBody) -> bool {
    matches!(
        body,
        FactBody::Samples(_)
            | FactBody::Verdicts(_)
            | FactBody::Scores(_)
            | FactBody::Delta(_)
            | FactBody::Checkpoint(_)
            | FactBody::Eval(_)
    )
}

fn to_selected(selected: &v1::Selected) -> Selected {
    Selected {
        considered: selected.considered,
        kept: selected.kept,
        dropped: selected.dropped.clone(),
        min_reward: selected.min_reward,
        diversity: selected.diversity,
        entropy: selected.entropy,
    }
}

fn to_point(checkpoint: &v1::Checkpoint, shown: &CycleDetails) -> Point {
    let manifest =
        |tree: &Option<v1::Tree>| tree.as_ref().map_or(String::new(), |tree| tree.manifest.clone());
    Point {
        step: checkpoint.step,
        steps: checkpoint.steps,
        r#final: checkpoint.r#final,
        at_s: shown.published.get(&checkpoint.step).copied().unwrap_or_default(),
        loss: checkpoint.loss,
        learning_rate: checkpoint.learning_rate,
        grad_norm: checkpoint.grad_norm,
        weight_change: checkpoint.weight_change,
        tokens: checkpoint.tokens,
        agent: checkpoint.agent.clone(),
        engine: checkpoint.engine.clone(),
        manifest: manifest(&checkpoint.tree),
        parent: manifest(&checkpoint.parent),
        path: checkpoint.tree.as_ref().map_or(String::new(), |tree| tree.path.clone()),
        weighting: checkpoint.weighting.clone(),
    }
}

fn to_figure(eval: &v1::Eval) -> Figure {
    Figure {
        step: eval.step,
        suite: eval.suite.clone(),
        perplexity: eval.perplexity,
        stderr: eval.stderr,
        bits_per_byte: eval.bits_per_byte,
        agent: eval.agent.clone(),
        engine: eval.engine.clone(),
        stormed: eval.shootdowns.is_some_and(|shootdowns| shootdowns.stormed),
    }
}

/// Removes the oldest beyond `most` items.
fn push_bounded<T>(newest: &mut VecDeque<T>, one: T, most: usize) {
    if newest.len() == most {
        newest.pop_front();
    }
    newest.push_back(one);
}

#[cfg(test)]
mod tests;
