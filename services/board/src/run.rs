//! A run as it goes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cycle::{Phase, Run};
use wire::{Body, Place, Record, v1};

use crate::{
    eta,
    lanes::Lanes,
    tally::{Tally, add},
};

use v1::board::{Cycle, Eta, Figure, Head, Point, Selected, Steered, Trouble};

/// The newest troubles, and pauses and resumes: a page of them.
const TROUBLES_MAX: usize = 50;
const STEERED_MAX: usize = 50;

/// Cycles of one message: a few hundred kilobytes.
const CYCLES_MAX: usize = 16;

/// A run, folded from its facts in log order.
#[derive(Debug, Clone)]
pub struct Board {
    run: Run,
    cycles: BTreeMap<u32, Shown>,
    steered: VecDeque<Steered>,
    troubles: VecDeque<Trouble>,
    troubles_in_all: u32,
    clock: Clock,
    phase: Began,
    /// When cycles ended, by the clock.
    ends: Vec<f64>,
    /// Counts what was taken in.
    revision: u64,
}

/// What a cycle's picture is made of, beyond what the run knows of it.
#[derive(Debug, Clone, Default)]
struct Shown {
    /// When it last changed.
    revision: u64,
    train: Tally,
    heldout: Tally,
    lanes: Lanes,
    /// When each checkpoint was published, by step.
    published: BTreeMap<u32, f64>,
}

/// Stands still while the run is paused.
#[derive(Debug, Clone, Default)]
struct Clock {
    /// The last fact's time, in seconds since the run was submitted.
    at_s: f64,
    paused_s: f64,
    paused: bool,
}

/// When a phase began, by the clock, and how many results it has brought since.
#[derive(Debug, Clone, Copy)]
struct Began {
    phase: (u32, Phase),
    at: f64,
    results: u32,
}

/// How far a phase is.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    done: u64,
    total: u64,
    unit: &'static str,
}

impl Board {
    /// The run a `spec` fact starts. `None` for any other fact.
    pub fn start(record: &Record) -> Option<Self> {
        let run = Run::start(record)?;
        let phase = Began { phase: (0, run.phase()), at: 0.0, results: 0 };
        Some(Self {
            run,
            cycles: BTreeMap::new(),
            steered: VecDeque::new(),
            troubles: VecDeque::new(),
            troubles_in_all: 0,
            clock: Clock::default(),
            phase,
            ends: Vec::new(),
            revision: 1,
        })
    }

