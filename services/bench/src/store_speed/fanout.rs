//! Measures an adapter's distribution to eight boxes at once, with and without peers.
//!
//! Each box and the store are behind a link of 1 Gb/s. The figures are the time of the last box
//! relative to what its link needs, and the number of copies that the store sends.
//!
//! All boxes share this machine's cores, which also carry the links. Their capacity is measured
//! with plain sockets: each box sends its neighbour as many bytes.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use cli::{output, work_directory::WorkDirectory};
use serde::de::DeserializeOwned;
use store::{Store, TreeMetadata, TreePlace};
use wire::v1;

use super::{
    super::{
        BenchFigure,
        procfs::{read_cpu_seconds, read_machine_seconds},
    },
    swarm_worker::{FetchInstruction, PeerContact, SwarmTask},
    test_network::TestNetwork,
};

/// Boxes that fetch the adapter.
const BOXES: usize = 8;
/// Index of the publisher in the network, after the boxes.
const PUBLISHER: usize = BOXES + 1;
/// Index of the store in the network.
const STORE: usize = BOXES + 2;
/// Size of the adapter.
const BYTES: usize = 40_000_000;
/// Rates of the links. At the slower one the machine's cores are not the bottleneck.
const RATES_MBIT: [u32; 2] = [1000, 250];
/// Rounds of each measurement.
const ROUNDS: usize = 3;
/// Required share of the line's rate.
const RATE: f64 = 0.85;
/// Accepted number of copies that one node sends.
const COPIES: f64 = 1.5;
/// Port of the store and of the plain sockets.
const PORT: u16 = 7070;

/// Measures both rates. Returns no figures on a machine that cannot create networks, and prints the
/// reason.
pub(super) async fn measure_fanout() -> anyhow::Result<Vec<BenchFigure>> {
    output::print_message(&format!(
        "store: an adapter of 40 MB to {BOXES} boxes, {ROUNDS} times …"
    ));
    let scratch = WorkDirectory::open_or_create(None, "bench-fanout")?;
    let (directory, source) = (scratch.as_path().join("store"), scratch.as_path().join("adapter"));
    let store = Store::open(&format!("file://{}", directory.display())).await?;
    fs::create_dir(&source)?;
    let mut noise = vec![0; BYTES];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    fs::write(source.join("adapter_model.safetensors"), noise)?;
    fs::write(source.join("adapter_config.json"), "{\"r\": 16}")?;
    let place = TreePlace::for_checkpoint(&"bench-1".parse()?, 0, 1);
    let tree = store.publish_tree(&source, &place, TreeMetadata::new()).await?;
    let mut figures = Vec::new();
    for rate in RATES_MBIT {
        let network = match TestNetwork::new(STORE, rate) {
            Ok(network) => network,
            Err(error) => {
                output::print_message(&format!(
                    "store: no fan-out, for there are no networks here: {error:#}"
                ));
                return Ok(figures);
            }
        };
        let round = |with| run_round(&network, scratch.as_path(), (&directory, &tree), with);
        let best = |with| -> anyhow::Result<FanoutRound> {
            let rounds: Vec<FanoutRound> =
                (0..ROUNDS).map(|_| round(with)).collect::<anyhow::Result<_>>()?;
            rounds.into_iter().min_by_key(|round| round.last).context("rounds")
        };
        let plain: Vec<f64> =
            (0..ROUNDS).map(|_| time_plain_sockets(&network)).collect::<anyhow::Result<_>>()?;
        figures.extend(fanout_figures(
            rate,
            plain.into_iter().fold(f64::MAX, f64::min),
            &round(FetchSource::Store)?,
            &best(FetchSource::Peers)?,
            &best(FetchSource::Publisher)?,
        ));
    }
    Ok(figures)
}

#[derive(Clone, Copy, PartialEq)]
enum FetchSource {
    Store,
    Peers,
    Publisher,
}

