//! Verifiers that run programs that a model wrote. Every program runs in a sandbox; a host without
//! a sandbox cannot use these verifiers.

mod build;
mod cases;
mod compile;
mod harness_report;
mod limits;
mod output_match;
mod pytest;
mod python;
mod sandbox_pool;
mod stdio;

pub(crate) use self::{
    compile::CompileVerifier,
    harness_report::describe_end,
    pytest::PytestVerifier,
    python::PythonVerifier,
    sandbox_pool::{SandboxPool, SandboxSlot},
    stdio::StdioVerifier,
};
