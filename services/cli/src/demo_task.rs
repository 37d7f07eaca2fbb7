//! The built-in task: sums with written steps, which a tiny model learns within a minute.

mod run_files;
mod sums;

pub use self::{
    run_files::{BaseRunFiles, RaftRunFiles},
    sums::DigitCount,
};
