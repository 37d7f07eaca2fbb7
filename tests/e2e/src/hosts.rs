//! Another host: a network namespace with a link that can be cut.

use std::{net::Ipv4Addr, process::Command};

use requirements::skip_test;

use crate::{command::run_checked, lan::skip_network_test};

/// A network namespace that is connected to this machine by a veth pair.
pub struct OtherHost {
    name: String,
    link: String,
    local: Ipv4Addr,
}

impl OtherHost {
    /// Creates the host. Records this test as skipped and returns `None` without the rights or the
    /// tools.
    pub fn connect() -> Option<Self> {
        let id = std::process::id();
        let third = u8::try_from(id % 250).expect("below 250");
        let local = Ipv4Addr::new(10, 213, third, 1);
        let host = Self { name: format!("flotilla-{id}"), link: format!("fl{id}"), local };
        let (name, link, far) = (&*host.name, &*host.link, format!("{}b", host.link));
        let (local, remote) = (format!("{local}/24"), format!("10.213.{third}.2/24"));
        let steps: [&[&str]; 8] = [
            &["netns", "add", name],
            &["link", "add", link, "type", "veth", "peer", "name", &far],
            &["link", "set", &far, "netns", name],
            &["addr", "add", &local, "dev", link],
            &["link", "set", link, "up"],
            &["-n", name, "addr", "add", &remote, "dev", &far],
            &["-n", name, "link", "set", &far, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ];
        for step in steps {
            if let Err(why) = run("ip", step) {
                skip_network_test(&why);
                return None;
            }
        }
        Some(host)
    }

    /// Returns the address of this machine on the link.
    pub fn local_address(&self) -> Ipv4Addr {
        self.local
    }

    /// Returns the words before a program that is to run on that host.
    pub fn command_prefix(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.name].map(str::to_owned).to_vec()
    }

    /// Takes the link down. Packets are dropped and connections stay open.
    pub fn cut_link(&self) {
        run("ip", &["link", "set", &self.link, "down"]).expect("the cable can be pulled");
    }

    pub fn restore_link(&self) {
        run("ip", &["link", "set", &self.link, "up"]).expect("the cable can be plugged in");
    }

    /// Drops this share of the packets to the host. Records a skipped part of this test and returns
    /// false if the kernel does not support it.
    pub fn set_packet_loss(&self, percent: u32) -> bool {
        let loss = format!("{percent}%");
        let rule = ["qdisc", "replace", "dev", &self.link, "root", "netem", "loss", &loss];
        let remedy = |why: &String| format!("load the kernel's module sch_netem: {why}");
        run("tc", &rule).inspect_err(|why| skip_test("netem", &remedy(why))).is_ok()
    }
}

impl Drop for OtherHost {
    fn drop(&mut self) {
        // The other end is deleted with its namespace if it was moved there.
        let _ = run("ip", &["netns", "del", &self.name]);
        let _ = run("ip", &["link", "del", &self.link]);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    run_checked(Command::new(program).args(arguments))
}
