//! `flotilla channel` and `flotilla serve`: names that point to a model, and agents that answer
//! requests to it.

use std::{path::PathBuf, sync::Arc};

use control::{SpecFiles, build_serving, parse_channel_name, parse_checkpoint_ref};
use wire::v1;

use crate::{
    args::{ChannelCommand, ChannelModelArgs, GlobalArgs, MoveArgs, ServeArgs},
    output,
    progress_meter::ProgressMeter,
};

pub(crate) async fn handle_channels(
    flags: &GlobalArgs,
    command: ChannelCommand,
) -> anyhow::Result<()> {
    match command {
        ChannelCommand::List => {
            let channels = flags.fleet.connect_control().await?.list_channels().await?;
            let empty = "no channels yet; `flotilla serve NAME --checkpoint RUN` creates one";
            output::print_json_or(flags.json, &channels, || print_channels(&channels, empty))
        }
        ChannelCommand::History { channel } => {
            let channel = parse_channel_name(&channel)?;
            let moves = flags.fleet.connect_control().await?.list_channel_moves(&channel).await?;
            output::print_json_or(flags.json, &moves, || print_channels(&moves, ""))
        }
        ChannelCommand::Move(MoveArgs { channel, model, if_better, reason }) => {
            let request =
                v1::MoveChannelRequest { channel, if_better, reason, ..Default::default() };
            move_channel(flags, request, model).await
        }
        ChannelCommand::RollBack { channel, reason } => {
            let channel = parse_channel_name(&channel)?;
            let control = flags.fleet.connect_control().await?;
            let moved = control.roll_back_channel(&channel, &reason, String::new()).await?;
            output::print_json_or(flags.json, &moved, || print_moved(&moved))
        }
    }
}

pub(crate) async fn serve_channel(flags: &GlobalArgs, args: ServeArgs) -> anyhow::Result<()> {
    let ServeArgs { channel, model, pool, replicas, stop } = args;
    let serving = (!stop).then(|| build_serving(&pool, replicas)).transpose()?;
    let request =
        v1::MoveChannelRequest { channel, serving, stop_serving: stop, ..Default::default() };
    move_channel(flags, request, model).await
}

async fn move_channel(
    flags: &GlobalArgs,
    mut request: v1::MoveChannelRequest,
    model: ChannelModelArgs,
) -> anyhow::Result<()> {
    request.checkpoint = model.checkpoint.as_deref().map(parse_checkpoint_ref).transpose()?;
    request.base = model.base.unwrap_or_default();
    let control = flags.fleet.connect_control().await?;
    let meter = Arc::new(ProgressMeter::new());
    let shown = meter.clone();
    let watch: control::TransferCallback = Arc::new(move |progress| {
        shown.show_progress(progress.activity, "bytes", progress.bytes, progress.total);
    });
    let files = SpecFiles::Local(PathBuf::from("."));
    // The log names the author.
    let moved = control.move_channel(request, String::new(), &files, &watch).await?;
    meter.finish_bar();
    output::print_json_or(flags.json, &moved, || print_moved(&moved))
}

fn print_moved(channel: &v1::Channel) {
    let v1::Channel { channel: name, number, .. } = channel;
    output::print_line(&format!("{name} names {} (move {number})", model_text(channel)));
    let serving = channel.r#move.as_ref().and_then(|it| it.serving.as_ref());
    if let Some(serving) = serving {
        let agents = match serving.replicas {
            0 => "all agents".to_owned(),
            1 => "1 agent".to_owned(),
            many => format!("{many} agents"),
        };
        output::print_message(&format!(
            "{agents} with the role server in the pool {} serve it; clients name the model {name} at \
             the gateway, http://HOST:PORT/v1",
            serving.pool
        ));
    }
}

fn print_channels(channels: &[v1::Channel], empty: &str) {
    let rows = channels.iter().map(|channel| {
        let found = channel.r#move.clone().unwrap_or_default();
        let evidence = found.evidence.as_ref().map(|it| {
            let points = it.difference * 100.0;
            format!("{points:+.1} points over {}/{}, p = {:.2}", it.run, it.cycle, it.p)
        });
        let reason: Vec<String> = [evidence, Some(found.reason)]
            .into_iter()
            .flatten()
            .filter(|it| !it.is_empty())
            .collect();
        [
            channel.channel.clone(),
            channel.number.to_string(),
            model_text(channel),
            output::format_time(channel.at.as_ref()),
            output::text_or_dash(found.user),
            match (&found.serving, channel.agents.is_empty()) {
                (None, _) => "no".to_owned(),
                (Some(_), true) => "none yet".to_owned(),
                (Some(_), false) => channel.agents.join(", "),
            },
            output::text_or_dash(reason.join("; ")),
        ]
    });
    let headings = ["channel", ">move", "model", "~at", "~by", "served by", "reason"];
    output::print_list(headings, rows, empty);
}

/// Returns `raft-1/3`, or the base's path in the store.
fn model_text(channel: &v1::Channel) -> String {
    let Some(found) = &channel.r#move else { return "-".into() };
    if found.run.is_empty() {
        return found.base.as_ref().map_or("-".into(), |base| base.path.clone());
    }
    format!("{}/{}", found.run, found.cycle)
}