struct FanoutRound {
    first: Duration,
    last: Duration,
    /// Copies that the store sent.
    copies: f64,
    /// Copies that the publisher sent, if it takes part.
    published: f64,
    /// CPU seconds of all boxes and the store, which share this machine's cores.
    cpu_s: f64,
    /// Share of all cores' time that any process used.
    busy: f64,
}

/// They come from the rounds with a publisher, because in a fleet the trainer that publishes an
/// adapter also serves it.
fn fanout_figures(
    rate: u32,
    plain: f64,
    alone: &FanoutRound,
    unpublished: &FanoutRound,
    together: &FanoutRound,
) -> [BenchFigure; 2] {
    let ideal = BYTES as f64 * 8.0 / (f64::from(rate) * 1e6);
    let [last, first, alone_last, unpublished_last] =
        [together.last, together.first, alone.last, unpublished.last]
            .map(|taken| taken.as_secs_f64());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (time, egress) = match rate {
        1000 => ("store: 40 MB to 8, 1 Gb/s", "store: copies sent, 1 Gb/s"),
        _ => ("store: 40 MB to 8, 250 Mb/s", "store: copies sent, 250 Mb/s"),
    };
    let how = format!(
        "last of {BOXES}; first {first:.3} s; {:.0} % of the line rate, {:.0} % of plain sockets \
         ({plain:.3} s); {:.2} CPU s, {cores} cores {:.0} % busy; publisher not a peer: \
         {unpublished_last:.3} s; no peers: {alone_last:.3} s",
        100.0 * ideal / last,
        100.0 * plain / last,
        together.cpu_s,
        100.0 * together.busy
    );
    let limit = Some(ideal.max(plain) / RATE);
    [
        BenchFigure { name: time, measured: last, unit: "s", limit, how },
        BenchFigure {
            name: egress,
            measured: together.copies.max(together.published),
            unit: "x",
            limit: Some(COPIES),
            how: format!(
                "maximum, with headers; store {:.2}, publisher {:.2}; store {:.2} without the \
                 publisher as peer, {:.2} without peers",
                together.copies, together.published, unpublished.copies, alone.copies
            ),
        },
    ]
}

/// Returns the seconds until each box has received the bytes from its neighbour, over plain
/// sockets, all at once.
fn time_plain_sockets(network: &TestNetwork) -> anyhow::Result<f64> {
    let mut boxes = Vec::new();
    for index in 1..=BOXES {
        let (listen, neighbour) =
            (node_address(index, PORT)?, node_address(index % BOXES + 1, PORT)?);
        let part = SwarmTask::Plain { listen, neighbour, bytes: BYTES };
        let mut one = SwarmNode::start(network, index, &part)?;
        one.receive_message::<String>()?;
        boxes.push(one);
    }
    let began = Instant::now();
    for one in &mut boxes {
        one.send_message(&"go")?;
    }
    let done = wait_all_done(&mut boxes)?;
    let last = done.into_iter().max().context("boxes")?;
    Ok(last.duration_since(began).as_secs_f64())
}

