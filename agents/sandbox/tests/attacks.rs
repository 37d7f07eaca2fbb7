//! A corpus of attacks, each a file of `tests/attacks`. Their effects on files, sockets, processes
//! and memory of the host are checked from outside.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    net::{TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Duration,
};

use requirements::require_system_program;
use sandbox::{
    CellLaunch, PathVisibility, ProgramEnd, ProgramLimits, ProgramResult, Sandbox, SandboxCell,
    SandboxProgram, SandboxRoom,
};

enum Ends {
    /// Exits with success after every attempt failed.
    InVain,
    With(ProgramEnd),
    /// Ends in any way.
    Somehow,
}

const MIB: u64 = 1 << 20;

/// Lists the files, their limits and their expected ends.
fn corpus() -> Vec<(&'static str, ProgramLimits, Ends)> {
    let usual = || ProgramLimits { wall: Duration::from_secs(60), ..ProgramLimits::default() };
    let short = || ProgramLimits { wall: Duration::from_millis(1500), ..ProgramLimits::default() };
    let small = || ProgramLimits { memory_bytes: 128 * MIB, ..usual() };
    let disk = ProgramLimits { disk_bytes: 32 * MIB, ..usual() };
    let few = ProgramLimits { processes: 32, ..usual() };
    let timed_out = || Ends::With(ProgramEnd::TimedOut);
    let no_memory = || Ends::With(ProgramEnd::OutOfMemory);
    let flooded = || Ends::With(ProgramEnd::OutputTooLong);
    vec![
        ("abstract.py", usual(), Ends::InVain),
        ("core.c", usual(), Ends::With(ProgramEnd::Signalled(6))),
        ("daemon.py", usual(), Ends::InVain),
        ("deep.py", usual(), Ends::InVain),
        ("descriptors.py", usual(), Ends::With(ProgramEnd::Exited(3))),
        ("devices.py", usual(), Ends::InVain),
        ("disk.py", disk, Ends::InVain),
        ("disk_names.py", usual(), Ends::InVain),
        ("environment.py", usual(), Ends::InVain),
        ("flood.sh", usual(), flooded()),
        ("flood_stderr.py", usual(), flooded()),
        ("fork_bomb.py", short(), timed_out()),
        ("fork_bomb.sh", short(), Ends::Somehow),
        ("i386.c", usual(), Ends::Somehow),
        ("leave.py", usual(), Ends::InVain),
        ("limits.py", usual(), Ends::InVain),
        ("memory.py", small(), Ends::Somehow),
        ("memory_children.py", small(), no_memory()),
        ("memory_file.c", usual(), Ends::InVain),
        ("memory_shared.py", small(), no_memory()),
        ("network.py", usual(), Ends::InVain),
        ("privileges.py", usual(), Ends::InVain),
        ("ptrace.c", usual(), Ends::InVain),
        ("read_files.py", usual(), Ends::InVain),
        ("signals.py", usual(), Ends::InVain),
        ("sleep.sh", short(), timed_out()),
        ("stop.py", short(), timed_out()),
        ("symlinks.py", usual(), Ends::InVain),
        ("syscalls.c", usual(), Ends::InVain),
        ("threads.py", few, Ends::InVain),
    ]
}

fn open() -> Sandbox {
    let program = env!("CARGO_BIN_EXE_sandbox-cell").into();
    Sandbox::open(CellLaunch { program, arguments: Vec::new() }, PathVisibility::default()).unwrap()
}

fn program(argv: &[&str]) -> SandboxProgram {
    SandboxProgram {
        argv: argv.iter().map(|&part| part.to_owned()).collect(),
        ..SandboxProgram::default()
    }
}

fn text(ended: &ProgramResult) -> String {
    let ProgramResult { how, stdout, stderr, .. } = ended;
    let (stdout, stderr) = (String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr));
    let beginning = |text: &str| text.chars().take(2000).collect::<String>();
    format!("{how:?}\n{}{}", beginning(&stdout), beginning(&stderr))
}

