//! Creates a network of namespaces on a bridge, each behind a link of a given rate. It is removed
//! when the value is dropped.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// Burst of the traffic shaper: a few of the largest packets of a virtual link.
const BURST: &str = "256kb";
/// Longest queueing delay in front of a link, as in switches.
const LATENCY: &str = "20ms";

pub(super) struct TestNetwork {
    name: String,
    machines: Vec<String>,
}

impl TestNetwork {
    /// Creates `count` nodes at 10.99.0.1 and following addresses, with links of `mbit` Mbit/s in
    /// both directions.
    pub(super) fn new(count: usize, mbit: u32) -> anyhow::Result<Self> {
        let name = format!("flo{}", std::process::id());
        let mut network = Self { name: name.clone(), machines: Vec::new() };
        let switch = format!("{name}-switch");
        network.add_namespace(&switch)?;
        run_within(&switch, &["ip", "link", "add", "bridge", "type", "bridge"])?;
        run_within(&switch, &["ip", "link", "set", "bridge", "up"])?;
        let rate = format!("{mbit}mbit");
        for index in 1..=count {
            let (machine, port) = (format!("{name}-{index}"), format!("port{index}"));
            network.add_namespace(&machine)?;
            run_command(&[
                "ip", "link", "add", "name", "wire", "netns", &machine, "type", "veth", "peer",
                "name", &port, "netns", &switch,
            ])?;
            run_within(&switch, &["ip", "link", "set", &port, "master", "bridge", "up"])?;
            let address = format!("10.99.0.{index}/24");
            run_within(&machine, &["ip", "address", "add", &address, "dev", "wire"])?;
            for (place, device) in [(&machine, "wire"), (&switch, port.as_str())] {
                let shape = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", &rate];
                let shape = [&shape[..], &["burst", BURST, "latency", LATENCY]].concat();
                run_within(place, &shape)?;
            }
            run_within(&machine, &["ip", "link", "set", "wire", "up"])?;
            run_within(&machine, &["ip", "link", "set", "lo", "up"])?;
        }
        Ok(network)
    }

    fn add_namespace(&mut self, name: &str) -> anyhow::Result<()> {
        run_command(&["ip", "netns", "add", name])?;
        self.machines.push(name.to_owned());
        Ok(())
    }

    pub(super) fn node_ip(index: usize) -> String {
        format!("10.99.0.{index}")
    }

    pub(super) fn command_on(&self, index: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{index}", self.name)]);
        command
    }

    pub(super) fn read_sent_bytes(&self, index: usize) -> anyhow::Result<u64> {
        let path = "/sys/class/net/wire/statistics/tx_bytes";
        let read = self.command_on(index).args(["cat", path]).output().context("run ip")?;
        let text = String::from_utf8_lossy(&read.stdout);
        text.trim().parse().with_context(|| format!("{path} of a machine of the bench's"))
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        for machine in &self.machines {
            // An error needs no handling: failures were reported at creation.
            let _ = run_command(&["ip", "netns", "delete", machine]);
        }
    }
}

fn run_within(machine: &str, command: &[&str]) -> anyhow::Result<()> {
    run_command(&[&["ip", "netns", "exec", machine], command].concat())
}

fn run_command(command: &[&str]) -> anyhow::Result<()> {
    let [program, arguments @ ..] = command else { return Ok(()) };
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("run {program} (Debian's iproute2)"))?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{}: {}", command.join(" "), String::from_utf8_lossy(&output.stderr).trim())
}
