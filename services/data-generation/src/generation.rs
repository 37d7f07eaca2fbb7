//! The state of a generation, a fold of events, and the decision about what to ask for next.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use spec::GenerationLimits;

use crate::{duplicates::DuplicateIndex, plan::GenerationPlan};

/// Existing prompts that a request for further ones shows: the newest.
const KNOWN_PROMPTS_MAX: usize = 30;

/// Something that happened in a generation. The log of a directory has all of them, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum GenerationEvent {
    /// A command began with a plan: digests of its parts.
    Plan { parts: BTreeMap<String, String> },
    /// A request for prompts was answered. `prompts` is empty if the answer was unusable.
    Prompts { category: String, request: u32, wanted: u32, prompts: Vec<String>, tokens: u64 },
    /// A prompt was answered.
    Answer { category: String, number: u32, completion: String, tokens: u64 },
    /// A prompt was not answered, or not in a usable form.
    Unusable { category: String, number: u32, problem: String, tokens: u64 },
    /// A sample was judged.
    Verdict { category: String, number: u32, outcome: SampleOutcome, detail: String },
}

/// The outcome of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleOutcome {
    Pass,
    Fail,
    /// The verifier failed, not the sample.
    Error,
}

/// The next thing to do.
#[derive(Debug, Clone, PartialEq)]
pub enum GenerationCommand {
    /// Ask the model for prompts.
    WritePrompts { category: String, request: u32, wanted: u32, body: Value },
    /// Ask the model for the answer to a prompt.
    WriteAnswer { category: String, number: u32, body: Value },
    /// Judge a sample with the plan's verifier of this index.
    Verify { category: String, number: u32, verifier: usize, prompt: String, completion: String },
}

/// A prompt that is no duplicate.
#[derive(Debug)]
pub(crate) struct WrittenSample {
    pub prompt: String,
    pub stage: SampleStage,
}

/// The progress of a sample.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SampleStage {
    /// Has no answer yet.
    Prompt,
    /// Has a completion without a verdict.
    Answered(String),
    /// Part of the data.
    Kept(String),
    Dropped,
}

/// The samples of one category. Numbers count from 1.
#[derive(Debug, Default)]
pub(crate) struct CategoryProgress {
    pub asked: u32,
    pub written: u32,
    pub duplicates: u32,
    pub unusable: u32,
    pub failed: u32,
    pub verifier_errors: u32,
    pub kept: u32,
    pub samples: Vec<WrittenSample>,
    /// Samples that may be kept.
    pending: u32,
    next_request: u32,
    /// True while a request for prompts is open. Two at a time would write the same.
    is_asked: bool,
}

/// A fold of the events of a generation, which decides what to ask for next.
///
/// Answers come before prompts, and prompts of the category that lacks the largest share of its
/// samples come first. A command whose event never comes, because the process ended, is decided
/// again by the next process; one whose event is in the log is not.
#[derive(Debug)]
pub struct Generation {
    plan: GenerationPlan,
    indices: BTreeMap<String, usize>,
    categories: Vec<CategoryProgress>,
    duplicates: DuplicateIndex,
    /// Category and index of samples that need an answer or a verdict. A sample that got it in the
    /// meantime is skipped.
    unanswered: VecDeque<(usize, usize)>,
    unjudged: VecDeque<(usize, usize)>,
    /// Answered requests, in all commands.
    requests: u32,
    open_requests: u32,
    tokens: u64,
}

impl Generation {
    /// Starts without samples. Examples of the spec count as prompts that exist.
    pub fn new(plan: GenerationPlan) -> Self {
        let mut duplicates = DuplicateIndex::new(plan.spec.deduplicate);
        for seed in plan.spec.categories.iter().flat_map(|category| &category.seeds) {
            duplicates.check_and_insert(&seed.prompt);
        }
        let names = plan.spec.categories.iter().map(|category| category.name.clone());
        Self {
            indices: names.zip(0..).collect(),
            categories: plan.counts.iter().map(|_| CategoryProgress::default()).collect(),
            plan,
            duplicates,
            unanswered: VecDeque::new(),
            unjudged: VecDeque::new(),
            requests: 0,
            open_requests: 0,
            tokens: 0,
        }
    }

