//! Decides which samples a server draws on which of its slots. Pure.
//!
//! A slot keeps the state of its last prompt, and the next sample of the same prompt needs no
//! prefill there. So the samples of a prompt are drawn one after another on few slots. If there are
//! more free slots than waiting prompts, one prefill is copied to several slots. Slots that no
//! waiting prompt needs help with the prompt that has the most samples left, with a prefill of
//! their own.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
};

use super::{
    pending_calls::SampleTag,
    sample_task::{PreparedRequest, SampleTask},
};

/// The number of a slot in its server, from 0.
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
    /// Compute a prompt and copy its state to slots.
    Prefill {
        tag: SampleTag,
        request: Rc<PreparedRequest>,
        slots: Vec<SlotId>,
    },
    Draw(SampleTask),
}

/// The slots of a server and the prompts that wait for them.
pub(super) struct SlotPlanner {
    /// True if a slot's state can be used again.
    keeps_state: bool,
    slots: usize,
    /// Idle slots without a use for their state.
    free: BTreeSet<SlotId>,
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
enum SlotChoice {
    Warm(SlotId, usize),
    Prefill(usize, usize),
    Free(SlotId, usize),
}

impl SlotPlanner {
    /// Without `keeps_state`, samples are drawn in their order on any slot.
    pub(super) fn new(slots: u32, keeps_state: bool) -> Self {
        let (warm, prompts) = (BTreeMap::new(), VecDeque::new());
        Self { keeps_state, slots: slots as usize, free: (0..slots).collect(), warm, prompts }
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
        self.free.len() + self.warm.len() == self.slots
    }

    /// Forgets what the slots of an idle server hold, because another server takes its place.
    pub(super) fn forget_state(&mut self) {
        self.free.extend(std::mem::take(&mut self.warm).into_keys());
    }

    /// Returns the prompt that the next step is for.
    pub(super) fn next_prompt(&self) -> Option<&WaitingPrompt> {
        let (SlotChoice::Warm(_, index)
        | SlotChoice::Prefill(index, _)
        | SlotChoice::Free(_, index)) = self.choose_step()?;
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
            SlotChoice::Warm(slot, index) => {
                self.warm.remove(&slot);
                Some(SlotStep::Draw(self.begin_sample(index, slot)))
            }
            SlotChoice::Free(slot, index) => {
                self.free.remove(&slot);
                Some(SlotStep::Draw(self.begin_sample(index, slot)))
            }
            SlotChoice::Prefill(index, count) => {
                let slots = std::iter::from_fn(|| self.free.pop_first()).take(count).collect();
                let prompt = &mut self.prompts[index];
                prompt.begun = true;
                let WaitingPrompt { tag, request, .. } = &prompt.waiting;
                Some(SlotStep::Prefill { tag: *tag, request: request.clone(), slots })
            }
        }
    }

    /// Takes the end of a prefill of some slots. `held` are those that have the prompt's state now.
    pub(super) fn end_prefill(&mut self, tag: SampleTag, slots: &[SlotId], held: &[SlotId]) {
        for slot in slots {
            if held.contains(slot) {
                self.warm.insert(*slot, tag);
            } else {
                self.free.insert(*slot);
            }
        }
        self.release_useless_slots();
    }

    /// Takes the end of a sample on a slot. `holds_prompt` is false if its request failed.
    pub(super) fn end_sample(&mut self, tag: SampleTag, slot: SlotId, holds_prompt: bool) {
        if self.keeps_state && holds_prompt {
            self.warm.insert(slot, tag);
            self.release_useless_slots();
        } else {
            self.free.insert(slot);
        }
    }

    fn choose_step(&self) -> Option<SlotChoice> {
        if let Some((slot, tag)) = self.warm.first_key_value() {
            let index = self.prompts.iter().position(|prompt| prompt.waiting.tag == *tag);
            return index.map(|index| SlotChoice::Warm(*slot, index));
        }
        let slot = *self.free.first()?;
        if !self.keeps_state {
            return (!self.prompts.is_empty()).then_some(SlotChoice::Free(slot, 0));
        }
        let waiting = self.prompts.iter().filter(|prompt| !prompt.begun).count();
        let Some(index) = self.prompts.iter().position(|prompt| !prompt.begun) else {
            let left = |index: &usize| self.prompts[*index].waiting.samples.len();
            // Of those with equally many samples left, the one that came first.
            let index = (0..self.prompts.len()).rev().max_by_key(left)?;
            return Some(SlotChoice::Free(slot, index));
        };
        let samples = self.prompts[index].waiting.samples.len();
        let share = self.free.len().div_ceil(waiting).min(samples);
        Some(if share > 1 {
            SlotChoice::Prefill(index, share)
        } else {
            SlotChoice::Free(slot, index)
        })
    }

