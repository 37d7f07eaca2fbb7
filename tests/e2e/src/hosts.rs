//! Another host: a network namespace behind a cable that can be pulled.

use std::{net::Ipv4Addr, process::Command};

use crate::command::done;

/// This machine at one end of a veth pair, a namespace at the other.
pub struct OtherHost {
    name: String,
    cable: String,
    here: Ipv4Addr,
}

impl OtherHost {
    /// `None`, with a word on stdout, where this needs rights or tools that are not there.
    pub fn connect() -> Option<Self> {
        let id = std::process::id();
        let third = u8::try_from(id % 250).expect("below 250");
        let here = Ipv4Addr::new(10, 213, third, 1);
        let host = Self { name: format!("flotilla-{id}"), cable: format!("fl{id}"), here };
        let (name, cable, far) = (&*host.name, &*host.cable, format!("{}b", host.cable));
        let (here, there) = (format!("{here}/24"), format!("10.213.{third}.2/24"));
        let steps: [&[&str]; 8] = [
            &["netns", "add", name],
            &["link", "add", cable, "type", "veth", "peer", "name", &far],
            &["link", "set", &far, "netns", name],
            &["addr", "add", &here, "dev", cable],
            &["link", "set", cable, "up"],
            &["-n", name, "addr", "add", &there, "dev", &far],
            &["-n", name, "link", "set", &far, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ];
        for step in steps {
            if let Err(why) = run("ip", step) {
                println!("skipped: {why}");
                return None;
            }
        }
        Some(host)
    }

    /// Our own end of the cable.
    pub fn here(&self) -> Ipv4Addr {
        self.here
    }

    /// What goes before a program that is to run there.
    pub fn on(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.name].map(str::to_owned).to_vec()
    }

    /// Pulls the cable: nothing arrives, and nobody is told.
    ///
    /// # Panics
    /// When it cannot be pulled.
    pub fn pull(&self) {
        run("ip", &["link", "set", &self.cable, "down"]).expect("the cable can be pulled");
    }

    /// # Panics
    /// When it cannot be plugged in.
    pub fn plug(&self) {
        run("ip", &["link", "set", &self.cable, "up"]).expect("the cable can be plugged in");
    }

    /// From now on this share of packets is lost on the way there; 0 ends it. False, with a
    /// word on stdout, where the kernel cannot.
    pub fn lose(&self, percent: u32) -> bool {
        let loss = format!("{percent}%");
        let rule = ["qdisc", "replace", "dev", &self.cable, "root", "netem", "loss", &loss];
        run("tc", &rule).inspect_err(|why| println!("skipped: {why}")).is_ok()
    }
}

impl Drop for OtherHost {
    fn drop(&mut self) {
        // The other end goes with its namespace, unless it never got there.
        let _ = run("ip", &["netns", "del", &self.name]);
        let _ = run("ip", &["link", "del", &self.cable]);
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    done(Command::new(program).args(arguments))
}
