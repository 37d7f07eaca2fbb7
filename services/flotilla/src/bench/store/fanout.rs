//! An adapter to eight boxes at once, each behind a link of 1 Gb/s, as the store is: with peers and
//! without. How long the last box takes beside what its link needs for the bytes, and how often the
//! store sends the file.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use store::{About, Store, TreePlace};
use wire::v1;

use super::{
    super::{Figure, processes::cpu_seconds},
    network::Network,
    peer::{Card, Go, Part},
};
use crate::{directory::Directory, output};

const BOXES: usize = 8;
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
        let network = match Network::new(BOXES + 1, rate) {
            Ok(network) => network,
            Err(error) => {
                output::say(&format!(
                    "store: no fan-out, for there are no networks here: {error:#}"
                ));
                return Ok(figures);
            }
        };
        let alone = round(&network, scratch.path(), (&directory, &tree), false)?;
        let mut together = round(&network, scratch.path(), (&directory, &tree), true)?;
        for _ in 1..ROUNDS {
            let again = round(&network, scratch.path(), (&directory, &tree), true)?;
            if again.last < together.last {
                together = again;
            }
        }
        figures.extend(told(rate, &alone, &together));
    }
    Ok(figures)
}

struct Round {
    first: Duration,
    last: Duration,
    copies: f64,
    /// Of all boxes and the store, for they share this machine's cores.
    cpu_s: f64,
}

fn told(rate: u32, alone: &Round, together: &Round) -> [Figure; 2] {
    let ideal = BYTES as f64 * 8.0 / (f64::from(rate) * 1e6);
    let [last, first, without] =
        [together.last, together.first, alone.last].map(|taken| taken.as_secs_f64());
    let (time, egress) = match rate {
        1000 => ("store: 40 MB to 8, 1 Gb/s", "store: copies sent, 1 Gb/s"),
        _ => ("store: 40 MB to 8, 250 Mb/s", "store: copies sent, 250 Mb/s"),
    };
    let how = format!(
        "the last of {BOXES}; the first {first:.3} s; {:.0} % of the line's rate, for {:.2} CPU s; \
         the store alone: {without:.3} s",
        100.0 * ideal / last,
        together.cpu_s
    );
    [
        Figure { name: time, measured: last, unit: "s", limit: Some(ideal / RATE), how },
        Figure {
            name: egress,
            measured: together.copies,
            unit: "x",
            limit: Some(COPIES),
            how: format!("bytes that left the store, headers included; alone {:.2}", alone.copies),
        },
    ]
}

fn round(
    network: &Network,
    scratch: &Path,
    (directory, tree): (&Path, &v1::Tree),
    peers: bool,
) -> anyhow::Result<Round> {
    let at = |index: usize, port: u16| -> anyhow::Result<SocketAddr> {
        Ok(format!("{}:{port}", Network::address(index)).parse()?)
    };
    let of_store = BOXES + 1;
    let listen = at(of_store, PORT)?;
    let mut store =
        Worker::start(network, of_store, &Part::Store { listen, directory: directory.into() })?;
    store.hear::<String>()?;
    let (mut boxes, mut cards) = (Vec::new(), Vec::new());
    for index in 1..=BOXES {
        let (name, cache) = (format!("box-{index}"), scratch.join(format!("cache-{index}")));
        let (own, door) = (at(index, 0)?, listen);
        let mut one =
            Worker::start(network, index, &Part::Box { name, listen: own, door, cache, peers })?;
        cards.push(one.hear::<Card>()?);
        boxes.push(one);
    }
    for one in &mut boxes {
        let tree = (tree.manifest.clone(), tree.path.clone());
        one.say(&Go { cards: cards.clone(), tree })?;
        one.hear::<String>()?;
    }
    let before = network.sent(of_store)?;
    let pids = boxes.iter().map(|one| one.process.id()).chain([store.process.id()]);
    let cpu_before: f64 = pids.map(cpu_seconds).sum::<anyhow::Result<f64>>()?;
    let began = Instant::now();
    for one in &mut boxes {
        one.say(&"go")?;
    }
    let listening: Vec<_> = boxes
        .into_iter()
        .map(|mut one| {
            std::thread::spawn(move || {
                let heard = one.hear::<String>();
                (heard.map(|_| Instant::now()), one)
            })
        })
        .collect();
    let (mut done, mut boxes) = (Vec::new(), Vec::new());
    for one in listening {
        let (heard, one) = one.join().map_err(|_| anyhow::anyhow!("a listening thread ended"))?;
        done.push(heard?);
        boxes.push(one);
    }
    let sent = network.sent(of_store)? - before;
    let pids = boxes.iter().map(|one| one.process.id()).chain([store.process.id()]);
    let cpu_s: f64 = pids.map(cpu_seconds).sum::<anyhow::Result<f64>>()? - cpu_before;
    drop((boxes, store));
    for index in 1..=BOXES {
        fs::remove_dir_all(scratch.join(format!("cache-{index}")))?;
    }
    let after = |at: Option<&Instant>| at.map_or(Duration::MAX, |at| at.duration_since(began));
    Ok(Round {
        first: after(done.iter().min()),
        last: after(done.iter().max()),
        copies: sent as f64 / BYTES as f64,
        cpu_s,
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
