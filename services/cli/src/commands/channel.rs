//! `flotilla channel` and `flotilla serve`: names that point to a model, and agents that answer
//! requests to it.

use std::{path::PathBuf, sync::Arc};

use control::{FleetControl, SpecFiles, build_serving, parse_channel_name, parse_checkpoint_ref};
use run_view::describe_serving;
use wire::{clock::unix_seconds, v1};

use crate::{
    args::{
        ChannelCommand, ChannelFeedbackArgs, ChannelModelArgs, GlobalArgs, LearnArgs, MoveArgs,
        ServeArgs,
    },
    fleet::FleetFile,
    output,
    progress_meter::ProgressMeter,
    run_submission::read_spec,
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
            let control = flags.fleet.connect_control().await?;
            let moves = control.describe_channel_history(&channel).await?.moves;
            output::print_json_or(flags.json, &moves, || print_channels(&moves, ""))
        }
        ChannelCommand::Move(MoveArgs { channel, model, feedback, if_better, reason }) => {
            let request =
                v1::MoveChannelRequest { channel, if_better, reason, ..Default::default() };
            move_channel(flags, request, model, feedback).await
        }
        ChannelCommand::Learn(args) => learn_channel(flags, args).await,
        ChannelCommand::Forget { channel, reason } => {
            let request =
                v1::MoveChannelRequest { channel, reason, forget: true, ..Default::default() };
            let files = SpecFiles::Local(PathBuf::from("."));
            let control = flags.fleet.connect_control().await?;
            let watch: control::TransferCallback = Arc::new(|_| ());
            let moved = control.move_channel(request, String::new(), &files, &watch).await?;
            output::print_json_or(flags.json, &moved, || {
                output::print_line(&format!("{} is forgotten", moved.channel));
            })
        }
        ChannelCommand::RollBack { channel, reason } => {
            let channel = parse_channel_name(&channel)?;
            let control = flags.fleet.connect_control().await?;
            let moved = control.roll_back_channel(&channel, None, &reason, String::new()).await?;
            print_moved(flags, &control, &moved).await
        }
    }
}

pub(crate) async fn serve_channel(flags: &GlobalArgs, args: ServeArgs) -> anyhow::Result<()> {
    let ServeArgs { channel, model, feedback, pool, replicas, stop } = args;
    let serving = (!stop).then(|| build_serving(&pool, replicas)).transpose()?;
    let request =
        v1::MoveChannelRequest { channel, serving, stop_serving: stop, ..Default::default() };
    move_channel(flags, request, model, feedback).await
}

async fn learn_channel(flags: &GlobalArgs, args: LearnArgs) -> anyhow::Result<()> {
    let channel = parse_channel_name(&args.channel)?;
    let control = flags.fleet.connect_control().await?;
    let moved = match &args.spec {
        None => control.stop_learning(&channel, String::new()).await?,
        Some(file) => {
            let (yaml, files) = read_spec(file).await?;
            control.learn_channel(&channel, &yaml, &files, args.at_least, String::new()).await?
        }
    };
    output::print_json_or(flags.json, &moved, || match args.spec {
        None => output::print_line(&format!("{channel} starts no more runs from feedback")),
        Some(_) => output::print_line(&format!(
            "a run starts when {} requests to {channel} have new feedback; if its best checkpoint is \
             better, {channel} moves to it",
            args.at_least
        )),
    })
}

async fn move_channel(
    flags: &GlobalArgs,
    mut request: v1::MoveChannelRequest,
    model: ChannelModelArgs,
    feedback: ChannelFeedbackArgs,
) -> anyhow::Result<()> {
    request.keep_days = feedback.keep_days;
    request.auto_roll_back = feedback.auto_roll_back;
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
    print_moved(flags, &control, &moved).await
}

async fn print_moved(
    flags: &GlobalArgs,
    control: &FleetControl,
    channel: &v1::Channel,
) -> anyhow::Result<()> {
    let agents = control.list_agents().await?;
    let file = flags.fleet.dir.as_deref().map(FleetFile::read).transpose()?.flatten();
    let page = file.map_or("https://HOST:PORT/".to_owned(), |file| file.api_url());
    output::print_json_or(flags.json, channel, || {
        let v1::Channel { channel: name, number, .. } = channel;
        output::print_line(&format!("{name} names {} (move {number})", model_text(channel)));
        let serving = describe_serving(channel, &agents, &page, unix_seconds());
        serving.iter().for_each(|text| output::print_message(text));
    })
}

/// Prints moves as a table, those of one channel in their order. Who serves a channel is known only
/// of its last move.
fn print_channels(channels: &[v1::Channel], empty: &str) {
    let rows = channels.iter().enumerate().map(|(at, channel)| {
        let next = channels.get(at + 1);
        let is_last = next.is_none_or(|next| next.channel != channel.channel);
        let found = channel.r#move.clone().unwrap_or_default();
        let evidence = found.evidence.as_ref().map(|it| {
            let points = it.difference * 100.0;
            let by = if it.live { " by ratings" } else { "" };
            let over = match it.run.as_str() {
                "" => "the base".to_owned(),
                run => format!("{run}/{}", it.cycle),
            };
            format!("{points:+.1} points{by} over {over}, p = {:.2}", it.p)
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
            match &found.serving {
                _ if !is_last => "-".to_owned(),
                None => "no".to_owned(),
                Some(_) if channel.agents.is_empty() => "none yet".to_owned(),
                Some(_) => channel.agents.join(", "),
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
