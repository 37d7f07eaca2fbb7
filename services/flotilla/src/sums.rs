//! The built-in tasks: sums with written work, on which a tiny model gets better within a minute.

mod specs;
mod task;

pub(crate) use self::{
    specs::{Base, Raft},
    task::Digits,
};
