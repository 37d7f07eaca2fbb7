//! Decides which samples a server draws on which of its slots. Pure.
//!
//! A slot keeps the state of its last prompt, and the next sample of the same prompt needs no
//! prefill there. So the samples of a prompt are drawn one after another on few slots. If there are
//! more free slots than waiting prompts, one prefill is copied to several slots. Slots that no
//! waiting prompt needs help with the prompt that has the most samples left, with a prefill of
//! their own.

use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
};

use super::{
    pending_calls::SampleTag,
    sample_task::{PreparedRequest, SampleTask},
};

/// The number of a slot in its server.
pub(super) type SlotId = u32;

/// The samples of a prompt that are not begun.
pub(super) struct WaitingPrompt {
    pub tag: SampleTag,
    pub request: Rc<PreparedRequest>,
    /// The number of each sample among those of its prompt, and its seed.
    pub samples: VecDeque<(u32, u64)>,
}

/// The next request to the server.
pub(super) enum SlotStep {
    /// Compute a prompt and keep its state on a number of free slots.
    Prefill { tag: SampleTag, request: Rc<PreparedRequest>, slots: usize },
    /// Draw a sample, on its slot or on any free one.
    Draw(SampleTask),
}

/// The slots of a server and the prompts that wait for them.
pub(super) struct SlotPlanner {
    /// True if a slot's state can be used again.
    keeps_state: bool,
    slots: usize,
    /// Slots without a use for their state.
    free: usize,
    /// Idle slots with the state of a waiting prompt.
    warm: BTreeMap<SlotId, SampleTag>,
    prompts: VecDeque<PlannedPrompt>,
}

struct PlannedPrompt {
    waiting: WaitingPrompt,
    begun: bool,
}

/// A step for the prompt at an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Warm(SlotId, usize),
    Prefill(usize, usize),
    Free(usize),
}

impl SlotPlanner {
    /// Without `keeps_state`, samples are drawn in their order on any slot.
    pub(super) fn new(slots: usize, keeps_state: bool) -> Self {
        let (warm, prompts) = (BTreeMap::new(), VecDeque::new());
        Self { keeps_state, slots, free: slots, warm, prompts }
    }

    pub(super) fn add_prompt(&mut self, waiting: WaitingPrompt) {
        if !waiting.samples.is_empty() {
            self.prompts.push_back(PlannedPrompt { waiting, begun: false });
        }
    }

    /// Removes the prompts of a call.
    pub(super) fn remove_call(&mut self, call: u64) {
        self.prompts.retain(|prompt| prompt.waiting.tag.call != call);
        self.release_useless_slots();
    }

    pub(super) fn remove_all(&mut self) {
        self.prompts.clear();
        self.release_useless_slots();
    }

