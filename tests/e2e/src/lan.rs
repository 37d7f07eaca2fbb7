//! A network of hosts with their own names, addresses, directories and processes. The hosts are
//! namespaces of this machine on one bridge and find each other through `/etc/hosts`.

use std::{
    fs::{self, File},
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use requirements::skip_test;

use crate::{command::run_checked, wait_until};

/// Hosts on one bridge. The bridge has its own network namespace, away from the firewall of this
/// machine.
pub struct Lan {
    here: Ipv4Addr,
    link_prefix: String,
    hosts: Vec<Host>,
    etc: PathBuf,
    bridge: Namespace,
}

/// A host. Its processes end when it is dropped.
pub struct Host {
    name: String,
    address: Ipv4Addr,
    home: PathBuf,
    namespace: Namespace,
}

/// A set of namespaces and its first process. All other processes there end with the first.
struct Namespace {
    unshare: Child,
    first: u32,
}

impl Lan {
    /// Creates hosts with home directories below `directory`. The first host sees the homes of the
    /// others, as through a mount; the others do not see the home of the first. Records this test
    /// as skipped and returns `None` without the rights or the tools.
    pub fn create(names: &[&str], directory: &Path) -> Option<Self> {
        let created = Self::create_bridge(directory, names).and_then(|mut lan| {
            for (n, name) in names.iter().enumerate() {
                lan.add_host(name, directory.join(name), n)?;
            }
            Ok(lan)
        });
        created.inspect_err(|why| skip_network_test(why)).ok()
    }

    /// Returns the address of this machine in the network. The hosts know it as `s3`.
    pub fn local_address(&self) -> Ipv4Addr {
        self.here
    }

    pub fn host(&self, name: &str) -> &Host {
        let host = self.hosts.iter().find(|host| host.name == name);
        host.unwrap_or_else(|| panic!("there is no host {name}"))
    }

    fn create_bridge(directory: &Path, names: &[&str]) -> Result<Self, String> {
        let id = std::process::id();
        let third = u8::try_from(id % 250).expect("below 250");
        let here = Ipv4Addr::new(10, 214, third, 1);
        let etc = directory.join("hosts");
        let hosts =
            names.iter().enumerate().map(|(n, name)| format!("{} {name}\n", nth_address(here, n)));
        let hosts: String = hosts.collect();
        let text = format!("127.0.0.1 localhost\n{here} s3\n{hosts}");
        fs::write(&etc, text).expect("a file");
        let bridge = Namespace::new("exec sleep 3600", &[])?;
        bridge.run_ip(&["link", "add", "lan", "type", "bridge"])?;
        bridge.run_ip(&["link", "set", "lan", "up"])?;
        let lan = Self { here, link_prefix: format!("fl{id}"), hosts: Vec::new(), etc, bridge };
        let local = lan.add_link("s", None)?;
        run_ip(&["addr", "add", &format!("{here}/24"), "dev", &local])?;
        run_ip(&["link", "set", &local, "up"])?;
        Ok(lan)
    }

    /// Connects the bridge with a namespace, or with this machine, and returns the name of that
    /// end.
    fn add_link(&self, name: &str, to: Option<&Namespace>) -> Result<String, String> {
        let (near, far) =
            (format!("{}{name}a", self.link_prefix), format!("{}{name}b", self.link_prefix));
        run_ip(&["link", "add", &near, "type", "veth", "peer", "name", &far])?;
        run_ip(&["link", "set", &near, "netns", &self.bridge.first.to_string()])?;
        self.bridge.run_ip(&["link", "set", &near, "master", "lan", "up"])?;
        if let Some(to) = to {
            run_ip(&["link", "set", &far, "netns", &to.first.to_string()])?;
        }
        Ok(far)
    }

    fn add_host(&mut self, name: &str, home: PathBuf, n: usize) -> Result<(), String> {
        fs::create_dir_all(&home).expect("a directory");
        let script = "hostname \"$0\" && mount --bind \"$1\" /etc/hosts && \
                      if [ $# = 2 ]; then mount -t tmpfs none \"$2\"; fi && exec sleep 3600";
        let etc = self.etc.display().to_string();
        let hidden = self.hosts.first().map(|first| first.home.display().to_string());
        let arguments = [Some(name), Some(&*etc), hidden.as_deref()];
        let namespace =
            Namespace::new(script, &arguments.into_iter().flatten().collect::<Vec<_>>())?;
        let link = self.add_link(&n.to_string(), Some(&namespace))?;
        let address = nth_address(self.here, n);
        namespace.run_ip(&["link", "set", "lo", "up"])?;
        namespace.run_ip(&["addr", "add", &format!("{address}/24"), "dev", &link])?;
        namespace.run_ip(&["link", "set", &link, "up"])?;
        self.hosts.push(Host { name: name.to_owned(), address, home, namespace });
        Ok(())
    }
}

/// Records this test as skipped, because the hosts of its network cannot be created.
pub(crate) fn skip_network_test(why: &str) {
    skip_test("network namespaces", &format!("run the tests as root, with iproute2: {why}"));
}

fn nth_address(first: Ipv4Addr, n: usize) -> Ipv4Addr {
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
        // The script is ready when it sleeps.
        let first = wait_until("a namespace", Duration::from_secs(10), || {
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

    fn nsenter_command(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.first))
            .args(["--net", "--mount", "--uts", "--pid"]);
        command
    }

    fn run_ip(&self, arguments: &[&str]) -> Result<(), String> {
        run_checked(self.nsenter_command().args(["--", "ip"]).args(arguments))
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

    /// Returns its home directory, where commands run.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Returns a command that runs a program on this host.
    pub fn command(&self, program: &str) -> Command {
        let mut command = self.namespace.nsenter_command();
        command.arg(format!("--wdns={}", self.home.display())).arg("--").arg(program);
        command.env("HOME", &self.home).stdin(Stdio::null());
        command
    }

    /// Starts a shell on this host that runs until the host ends. Its output goes to the file
    /// `log`.
    ///
    /// # Errors
    /// If the shell cannot be started.
    pub fn start_script(
        &self,
        prepare: impl FnOnce(&mut Command),
        log: &Path,
    ) -> io::Result<Child> {
        let mut command = self.command("bash");
        prepare(&mut command);
        let log = File::create(log)?;
        command.stdout(log.try_clone()?).stderr(log).spawn()
    }
}

fn run_ip(arguments: &[&str]) -> Result<(), String> {
    run_checked(Command::new("ip").args(arguments))
}
