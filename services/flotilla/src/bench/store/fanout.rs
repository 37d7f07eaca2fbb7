//! An adapter to eight boxes at once, each behind a link of 1 Gb/s, as the store is: with peers and
//! without. How long the last box takes beside what its link needs for the bytes, and how often the
//! store sends the file.
//!
//! All boxes share this machine's cores, and the links are its work too: what they carry at most is
//! found with plain sockets, each box sending its neighbour as many bytes.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use store::{About, Store, TreePlace};
use wire::v1;

use super::{
    super::{
        Figure,
        processes::{cpu_seconds, machine_seconds},
    },
    network::Network,
    peer::{Card, Go, Part},
};
use crate::{directory::Directory, output};

const BOXES: usize = 8;
/// Their places in the network, after those of the boxes.
const PUBLISHER: usize = BOXES + 1;
const STORE: usize = BOXES + 2;
const BYTES: usize = 40_000_000;
/// The links, and slower ones, at which this machine is not what is measured.
const RATES_MBIT: [u32; 2] = [1000, 250];
const ROUNDS: usize = 3;
/// Of the line's rate, at least.
const RATE: f64 = 0.85;
/// Copies that the store may send.
const COPIES: f64 = 1.5;
const PORT: u16 = 7070;

/// Nothing on a machine that cannot have networks of its own; it is said why.
pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::say(&format!("store: an adapter of 40 MB to {BOXES} boxes, {ROUNDS} times …"));
    let scratch = Directory::choose(None, "bench-fanout")?;
    let (directory, source) = (scratch.path().join("store"), scratch.path().join("adapter"));
    let store = Store::open(&format!("file://{}", directory.display())).await?;
    fs::create_dir(&source)?;
    let mut noise = vec![0; BYTES];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    fs::write(source.join("adapter_model.safetensors"), noise)?;
    fs::write(source.join("adapter_config.json"), "{\"r\": 16}")?;
    let place = TreePlace::checkpoint(&"bench-1".parse()?, 0, 1);
    let tree = store.publish_tree(&source, &place, About::new()).await?;
    let mut figures = Vec::new();
    for rate in RATES_MBIT {
        let network = match Network::new(STORE, rate) {
            Ok(network) => network,
            Err(error) => {
                output::say(&format!(
                    "store: no fan-out, for there are no networks here: {error:#}"
                ));
                return Ok(figures);
            }
        };
        let round = |with| round(&network, scratch.path(), (&directory, &tree), with);
        let best = |with| -> anyhow::Result<Round> {
            let rounds: Vec<Round> =
                (0..ROUNDS).map(|_| round(with)).collect::<anyhow::Result<_>>()?;
            rounds.into_iter().min_by_key(|round| round.last).context("rounds")
        };
        let plain: Vec<f64> =
            (0..ROUNDS).map(|_| plain(&network)).collect::<anyhow::Result<_>>()?;
        figures.extend(told(
            rate,
            plain.into_iter().fold(f64::MAX, f64::min),
            &round(With::Store)?,
            &best(With::Peers)?,
            &best(With::Publisher)?,
        ));
    }
    Ok(figures)
}

/// Whom boxes have it from.
#[derive(Clone, Copy, PartialEq)]
enum With {
    Store,
    /// And each other.
    Peers,
    /// And another that has it already.
    Publisher,
}

struct Round {
    first: Duration,
    last: Duration,
    /// That left the store.
    copies: f64,
    /// That left the publisher, if it is there.
    published: f64,
    /// Of all boxes and the store, for they share this machine's cores.
    cpu_s: f64,
    /// Of what all cores had, what was used, by anybody.
    busy: f64,
}

/// A trainer has what it publishes, so its publisher is among the peers of a fleet.
fn told(
    rate: u32,
    plain: f64,
    alone: &Round,
    unpublished: &Round,
    together: &Round,
) -> [Figure; 2] {
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
        "the last of {BOXES}; the first {first:.3} s; {:.0} % of the line's rate, and {:.0} % of what \
         links and cores make of plain sockets, {plain:.3} s, the slower of which is the limit's; for \
         {:.2} CPU s of {cores} cores that were busy to {:.0} %; without its publisher among the peers \
         {unpublished_last:.3} s; the store alone: {alone_last:.3} s",
        100.0 * ideal / last,
        100.0 * plain / last,
        together.cpu_s,
        100.0 * together.busy
    );
    let limit = Some(ideal.max(plain) / RATE);
    [
        Figure { name: time, measured: last, unit: "s", limit, how },
        Figure {
            name: egress,
            measured: together.copies.max(together.published),
            unit: "x",
            limit: Some(COPIES),
            how: format!(
                "the most that left one of the store, {:.2}, and the publisher, {:.2}, headers \
                 included; the store's without its publisher among the peers {:.2}; alone {:.2}",
                together.copies, together.published, unpublished.copies, alone.copies
            ),
        },
    ]
}