#[test]
fn nothing_gets_out_and_nothing_is_left() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attacks");
    let mut files: Vec<_> = fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let corpus = corpus();
    assert_eq!(files, corpus.iter().map(|(file, ..)| *file).collect::<Vec<_>>());
    let sandbox = open();
    let mut cell = sandbox.start_cell().unwrap();
    let mut world = World::new();
    for (file, limits, ends) in corpus {
        if !has_language(file) {
            continue;
        }
        let ended = attack(&mut cell, &world, &directory.join(file), &limits);
        println!("{file}: {:?} after {:?}", ended.how, ended.wall);
        let said = text(&ended);
        match ends {
            Ends::InVain => assert_eq!(ended.how, ProgramEnd::Exited(0), "{file}: {said}"),
            Ends::With(how) => assert_eq!(ended.how, how, "{file}: {said}"),
            Ends::Somehow => {}
        }
        check_output(file, &ended, &limits);
        world.check(file);
        // The next room and program are unaffected.
        let mut room = cell.create_room(&[("new", "new")]).unwrap();
        let script =
            "ls -A /room/work /tmp /dev/shm; cat new; kill -0 -1 2>&1; ls /proc | grep -c '^[0-9]'";
        let after =
            room.run(&program(&["/bin/sh", "-c", script]), &ProgramLimits::default()).unwrap();
        let said = text(&after);
        assert!(said.contains("/room/work:\nnew\n") && !said.contains("left"), "{file}: {said}");
    }
}

/// Returns true if the machine has the interpreter or compiler of an attack. Records this test as
/// skipped in part otherwise.
fn has_language(file: &str) -> bool {
    let language = match file.rsplit_once('.').unwrap().1 {
        "py" => "python3",
        "c" => "gcc",
        _ => "sh",
    };
    require_system_program(language).is_some()
}

/// Runs an attack in a room of its own.
fn attack(
    cell: &mut SandboxCell,
    world: &World,
    path: &Path,
    limits: &ProgramLimits,
) -> ProgramResult {
    let source = fs::read(path).unwrap();
    let extension = path.extension().unwrap().to_str().unwrap();
    let name = format!("attack.{extension}");
    let mut room = cell.create_room(&[(&name, source)]).unwrap();
    let argv: &[&str] = match extension {
        "py" => &["python3", "-I", "-B", &name],
        "sh" => &["/bin/sh", &name],
        "c" => {
            let compiled = compile(&mut room, &name);
            assert_eq!(
                compiled.how,
                ProgramEnd::Exited(0),
                "{}: {}",
                path.display(),
                text(&compiled)
            );
            &["./attack"]
        }
        other => panic!("no way to run {other}"),
    };
    let mut program = program(argv);
    program.env = world.variables();
    let ended = room.run(&program, limits).unwrap();
    assert!(!matches!(ended.how, ProgramEnd::NotStarted(_)), "{name}: {}", text(&ended));
    ended
}

fn compile(room: &mut SandboxRoom, name: &str) -> ProgramResult {
    let gcc = program(&["gcc", "-w", "-o", "attack", name]);
    room.run(&gcc, &ProgramLimits::default()).unwrap()
}

