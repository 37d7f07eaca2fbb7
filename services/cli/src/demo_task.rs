//! The built-in task: sums with written steps, which a tiny model learns within a minute.

mod loop_files;
mod run_files;
mod sums;

pub use self::{
    loop_files::LoopFiles,
    run_files::{BaseRunFiles, RaftRunFiles},
    sums::DigitCount,
};
