//! The report on a generation: counts and lengths by category.

use serde::Serialize;
use wire::v1::data_file::Lengths;

/// The samples of a category.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CategoryReport {
    pub category: String,
    pub wanted: u32,
    /// Prompts that the model was asked for.
    pub asked: u32,
    /// Prompts in its answers.
    pub written: u32,
    pub duplicates: u32,
    /// Answers that refuse, are cut off, or cannot be read.
    pub unusable: u32,
    /// Samples that the verifier failed.
    pub failed: u32,
    /// Samples with which the verifier itself failed.
    pub verifier_errors: u32,
    /// In both files.
    pub kept: usize,
    pub heldout: usize,
    pub prompt_bytes: Option<Lengths>,
    pub completion_bytes: Option<Lengths>,
}

/// The result of a generation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GenerationReport {
    pub model: String,
    pub categories: Vec<CategoryReport>,
    /// Requests and tokens of this and earlier commands.
    pub requests: u32,
    pub tokens: u64,
    /// The limit that was reached before all samples were there.
    pub stopped: Option<String>,
}

impl GenerationReport {
    /// Headings of a table; `>` marks numbers.
    pub const HEADINGS: [&str; 11] = [
        "category",
        ">wanted",
        ">asked",
        ">written",
        ">duplicate",
        ">unusable",
        ">failed",
        ">kept",
        ">held out",
        ">prompt bytes",
        ">answer bytes",
    ];

    /// Returns the numbers of kept and of wanted samples.
    pub fn count_samples(&self) -> (usize, usize) {
        let kept = self.categories.iter().map(|it| it.kept).sum();
        (kept, self.categories.iter().map(|it| it.wanted as usize).sum())
    }

    /// Returns a row for each category and one for all. Lengths are medians; errors of the verifier
    /// are counted as failed.
    pub fn table_rows(&self) -> Vec<[String; 11]> {
        let rows = self.categories.iter().map(|it| {
            let counts = Self::count_columns(&[it]);
            let median = |lengths: Option<&Lengths>| {
                lengths.map_or("-".to_owned(), |lengths| lengths.median.to_string())
            };
            let lengths = [it.prompt_bytes.as_ref(), it.completion_bytes.as_ref()].map(median);
            Self::join_row(&it.category, counts, lengths)
        });
        let all: Vec<&CategoryReport> = self.categories.iter().collect();
        let total = Self::join_row("all", Self::count_columns(&all), ["-", "-"].map(str::to_owned));
        rows.chain([total]).collect()
    }

    fn count_columns(categories: &[&CategoryReport]) -> [u64; 8] {
        let sum = |count: fn(&CategoryReport) -> u64| -> u64 {
            categories.iter().map(|category| count(category)).sum()
        };
        [
            sum(|it| it.wanted.into()),
            sum(|it| it.asked.into()),
            sum(|it| it.written.into()),
            sum(|it| it.duplicates.into()),
            sum(|it| it.unusable.into()),
            sum(|it| u64::from(it.failed) + u64::from(it.verifier_errors)),
            sum(|it| it.kept as u64),
            sum(|it| it.heldout as u64),
        ]
    }

    fn join_row(name: &str, counts: [u64; 8], lengths: [String; 2]) -> [String; 11] {
        let [wanted, asked, written, duplicate, unusable, failed, kept, heldout] =
            counts.map(|count| count.to_string());
        let [prompt, answer] = lengths;
        [
            name.to_owned(),
            wanted,
            asked,
            written,
            duplicate,
            unusable,
            failed,
            kept,
            heldout,
            prompt,
            answer,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_category_and_their_sum() {
        let category = |name: &str, kept| CategoryReport {
            category: name.to_owned(),
            wanted: 10,
            asked: 20,
            written: 19,
            duplicates: 3,
            unusable: 2,
            failed: 4,
            verifier_errors: 1,
            kept,
            heldout: 1,
            prompt_bytes: Lengths::measure([3, 5, 9].into_iter()),
            completion_bytes: None,
        };
        let report = GenerationReport {
            model: "m".to_owned(),
            categories: vec![category("a", 9), category("b", 8)],
            requests: 7,
            tokens: 99,
            stopped: None,
        };
        let rows: Vec<String> = report.table_rows().iter().map(|row| row.join(" ")).collect();
        assert_eq!(rows[0], "a 10 20 19 3 2 5 9 1 5 -");
        assert_eq!(rows[2], "all 20 40 38 6 4 10 17 2 - -");
        assert_eq!(report.count_samples(), (17, 20));
    }
}
