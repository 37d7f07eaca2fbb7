//! A network of hosts: each has a name, an address, a directory and processes of its own, and knows
//! the others by `/etc/hosts`. They are namespaces of this machine on one bridge.

use std::{
    fs::{self, File},
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::{command::done, until};

/// A switch in a network of its own, where no firewall of this machine is in the way, and hosts.
pub struct Lan {
    here: Ipv4Addr,
    cables: String,
    hosts: Vec<Host>,
    etc: PathBuf,
    switch: Namespace,
}

/// Ends, with all that runs there, when it is dropped.
pub struct Host {
    name: String,
    address: Ipv4Addr,
    home: PathBuf,
    space: Namespace,
}

/// The first process of some namespaces: all others there end with it.
struct Namespace {
    unshare: Child,
    first: u32,
}

impl Lan {
    /// Hosts of these names with their homes in a directory. The first sees the homes of the others, as
    /// by a mount; its own they do not see. `None`, with a word on stdout, where
    /// this needs rights or tools that are not there.
    ///
    /// # Panics
    /// When the directory cannot be written.
    pub fn of(names: &[&str], directory: &Path) -> Option<Self> {
        let made = Self::lay(directory, names).and_then(|mut lan| {
            for (n, name) in names.iter().enumerate() {
                lan.host(name, directory.join(name), n)?;
            }
            Ok(lan)
        });
        made.inspect_err(|why| println!("skipped: {why}")).ok()
    }

    /// This machine's own address on it; the hosts know it as `s3`.
    pub fn here(&self) -> Ipv4Addr {
        self.here
    }

    /// # Panics
    /// When there is none of this name.
    pub fn on(&self, name: &str) -> &Host {
        let host = self.hosts.iter().find(|host| host.name == name);
        host.unwrap_or_else(|| panic!("there is no host {name}"))
    }

    fn lay(directory: &Path, names: &[&str]) -> Result<Self, String> {
        let id = std::process::id();
        let third = u8::try_from(id % 250).expect("below 250");
        let here = Ipv4Addr::new(10, 214, third, 1);
        let etc = directory.join("hosts");
        let hosts = names.iter().enumerate().map(|(n, name)| format!("{} {name}\n", nth(here, n)));
        let hosts: String = hosts.collect();
        let text = format!("127.0.0.1 localhost\n{here} s3\n{hosts}");
        fs::write(&etc, text).expect("a file");
        let switch = Namespace::new("exec sleep 3600", &[])?;
        switch.ip(&["link", "add", "lan", "type", "bridge"])?;
        switch.ip(&["link", "set", "lan", "up"])?;
        let lan = Self { here, cables: format!("fl{id}"), hosts: Vec::new(), etc, switch };
        let own = lan.cable("s", None)?;
        ip(&["addr", "add", &format!("{here}/24"), "dev", &own])?;
        ip(&["link", "set", &own, "up"])?;
        Ok(lan)
    }

    /// From the switch to a namespace, or to this machine: the name of that end.
    fn cable(&self, name: &str, to: Option<&Namespace>) -> Result<String, String> {
        let (near, far) = (format!("{}{name}a", self.cables), format!("{}{name}b", self.cables));
        ip(&["link", "add", &near, "type", "veth", "peer", "name", &far])?;
        ip(&["link", "set", &near, "netns", &self.switch.first.to_string()])?;
        self.switch.ip(&["link", "set", &near, "master", "lan", "up"])?;
        if let Some(to) = to {
            ip(&["link", "set", &far, "netns", &to.first.to_string()])?;
        }
        Ok(far)
    }

    fn host(&mut self, name: &str, home: PathBuf, n: usize) -> Result<(), String> {
        fs::create_dir_all(&home).expect("a directory");
        let script = "hostname \"$0\" && mount --bind \"$1\" /etc/hosts && \
                      if [ $# = 2 ]; then mount -t tmpfs none \"$2\"; fi && exec sleep 3600";
        let etc = self.etc.display().to_string();
        let hidden = self.hosts.first().map(|first| first.home.display().to_string());
        let arguments = [Some(name), Some(&*etc), hidden.as_deref()];
        let space = Namespace::new(script, &arguments.into_iter().flatten().collect::<Vec<_>>())?;
        let cable = self.cable(&n.to_string(), Some(&space))?;
        let address = nth(self.here, n);
        space.ip(&["link", "set", "lo", "up"])?;
        space.ip(&["addr", "add", &format!("{address}/24"), "dev", &cable])?;
        space.ip(&["link", "set", &cable, "up"])?;
        self.hosts.push(Host { name: name.to_owned(), address, home, space });
        Ok(())
    }
}

/// The n-th address behind one.
fn nth(first: Ipv4Addr, n: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(first) + 1 + u32::try_from(n).expect("a handful of hosts"))
}

impl Namespace {
    fn new(script: &str, arguments: &[&str]) -> Result<Self, String> {
        let mut unshare = Command::new("unshare")
            .args(["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["sh", "-c", script])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let parent = unshare.id();
        // It is ready when it sleeps.
        let first = until("a namespace", Duration::from_secs(10), || {
            if unshare.try_wait().expect("it can be asked").is_some() {
                return Some(None);
            }
            let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
            let first: u32 = children.ok()?.split_whitespace().next()?.parse().ok()?;
            let name = fs::read_to_string(format!("/proc/{first}/comm")).ok()?;
            (name.trim() == "sleep").then_some(Some(first))
        });
        let first = first.ok_or("unshare: not permitted here")?;
        Ok(Self { unshare, first })
    }

    /// What runs a program there.
    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.first))
            .args(["--net", "--mount", "--uts", "--pid"]);
        command
    }

    fn ip(&self, arguments: &[&str]) -> Result<(), String> {
        done(self.enter().args(["--", "ip"]).args(arguments))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

impl Host {
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its directory, where commands run.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// A program there.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.space.enter();
        command.arg(format!("--wdns={}", self.home.display())).arg("--").arg(program);
        command.env("HOME", &self.home).stdin(Stdio::null());
        command
    }

    /// A shell's script there that goes on, until the host ends. What it says is in a file.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&self, prepare: impl FnOnce(&mut Command), said: &Path) -> io::Result<Child> {
        let mut command = self.command("bash");
        prepare(&mut command);
        let said = File::create(said)?;
        command.stdout(said.try_clone()?).stderr(said).spawn()
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    done(Command::new("ip").args(arguments))
}
