//! Fleets of real processes for tests. Each runs `flotilla up` in its own directory on free ports,
//! ends with its test, and is used through the command line. Helpers panic if a step fails.

mod bus_proxy;
mod client;
mod cluster;
mod command;
mod disk;
mod ended;
mod fact_reader;
mod fake_box;
mod files;
mod fleet;
mod hosts;
pub mod journal;
mod lan;
mod llama;
mod member;
mod misbehaving;
pub mod nats;
pub mod pages;
mod processes;
mod python;
mod random;
mod reference;
mod report;
mod scripts;
mod storm;
mod systemd;
mod terminal;
mod wait;

pub use bus_proxy::{BusProxy, Withheld};
pub use client::{Client, find_logs};
pub use cluster::Cluster;
pub use command::{Output, program_path, run_flotilla};
pub use disk::{FullDisk, SmallDisk};
pub use ended::{ChildGuard, GroupGuard};
pub use fact_reader::FactReader;
pub use fake_box::FakeBox;
pub use files::{Sampling, SpecFiles};
pub use fleet::Fleet;
pub use hosts::OtherHost;
pub use lan::{Host, Lan};
pub use llama::{
    find_llama_cpp, find_llama_cpp_with_vulkan, start_llama_generator, write_llama_cpp,
};
pub use member::Member;
pub use misbehaving::{FaultyWorkers, WorkerFault};
pub use nats::NatsServer;
pub use processes::Process;
pub use python::{PythonEnv, ScriptSession, client_directory};
pub use random::Random;
pub use reference::ReferenceResults;
pub use report::ChaosEvidence;
pub use scripts::{write_executable, write_script};
pub use storm::{FaultInjector, InjectedFault, ProcessKind, unix_time_s};
pub use systemd::Systemd;
pub use terminal::Terminal;
pub use wait::wait_until;
