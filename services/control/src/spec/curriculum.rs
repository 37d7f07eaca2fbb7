//! How a spec says which prompts a cycle samples, and how often.

use serde::Deserialize;
use wire::v1;

use super::curve::Curve;
use crate::check::{Checked, count, ensure, within};

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CurriculumSpec {
    pub difficulty: Option<DifficultySpec>,
    pub budget: Option<BudgetSpec>,
}

/// Prompts whose pass rate is closest to a target.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DifficultySpec {
    /// A pass rate.
    pub target: Curve,
    /// The share of prompts taken by turns.
    pub explore: f64,
}

/// More samples of prompts whose outcome is uncertain, of each at least and at most so many.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetSpec {
    #[serde(default = "one")]
    pub min: u32,
    pub max: u32,
}

fn one() -> u32 {
    1
}

impl Default for DifficultySpec {
    fn default() -> Self {
        Self { target: Curve::Constant(0.5), explore: 0.2 }
    }
}

impl CurriculumSpec {
    pub(crate) fn resolve(&self, cycles: u32) -> v1::Curriculum {
        let difficulty = self.difficulty.as_ref().map(|spec| {
            let values = spec.target.values(cycles);
            let target = if values.is_empty() { vec![spec.target.first()] } else { values };
            v1::curriculum::Difficulty { target, explore: spec.explore }
        });
        let budget = self.budget.map(|BudgetSpec { min, max }| v1::curriculum::Budget { min, max });
        v1::Curriculum { difficulty, budget }
    }

    /// A run draws `samples` of each of `prompts` prompts a cycle; 0: of all.
    pub(crate) fn check(&self, section: &str, cycles: u32, prompts: u32, samples: u32) -> Checked {
        let field = |name: &str| format!("{section}.{name}");
        if let Some(difficulty) = &self.difficulty {
            let remedy = "chooses among prompts; set raft.prompts_per_cycle below their number";
            ensure(prompts > 0, &field("difficulty"), remedy)?;
            difficulty.target.check(&field("difficulty.target"), cycles, 0.0, 1.0)?;
            within(&field("difficulty.explore"), difficulty.explore, 0.0, 1.0)?;
        }
        if let Some(budget) = &self.budget {
            count(&field("budget.min"), budget.min, 1, samples)?;
            count(&field("budget.max"), budget.max, samples, 4096)?;
            let most = u64::from(prompts) * u64::from(samples);
            let remedy =
                format!("shares out at most {} samples a cycle", cycle::BUDGET_SAMPLES_MAX);
            ensure(most <= cycle::BUDGET_SAMPLES_MAX, &field("budget"), remedy)?;
        }
        Ok(())
    }
}