fn check_output(file: &str, ended: &ProgramResult, limits: &ProgramLimits) {
    let said = text(ended);
    let all = [&ended.stdout[..], &ended.stderr[..]].concat();
    let whole = String::from_utf8_lossy(&all);
    assert!(!whole.contains("ESCAPED"), "{file}: {said}");
    assert!(!whole.contains(SECRET), "{file} read what it must not: {said}");
    assert!(all.len() as u64 <= limits.output_bytes, "{file} wrote {}", all.len());
    let number = |before: &str| -> Option<u64> {
        whole.rsplit_once(before)?.1.split_whitespace().next()?.parse().ok()
    };
    match file {
        "disk.py" => {
            let wrote = number("wrote ").unwrap();
            assert!(wrote <= limits.disk_bytes && wrote >= limits.disk_bytes / 2, "{wrote}");
        }
        "disk_names.py" => assert!(number("made ").unwrap() < 100_000, "{said}"),
        "threads.py" => assert!(number("threads ").unwrap() <= limits.processes.into(), "{said}"),
        "memory.py" => {
            assert_ne!(ended.how, ProgramEnd::Exited(0), "{said}");
            let reached = number("reached ").unwrap() * MIB;
            assert!(reached <= 2 * limits.memory_bytes, "{said}");
        }
        "descriptors.py" => assert!(said.contains("open [0, 1, 2, 3]"), "{said}"),
        _ => {}
    }
}

const SECRET: &str = "what-only-the-agent-knows";

/// The surroundings of a sandbox that attacks try to reach.
struct World {
    directory: tempfile::TempDir,
    listener: TcpListener,
    datagrams: UdpSocket,
    abstract_name: String,
    abstract_listener: UnixListener,
    bystander: Child,
    /// Processes below this one before any attack.
    processes: usize,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("canary"), SECRET).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let datagrams = UdpSocket::bind(listener.local_addr().unwrap()).unwrap();
        datagrams.set_nonblocking(true).unwrap();
        let abstract_name = format!("sandbox-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let abstract_listener = UnixListener::bind_addr(&address).unwrap();
        abstract_listener.set_nonblocking(true).unwrap();
        let bystander = Command::new("sleep").arg("1000").spawn().unwrap();
        let processes = descendants();
        Self {
            directory,
            listener,
            datagrams,
            abstract_name,
            abstract_listener,
            bystander,
            processes,
        }
    }

    fn canary(&self) -> PathBuf {
        self.directory.path().join("canary")
    }

    fn variables(&self) -> Vec<(String, String)> {
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        [
            ("CANARY", path(&self.canary())),
            ("OUTSIDE", path(&self.directory.path().join("written"))),
            ("PORT", self.listener.local_addr().unwrap().port().to_string()),
            ("ABSTRACT", self.abstract_name.clone()),
            ("BYSTANDER", self.bystander.id().to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// Checks that nothing has changed.
    fn check(&mut self, file: &str) {
        assert_eq!(fs::read_to_string(self.canary()).unwrap(), SECRET, "{file}: the canary");
        let names = fs::read_dir(self.directory.path()).unwrap().count();
        assert_eq!(names, 1, "{file} wrote beside the canary");
        let silent = |error: std::io::Error| error.kind() == ErrorKind::WouldBlock;
        assert!(self.listener.accept().is_err_and(silent), "{file} reached a port");
        assert!(self.datagrams.recv(&mut [0]).is_err_and(silent), "{file} sent a datagram");
        let reached = self.abstract_listener.accept();
        assert!(reached.is_err_and(silent), "{file} reached an abstract socket");
        assert!(self.bystander.try_wait().unwrap().is_none(), "{file} ended a bystander");
        let state = fs::read_to_string(format!("/proc/{}/stat", self.bystander.id())).unwrap();
        assert!(!state.contains(") T "), "{file} stopped a bystander");
        assert_eq!(descendants(), self.processes, "{file} left processes");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.bystander.kill();
        let _ = self.bystander.wait();
    }
}

/// Counts the processes below this one, in any namespace.
fn descendants() -> usize {
    let mut parents = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        // The process may have ended meanwhile.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        parents.insert(pid, parent.unwrap().parse::<u32>().unwrap());
    }
    let this = std::process::id();
    let is_below = |pid: &u32| {
        std::iter::successors(parents.get(pid), |pid| parents.get(pid)).any(|above| *above == this)
    };
    parents.keys().filter(|pid| is_below(pid)).count()
}