/// Seconds until each box has as many bytes from its neighbour, by plain sockets, all at once.
fn plain(network: &Network) -> anyhow::Result<f64> {
    let mut boxes = Vec::new();
    for index in 1..=BOXES {
        let (listen, neighbour) = (at(index, PORT)?, at(index % BOXES + 1, PORT)?);
        let part = Part::Plain { listen, neighbour, bytes: BYTES };
        let mut one = Worker::start(network, index, &part)?;
        one.hear::<String>()?;
        boxes.push(one);
    }
    let began = Instant::now();
    for one in &mut boxes {
        one.say(&"go")?;
    }
    let done = all_done(&mut boxes)?;
    let last = done.into_iter().max().context("boxes")?;
    Ok(last.duration_since(began).as_secs_f64())
}

fn round(
    network: &Network,
    scratch: &Path,
    (directory, tree): (&Path, &v1::Tree),
    with: With,
) -> anyhow::Result<Round> {
    let part = Part::Store { listen: at(STORE, PORT)?, directory: directory.into() };
    let mut store = Worker::start(network, STORE, &part)?;
    store.hear::<String>()?;
    let mut boxes = start_boxes(network, scratch, tree, with)?;
    if with == With::Publisher {
        // It has it before the others ask.
        let publisher = &mut boxes[PUBLISHER - 1];
        publisher.say(&"go")?;
        publisher.hear::<String>()?;
    }
    let pids = boxes.iter().map(|one| one.process.id()).chain([store.process.id()]);
    let pids: Vec<u32> = pids.collect();
    let cpu = || pids.iter().map(|pid| cpu_seconds(*pid)).sum::<anyhow::Result<f64>>();
    let (sent_before, cpu_before) = (network.sent(STORE)?, cpu()?);
    let published_before = network.sent(PUBLISHER)?;
    let (busy_before, all_before) = machine_seconds()?;
    let began = Instant::now();
    for one in &mut boxes[..BOXES] {
        one.say(&"go")?;
    }
    let done = all_done(&mut boxes[..BOXES])?;
    let (busy, all) = machine_seconds()?;
    let (sent, cpu_s) = (network.sent(STORE)? - sent_before, cpu()? - cpu_before);
    let published = network.sent(PUBLISHER)? - published_before;
    for index in 1..=boxes.len() {
        fs::remove_dir_all(cache(scratch, index))?;
    }
    let after = |at: Option<&Instant>| at.map_or(Duration::MAX, |at| at.duration_since(began));
    Ok(Round {
        first: after(done.iter().min()),
        last: after(done.iter().max()),
        copies: sent as f64 / BYTES as f64,
        published: published as f64 / BYTES as f64,
        cpu_s,
        busy: (busy - busy_before) / (all - all_before),
    })
}

fn at(index: usize, port: u16) -> anyhow::Result<SocketAddr> {
    Ok(format!("{}:{port}", Network::address(index)).parse()?)
}

fn cache(scratch: &Path, index: usize) -> PathBuf {
    scratch.join(format!("cache-{index}"))
}

/// All know of each other, and wait to be told to go.
fn start_boxes(
    network: &Network,
    scratch: &Path,
    tree: &v1::Tree,
    with: With,
) -> anyhow::Result<Vec<Worker>> {
    let count = if with == With::Publisher { PUBLISHER } else { BOXES };
    let (mut boxes, mut cards) = (Vec::new(), Vec::new());
    for index in 1..=count {
        let part = Part::Box {
            name: format!("box-{index}"),
            listen: at(index, 0)?,
            door: at(STORE, PORT)?,
            cache: cache(scratch, index),
            peers: with != With::Store,
        };
        let mut one = Worker::start(network, index, &part)?;
        cards.push(one.hear::<Card>()?);
        boxes.push(one);
    }
    for one in &mut boxes {
        let tree = (tree.manifest.clone(), tree.path.clone());
        one.say(&Go { cards: cards.clone(), tree })?;
        one.hear::<String>()?;
    }
    Ok(boxes)
}

/// When each was done.
fn all_done(boxes: &mut [Worker]) -> anyhow::Result<Vec<Instant>> {
    std::thread::scope(|scope| {
        let listen = |one| scope.spawn(|| Worker::hear::<String>(one).map(|_| Instant::now()));
        let listening: Vec<_> = boxes.iter_mut().map(listen).collect();
        let heard = listening.into_iter().map(|one| match one.join() {
            Ok(heard) => heard,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        heard.collect()
    })
}

struct Worker {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Worker {
    fn start(network: &Network, index: usize, part: &Part) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut process = network
            .on(index)
            .arg(program)
            .args(["worker", "swarm", "--part", &serde_json::to_string(part)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a box of the bench")?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (to, from) = pipes.context("talk to a box of the bench")?;
        Ok(Self { process, to, from: BufReader::new(from) })
    }

    fn say(&mut self, what: &impl serde::Serialize) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.to.write_all(&line).context("talk to a box of the bench")
    }

    fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            bail!("a box of the bench ended");
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