    /// Returns true if the server does nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.free + self.warm.len() == self.slots
    }

    /// Forgets what the slots of an idle server hold, because another server takes its place.
    pub(super) fn forget_state(&mut self) {
        self.free += self.warm.len();
        self.warm.clear();
    }

    /// Returns the prompt that the next step is for.
    pub(super) fn next_prompt(&self) -> Option<&WaitingPrompt> {
        let (Choice::Warm(_, index) | Choice::Prefill(index, _) | Choice::Free(index)) =
            self.choose_step()?;
        Some(&self.prompts[index].waiting)
    }

    /// Returns the most positions that a waiting sample needs.
    pub(super) fn largest_context(&self) -> usize {
        let positions = self.prompts.iter().map(|prompt| prompt.waiting.request.positions);
        positions.max().unwrap_or(0)
    }

    /// Returns the next request and reserves its slots. `None` if all slots are busy or no sample
    /// waits.
    pub(super) fn begin_step(&mut self) -> Option<SlotStep> {
        match self.choose_step()? {
            Choice::Warm(slot, index) => {
                self.warm.remove(&slot);
                Some(SlotStep::Draw(self.begin_sample(index, Some(slot))))
            }
            Choice::Free(index) => {
                self.free -= 1;
                Some(SlotStep::Draw(self.begin_sample(index, None)))
            }
            Choice::Prefill(index, slots) => {
                self.free -= slots;
                let prompt = &mut self.prompts[index];
                prompt.begun = true;
                let WaitingPrompt { tag, request, .. } = &prompt.waiting;
                Some(SlotStep::Prefill { tag: *tag, request: request.clone(), slots })
            }
        }
    }

    /// Takes the end of a prefill that was begun for a number of slots. `held` are those that have
    /// the prompt's state now.
    pub(super) fn end_prefill(&mut self, tag: SampleTag, slots: usize, held: &[SlotId]) {
        let held: BTreeMap<_, _> = held.iter().take(slots).map(|slot| (*slot, tag)).collect();
        self.free += slots - held.len();
        self.warm.extend(held);
        self.release_useless_slots();
    }

    /// Takes the end of a sample. `held` is its slot, if the server reported it.
    pub(super) fn end_sample(&mut self, tag: SampleTag, held: Option<SlotId>) {
        match held.filter(|_| self.keeps_state) {
            Some(slot) => drop(self.warm.insert(slot, tag)),
            None => self.free += 1,
        }
        self.release_useless_slots();
    }

    fn choose_step(&self) -> Option<Choice> {
        if let Some((slot, tag)) = self.warm.first_key_value() {
            let index = self.prompts.iter().position(|prompt| prompt.waiting.tag == *tag);
            return index.map(|index| Choice::Warm(*slot, index));
        }
        if self.free == 0 {
            return None;
        }
        if !self.keeps_state {
            return (!self.prompts.is_empty()).then_some(Choice::Free(0));
        }
        let waiting = self.prompts.iter().filter(|prompt| !prompt.begun).count();
        let Some(index) = self.prompts.iter().position(|prompt| !prompt.begun) else {
            let left = |index: &usize| self.prompts[*index].waiting.samples.len();
            // Of those with equally many samples left, the one that came first.
            let index = (0..self.prompts.len()).rev().max_by_key(left)?;
            return Some(Choice::Free(index));
        };
        let share = self.free.div_ceil(waiting).min(self.prompts[index].waiting.samples.len());
        Some(if share > 1 { Choice::Prefill(index, share) } else { Choice::Free(index) })
    }

    fn begin_sample(&mut self, index: usize, slot: Option<SlotId>) -> SampleTask {
        let prompt = &mut self.prompts[index];
        prompt.begun = true;
        let WaitingPrompt { tag, request, samples } = &mut prompt.waiting;
        let (nth, seed) = samples.pop_front().expect("a prompt without samples is removed");
        let task = SampleTask { tag: *tag, nth, seed, request: request.clone(), slot };
        if samples.is_empty() {
            self.prompts.remove(index);
            self.release_useless_slots();
        }
        task
    }

    fn release_useless_slots(&mut self) {
        let before = self.warm.len();
        self.warm.retain(|_, tag| self.prompts.iter().any(|prompt| prompt.waiting.tag == *tag));
        self.free += before - self.warm.len();
    }
}

#[cfg(test)]
mod tests {
    use llama::completion::LlamaSampling;

    use super::*;
    use crate::worker::sample_task::HttpPrompt;

    fn prompt(number: usize, samples: u32) -> WaitingPrompt {
        let sampling = LlamaSampling { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: 4 };
        let prompt = HttpPrompt::Tokens(vec![1; 8]);
        let request = PreparedRequest { prompt, sampling, positions: 12, logprobs: false };
        WaitingPrompt {
            tag: SampleTag { call: 0, request: number },
            request: Rc::new(request),
            samples: (0..samples).map(|nth| (nth, u64::from(nth))).collect(),
        }
    }

    /// A server that gives out its slots in order.
    struct TestServer {
        planner: SlotPlanner,
        prefills: usize,
        drawn: Vec<(usize, u32)>,
        busy: Vec<(SampleTag, SlotId)>,
        idle: Vec<SlotId>,
        state: BTreeMap<SlotId, SampleTag>,
    }

    impl TestServer {
        fn new(slots: u32, prompts: usize, samples: u32) -> Self {
            let mut planner = SlotPlanner::new(slots as usize, true);
            (0..prompts).for_each(|number| planner.add_prompt(prompt(number, samples)));
            let (prefills, drawn, busy, state) = (0, Vec::new(), Vec::new(), BTreeMap::new());
            Self { planner, prefills, drawn, busy, idle: (0..slots).rev().collect(), state }
        }

        fn take_slot(&mut self, wanted: Option<SlotId>, tag: SampleTag) -> SlotId {
            let index = wanted.map_or(self.idle.len() - 1, |wanted| {
                self.idle.iter().position(|slot| *slot == wanted).expect("the slot is idle")
            });
            let slot = self.idle.remove(index);
            if wanted.is_some() {
                assert_eq!(self.state.get(&slot), Some(&tag), "the slot has the prompt's state");
            } else if self.state.insert(slot, tag) != Some(tag) {
                self.prefills += 1;
            }
            slot
        }