fn run_round(
    network: &TestNetwork,
    scratch: &Path,
    (directory, tree): (&Path, &v1::Tree),
    with: FetchSource,
) -> anyhow::Result<FanoutRound> {
    let part = SwarmTask::Store { listen: node_address(STORE, PORT)?, directory: directory.into() };
    let mut store = SwarmNode::start(network, STORE, &part)?;
    store.receive_message::<String>()?;
    let mut boxes = start_boxes(network, scratch, tree, with)?;
    if with == FetchSource::Publisher {
        // The publisher must have the adapter before the boxes ask for it.
        let publisher = &mut boxes[PUBLISHER - 1];
        publisher.send_message(&"go")?;
        publisher.receive_message::<String>()?;
    }
    let pids = boxes.iter().map(|one| one.process.id()).chain([store.process.id()]);
    let pids: Vec<u32> = pids.collect();
    let cpu = || pids.iter().map(|pid| read_cpu_seconds(*pid)).sum::<anyhow::Result<f64>>();
    let (sent_before, cpu_before) = (network.read_sent_bytes(STORE)?, cpu()?);
    let published_before = network.read_sent_bytes(PUBLISHER)?;
    let (busy_before, all_before) = read_machine_seconds()?;
    let began = Instant::now();
    for one in &mut boxes[..BOXES] {
        one.send_message(&"go")?;
    }
    let done = wait_all_done(&mut boxes[..BOXES])?;
    let (busy, all) = read_machine_seconds()?;
    let (sent, cpu_s) = (network.read_sent_bytes(STORE)? - sent_before, cpu()? - cpu_before);
    let published = network.read_sent_bytes(PUBLISHER)? - published_before;
    for index in 1..=boxes.len() {
        fs::remove_dir_all(cache_path(scratch, index))?;
    }
    let after = |at: Option<&Instant>| at.map_or(Duration::MAX, |at| at.duration_since(began));
    Ok(FanoutRound {
        first: after(done.iter().min()),
        last: after(done.iter().max()),
        copies: sent as f64 / BYTES as f64,
        published: published as f64 / BYTES as f64,
        cpu_s,
        busy: (busy - busy_before) / (all - all_before),
    })
}

fn node_address(index: usize, port: u16) -> anyhow::Result<SocketAddr> {
    Ok(format!("{}:{port}", TestNetwork::node_ip(index)).parse()?)
}

fn cache_path(scratch: &Path, index: usize) -> PathBuf {
    scratch.join(format!("cache-{index}"))
}

fn start_boxes(
    network: &TestNetwork,
    scratch: &Path,
    tree: &v1::Tree,
    with: FetchSource,
) -> anyhow::Result<Vec<SwarmNode>> {
    let count = if with == FetchSource::Publisher { PUBLISHER } else { BOXES };
    let (mut boxes, mut cards) = (Vec::new(), Vec::new());
    for index in 1..=count {
        let part = SwarmTask::Box {
            name: format!("box-{index}"),
            listen: node_address(index, 0)?,
            gateway: node_address(STORE, PORT)?,
            cache: cache_path(scratch, index),
            peers: with != FetchSource::Store,
        };
        let mut one = SwarmNode::start(network, index, &part)?;
        cards.push(one.receive_message::<PeerContact>()?);
        boxes.push(one);
    }
    for one in &mut boxes {
        let tree = (tree.manifest.clone(), tree.path.clone());
        one.send_message(&FetchInstruction { cards: cards.clone(), tree })?;
        one.receive_message::<String>()?;
    }
    Ok(boxes)
}

fn wait_all_done(boxes: &mut [SwarmNode]) -> anyhow::Result<Vec<Instant>> {
    std::thread::scope(|scope| {
        let listen =
            |one| scope.spawn(|| SwarmNode::receive_message::<String>(one).map(|_| Instant::now()));
        let listening: Vec<_> = boxes.iter_mut().map(listen).collect();
        let waited = listening.into_iter().map(|one| match one.join() {
            Ok(waited) => waited,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        waited.collect()
    })
}

struct SwarmNode {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl SwarmNode {
    fn start(network: &TestNetwork, index: usize, part: &SwarmTask) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut process = network
            .command_on(index)
            .arg(program)
            .args(["worker", "swarm", "--part", &serde_json::to_string(part)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a box of the bench")?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (to, from) = pipes.context("talk to a box of the bench")?;
        Ok(Self { process, stdin: to, stdout: BufReader::new(from) })
    }

    /// Sends a message as a line of JSON.
    fn send_message(&mut self, what: &impl serde::Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.stdin.write_all(&line).context("talk to a box of the bench")
    }

    fn receive_message<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            bail!("a box of the bench ended");
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for SwarmNode {
    fn drop(&mut self) {
        // The process may already have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
