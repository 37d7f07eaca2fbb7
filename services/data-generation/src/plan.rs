//! The plan of a generation: how many samples of which category, and the requests for them.

use std::collections::BTreeMap;

use regex::Regex;
use serde::Serialize;
use serde_json::{Value, json};
use spec::{CategorySpec, GenerationSpec, SeedExample, WritingSampling};
use wire::{Digest, derive_seed, fill_template, v1};

/// Examples that a request for prompts shows.
const EXAMPLES_SHOWN_MAX: usize = 5;
/// Examples with answers that precede a request for an answer, as turns of the conversation.
const ANSWERS_SHOWN_MAX: usize = 4;
/// Characters of an existing prompt that a request for prompts shows.
const KNOWN_CHARS_MAX: usize = 200;

/// A spec, the model that writes, and what follows from both.
#[derive(Debug, Clone)]
pub struct GenerationPlan {
    pub(crate) spec: GenerationSpec,
    model: String,
    /// Wanted samples by category.
    pub(crate) counts: Vec<u32>,
    extract: Option<Regex>,
    verifiers: Vec<v1::Verifier>,
    /// Index of the verifier by category.
    category_verifiers: Vec<Option<usize>>,
}

impl GenerationPlan {
    /// Makes a plan from a checked spec.
    pub fn new(spec: GenerationSpec, model: String) -> Self {
        let mut verifiers: Vec<v1::Verifier> = Vec::new();
        let own = spec.categories.iter().map(|it| it.verify.as_ref().or(spec.verify.as_ref()));
        let category_verifiers = own
            .map(|verifier| {
                let verifier = verifier?.to_proto()?;
                Some(verifiers.iter().position(|it| *it == verifier).unwrap_or_else(|| {
                    verifiers.push(verifier);
                    verifiers.len() - 1
                }))
            })
            .collect();
        let extract = &spec.answers.extract;
        let extract = (!extract.is_empty())
            .then(|| Regex::new(extract).expect("the spec's check compiled the pattern"));
        let counts = spec.category_counts();
        Self { spec, model, counts, extract, verifiers, category_verifiers }
    }

    /// Returns the different verifiers, in the order of their indices.
    pub fn verifiers(&self) -> &[v1::Verifier] {
        &self.verifiers
    }

    pub(crate) fn model_name(&self) -> &str {
        &self.model
    }

    pub(crate) fn verifier_of(&self, category: usize) -> Option<usize> {
        self.category_verifiers[category]
    }

    /// Returns a digest of each part that the requests and the samples depend on. Counts, limits
    /// and the held-out share are not among them: they may change between two commands.
    pub(crate) fn part_digests(&self) -> BTreeMap<String, String> {
        let GenerationSpec { seed, prompts, answers, deduplicate, .. } = &self.spec;
        let mut parts = BTreeMap::from([
            ("the model".to_owned(), digest_part(&self.model)),
            ("seed".to_owned(), digest_part(seed)),
            ("prompts".to_owned(), digest_part(prompts)),
            ("answers".to_owned(), digest_part(answers)),
            ("deduplicate".to_owned(), digest_part(deduplicate)),
        ]);
        for (category, verifier) in self.spec.categories.iter().zip(&self.category_verifiers) {
            let name = &category.name;
            parts.insert(format!("category {name}"), digest_part(category));
            let verifier = verifier.map(|index| &self.verifiers[index]);
            parts.insert(format!("verify of category {name}"), digest_part(&verifier));
        }
        parts
    }

    /// Builds the request for prompts of a category. `known` are prompts that exist already.
    pub(crate) fn prompts_request<'a>(
        &self,
        category: usize,
        request: u32,
        wanted: u32,
        known: impl Iterator<Item = &'a str>,
    ) -> Value {
        let CategorySpec { name, description, seeds, .. } = &self.spec.categories[category];
        // Each request shows the next examples.
        let first = (request as usize * EXAMPLES_SHOWN_MAX) % seeds.len().max(1);
        let shown = seeds.iter().cycle().skip(first).take(seeds.len().min(EXAMPLES_SHOWN_MAX));
        let examples = list_texts(shown.map(|seed| seed.prompt.as_str()), usize::MAX);
        let text = fill_template(
            &self.spec.prompts.template,
            &[
                ("{count}", &wanted.to_string()),
                ("{category}", name),
                ("{description}", description.trim()),
                ("{examples}", &examples),
                ("{known}", &list_texts(known, KNOWN_CHARS_MAX)),
            ],
        );
        let seed = derive_seed(self.spec.seed, &["prompts", name, &request.to_string()]);
        let messages = [json!({ "role": "user", "content": text })];
        self.chat_request(&messages, &self.spec.prompts.sampling, seed)
    }

    /// Builds the request for the answer to a prompt of a category.
    pub(crate) fn answer_request(&self, category: usize, number: u32, prompt: &str) -> Value {
        let CategorySpec { name, description, seeds, .. } = &self.spec.categories[category];
        let answers = &self.spec.answers;
        let ask = |prompt: &str| {
            let values = [
                ("{prompt}", prompt),
                ("{category}", name.as_str()),
                ("{description}", description.trim()),
            ];
            json!({ "role": "user", "content": fill_template(&answers.template, &values) })
        };
        let mut messages = Vec::new();
        if !answers.system.is_empty() {
            messages.push(json!({ "role": "system", "content": answers.system }));
        }
        let answered = |seed: &SeedExample| {
            let answer = json!({ "role": "assistant", "content": seed.answer.as_ref()? });
            Some([ask(&seed.prompt), answer])
        };
        messages.extend(seeds.iter().filter_map(answered).take(ANSWERS_SHOWN_MAX).flatten());
        messages.push(ask(prompt));
        let seed = derive_seed(self.spec.seed, &["answer", name, &number.to_string()]);
        self.chat_request(&messages, &answers.sampling, seed)
    }

    fn chat_request(&self, messages: &[Value], sampling: &WritingSampling, seed: u64) -> Value {
        json!({
            "model": self.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            // Some servers read a signed number of 32 bits.
            "seed": seed >> 33,
            "stream": false,
        })
    }

    /// Returns the final answer in a completion; `None` if the pattern finds none.
    pub(crate) fn extract_answer(&self, completion: &str) -> Option<String> {
        let Some(pattern) = &self.extract else { return Some(completion.to_owned()) };
        let found = pattern.captures_iter(completion).last()?;
        let answer = found.get(1)?.as_str().trim();
        (!answer.is_empty()).then(|| answer.to_owned())
    }

    /// Returns true if an answer begins as a refusal does.
    pub(crate) fn is_refusal(&self, completion: &str) -> bool {
        let beginning = |text: &str, length: usize| -> String {
            text.trim().replace('’', "'").to_lowercase().chars().take(length).collect()
        };
        self.spec.answers.refusals.iter().any(|refusal| {
            let refusal = beginning(refusal, usize::MAX);
            beginning(completion, refusal.chars().count()) == refusal
        })
    }
}

