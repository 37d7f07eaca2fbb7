//! The cell's side: a process with one thread that has given up the box.
//!
//! Two processes make a cell. The outer one stays as it was started and only maps identities and
//! waits. The inner one is the first process of its namespaces: when it ends, for whatever
//! reason, the kernel ends everything in them.

mod confine;
mod filter;
mod group;
mod identity;
mod init;
mod look;
mod probe;
mod room;
mod run;
mod view;

pub(crate) use probe::CONTAINED;

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::AsFd,
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::{
    Layer, Policy,
    frame::{self, Reply, Request},
    kernel::{CELL_NAMESPACES, Fork, close_inherited, fork},
};

/// The work directory of a room, where its programs start.
pub const WORK: &str = "/room/work";

/// A layer that could not be had, and why.
#[derive(Debug)]
struct Lacking(Layer, io::Error);

/// The pipes to the process that holds this cell.
struct Holder {
    requests: File,
    replies: File,
}

impl Holder {
    fn open() -> io::Result<Self> {
        let requests = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        let replies = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok(Self { requests, replies })
    }

    fn next(&mut self) -> io::Result<Option<(Request, Vec<u8>)>> {
        frame::read(&mut self.requests)
    }

    fn reply(&mut self, reply: &Reply, body: &[&[u8]]) -> io::Result<()> {
        frame::write(&mut self.replies, reply, body)
    }
}

/// What `flotilla worker cell` does: contains itself, then runs programs until the process that
/// started it closes the pipe or dies. Must be called while the process has one thread and has opened nothing: what it inherited
/// beside its standard streams is closed.
pub fn serve_cell() -> ! {
    // Whoever held this cell is gone; there is nobody to tell.
    let code = i32::from(serve().is_err());
    std::process::exit(code)
}

fn serve() -> io::Result<()> {
    close_inherited()?;
    let mut holder = Holder::open()?;
    let Some((Request::Setup(setup), _)) = holder.next()? else { return Ok(()) };
    let group = match setup.group.as_deref().map(group::Group::join).transpose() {
        Ok(group) => group,
        Err(error) => return unfit(&mut holder, &Lacking(Layer::Cell, error)),
    };
    let (mut mapped, map) = io::pipe()?;
    match fork(CELL_NAMESPACES) {
        Err(error) => unfit(&mut holder, &Lacking(Layer::Namespaces, error)),
        Ok(Fork::Parent(inner)) => {
            drop(mapped);
            attend(&mut holder, inner, map)
        }
        Ok(Fork::Child) => {
            drop(map);
            // Nothing comes when the identity could not be mapped.
            mapped.read_exact(&mut [0])?;
            match settle(&setup.policy) {
                Ok(filter) => answer(holder, group, filter),
                Err(lacking) => unfit(&mut holder, &lacking),
            }
        }
    }
}

fn unfit(holder: &mut Holder, Lacking(layer, problem): &Lacking) -> io::Result<()> {
    use io::ErrorKind::{PermissionDenied, StorageFull};
    // No user namespace left to make: "no space".
    let refused = matches!(problem.kind(), PermissionDenied | StorageFull);
    let problem = problem.to_string();
    holder.reply(&Reply::Unfit { layer: *layer, problem, refused }, &[])
}

/// The outer process: lets the inner one go on as nobody, and waits for its end.
fn attend(holder: &mut Holder, inner: Pid, mut map: io::PipeWriter) -> io::Result<()> {
    let mapped = identity::map(inner).and_then(|()| map.write_all(&[1]));
    if let Err(error) = mapped {
        // It may be gone already.
        let _ = kill_process(inner, Signal::KILL);
        unfit(holder, &Lacking(Layer::Identity, error))?;
    }
    waitpid(Some(inner), WaitOptions::empty())?;
    Ok(())
}

/// The inner process gives up everything but what programs may have and it needs to run them.
fn settle(policy: &Policy) -> Result<filter::Program, Lacking> {
    let lacking = |layer| move |error| Lacking(layer, error);
    let view = view::gather(policy).map_err(lacking(Layer::View))?;
    identity::take().map_err(lacking(Layer::Identity))?;
    confine::first_to_go().map_err(lacking(Layer::Identity))?;
    view.build().map_err(lacking(Layer::View))?;
    view::proc_of_cell().map_err(lacking(Layer::Proc))?;
    view::enter().map_err(lacking(Layer::View))?;
    confine::cell().map_err(lacking(Layer::Identity))?;
    filter::confine_cell().map_err(lacking(Layer::Seccomp))?;
    filter::program().map_err(lacking(Layer::Seccomp))
}

/// Does what it is asked, one request at a time.
fn answer(
    mut holder: Holder,
    group: Option<group::Group>,
    filter: filter::Program,
) -> io::Result<()> {
    let runner = run::Runner::new(filter, group);
    holder.reply(&Reply::Done, &[])?;
    let mut room = room::Rooms::default();
    while let Some((request, body)) = holder.next()? {
        let outcome = match request {
            Request::Room { files, disk_bytes } => {
                room.fresh(&files, &body, disk_bytes).map(|()| None)
            }
            Request::Run { program, limits } => room
                .resize(limits.disk_bytes)
                .and_then(|()| {
                    runner.run(&init::Job::Program(program), &body, &limits, &holder.requests)
                })
                .map(Some),
            Request::Probe { canary, limits } => {
                runner.run(&init::Job::Probe(canary), &body, &limits, &holder.requests).map(Some)
            }
            Request::Setup(_) => Err(io::Error::other("this cell is set up already")),
        };
        match outcome {
            Ok(None) => holder.reply(&Reply::Done, &[])?,
            Ok(Some(ended)) => {
                let (how, wall, stdout) = (ended.how, ended.wall, ended.stdout.len());
                let head = Reply::Ended { how, wall, stdout };
                holder.reply(&head, &[&ended.stdout, &ended.stderr])?;
            }
            Err(error) => holder.reply(&Reply::Broken(error.to_string()), &[])?,
        }
    }
    Ok(())
}
