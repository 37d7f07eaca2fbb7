//! The screen. What is told by colour is told by a word as well.

use board::Board;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, Borders, Gauge, Paragraph, Row, Table, TableState},
};
use wire::v1;

use crate::{
    commands::{agents, cycles_table, perplexities_table},
    progress::Jobs,
};

use super::model::{Focus, Model};

/// Rows of a list, and what is around them.
const AGENTS_MAX: usize = 12;
const RUNS_MAX: usize = 6;
const AROUND: usize = 3;
/// Of the chosen run, whatever else there is.
const RUN_MIN: u16 = 7;

const KEYS: &str = "↑↓ choose  Tab boxes/runs  p pause  r resume  c cancel  d drain  q quit";

pub(super) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let height = |rows: usize, most: usize| {
        Constraint::Length(u16::try_from(rows.clamp(1, most) + AROUND).unwrap_or(u16::MAX))
    };
    let areas = Layout::vertical([
        height(model.agents.len(), AGENTS_MAX),
        height(model.runs.len(), RUNS_MAX),
        Constraint::Min(RUN_MIN),
        Constraint::Length(1),
    ]);
    let [boxes, runs, run, foot] = areas.areas(frame.area());
    draw_agents(frame, model, boxes);
    draw_runs(frame, model, runs);
    draw_run(frame, model, run);
    frame.render_widget(foot_line(model), foot);
}

fn panel(title: String, focused: bool) -> Block<'static> {
    let style = if focused { Style::new().fg(Color::Cyan) } else { Style::new() };
    Block::new().borders(Borders::ALL).border_style(style).title(title)
}

fn counted(count: usize, one: &str, more: &str) -> String {
    format!(" {count} {} ", if count == 1 { one } else { more })
}

const CHOSEN: Style = Style::new().add_modifier(Modifier::REVERSED);

fn draw_agents(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let rows = model.agents.values().map(|agent| {
        let jobs = agent.jobs.iter().filter(|job| !job.waits);
        let jobs = jobs.map(|job| match job.total {
            0 => format!("{} {}", job.run, job.note),
            total => format!("{} {}/{total} {}", job.run, job.done, job.note),
        });
        let trouble = agents::trouble(agent);
        let works: Vec<String> = jobs.collect();
        let does = if trouble.is_empty() { works.join("; ") } else { trouble.clone() };
        let style = match agent.state() {
            _ if !trouble.is_empty() => Style::new().fg(Color::Yellow),
            v1::agent_status::State::Ready => Style::new(),
            _ => Style::new().fg(Color::DarkGray),
        };
        let rate = match agent.tokens_per_s {
            rate if rate > 0.0 => format!("{rate:.0}"),
            _ => "-".into(),
        };
        let on = agent.telemetry.as_ref().map_or("-".into(), agents::doing);
        let cells =
            [agent.agent.clone(), agent.roles.join(", "), agents::state(agent), rate, on, does];
        Row::new(cells).style(style)
    });
    let widths = [
        Constraint::Max(20),
        Constraint::Max(20),
        Constraint::Max(16),
        Constraint::Length(8),
        Constraint::Max(24),
        Constraint::Min(16),
    ];
    let head = Row::new(["box", "roles", "state", "tokens/s", "doing", "work"]);
    let focused = model.focus == Focus::Agents;
    let title = counted(model.agents.len(), "box", "boxes");
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(if focused { CHOSEN } else { Style::new() })
        .block(panel(title, focused));
    let mut at = TableState::new().with_selected(Some(model.agent));
    frame.render_stateful_widget(table, area, &mut at);
}

fn draw_runs(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let rows = model.runs.iter().map(|run| {
        let style = match run.state() {
            v1::run::State::Failed => Style::new().fg(Color::Red),
            v1::run::State::Running => Style::new().fg(Color::Green),
            _ => Style::new(),
        };
        // The list knows no jobs, so it tells only of the chosen one what it waits for.
        let chosen = model.run.as_ref().filter(|chosen| chosen.id.as_str() == run.run);
        let phase = chosen.map_or("", |run| run.phase().as_str());
        let cycle = match run.cycles {
            0 => "-".into(),
            cycles => format!("{}/{cycles}", run.cycle),
        };
        Row::new([
            run.run.clone(),
            run.name.clone(),
            run.kind.clone(),
            run.state().as_str_name().to_lowercase(),
            cycle,
            if run.message.is_empty() { phase.to_owned() } else { run.message.clone() },
        ])
        .style(style)
    });
    let widths = [
        Constraint::Max(28),
        Constraint::Max(24),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(7),
        Constraint::Min(10),
    ];
    let head = Row::new(["run", "name", "kind", "state", "cycle", "phase"]);
    let focused = model.focus == Focus::Runs;
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(CHOSEN)
        .block(panel(counted(model.runs.len(), "run", "runs"), focused));
    let mut at = TableState::new().with_selected(model.at());
    frame.render_stateful_widget(table, area, &mut at);
}