fn digest_part(part: &impl Serialize) -> String {
    let bytes = serde_json::to_vec(part).expect("a spec is JSON");
    Digest::hash_bytes(&bytes).to_string()
}

/// Writes one text per line; `(none)` without texts.
fn list_texts<'a>(texts: impl Iterator<Item = &'a str>, chars_max: usize) -> String {
    let lines: Vec<String> = texts
        .map(|text| {
            let line: String = text.trim().chars().take(chars_max).collect();
            format!("- {}", line.replace('\n', "\n  "))
        })
        .collect();
    if lines.is_empty() { "(none)".to_owned() } else { lines.join("\n") }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan(yaml: &str) -> GenerationPlan {
        GenerationPlan::new(GenerationSpec::parse(yaml).unwrap(), "m".to_owned())
    }

    const SPEC: &str = r#"
count: 4
answers: { system: Short., extract: '#### (.+)' }
categories:
  - name: sums
    description: Addition.
    verify: { regex: { pattern: '####' } }
    seeds:
      - { prompt: '1+1?', answer: '2\n#### 2' }
      - { prompt: '{count}' }
  - name: words
    verify: { regex: { pattern: '####' } }
"#;

    #[test]
    fn a_request_has_the_examples_and_the_prompts_that_exist() {
        let plan = plan(SPEC);
        let request = plan.prompts_request(0, 0, 7, ["a\nb"].into_iter());
        let text = request["messages"][0]["content"].as_str().unwrap();
        for part in
            ["Write 7 different", "\"sums\". Addition.", "- 1+1?\n- {count}\n", "- a\n  b\n"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!((&request["model"], &request["stream"]), (&json!("m"), &json!(false)));
        assert!(request["seed"].as_u64().unwrap() < 1 << 31);
        assert_ne!(request["seed"], plan.prompts_request(0, 1, 7, std::iter::empty())["seed"]);
        let none = plan.prompts_request(1, 3, 7, std::iter::empty())["messages"].to_string();
        assert!(none.contains("Examples:\\n(none)"), "{none}");

        let request = plan.answer_request(0, 1, "3+4?");
        let roles: Vec<&str> = request["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| message["role"].as_str().unwrap())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!(request["messages"][3]["content"], "3+4?");
    }

    #[test]
    fn the_answer_is_the_last_match_and_refusals_are_known_by_their_beginning() {
        let plan = plan(SPEC);
        assert_eq!(plan.extract_answer("#### 1\nno\n####  7 "), Some("7".to_owned()));
        assert_eq!(plan.extract_answer("7"), None);
        assert!(plan.is_refusal(" i’m SORRY, no") && !plan.is_refusal("You say I'm sorry"));
    }

    #[test]
    fn equal_verifiers_are_one_and_only_parts_that_samples_depend_on_are_compared() {
        let plan_of = |from: &str, to: &str| plan(&SPEC.replace(from, to));
        let parts = plan_of("", "").part_digests();
        assert_eq!(plan_of("", "").verifiers().len(), 1);
        let changed = |from: &str, to: &str| -> Vec<String> {
            let now = plan_of(from, to).part_digests();
            parts
                .iter()
                .filter(|(name, it)| now.get(*name) != Some(it))
                .map(|it| it.0.clone())
                .collect()
        };
        assert_eq!(changed("count: 4", "count: 9\nheldout: {share: 0.2}"), [""; 0]);
        assert_eq!(changed("Short.", "Long."), ["answers"]);
        assert_eq!(changed("Addition.", "Sums."), ["category sums"]);
        assert_eq!(
            changed("  - name: words\n", "  - name: terms\n"),
            ["category words", "verify of category words"]
        );
    }
}