    /// Counts up with each change.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn has_ended(&self) -> bool {
        self.run.done.is_some()
    }

    /// Takes in one fact of this run. Facts at or below the last sequence are ignored.
    pub fn fold(&mut self, mut record: Record) {
        if record.sequence <= self.run.sequence {
            return;
        }
        let at_s = self.since_submission(record.time_ms);
        self.clock.pass(at_s, self.run.paused);
        forget_texts(&mut record.fact.body);
        self.revision += 1;
        self.run.fold(&record);
        self.note(&record, at_s);
        let phase = (self.run.cycle_at_work(), self.run.phase());
        if self.phase.phase != phase {
            self.phase = Began { phase, at: self.clock.now(), results: 0 };
        } else if brings_result(&record.fact.body) {
            self.phase.results = self.phase.results.saturating_add(1);
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "milliseconds far below 2^52")]
    fn since_submission(&self, time_ms: u64) -> f64 {
        time_ms.saturating_sub(self.run.submitted_ms) as f64 / 1000.0
    }

    /// What the picture needs of a fact that the run has taken in.
    fn note(&mut self, record: &Record, at_s: f64) {
        let place = &record.fact.subject.place;
        if let Some(number) = place.cycle() {
            self.cycles.entry(number).or_default().revision = self.revision;
        }
        match (place, &record.fact.body) {
            (_, Body::Control(control)) => {
                let action = control.action().as_str_name().to_lowercase();
                let steered = Steered { at_s, action, reason: control.reason.clone() };
                push(&mut self.steered, steered, STEERED_MAX);
            }
            (Place::Plan { cycle }, Body::Plan(_)) => self.count_again(*cycle),
            (Place::Samples { cycle, job }, Body::Samples(samples)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.lanes.add(&samples.agent, "generate", samples.wall_s, at_s);
                if let Some(job) = self.run.cycles.get(cycle).and_then(|it| it.jobs.get(job)) {
                    shown.tally(job.purpose).draw(job);
                }
            }
            (Place::Verdicts { cycle, job }, Body::Verdicts(verdicts)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.lanes.add(&verdicts.agent, "verify", verdicts.wall_s, at_s);
                if let Some(job) = self.run.cycles.get(cycle).and_then(|it| it.jobs.get(job)) {
                    shown.tally(job.purpose).judge(job);
                }
            }
            (Place::Checkpoint { cycle, step }, Body::Checkpoint(checkpoint)) => {
                let shown = self.cycles.entry(*cycle).or_default();
                shown.published.insert(*step, at_s);
                shown.lanes.add(&checkpoint.agent, "train", checkpoint.wall_s, at_s);
            }
            (Place::Eval { cycle, .. }, Body::Eval(eval)) => {
                let wall_s = eval.process.map_or(0.0, |process| process.wall_s);
                let shown = self.cycles.entry(*cycle).or_default();
                shown.lanes.add(&eval.agent, "evaluate", wall_s, at_s);
            }
            (_, Body::CycleDone(_)) => self.ends.push(self.clock.now()),
            (_, Body::Failure(failure)) => self.trouble(Trouble {
                at_s,
                what: format!("{} {}", failure.kind, failure.id),
                agent: failure.agent.clone(),
                message: failure.message.clone(),
                r#final: failure.r#final,
            }),
            (_, Body::Quarantine(quarantine)) => self.quarantine(quarantine, at_s),
            _ => {}
        }
    }

    fn quarantine(&mut self, quarantine: &v1::Quarantine, at_s: f64) {
        for job in &quarantine.jobs {
            self.count_again(job.cycle);
        }
        let message = format!(
            "{} jobs are drawn again: what it sampled with is not what was ordered",
            quarantine.jobs.len()
        );
        let (what, agent) = ("quarantine".to_owned(), quarantine.agent.clone());
        self.trouble(Trouble { at_s, what, agent, message, r#final: true });
    }

    fn trouble(&mut self, trouble: Trouble) {
        self.troubles_in_all = self.troubles_in_all.saturating_add(1);
        push(&mut self.troubles, trouble, TROUBLES_MAX);
    }

    /// Where jobs came or went.
    fn count_again(&mut self, number: u32) {
        let Some(cycle) = self.run.cycles.get(&number) else { return };
        let shown = self.cycles.entry(number).or_default();
        shown.revision = self.revision;
        let of = |purpose| Tally::of(cycle.jobs_for(purpose).map(|(_, job)| job));
        shown.train = of(v1::Purpose::Train);
        shown.heldout = of(v1::Purpose::Heldout);
    }

    /// Archives of cycles whose samples the log has let go of, the newest first: what a
    /// [`Board::recall`] takes is in them.
    pub fn forgotten(&self) -> Vec<v1::Archived> {
        let unseen = |number: &u32| {
            let shown = self.cycles.get(number);
            let [train, heldout] = [|it: &Shown| it.train.samples, |it: &Shown| it.heldout.samples]
                .map(|of| shown.map(of).unwrap_or_default());
            train.drawn + heldout.drawn == 0 && train.planned + heldout.planned > 0
        };
        let forgotten = self.run.cycles.iter().rev().filter(|(number, _)| unseen(number));
        forgotten.filter_map(|(_, cycle)| cycle.archived.clone()).collect()
    }

    /// Takes in what an archive has of a cycle: who drew and judged what, and when.
    pub fn recall(&mut self, number: u32, records: &[Record]) {
        self.revision += 1;
        let void = self.run.quarantines.iter().flat_map(|quarantine| quarantine.jobs_of(number));
        let void: BTreeSet<String> = void.map(str::to_owned).collect();
        for record in records {
            if let Place::Samples { job, .. } | Place::Verdicts { job, .. } =
                &record.fact.subject.place
                && void.contains(job.as_str())
            {
                continue;
            }
            let at_s = self.since_submission(record.time_ms);
            let shown = self.cycles.entry(number).or_default();
            shown.revision = self.revision;
            match &record.fact.body {
                Body::Samples(samples) => {
                    let drawn = u32::try_from(samples.samples.len()).unwrap_or(u32::MAX);
                    let tally = shown.tally(samples.purpose());
                    add(&mut tally.samples.drawn, drawn);
                    shown.lanes.add(&samples.agent, "generate", samples.wall_s, at_s);
                }
                Body::Verdicts(verdicts) => {
                    shown.tally(verdicts.purpose()).add(verdicts);
                    shown.lanes.add(&verdicts.agent, "verify", verdicts.wall_s, at_s);
                }
                _ => {}
            }
        }
    }

    /// What has changed behind a revision, all of it behind 0; and the revision that it comes up to,
    /// which is not the last where there is too much for one message.
    pub fn since(&self, revision: u64) -> Option<(v1::Board, u64)> {
        if self.revision <= revision {
            return None;
        }
        let changed = self.cycles.iter().filter(|(_, shown)| shown.revision > revision);
        let mut changed: Vec<(u32, &Shown)> = changed.map(|(number, it)| (*number, it)).collect();
        // Those of one revision stay together.
        changed.sort_by_key(|(_, shown)| shown.revision);
        let reached = match changed.get(CYCLES_MAX) {
            Some((_, next)) if next.revision > changed[0].1.revision => next.revision - 1,
            _ => self.revision,
        };
        changed.retain(|(_, shown)| shown.revision <= reached);
        let board = v1::Board {
            cursor: self.run.sequence,
            head: Some(self.head()),
            cycles: changed.into_iter().map(|(number, shown)| self.cycle(number, shown)).collect(),
            spec: (revision == 0).then(|| self.run.spec.clone()),
        };
        Some((board, reached))
    }

    /// How the run is, and how far.
    pub fn head(&self) -> Head {
        let run = &self.run;
        let progress = self.progress();
        let (phase_ends, run_ends) = self.ends(progress);
        Head {
            run: run.id.to_string(),
            name: run.spec.name.clone(),
            kind: run.kind().into(),
            state: run.state().as_str_name().to_lowercase(),
            message: run.done.as_ref().map_or(String::new(), |done| done.message.clone()),
            submitted_at: Some(wire::timestamp(std::time::Duration::from_millis(run.submitted_ms))),
            ended_s: run.ended_ms.map(|ended| self.since_submission(ended)),
            cycle: run.cycle_at_work(),
            cycles: run.last_cycle(),
            phase: run.phase().as_str().into(),
            done: progress.done,
            total: progress.total,
            unit: progress.unit.into(),
            phase_ends,
            run_ends,
            troubles: self.troubles.iter().cloned().collect(),
            troubles_in_all: self.troubles_in_all,
            steered: self.steered.iter().cloned().collect(),
            at_s: self.clock.at_s,
        }
    }

    fn progress(&self) -> Progress {
        let number = self.run.cycle_at_work();
        let (Some(cycle), Some(shown)) = (self.run.cycles.get(&number), self.cycles.get(&number))
        else {
            return Progress::default();
        };
        let samples = |done: u32, total: u32| Progress {
            done: done.into(),
            total: total.max(done).into(),
            unit: "samples",
        };
        match self.run.phase() {
            Phase::Generate => samples(shown.train.samples.drawn, shown.train.samples.planned),
            Phase::Verify => {
                let v1::board::Samples { judged, errors, drawn, .. } = shown.train.samples;
                samples(judged.saturating_add(errors), drawn)
            }
            Phase::Train => {
                let last = cycle.checkpoints.values().next_back();
                let (done, total) = last.map_or((0, 0), |last| (last.step, last.steps));
                Progress { done: done.into(), total: total.into(), unit: "steps" }
            }
            Phase::Evaluate => {
                let v1::board::Samples { planned, judged, errors, .. } = shown.heldout.samples;
                let measured = judged.saturating_add(errors);
                if planned > measured {
                    return samples(measured, planned);
                }
                let suites = self.run.spec.suites.len();
                let total = (suites * cycle.checkpoints.len()) as u64;
                Progress { done: cycle.evals.len() as u64, total, unit: "evals" }
            }
            Phase::Plan | Phase::Select | Phase::Done => Progress::default(),
        }
    }

    /// When the phase and the run are likely to end. A paused run ends when somebody resumes it.
    fn ends(&self, progress: Progress) -> (Option<Eta>, Option<Eta>) {
        if self.run.paused || self.run.cancelled || self.has_ended() || self.run.is_watched() {
            return (None, None);
        }
        let now = self.clock.now();
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let share = progress.done as f64 / progress.total.max(1) as f64;
        let phase = eta::of_phase(self.phase.at, now, share, self.phase.results);
        let done = self.ends.len();
        let all = self.run.last_cycle() as usize + 1;
        let left = u32::try_from(all.saturating_sub(done)).unwrap_or(u32::MAX);
        let run = match self.run.raft() {
            Some(_) => eta::of_run(&self.ends, left, now),
            // Its training is nearly all of it.
            None => phase,
        };
        let wall = |eta: Eta| self.clock.wall(eta);
        (phase.map(wall), run.map(wall))
    }

    fn cycle(&self, number: u32, shown: &Shown) -> Cycle {
        let cycle = self.run.cycles.get(&number);
        let point = |checkpoint| point(checkpoint, shown);
        Cycle {
            cycle: number,
            train: Some(shown.train.samples),
            heldout: Some(shown.heldout.samples),
            rewards: shown.train.rewards.shown(),
            selected: cycle.and_then(|cycle| cycle.selected.as_ref()).map(selected),
            done: cycle.and_then(|cycle| cycle.done.clone()),
            spans: shown.lanes.shown(),
            checkpoints: cycle.map_or(vec![], |it| it.checkpoints.values().map(point).collect()),
            evals: cycle.map_or(vec![], |it| it.evals.values().map(figure).collect()),
        }
    }
}

impl Shown {
    fn tally(&mut self, purpose: v1::Purpose) -> &mut Tally {
        match purpose {
            v1::Purpose::Heldout => &mut self.heldout,
            v1::Purpose::Train | v1::Purpose::Unspecified => &mut self.train,
        }
    }
}

impl Clock {
    /// `paused`: since the time before.
    fn pass(&mut self, at_s: f64, paused: bool) {
        let passed = (at_s - self.at_s).max(0.0);
        if paused {
            self.paused_s += passed;
        }
        (self.at_s, self.paused) = (self.at_s + passed, paused);
    }

    fn now(&self) -> f64 {
        self.at_s - self.paused_s
    }

    fn wall(&self, eta: Eta) -> Eta {
        let Eta { early_s, likely_s, late_s } = eta;
        let later = self.paused_s;
        Eta { early_s: early_s + later, likely_s: likely_s + later, late_s: late_s + later }
    }
}

/// They are most of a run, and here nobody reads them.
fn forget_texts(body: &mut Body) {
    match body {
        Body::Samples(samples) => {
            samples.samples.iter_mut().for_each(|sample| sample.text = String::new());
        }
        Body::GenerateOrder(order) => {
            order.requests.iter_mut().for_each(|request| request.text = String::new());
        }
        Body::Verdicts(verdicts) => {
            verdicts.verdicts.iter_mut().for_each(|verdict| verdict.detail = String::new());
        }
        _ => {}
    }
}

fn brings_result(body: &Body) -> bool {
    matches!(body, Body::Samples(_) | Body::Verdicts(_) | Body::Checkpoint(_) | Body::Eval(_))
}

fn selected(selected: &v1::Selected) -> Selected {
    Selected {
        considered: selected.considered,
        kept: selected.kept,
        dropped: selected.dropped.clone(),
        min_reward: selected.min_reward,
        diversity: selected.diversity,
        entropy: selected.entropy,
    }
}

fn point(checkpoint: &v1::Checkpoint, shown: &Shown) -> Point {
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
    }
}

fn figure(eval: &v1::Eval) -> Figure {
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

fn push<T>(newest: &mut VecDeque<T>, one: T, most: usize) {
    if newest.len() == most {
        newest.pop_front();
    }
    newest.push_back(one);
}

#[cfg(test)]
mod tests;