fn draw_run(frame: &mut Frame<'_>, model: &Model, area: Rect) {
    let Some(run) = &model.run else {
        let nothing = "no run yet: `flotilla run submit SPEC` starts one";
        return frame
            .render_widget(Paragraph::new(nothing).block(panel(String::new(), false)), area);
    };
    let block = panel(format!(" {} {} ", run.id, run.spec.name), false);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [bar, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(inner);
    let jobs = Jobs::of(run, model.agents.values());
    let gauge = jobs.gauge(run);
    let ratio = gauge.done as f64 / gauge.total.max(1) as f64;
    let (cycle, phase) = (run.cycle_at_work(), run.phase());
    let label = match phase {
        cycle::Phase::Done => "done".into(),
        phase => format!(
            "cycle {cycle}: {} {}/{} {}{}",
            phase.as_str(),
            gauge.done,
            gauge.total,
            gauge.note,
            model.board.as_ref().map_or(String::new(), ends)
        ),
    };
    let whole = phase == cycle::Phase::Done;
    let bar_of = Gauge::default()
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(if whole { 1.0 } else { ratio.clamp(0.0, 1.0) })
        .label(label);
    frame.render_widget(bar_of, bar);
    let view = control::view(run);
    let told =
        if view.cycles_done.len() > 1 { cycles_table(&view) } else { perplexities_table(&view) };
    let mut lines: Vec<Line<'_>> = told.lines().map(|line| Line::from(line.to_owned())).collect();
    if let Some(failure) = view.failures.last() {
        let why = format!("{} {}: {}", failure.kind, failure.id, failure.message);
        lines.push(Line::styled(format!("{} failures; {why}", view.failures.len()), Color::Yellow));
    }
    // What came last is what people look for.
    let over = lines.len().saturating_sub(usize::from(rest.height));
    let head = lines.len().min(2);
    if over > 0 && lines.len() > head {
        lines.drain(head..(head + over).min(lines.len()));
    }
    frame.render_widget(Paragraph::new(lines), rest);
}

/// When the run is likely to end, or else its phase, as it was when its last fact came.
fn ends(board: &Board) -> String {
    let head = board.head();
    let (what, eta) = match (head.run_ends, head.phase_ends) {
        (Some(eta), _) => ("run", eta),
        (None, Some(eta)) => ("phase", eta),
        (None, None) => return String::new(),
    };
    let left = |end: f64| lasting(end - head.at_s);
    let (early, late) = (left(eta.early_s), left(eta.late_s));
    format!(", {what} ends in {} ({early} to {late})", left(eta.likely_s))
}

/// As exact as it is worth.
fn lasting(seconds: f64) -> String {
    let minutes = seconds / 60.0;
    match seconds {
        ..100.0 => format!("{:.0} s", seconds.max(0.0)),
        ..6000.0 => format!("{minutes:.0} min"),
        _ => format!("{:.1} h", minutes / 60.0),
    }
}

fn foot_line(model: &Model) -> Paragraph<'_> {
    match &model.asks {
        Some(act) => {
            Paragraph::new(format!("{act}? y does it, any other key does not")).style(CHOSEN)
        }
        None if !model.said.is_empty() => Paragraph::new(model.said.as_str()),
        None => Paragraph::new(KEYS),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};
    use wire::RunId;

    use super::*;
    use crate::watch::model::Key;

    fn screen(model: &Model, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, model)).unwrap();
        terminal.backend().to_string()
    }

    fn model() -> Model {
        let mut model = Model::default();
        model.heard(v1::AgentStatus {
            agent: "box-1".into(),
            roles: vec!["generator".into()],
            state: v1::agent_status::State::Draining.into(),
            tokens_per_s: 123.4,
            ..Default::default()
        });
        let run =
            v1::Run { run: "r-1".into(), name: "sums".into(), cycles: 3, ..Default::default() };
        model.listed(vec![run]);
        model.choose(&RunId::new("r-1").unwrap());
        model
    }

    #[test]
    fn boxes_runs_and_keys_are_on_the_screen() {
        let shown = screen(&model(), 100, 24);
        for word in ["1 box", "box-1", "generator", "123", "r-1", "sums", "0/3", "q quit"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
    }

    #[test]
    fn a_duration_is_said_as_exactly_as_it_is_worth() {
        let said = [-3.0, 42.4, 1800.0, 100_000.0].map(lasting);
        assert_eq!(said, ["0 s", "42 s", "30 min", "27.8 h"]);
    }

    #[test]
    fn what_would_be_done_is_asked_for() {
        let mut model = model();
        model.key(Key::Char('c'));
        assert!(screen(&model, 100, 24).contains("cancel r-1? y does it"));
    }

    #[test]
    fn a_small_terminal_and_a_fleet_of_nothing_are_drawn() {
        for (width, height) in [(1, 1), (20, 5), (40, 12), (300, 100)] {
            screen(&Model::default(), width, height);
            screen(&model(), width, height);
        }
    }
}
