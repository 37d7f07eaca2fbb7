//! Verifiers that run what a model wrote. Everything runs in a sandbox; a box without one judges
//! by other means only.

mod cases;
mod compile;
mod limits;
mod native;
mod output;
mod pytest;
mod python;
mod report;
mod shop;
mod stdio;

pub(crate) use self::{
    compile::Compile,
    pytest::Pytest,
    python::Python,
    shop::{Desk, Shop},
    stdio::Stdio,
};