    pub(crate) fn plan(&self) -> &GenerationPlan {
        &self.plan
    }

    pub(crate) fn categories(&self) -> &[CategoryProgress] {
        &self.categories
    }

    pub(crate) fn requests(&self) -> u32 {
        self.requests
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the numbers of kept and of wanted samples.
    pub fn count_samples(&self) -> (u64, u64) {
        let kept = self.categories.iter().zip(&self.plan.counts);
        let kept = kept.map(|(category, count)| u64::from(category.kept.min(*count))).sum();
        (kept, self.plan.counts.iter().copied().map(u64::from).sum())
    }

    /// Applies an event of the log, or of an open command. Fails with the reason if it does not
    /// follow from the events before it.
    pub fn apply_event(&mut self, event: &GenerationEvent) -> Result<(), String> {
        match event {
            GenerationEvent::Plan { .. } => return Ok(()),
            GenerationEvent::Prompts { category, request, wanted, prompts, tokens } => {
                let index = self.category_index(category)?;
                self.count_request(*tokens);
                self.add_prompts(index, *request, *wanted, prompts);
            }
            GenerationEvent::Answer { category, number, completion, tokens } => {
                let (index, place) = self.find_sample(category, *number)?;
                self.require_stage(index, place, |stage| *stage == SampleStage::Prompt)?;
                self.count_request(*tokens);
                let stage = if self.plan.verifier_of(index).is_some() {
                    self.unjudged.push_back((index, place));
                    SampleStage::Answered(completion.clone())
                } else {
                    self.categories[index].settle_sample(true);
                    SampleStage::Kept(completion.clone())
                };
                self.categories[index].samples[place].stage = stage;
            }
            GenerationEvent::Unusable { category, number, tokens, .. } => {
                let (index, place) = self.find_sample(category, *number)?;
                self.require_stage(index, place, |stage| *stage == SampleStage::Prompt)?;
                self.count_request(*tokens);
                let category = &mut self.categories[index];
                category.unusable += 1;
                category.settle_sample(false);
                category.samples[place].stage = SampleStage::Dropped;
            }
            GenerationEvent::Verdict { category, number, outcome, .. } => {
                let (index, place) = self.find_sample(category, *number)?;
                let is_answered = |stage: &SampleStage| matches!(stage, SampleStage::Answered(_));
                self.require_stage(index, place, is_answered)?;
                self.categories[index].apply_verdict(place, *outcome);
            }
        }
        Ok(())
    }

    fn category_index(&self, name: &str) -> Result<usize, String> {
        self.indices.get(name).copied().ok_or_else(|| format!("there is no category {name:?}"))
    }

    fn find_sample(&self, category: &str, number: u32) -> Result<(usize, usize), String> {
        let index = self.category_index(category)?;
        let place = (number as usize).wrapping_sub(1);
        match self.categories[index].samples.get(place) {
            Some(_) => Ok((index, place)),
            None => Err(format!("{category} has no prompt {number}")),
        }
    }

    fn require_stage(
        &self,
        index: usize,
        place: usize,
        is_expected: impl Fn(&SampleStage) -> bool,
    ) -> Result<(), String> {
        let is_right = is_expected(&self.categories[index].samples[place].stage);
        if is_right { Ok(()) } else { Err(format!("prompt {} is in another stage", place + 1)) }
    }

    fn count_request(&mut self, tokens: u64) {
        self.requests = self.requests.saturating_add(1);
        self.open_requests = self.open_requests.saturating_sub(1);
        self.tokens = self.tokens.saturating_add(tokens);
    }

    fn add_prompts(&mut self, index: usize, request: u32, wanted: u32, prompts: &[String]) {
        let category = &mut self.categories[index];
        category.is_asked = false;
        category.next_request = category.next_request.max(request.saturating_add(1));
        category.asked = category.asked.saturating_add(wanted);
        for prompt in prompts {
            category.written += 1;
            if self.duplicates.check_and_insert(prompt) {
                category.duplicates += 1;
                continue;
            }
            self.unanswered.push_back((index, category.samples.len()));
            category.pending += 1;
            let stage = SampleStage::Prompt;
            category.samples.push(WrittenSample { prompt: prompt.clone(), stage });
        }
    }

    /// Returns the limit of the spec that is reached while samples are missing.
    pub(crate) fn reached_limit(&self) -> Option<String> {
        let GenerationLimits { requests, tokens, attempts, .. } = self.plan.spec.limits;
        let is_short = |index: usize| self.categories[index].kept < self.plan.counts[index];
        let short: Vec<usize> = (0..self.categories.len()).filter(|it| is_short(*it)).collect();
        if short.is_empty() {
            return None;
        }
        if self.requests >= requests {
            return Some(format!("limits.requests ({requests}) is reached"));
        }
        if self.tokens >= tokens {
            return Some(format!("limits.tokens ({tokens}) is reached"));
        }
        let exhausted = short.into_iter().filter(|index| self.attempts_left(*index) == 0);
        let names: Vec<&str> =
            exhausted.map(|index| self.plan.spec.categories[index].name.as_str()).collect();
        let names = names.join(", ");
        (!names.is_empty()).then(|| format!("limits.attempts ({attempts}) is reached in {names}"))
    }

    /// Returns the number of prompts that may still be asked for.
    fn attempts_left(&self, index: usize) -> u32 {
        let most = f64::from(self.plan.counts[index]) * self.plan.spec.limits.attempts;
        // A number above 2^32 becomes 2^32 - 1.
        (most.ceil() as u32).saturating_sub(self.categories[index].asked)
    }

    fn may_request(&self) -> bool {
        let limits = &self.plan.spec.limits;
        let requests = self.requests.saturating_add(self.open_requests);
        requests < limits.requests && self.tokens < limits.tokens
    }

    /// Returns the next thing to do; `None` if there is nothing before an open command ends.
    pub fn next_command(&mut self) -> Option<GenerationCommand> {
        if let Some(command) = self.next_verification() {
            return Some(command);
        }
        if !self.may_request() {
            return None;
        }
        let command = self.next_answer().or_else(|| self.next_prompts())?;
        self.open_requests += 1;
        Some(command)
    }

    fn next_verification(&mut self) -> Option<GenerationCommand> {
        while let Some((index, place)) = self.unjudged.pop_front() {
            let WrittenSample { prompt, stage } = &self.categories[index].samples[place];
            if let (SampleStage::Answered(completion), Some(verifier)) =
                (stage, self.plan.verifier_of(index))
            {
                return Some(GenerationCommand::Verify {
                    category: self.category_name(index),
                    number: sample_number(place),
                    verifier,
                    prompt: prompt.clone(),
                    completion: completion.clone(),
                });
            }
        }
        None
    }

    fn next_answer(&mut self) -> Option<GenerationCommand> {
        while let Some((index, place)) = self.unanswered.pop_front() {
            let WrittenSample { prompt, stage } = &self.categories[index].samples[place];
            if *stage == SampleStage::Prompt {
                let number = sample_number(place);
                return Some(GenerationCommand::WriteAnswer {
                    category: self.category_name(index),
                    number,
                    body: self.plan.answer_request(index, number, prompt),
                });
            }
        }
        None
    }

    fn next_prompts(&mut self) -> Option<GenerationCommand> {
        let filled = |index: usize| {
            let CategoryProgress { kept, pending, .. } = self.categories[index];
            f64::from(kept + pending) / f64::from(self.plan.counts[index])
        };
        let is_short = |index: &usize| self.missing_prompts(*index) > 0;
        let short = (0..self.categories.len()).filter(is_short);
        let index = short.min_by(|a, b| filled(*a).total_cmp(&filled(*b)))?;
        let wanted = self.missing_prompts(index);
        let category = &mut self.categories[index];
        let request = category.next_request;
        category.next_request += 1;
        category.is_asked = true;
        let known = self.categories[index].samples.iter().rev().take(KNOWN_PROMPTS_MAX);
        let known = known.map(|sample| sample.prompt.as_str());
        Some(GenerationCommand::WritePrompts {
            category: self.category_name(index),
            request,
            wanted,
            body: self.plan.prompts_request(index, request, wanted, known),
        })
    }

    /// Returns the number of prompts that the next request of a category asks for.
    fn missing_prompts(&self, index: usize) -> u32 {
        let CategoryProgress { kept, pending, is_asked, .. } = self.categories[index];
        if is_asked {
            return 0;
        }
        let missing = self.plan.counts[index].saturating_sub(kept + pending);
        missing.min(self.plan.spec.prompts.per_request).min(self.attempts_left(index))
    }

    fn category_name(&self, index: usize) -> String {
        self.plan.spec.categories[index].name.clone()
    }
}

impl CategoryProgress {
    fn settle_sample(&mut self, is_kept: bool) {
        self.pending = self.pending.saturating_sub(1);
        self.kept += u32::from(is_kept);
    }

