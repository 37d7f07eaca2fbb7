//! Fleets of real processes for tests: `flotilla up` in a directory of its own, on free
//! ports, ended with the test. Talks to them as a user does: by the command line.

mod client;
mod cluster;
mod command;
mod disk;
mod ended;
mod fake_box;
mod files;
mod fleet;
mod hosts;
pub mod journal;
mod llama;
mod member;
mod misbehaving;
pub mod nats;
mod processes;
mod python;
mod random;
mod reference;
mod report;
mod storm;
mod systemd;
mod wait;

pub use client::Client;
pub use cluster::Cluster;
pub use command::{Output, binary, flotilla};
pub use disk::SmallDisk;
pub use ended::Ended;
pub use fake_box::FakeBox;
pub use files::{Files, Sampling};
pub use fleet::Fleet;
pub use hosts::OtherHost;
pub use llama::{llama_cpp, llama_generator};
pub use member::Member;
pub use misbehaving::{Fate, Misbehaving};
pub use nats::NatsServer;
pub use processes::Process;
pub use python::Python;
pub use random::Random;
pub use reference::Undisturbed;
pub use report::Evidence;
pub use storm::{Kind, Storm, Strike};
pub use systemd::Systemd;
pub use wait::until;
