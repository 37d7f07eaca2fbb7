//! Machines of a network of their own: namespaces on a bridge, each behind a link of a given rate.
//! All of it goes away with the value.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// What a shaper lets through at once: a few of the largest packets that a virtual link carries.
const BURST: &str = "256kb";
/// As much waits in front of a link as switches keep.
const LATENCY: &str = "20ms";

pub(super) struct Network {
    name: String,
    machines: Vec<String>,
}

impl Network {
    /// So many machines at 10.99.0.1 and on, with links of so many megabits a second, both ways.
    pub(super) fn new(count: usize, mbit: u32) -> anyhow::Result<Self> {
        let name = format!("flo{}", std::process::id());
        let mut network = Self { name: name.clone(), machines: Vec::new() };
        let switch = format!("{name}-switch");
        network.machine(&switch)?;
        within(&switch, &["ip", "link", "add", "bridge", "type", "bridge"])?;
        within(&switch, &["ip", "link", "set", "bridge", "up"])?;
        let rate = format!("{mbit}mbit");
        for index in 1..=count {
            let (machine, port) = (format!("{name}-{index}"), format!("port{index}"));
            network.machine(&machine)?;
            run(&[
                "ip", "link", "add", "name", "wire", "netns", &machine, "type", "veth", "peer",
                "name", &port, "netns", &switch,
            ])?;
            within(&switch, &["ip", "link", "set", &port, "master", "bridge", "up"])?;
            let address = format!("10.99.0.{index}/24");
            within(&machine, &["ip", "address", "add", &address, "dev", "wire"])?;
            for (place, device) in [(&machine, "wire"), (&switch, port.as_str())] {
                let shape = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", &rate];
                let shape = [&shape[..], &["burst", BURST, "latency", LATENCY]].concat();
                within(place, &shape)?;
            }
            within(&machine, &["ip", "link", "set", "wire", "up"])?;
            within(&machine, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(network)
    }

    fn machine(&mut self, name: &str) -> anyhow::Result<()> {
        run(&["ip", "netns", "add", name])?;
        self.machines.push(name.to_owned());
        Ok(())
    }

    pub(super) fn address(index: usize) -> String {
        format!("10.99.0.{index}")
    }

    /// What runs a program on that machine.
    pub(super) fn on(&self, index: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{index}", self.name)]);
        command
    }

    /// Bytes that a machine has sent, as its link counts them.
    pub(super) fn sent(&self, index: usize) -> anyhow::Result<u64> {
        let path = "/sys/class/net/wire/statistics/tx_bytes";
        let read = self.on(index).args(["cat", path]).output().context("run ip")?;
        let text = String::from_utf8_lossy(&read.stdout);
        text.trim().parse().with_context(|| format!("{path} of a machine of the bench's"))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for machine in &self.machines {
            // What cannot be removed was said when it was made.
            let _ = run(&["ip", "netns", "delete", machine]);
        }
    }
}

fn within(machine: &str, command: &[&str]) -> anyhow::Result<()> {
    run(&[&["ip", "netns", "exec", machine], command].concat())
}

fn run(command: &[&str]) -> anyhow::Result<()> {
    let [program, arguments @ ..] = command else { return Ok(()) };
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("run {program} (Debian's iproute2)"))?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{}: {}", command.join(" "), String::from_utf8_lossy(&output.stderr).trim())
}