    fn begin_sample(&mut self, index: usize, slot: SlotId) -> SampleTask {
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
        let waits = |tag: &SampleTag| self.prompts.iter().any(|prompt| prompt.waiting.tag == *tag);
        let useless: Vec<SlotId> =
            self.warm.iter().filter(|(_, tag)| !waits(tag)).map(|(slot, _)| *slot).collect();
        for slot in useless {
            self.warm.remove(&slot);
            self.free.insert(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use llama::completion::LlamaSampling;

    use super::*;
    use crate::worker::sample_task::{HttpPrompt, WantedLogprobs};

    fn prompt(number: usize, samples: u32) -> WaitingPrompt {
        let sampling = LlamaSampling { temperature: 1.0, top_k: 0, top_p: 1.0, max_new_tokens: 4 };
        let prompt = HttpPrompt::Tokens(vec![1; 8]);
        let request =
            PreparedRequest { prompt, sampling, positions: 12, wanted: WantedLogprobs::None };
        WaitingPrompt {
            tag: SampleTag { call: 0, request: number },
            request: Rc::new(request),
            samples: (0..samples).map(|nth| (nth, u64::from(nth))).collect(),
        }
    }

    /// Draws all samples and returns the number of prefills. All slots are busy as long as samples
    /// wait; those that were begun first end first.
    fn draw_all(slots: u32, prompts: usize, samples: u32) -> usize {
        let mut planner = SlotPlanner::new(slots, true);
        (0..prompts).for_each(|number| planner.add_prompt(prompt(number, samples)));
        let mut state: BTreeMap<SlotId, SampleTag> = BTreeMap::new();
        let (mut prefills, mut drawn, mut busy) = (0, Vec::new(), VecDeque::new());
        let all = prompts * samples as usize;
        loop {
            while let Some(step) = planner.begin_step() {
                match step {
                    SlotStep::Prefill { tag, slots, .. } => {
                        state.extend(slots.iter().map(|slot| (*slot, tag)));
                        prefills += 1;
                        planner.end_prefill(tag, &slots, &slots);
                    }
                    SlotStep::Draw(SampleTask { tag, nth, slot, .. }) => {
                        prefills += usize::from(state.insert(slot, tag) != Some(tag));
                        assert!(!busy.contains(&(tag, slot)), "a slot draws one sample at a time");
                        drawn.push((tag.request, nth));
                        busy.push_back((tag, slot));
                    }
                }
            }
            assert!(drawn.len() == all || busy.len() == slots as usize, "a slot is idle");
            let Some((tag, slot)) = busy.pop_front() else { break };
            planner.end_sample(tag, slot, true);
        }
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), all, "each sample is drawn once");
        assert!(planner.is_idle() && planner.warm.is_empty());
        prefills
    }

    #[test]
    fn samples_of_a_prompt_share_its_prefill() {
        assert_eq!(draw_all(4, 4, 8), 4, "one slot each");
        assert_eq!(draw_all(64, 16, 8), 16, "copied to four slots each");
        assert_eq!(draw_all(64, 4, 8), 4, "more slots than samples");
        assert_eq!(draw_all(1, 3, 5), 3);
        let uneven = draw_all(6, 4, 8);
        assert!((4..=8).contains(&uneven), "the last slots help: {uneven}");
    }

    #[test]
    fn a_prompt_of_a_removed_call_is_not_drawn() {
        let mut planner = SlotPlanner::new(2, true);
        planner.add_prompt(prompt(0, 3));
        let Some(SlotStep::Prefill { tag, slots, .. }) = planner.begin_step() else {
            panic!("both slots are prefilled");
        };
        planner.remove_call(0);
        assert!(planner.next_prompt().is_none() && !planner.is_idle());
        planner.end_prefill(tag, &slots, &slots);
        assert!(planner.is_idle() && planner.begin_step().is_none());
    }

    #[test]
    fn slots_that_a_server_could_not_fill_are_free() {
        let mut planner = SlotPlanner::new(4, true);
        planner.add_prompt(prompt(0, 5));
        let Some(SlotStep::Prefill { tag, slots, .. }) = planner.begin_step() else {
            panic!("all slots are prefilled");
        };
        planner.end_prefill(tag, &slots, &[2]);
        let begun = std::iter::from_fn(|| match planner.begin_step()? {
            SlotStep::Draw(task) => Some(task.slot),
            SlotStep::Prefill { .. } => None,
        });
        assert_eq!(begun.collect::<Vec<_>>(), [2, 0, 1, 3]);
        planner.end_sample(tag, 0, false);
        assert!(planner.warm.is_empty() && planner.free.contains(&0), "its request failed");
    }

    #[test]
    fn without_state_samples_are_drawn_in_order() {
        let mut planner = SlotPlanner::new(3, false);
        (0..2).for_each(|number| planner.add_prompt(prompt(number, 2)));
        let mut drawn = Vec::new();
        while let Some(step) = planner.begin_step() {
            let SlotStep::Draw(task) = step else { panic!("nothing is prefilled") };
            drawn.push((task.tag.request, task.nth));
            planner.end_sample(task.tag, task.slot, true);
        }
        assert_eq!(drawn, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    }
}
