//! The choice of the prompts that a cycle samples, and the number of samples of each.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::cycle_schedule::CycleSchedule;
use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};

/// The choice of the prompts of a cycle, and of the number of samples of each. Needs a verifier.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CurriculumSpec {
    /// A preference for prompts of a certain pass rate. Needs `raft.prompts_per_cycle`.
    pub difficulty: Option<DifficultySpec>,
    /// More samples for prompts with an uncertain outcome.
    pub budget: Option<BudgetSpec>,
}

/// A preference for prompts whose pass rate is closest to a target.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DifficultySpec {
    /// The preferred pass rate.
    #[schemars(extend("minimum" = 0.0, "maximum" = 1.0))]
    pub target: CycleSchedule,
    /// Share of prompts that are taken in turn, regardless of their pass rate.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub explore: f64,
}

/// A distribution of samples that favours prompts with an uncertain outcome, with bounds for each
/// prompt.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetSpec {
    /// Fewest samples of a prompt, at most `raft.samples_per_prompt`.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 4096))]
    pub min: u32,
    /// Largest number of samples of a prompt, at least `raft.samples_per_prompt`.
    #[schemars(range(min = 1, max = 4096))]
    pub max: u32,
}

fn one() -> u32 {
    1
}

impl Default for DifficultySpec {
    fn default() -> Self {
        Self { target: CycleSchedule::Constant(0.5), explore: 0.2 }
    }
}

impl CurriculumSpec {
    /// Converts the section to its form in the `spec` fact, for a run of `cycles` cycles.
    pub fn to_proto(&self, cycles: u32) -> v1::Curriculum {
        let difficulty = self.difficulty.as_ref().map(|spec| {
            let values = spec.target.cycle_values(cycles);
            let target = if values.is_empty() { vec![spec.target.first_value()] } else { values };
            v1::curriculum::Difficulty { target, explore: spec.explore }
        });
        let budget = self.budget.map(|BudgetSpec { min, max }| v1::curriculum::Budget { min, max });
        v1::Curriculum { difficulty, budget }
    }

    /// `prompts` is the number of prompts in a cycle (0: all of them), and `samples` is the number
    /// of samples of each.
    pub(crate) fn check_fields(
        &self,
        section: &str,
        cycles: u32,
        prompts: u32,
        samples: u32,
    ) -> FieldResult {
        let field = |name: &str| format!("{section}.{name}");
        if let Some(difficulty) = &self.difficulty {
            let remedy = "chooses among prompts; set raft.prompts_per_cycle below their number";
            ensure_field(prompts > 0, &field("difficulty"), remedy)?;
            difficulty.target.check_range(&field("difficulty.target"), cycles, 0.0, 1.0)?;
            check_range(&field("difficulty.explore"), difficulty.explore, 0.0, 1.0)?;
        }
        if let Some(budget) = &self.budget {
            check_count(&field("budget.min"), budget.min, 1, samples)?;
            check_count(&field("budget.max"), budget.max, samples, 4096)?;
            let most = u64::from(prompts) * u64::from(samples);
            let remedy =
                format!("shares out at most {} samples a cycle", cycle::BUDGET_SAMPLES_MAX);
            ensure_field(most <= cycle::BUDGET_SAMPLES_MAX, &field("budget"), remedy)?;
        }
        Ok(())
    }
}
