//! The cell's side: a single-threaded process that has given up access to the host.
//!
//! A cell consists of two processes. The outer one stays unconfined; it only maps the user ids and
//! waits. The inner one is the first process of its namespaces: when it ends for any reason, the
//! kernel ends all processes in them.

mod cgroup_files;
mod confine;
mod identity;
mod init;
mod masked;
mod memory_watch;
mod probe;
mod room_mount;
mod run;
mod syscall_filter;
mod view;

pub use masked::{MASKING_FAILED, find_outermost, hide_from_this_process, run_masked};
pub(crate) use probe::CONTAINED;

use std::{
    fs::File,
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::fd::AsFd,
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::{
    PathVisibility, SandboxLayer,
    protocol::{self, CellReply, CellRequest},
    syscalls::{CELL_NAMESPACES, ForkSide, close_inherited_files, fork_into},
};

/// The work directory of a room, in which its programs start.
pub const WORK: &str = "/room/work";

/// The exit code of a cell that could not do its work.
const CELL_FAILED: i32 = 1;

#[derive(Debug)]
struct LayerError(SandboxLayer, io::Error);

struct HolderPipes {
    requests: File,
    replies: File,
}

impl HolderPipes {
    fn open_pipes() -> io::Result<Self> {
        let requests = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        let replies = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok(Self { requests, replies })
    }

    /// Returns `None` if the holder closed the pipe.
    fn read_request(&mut self) -> io::Result<Option<(CellRequest, Vec<u8>)>> {
        protocol::read_message(&mut self.requests)
    }

    /// Returns copies of the pipes as a program's stdin and stdout.
    fn program_ends(&self) -> io::Result<(PipeReader, PipeWriter)> {
        let copy = |pipe: &File| pipe.as_fd().try_clone_to_owned();
        Ok((copy(&self.requests)?.into(), copy(&self.replies)?.into()))
    }

    fn send_reply(&mut self, reply: &CellReply, body: &[&[u8]]) -> io::Result<()> {
        protocol::write_message(&mut self.replies, reply, body)
    }
}

/// Runs a cell (`flotilla worker cell`): contains this process, then runs programs until the holder
/// closes the pipe or dies. Must be called while the process has one thread and has opened no
/// files: all inherited descriptors except the standard streams are closed.
pub fn serve_cell() -> ! {
    // The holder is gone, so the error cannot be reported.
    let code = run_cell().unwrap_or(CELL_FAILED);
    std::process::exit(code)
}

/// Sets up both processes and serves requests in the inner one. Returns the exit code.
fn run_cell() -> io::Result<i32> {
    close_inherited_files()?;
    let mut holder = HolderPipes::open_pipes()?;
    let Some((CellRequest::Setup(setup), _)) = holder.read_request()? else { return Ok(0) };
    let group = match setup.group.as_deref().map(cgroup_files::CgroupFiles::join_group).transpose()
    {
        Ok(group) => group,
        Err(error) => return reply_unfit(&mut holder, &LayerError(SandboxLayer::Cell, error)),
    };
    let (mut mapped, map) = io::pipe()?;
    match fork_into(CELL_NAMESPACES) {
        Err(error) => reply_unfit(&mut holder, &LayerError(SandboxLayer::Namespaces, error)),
        Ok(ForkSide::Parent(inner)) => {
            drop(mapped);
            wait_inner(&mut holder, inner, map)
        }
        Ok(ForkSide::Child) => {
            drop(map);
            // The pipe is closed without a byte if the identity could not be mapped.
            mapped.read_exact(&mut [0])?;
            match confine_inner(&setup.policy) {
                Ok(filter) => serve_requests(holder, group, filter),
                Err(lacking) => reply_unfit(&mut holder, &lacking),
            }
        }
    }
}

fn reply_unfit(
    holder: &mut HolderPipes,
    LayerError(layer, problem): &LayerError,
) -> io::Result<i32> {
    use io::ErrorKind::{PermissionDenied, StorageFull};
    // The limit of user namespaces is reported as "no space".
    let refused = matches!(problem.kind(), PermissionDenied | StorageFull);
    let problem = problem.to_string();
    holder.send_reply(&CellReply::Unfit { layer: *layer, problem, refused }, &[])?;
    Ok(CELL_FAILED)
}

/// Runs in the outer process until the inner one has ended. Returns the exit code of the inner one.
fn wait_inner(holder: &mut HolderPipes, inner: Pid, mut map: PipeWriter) -> io::Result<i32> {
    let mapped = identity::map_inner(inner).and_then(|()| map.write_all(&[1]));
    if let Err(error) = mapped {
        // The process may have ended already.
        let _ = kill_process(inner, Signal::KILL);
        reply_unfit(holder, &LayerError(SandboxLayer::Identity, error))?;
    }
    let ended = waitpid(Some(inner), WaitOptions::empty())?;
    Ok(ended.and_then(|(_, status)| status.exit_status()).unwrap_or(CELL_FAILED))
}

/// Leaves the inner process only what it needs to run programs. Returns their seccomp filter.
fn confine_inner(policy: &PathVisibility) -> Result<syscall_filter::ProgramFilter, LayerError> {
    let lacking = |layer| move |error| LayerError(layer, error);
    let view = view::gather_view(policy).map_err(lacking(SandboxLayer::View))?;
    identity::become_contained().map_err(lacking(SandboxLayer::Identity))?;
    confine::prefer_oom_kill().map_err(lacking(SandboxLayer::Identity))?;
    view.build_view().map_err(lacking(SandboxLayer::View))?;
    view::mount_cell_proc().map_err(lacking(SandboxLayer::Proc))?;
    view::enter_view().map_err(lacking(SandboxLayer::View))?;
    confine::confine_cell().map_err(lacking(SandboxLayer::Identity))?;
    syscall_filter::apply_cell_filter().map_err(lacking(SandboxLayer::Seccomp))?;
    syscall_filter::compile_program_filter().map_err(lacking(SandboxLayer::Seccomp))
}

fn serve_requests(
    mut holder: HolderPipes,
    group: Option<cgroup_files::CgroupFiles>,
    filter: syscall_filter::ProgramFilter,
) -> io::Result<i32> {
    let runner = run::ProgramRunner::new(filter, group);
    holder.send_reply(&CellReply::Done, &[])?;
    let mut room = room_mount::RoomMount::default();
    while let Some((request, body)) = holder.read_request()? {
        let outcome = match request {
            CellRequest::Room { files, disk_bytes } => {
                room.create_room(&files, &body, disk_bytes).map(|()| None)
            }
            CellRequest::Run { program, limits } => room
                .resize_room(limits.disk_bytes)
                .and_then(|()| {
                    runner.run(&init::CellJob::Program(program), &body, &limits, &holder.requests)
                })
                .map(Some),
            CellRequest::Probe { canary, limits } => runner
                .run(&init::CellJob::Probe(canary), &body, &limits, &holder.requests)
                .map(Some),
            CellRequest::Connect { program, limits } => match room.resize_room(limits.disk_bytes) {
                Ok(()) => {
                    holder.send_reply(&CellReply::Done, &[])?;
                    return runner.run_connected(program, &limits, &holder);
                }
                Err(error) => Err(error),
            },
            CellRequest::Setup(_) => Err(io::Error::other("this cell is set up already")),
        };
        match outcome {
            Ok(None) => holder.send_reply(&CellReply::Done, &[])?,
            Ok(Some(ended)) => {
                let (how, wall, stdout) = (ended.how, ended.wall, ended.stdout.len());
                let head = CellReply::Ended { how, wall, stdout };
                holder.send_reply(&head, &[&ended.stdout, &ended.stderr])?;
            }
            Err(error) => holder.send_reply(&CellReply::Broken(error.to_string()), &[])?,
        }
    }
    Ok(0)
}