        /// Begins all steps that are possible. Prefills end at once.
        fn begin_steps(&mut self) {
            while let Some(step) = self.planner.begin_step() {
                match step {
                    SlotStep::Prefill { tag, slots, .. } => {
                        let held = self.idle.split_off(self.idle.len() - slots);
                        self.state.extend(held.iter().map(|slot| (*slot, tag)));
                        self.prefills += 1;
                        self.planner.end_prefill(tag, slots, &held);
                        self.idle.extend(held);
                    }
                    SlotStep::Draw(task) => {
                        let slot = self.take_slot(task.slot, task.tag);
                        self.drawn.push((task.tag.request, task.nth));
                        self.busy.push((task.tag, slot));
                    }
                }
            }
        }

        /// Ends the sample that was begun first.
        fn end_sample(&mut self) {
            let (tag, slot) = self.busy.remove(0);
            self.idle.push(slot);
            self.planner.end_sample(tag, Some(slot));
        }

        /// Returns the number of prefills after all samples were drawn with all slots busy as long
        /// as samples wait.
        fn draw_all(mut self) -> usize {
            let slots = self.idle.len();
            let all: usize = self.planner.prompts.iter().map(|p| p.waiting.samples.len()).sum();
            loop {
                self.begin_steps();
                let begun = self.drawn.len();
                assert!(begun == all || self.busy.len() == slots, "no slot is idle without need");
                if self.busy.is_empty() {
                    break;
                }
                self.end_sample();
            }
            self.drawn.sort_unstable();
            self.drawn.dedup();
            assert_eq!(self.drawn.len(), all, "each sample is drawn once");
            assert!(self.planner.is_idle() && self.planner.warm.is_empty());
            self.prefills
        }
    }

    #[test]
    fn samples_of_a_prompt_share_its_prefill() {
        assert_eq!(TestServer::new(4, 4, 8).draw_all(), 4, "one slot each");
        assert_eq!(TestServer::new(64, 16, 8).draw_all(), 16, "copied to four slots each");
        assert_eq!(TestServer::new(64, 4, 8).draw_all(), 4, "more slots than samples");
        assert_eq!(TestServer::new(1, 3, 5).draw_all(), 3);
        let uneven = TestServer::new(6, 4, 8).draw_all();
        assert!((4..=8).contains(&uneven), "the last slots help: {uneven}");
    }

    #[test]
    fn a_prompt_of_a_removed_call_is_not_drawn() {
        let mut planner = SlotPlanner::new(2, true);
        planner.add_prompt(prompt(0, 3));
        let Some(SlotStep::Prefill { tag, slots: 2, .. }) = planner.begin_step() else {
            panic!("both slots are prefilled");
        };
        planner.remove_call(0);
        assert!(planner.next_prompt().is_none() && !planner.is_idle());
        planner.end_prefill(tag, 2, &[0, 1]);
        assert!(planner.is_idle() && planner.begin_step().is_none());
    }

    #[test]
    fn slots_that_a_server_did_not_fill_are_free() {
        let mut planner = SlotPlanner::new(4, true);
        planner.add_prompt(prompt(0, 4));
        let Some(SlotStep::Prefill { tag, slots: 4, .. }) = planner.begin_step() else {
            panic!("all slots are prefilled");
        };
        // A server that does not know several completions of a request fills one slot.
        planner.end_prefill(tag, 4, &[2]);
        let slots = std::iter::from_fn(|| match planner.begin_step()? {
            SlotStep::Draw(task) => Some(task.slot),
            SlotStep::Prefill { .. } => None,
        });
        assert_eq!(slots.collect::<Vec<_>>(), [Some(2), None, None, None]);
    }

    #[test]
    fn without_state_samples_are_drawn_in_order() {
        let mut planner = SlotPlanner::new(3, false);
        (0..2).for_each(|number| planner.add_prompt(prompt(number, 2)));
        let mut drawn = Vec::new();
        while let Some(step) = planner.begin_step() {
            let SlotStep::Draw(task) = step else { panic!("nothing is prefilled") };
            drawn.push((task.tag.request, task.nth, task.slot));
            planner.end_sample(task.tag, Some(7));
        }
        assert_eq!(drawn, [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]);
    }
}