    fn apply_verdict(&mut self, place: usize, outcome: SampleOutcome) {
        let stage = std::mem::replace(&mut self.samples[place].stage, SampleStage::Dropped);
        match (outcome, stage) {
            (SampleOutcome::Pass, SampleStage::Answered(completion)) => {
                self.samples[place].stage = SampleStage::Kept(completion);
            }
            (SampleOutcome::Error, _) => self.verifier_errors += 1,
            (SampleOutcome::Pass | SampleOutcome::Fail, _) => self.failed += 1,
        }
        self.settle_sample(outcome == SampleOutcome::Pass);
    }
}

/// Returns the number of a sample, counted from 1.
pub(crate) fn sample_number(place: usize) -> u32 {
    u32::try_from(place + 1).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    const SPEC: &str = "
count: 6
prompts: { per_request: 3 }
categories:
  - { name: a, seeds: [{ prompt: seed }] }
  - { name: b, verify: { regex: { pattern: x } } }
";

    fn generation(limits: &str) -> Generation {
        Generation::new(plan(&format!("{SPEC}\nlimits: {limits}")))
    }

    /// Answers a command as a model does that writes the prompts 0, 1, 2 and so on.
    fn answer(command: &GenerationCommand, next: &mut u32) -> GenerationEvent {
        match command.clone() {
            GenerationCommand::WritePrompts { category, request, wanted, .. } => {
                let prompts = (0..wanted).map(|_| {
                    *next += 1;
                    format!("{category} {next} {}", "#".repeat(*next as usize))
                });
                let prompts = prompts.collect();
                GenerationEvent::Prompts { category, request, wanted, prompts, tokens: 10 }
            }
            GenerationCommand::WriteAnswer { category, number, .. } => {
                let completion = "x".to_owned();
                GenerationEvent::Answer { category, number, completion, tokens: 10 }
            }
            GenerationCommand::Verify { category, number, .. } => {
                let outcome = SampleOutcome::Pass;
                GenerationEvent::Verdict { category, number, outcome, detail: String::new() }
            }
        }
    }

    /// Answers at most `steps` commands and returns the events.
    fn run_steps(
        generation: &mut Generation,
        next: &mut u32,
        steps: usize,
    ) -> Vec<GenerationEvent> {
        let mut events = Vec::new();
        while events.len() < steps
            && let Some(command) = generation.next_command()
        {
            events.push(answer(&command, next));
            generation.apply_event(events.last().unwrap()).unwrap();
        }
        events
    }

    #[test]
    fn each_category_gets_its_samples_and_verdicts() {
        let mut generation = generation("{}");
        let events = run_steps(&mut generation, &mut 0, 100);
        // Two lists, six answers, three verdicts.
        assert_eq!(events.len(), 11);
        assert_eq!((generation.count_samples(), generation.reached_limit()), ((6, 6), None));
        assert_eq!((generation.requests(), generation.tokens()), (8, 80));
    }

    #[test]
    fn a_generation_continues_from_any_event_and_asks_for_nothing_twice() {
        let events = run_steps(&mut generation("{}"), &mut 0, 100);
        for end in 0..=events.len() {
            let (mut resumed, mut next) = (generation("{}"), 100);
            for event in &events[..end] {
                resumed.apply_event(event).unwrap();
            }
            let more = run_steps(&mut resumed, &mut next, 100);
            assert_eq!(end + more.len(), 11, "{end}");
            assert_eq!((resumed.count_samples(), resumed.requests()), ((6, 6), 8), "{end}");
        }
    }

    #[test]
    fn duplicates_refusals_and_failures_are_counted_and_replaced_until_the_attempts_end() {
        let mut generation = generation("{ attempts: 2 }");
        let mut next = 0;
        while let Some(command) = generation.next_command() {
            let event = match answer(&command, &mut next) {
                GenerationEvent::Prompts { category, request, wanted, mut prompts, tokens } => {
                    prompts[0] = " SEED".to_owned();
                    GenerationEvent::Prompts { category, request, wanted, prompts, tokens }
                }
                GenerationEvent::Answer { category, number: 1, tokens, .. } if category == "a" => {
                    let problem = "refused".to_owned();
                    GenerationEvent::Unusable { category, number: 1, problem, tokens }
                }
                GenerationEvent::Verdict { category, number, detail, .. } => {
                    let outcome =
                        if number == 1 { SampleOutcome::Error } else { SampleOutcome::Fail };
                    GenerationEvent::Verdict { category, number, outcome, detail }
                }
                event => event,
            };
            generation.apply_event(&event).unwrap();
        }
        let [a, b] = generation.categories() else { panic!() };
        assert_eq!((a.asked, a.written, a.unusable), (6, 6, 1));
        assert_eq!((a.duplicates + a.unusable + a.kept, b.verifier_errors), (6, 1));
        assert_eq!((b.kept, b.failed + b.duplicates + b.verifier_errors), (0, 6));
        let limit = generation.reached_limit().unwrap();
        assert!(limit.starts_with("limits.attempts (2) is reached in ") && limit.contains('b'));
    }

    #[test]
    fn requests_and_tokens_are_bounded_open_requests_included() {
        let mut bounded = generation("{ requests: 3 }");
        let [first, second] = [(); 2].map(|()| bounded.next_command().unwrap());
        assert_eq!(bounded.next_command(), None, "a request for each category is open");
        let mut next = 0;
        bounded.apply_event(&answer(&first, &mut next)).unwrap();
        assert!(bounded.next_command().is_some());
        assert_eq!(bounded.next_command(), None, "three requests");
        bounded.apply_event(&answer(&second, &mut next)).unwrap();
        assert_eq!(bounded.reached_limit(), None, "one is open");

        let mut bounded = generation("{ tokens: 25 }");
        assert_eq!(run_steps(&mut bounded, &mut 0, 100).len(), 3);
        assert_eq!(bounded.reached_limit().unwrap(), "limits.tokens (25) is reached");
    }

    #[test]
    fn events_that_contradict_the_state_are_refused() {
        let mut generation = generation("{}");
        run_steps(&mut generation, &mut 0, 3);
        let verdict = |category: &str, number| GenerationEvent::Verdict {
            category: category.to_owned(),
            number,
            outcome: SampleOutcome::Pass,
            detail: String::new(),
        };
        for (event, words) in [
            (verdict("c", 1), "no category \"c\""),
            (verdict("a", 0), "a has no prompt 0"),
            (verdict("a", 9), "a has no prompt 9"),
            (verdict("a", 2), "another stage"),
        ] {
            let error = generation.apply_event(&event).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
