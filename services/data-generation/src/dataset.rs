//! The files of a generation: what is kept, split by category into training and held-out samples.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use spec::HeldoutSize;
use wire::{normalise_question, v1::data_file::Lengths};

use crate::{
    generation::{CategoryProgress, Generation, SampleStage, sample_number},
    report::CategoryReport,
};

/// The lines of both files, and the report on each category.
#[derive(Debug, Default)]
pub(crate) struct GeneratedData {
    pub train: String,
    pub heldout: String,
    pub categories: Vec<CategoryReport>,
}

/// A line, which is a prompt of a RAFT run and an example of an SFT run.
#[derive(Debug, Serialize)]
struct SampleLine<'a> {
    id: String,
    category: &'a str,
    prompt: &'a str,
    completion: &'a str,
    answer: String,
}

/// Writes what a generation has kept: at most the wanted number of each category, the first ones.
pub(crate) fn build_data(generation: &Generation) -> GeneratedData {
    let mut data = GeneratedData::default();
    for (index, progress) in generation.categories().iter().enumerate() {
        data.add_category(generation, index, progress);
    }
    data
}

impl GeneratedData {
    fn add_category(&mut self, generation: &Generation, index: usize, progress: &CategoryProgress) {
        let plan = generation.plan();
        let (name, wanted) = (plan.spec.categories[index].name.as_str(), plan.counts[index]);
        let lines: Vec<SampleLine<'_>> = progress
            .samples
            .iter()
            .enumerate()
            .filter_map(|(place, sample)| {
                let SampleStage::Kept(completion) = &sample.stage else { return None };
                let id = format!("{name}-{}", sample_number(place));
                // An unextractable answer is refused before it is kept.
                let answer = plan.extract_answer(completion)?;
                Some(SampleLine { id, category: name, prompt: &sample.prompt, completion, answer })
            })
            .take(wanted as usize)
            .collect();
        let questions: BTreeMap<String, usize> =
            lines.iter().map(|line| (normalise_question(line.prompt), 1)).collect();
        let heldout = choose_heldout(&questions, plan.spec.heldout.share, plan.spec.seed);
        for line in &lines {
            let text = serde_json::to_string(line).expect("a line is JSON") + "\n";
            let is_heldout = heldout.contains(&normalise_question(line.prompt));
            let file = if is_heldout { &mut self.heldout } else { &mut self.train };
            file.push_str(&text);
        }
        let lengths = |text: fn(&SampleLine<'_>) -> usize| Lengths::measure(lines.iter().map(text));
        self.categories.push(CategoryReport {
            category: name.to_owned(),
            wanted,
            asked: progress.asked,
            written: progress.written,
            duplicates: progress.duplicates,
            unusable: progress.unusable,
            failed: progress.failed,
            verifier_errors: progress.verifier_errors,
            kept: lines.len(),
            heldout: heldout.len(),
            prompt_bytes: lengths(|line| line.prompt.len()),
            completion_bytes: lengths(|line| line.completion.len()),
        });
    }
}

/// Chooses a category's share to the nearest number. Of two samples or more, both sides get some,
/// unless the share is 0.
fn choose_heldout(questions: &BTreeMap<String, usize>, share: f64, seed: u64) -> BTreeSet<&String> {
    let most = u32::try_from(questions.len().saturating_sub(1)).unwrap_or(u32::MAX);
    if share <= 0.0 || most == 0 {
        return BTreeSet::new();
    }
    let count = (share * questions.len() as f64).round() as u32;
    HeldoutSize::Count(count.clamp(1, most)).choose_questions(questions, seed)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::{generation::GenerationEvent, plan::tests::plan};

    fn generated(head: &str, samples: u32) -> GeneratedData {
        let plan =
            plan(&format!("{head}\ncategories:\n- {{ name: a }}\n- {{ name: b, count: 2 }}\n"));
        let mut generation = Generation::new(plan);
        let mut apply = |event| generation.apply_event(&event).unwrap();
        for (category, count) in [("a", samples), ("b", 1)] {
            let category = category.to_owned();
            apply(GenerationEvent::Prompts {
                category: category.clone(),
                request: 0,
                wanted: count,
                prompts: (0..count).map(|n| format!("{category}, prompt {n}")).collect(),
                tokens: 1,
            });
            for number in 1..=count {
                let (category, completion) = (category.clone(), format!("so: {number}"));
                apply(GenerationEvent::Answer { category, number, completion, tokens: 1 });
            }
        }
        build_data(&generation)
    }

    fn lines(text: &str) -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn every_category_is_split_by_its_share_and_the_same_seed_splits_alike() {
        let head = "count: 22\ndeduplicate: { similarity: 0 }\nanswers: { extract: 'so: (.*)' }";
        let data = generated(head, 25);
        let (train, heldout) = (lines(&data.train), lines(&data.heldout));
        let of = |lines: &[Value], category: &str| {
            lines.iter().filter(|line| line["category"] == category).count()
        };
        assert_eq!((of(&train, "a"), of(&heldout, "a")), (18, 2), "20 of 25 are wanted");
        assert_eq!((of(&train, "b"), of(&heldout, "b")), (1, 0));
        let first = train.iter().chain(&heldout).find(|line| line["id"] == "a-1").unwrap();
        let fields = ["prompt", "completion", "answer"].map(|name| first[name].as_str().unwrap());
        assert_eq!(fields, ["a, prompt 0", "so: 1", "1"]);
        let a = &data.categories[0];
        assert_eq!((a.wanted, a.kept, a.heldout, a.written), (20, 20, 2, 25));
        assert_eq!(a.completion_bytes.as_ref().map(|it| (it.min, it.max)), Some((5, 6)));

        assert_eq!(generated(head, 25).heldout, data.heldout);
        let seeded = format!("{head}\nseed: 1");
        assert_ne!(generated(&seeded, 25).heldout, data.heldout);
        assert_eq!(generated(&format!("{head}\nheldout: {{ share: 0 }}"), 25).heldout, "");
    }

    #[test]
    fn the_lines_are_prompts_with_unique_ids() {
        let data = generated("count: 9\ndeduplicate: { similarity: 0 }", 7);
        let prompts =
            wire::PromptEntry::parse_all((data.train + &data.heldout).as_bytes()).unwrap();
        assert_eq!(prompts.len(), 8);
        assert!(prompts.iter().all(|prompt| prompt.answer.is_some()));
    }
}
